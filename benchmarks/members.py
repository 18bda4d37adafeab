"""Every public member with Adam, beside Adam alone: what it may cost."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

import clipjax
from benchmarks.models import MODELS
from benchmarks.platforms import PLATFORMS, Cost, compile_step, devices_of
from benchmarks.steps import (
    GLOBAL,
    QK_CLIP,
    RADIUS,
    RMS,
    SPECTRAL_CAP,
    STEPS,
    Goals,
    Recipe,
    Step,
    adam,
    on,
)
from benchmarks.tables import Figure, Row
from benchmarks.trees import inputs_of, shapes_of

ADAM = Recipe(adam())
# The axes that all members reduce: the rows of matrices, in stacks, too.
_ROWS = -2
_MATRIX = (-2, -1)
_CLIP = clipjax.clip_by_global_norm(GLOBAL)
_MAX_NORM = clipjax.max_norm(RADIUS, axes=_ROWS)
_CLIPPED = optax.chain(_CLIP, adam())
_SKIPPED = clipjax.skip_nonfinite(_CLIPPED)
_BOUNDED = clipjax.bounded(adam(), clip=_CLIP, project=_MAX_NORM, nonfinite="skip")
_ADAM_H = optax.chain(
    optax.scale_by_adam(mu_dtype=jnp.float32),
    clipjax.relative_update(axes=_MATRIX),
    optax.scale_by_learning_rate(1e-3),
    clipjax.keep_norm(axes=_MATRIX),
)
_ACCUMULATED = clipjax.bounded(adam(), clip=_CLIP, nonfinite="skip", accumulate=4)


class Weight(NamedTuple):
    """Goals in units of the parameters' own size; None where there is none."""

    tpu: float | None = None  # bytes that a step moves
    gpu: float | None = None
    scratch: float | None = 0.1


class Member(NamedTuple):
    """A step and its goals."""

    step: Step  # beside Adam alone, with goals for the time on a CPU
    usual: Weight
    stacked: Weight  # for leaves that are larger than a chip's own memory


def _member(
    label: str,
    recipe: Recipe,
    usual: Weight,
    cpu: float | None = None,
    stacked: Weight | None = None,
    tree: str | None = None,
) -> Member:
    goals = Goals((cpu, cpu, None), None, 0, 0, 0)
    step = Step(label, recipe, ADAM, "Adam alone", goals, tree)
    return Member(step, usual, usual if stacked is None else stacked)


def _before(
    label: str,
    tx: optax.GradientTransformation,
    cpu: float = 1.25,
    usual: Weight | None = None,
) -> Member:
    usual = usual or Weight(8.1, 8.05)
    return _member(label, Recipe(optax.chain(tx, adam())), usual, cpu)


def _after(
    label: str,
    projection: optax.GradientTransformation,
) -> Member:
    recipe = Recipe(optax.chain(adam(), projection))
    return _member(label, recipe, Weight(8.3, 11.0), 2.3, Weight(10.1, 11.1, 0.5))


# Adam reads and writes 7; what comes after it reads and writes the weights again.
_WEIGHTS_TOO = Weight(9.2, 9.05)
_CALLED = Weight(10.1, 12.1, 0.5)
_CHAINED = Weight(11.1, 12.1, 0.5)


MEMBERS = {
    member.step.label: member
    for member in (
        _before("clip_by_global_norm", _CLIP),
        _before(
            "clip_by_global_norm, inf",
            clipjax.clip_by_global_norm(GLOBAL, ord=jnp.inf),
            cpu=1.4,
        ),
        _before("clip_by_norm", clipjax.clip_by_norm(GLOBAL)),
        _before(
            "clip_by_norm, inf", clipjax.clip_by_norm(GLOBAL, ord=jnp.inf), cpu=1.4
        ),
        _before("clip_by_norm of units", clipjax.clip_by_norm(GLOBAL, axes=_ROWS)),
        _before("clip_by_rms", clipjax.clip_by_rms(RMS)),
        _before("clip_by_group_norm", clipjax.clip_by_group_norm({"*": GLOBAL})),
        _before("clip_by_value", clipjax.clip_by_value(1.0), cpu=1.4),
        _before(
            "clip_by_value, low and high", clipjax.clip_by_value(-1.0, 1.0), cpu=1.4
        ),
        _before(
            "adaptive_grad_clip",
            clipjax.adaptive_grad_clip(axes=_ROWS),
            1.5,
            _WEIGHTS_TOO,
        ),
        _before(
            "tangent_cone", clipjax.tangent_cone(RADIUS, axes=_ROWS), 1.5, _WEIGHTS_TOO
        ),
        _before(
            "relative_update",
            clipjax.relative_update(axes=_MATRIX),
            1.5,
            _WEIGHTS_TOO,
        ),
        _before("autoclip", clipjax.autoclip()),
        _before("clip_by_quantile", clipjax.clip_by_quantile()),
        _before("zclip", clipjax.zclip()),
        _before("clip_by_lognormal", clipjax.clip_by_lognormal()),
        _before("adagc", clipjax.adagc()),
        _before("adagc by layer", clipjax.adagc(axes=_MATRIX)),
        _before("record_norms", clipjax.record_norms(name="gradients")),
        _before("record_norms, keep", clipjax.record_norms("leaf", keep=16)),
        _before("zero_nonfinite", clipjax.zero_nonfinite(), cpu=1.5),
        _member("skip_nonfinite around a clip", Recipe(_SKIPPED), Weight(8.1, 8.0)),
        _member(
            "skip_spikes around a clip",
            Recipe(clipjax.skip_spikes(_CLIPPED)),
            Weight(8.1, 8.0),
        ),
        _member(
            "skip_nonfinite, then max_norm called",
            Recipe(_SKIPPED, _MAX_NORM),
            Weight(8.2, 11.0),
            stacked=_CALLED,
        ),
        _member(
            "clip_by_global_norm, then max_norm called",
            Recipe(_CLIPPED, _MAX_NORM),
            Weight(8.2, 11.0),
            stacked=_CALLED,
        ),
        _member(
            "max_norm called",
            Recipe(adam(), _MAX_NORM),
            Weight(8.2, 10.0),
            stacked=Weight(9.1, 11.1, 0.5),
        ),
        _after("max_norm", _MAX_NORM),
        _after("min_max_norm", clipjax.min_max_norm(RADIUS / 2, RADIUS, axes=_ROWS)),
        _after("unit_norm", clipjax.unit_norm(axes=_ROWS)),
        _after("keep_norm", clipjax.keep_norm(axes=_MATRIX)),
        _member(
            "keep_norm called",
            Recipe(adam(), clipjax.keep_norm(axes=_MATRIX)),
            Weight(8.2),
            stacked=Weight(10.1, scratch=0.5),
        ),
        _member(
            "AdamH: relative_update and keep_norm",
            Recipe(_ADAM_H),
            Weight(11.3),
            stacked=Weight(scratch=1.0),
        ),
        _after("non_negative", clipjax.non_negative()),
        _after("box", clipjax.box(-RADIUS, RADIUS)),
        _member(
            "clip_by_global_norm and max_norm",
            Recipe(optax.chain(_CLIPPED, _MAX_NORM)),
            Weight(9.3, 12.0),
            2.3,
            _CHAINED,
        ),
        _member(
            "bounded: clip, max_norm, skip",
            Recipe(_BOUNDED),
            Weight(9.3, 12.0),
            stacked=_CHAINED,
        ),
        _member(
            "bounded: clip, skip, accumulate=4",
            Recipe(_ACCUMULATED),
            Weight(12.6, 12.0, 1.1),
            stacked=Weight(13.1, 13.1, 1.1),
        ),
        _member(
            "qk_clip called",
            Recipe(adam(), QK_CLIP),
            Weight(7.1, 7.0),
            1.25,
            tree="heads",
        ),
        _member(
            "spectral_cap called",
            Recipe(adam(), SPECTRAL_CAP),
            Weight(scratch=None),
            tree="matrix",
        ),
    )
}

# Optax's own, which have no goals.
_OPTAX = {
    "clip": Recipe(optax.chain(optax.clip(1.0), adam())),
    "clip_by_global_norm": STEPS["global"].theirs,
    "clip_by_block_rms": STEPS["rms"].theirs,
    "adaptive_grad_clip": STEPS["agc"].theirs,
    "zero_nans": Recipe(optax.chain(optax.zero_nans(), adam())),
    "apply_if_finite around a clip": Recipe(
        optax.apply_if_finite(STEPS["global"].theirs.tx, max_consecutive_errors=5)
    ),
}
PEERS = {
    f"optax.{name}": _member(f"optax.{name}", recipe, Weight(scratch=None))
    for name, recipe in _OPTAX.items()
}


def weigh(member: Member, platform: str, trees: Sequence[str], dtype: str) -> Row:
    """Compile a step for one device; sizes are in units of the parameters' own."""
    on_tpu = PLATFORMS[platform].compiler == "tpu"
    cells: dict[str, Figure | str] = {}
    for tree in filter(member.step.runs_on, trees):
        size, cost = _compiled(member.step.ours, platform, tree, dtype)
        goals = Weight(scratch=None)
        if dtype == "float32" and tree not in MODELS:
            # Leaves of 64 MB are large for newer TPUs, too.
            is_large = tree == "stacked" or platform in ("v6e", "tpu7x")
            goals = member.stacked if is_large else member.usual
        cells[tree] = Figure(cost.bytes / size, goals.tpu if on_tpu else goals.gpu)
        scratch = goals.scratch if on_tpu else None
        cells[f"{tree}: scratch"] = Figure(cost.temporaries / size, scratch)
        if not on_tpu:
            cells[f"{tree}: kernels"] = str(cost.kernels)
        if tree in MODELS:
            _, alone = _compiled(ADAM, platform, tree, dtype)
            cells[f"{tree}: beyond Adam"] = Figure((cost.bytes - alone.bytes) / size)
    return Row((member.step.label, PLATFORMS[platform].label, dtype), cells)


@functools.cache
def _compiled(recipe: Recipe, platform: str, tree: str, dtype: str) -> tuple[int, Cost]:
    """Return the size of the parameters in bytes, and what a step takes."""
    device = SingleDeviceSharding(devices_of(platform)[0])
    params = shapes_of(tree, dtype, lambda *_: device)
    size = sum(x.size * x.dtype.itemsize for x in params.values())
    inputs = inputs_of(tree, params)
    return size, compile_step(platform, on(tree, recipe), params, inputs)
