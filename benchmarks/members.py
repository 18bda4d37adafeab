"""Every public member in front of Adam, beside Adam alone: what it may cost."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

import clipjax
from benchmarks.platforms import PLATFORMS, compile_step, devices_of
from benchmarks.steps import (
    GLOBAL,
    QK_CLIP,
    RADIUS,
    RMS,
    SPECTRAL_CAP,
    Goals,
    Recipe,
    Step,
    adam,
)
from benchmarks.tables import Figure, Row
from benchmarks.trees import shapes_of
from tests.contract.members import FIRST

ADAM = Recipe(adam())
_CLIP, _MAX_NORM = clipjax.clip_by_global_norm(GLOBAL), clipjax.max_norm(RADIUS)
_CLIPPED = optax.chain(_CLIP, adam())
_SKIPPED = clipjax.skip_nonfinite(_CLIPPED)
_BOUNDED = clipjax.bounded(adam(), clip=_CLIP, project=_MAX_NORM, nonfinite="skip")
_ACCUMULATED = clipjax.bounded(adam(), clip=_CLIP, nonfinite="skip", accumulate=4)


class Member(NamedTuple):
    """A step and its goals: bytes and scratch in units of the parameters' own."""

    step: Step  # beside Adam alone, with goals for the time on a CPU
    tpu: float | None
    gpu: float | None
    scratch: float | None


def _member(
    label: str,
    recipe: Recipe,
    tpu: float | None,
    gpu: float | None,
    cpu: float | None,
    scratch: float | None = 0.1,
    tree: str | None = None,
) -> Member:
    goals = Goals((cpu, cpu, None), None, 0, 0, 0)
    return Member(
        Step(label, recipe, ADAM, "Adam alone", goals, tree), tpu, gpu, scratch
    )


def _before(
    label: str,
    tx: optax.GradientTransformation,
    tpu: float = 8.1,
    gpu: float | None = 8.0,
    cpu: float = 1.25,
) -> Member:
    return _member(label, Recipe(optax.chain(tx, adam())), tpu, gpu, cpu)


def _after(
    label: str,
    projection: optax.GradientTransformation,
    tpu: float = 8.3,
    gpu: float | None = 11.0,
) -> Member:
    return _member(label, Recipe(optax.chain(adam(), projection)), tpu, gpu, 2.3)


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
        _before("clip_by_norm, axes=0", clipjax.clip_by_norm(GLOBAL, axes=0)),
        _before("clip_by_rms", clipjax.clip_by_rms(RMS)),
        _before("clip_by_group_norm", clipjax.clip_by_group_norm({"*": GLOBAL})),
        _before("clip_by_value", clipjax.clip_by_value(1.0), cpu=1.4),
        _before(
            "clip_by_value, low and high", clipjax.clip_by_value(-1.0, 1.0), cpu=1.4
        ),
        _before("adaptive_grad_clip", clipjax.adaptive_grad_clip(), 9.2, 9.0, 1.5),
        _before("tangent_cone", clipjax.tangent_cone(RADIUS), 9.2, 9.0, 1.5),
        _before("relative_update", clipjax.relative_update(), 9.2, None, 1.5),
        _before("autoclip", clipjax.autoclip()),
        _before("clip_by_quantile", clipjax.clip_by_quantile()),
        _before("zclip", clipjax.zclip()),
        _before("clip_by_lognormal", clipjax.clip_by_lognormal()),
        _before("adagc", clipjax.adagc()),
        _before("record_norms", clipjax.record_norms(name="gradients")),
        _before("zero_nonfinite", clipjax.zero_nonfinite(), cpu=1.5),
        _member("skip_nonfinite around a clip", Recipe(_SKIPPED), 8.1, 8.0, None),
        _member(
            "skip_spikes around a clip",
            Recipe(clipjax.skip_spikes(_CLIPPED)),
            8.1,
            8.0,
            None,
        ),
        _member(
            "skip_nonfinite, then max_norm called",
            Recipe(_SKIPPED, _MAX_NORM),
            8.2,
            11.0,
            None,
        ),
        _member(
            "clip_by_global_norm, then max_norm called",
            Recipe(_CLIPPED, _MAX_NORM),
            8.2,
            11.0,
            None,
        ),
        _member("max_norm called", Recipe(adam(), _MAX_NORM), 8.2, 10.0, None),
        _after("max_norm", _MAX_NORM),
        _after("min_max_norm", clipjax.min_max_norm(RADIUS / 2, RADIUS)),
        _after("unit_norm", clipjax.unit_norm()),
        _after("keep_norm", clipjax.keep_norm(), gpu=None),
        _member(
            "keep_norm called", Recipe(adam(), clipjax.keep_norm()), 8.2, None, None
        ),
        _after("non_negative", clipjax.non_negative()),
        _after("box", clipjax.box(-RADIUS, RADIUS)),
        _member(
            "clip_by_global_norm and max_norm",
            Recipe(optax.chain(_CLIPPED, _MAX_NORM)),
            9.3,
            12.0,
            2.3,
        ),
        _member("bounded: clip, max_norm, skip", Recipe(_BOUNDED), 9.3, 12.0, None),
        _member(
            "bounded: clip, skip, accumulate=4",
            Recipe(_ACCUMULATED),
            12.6,
            12.0,
            None,
            1.1,
        ),
        _member(
            "qk_clip called", Recipe(adam(), QK_CLIP), 7.1, 7.0, 1.25, tree="heads"
        ),
        _member(
            "spectral_cap called",
            Recipe(adam(), SPECTRAL_CAP),
            None,
            None,
            None,
            None,
            "matrix",
        ),
    )
}

# What the table does not name, as the contract makes it; `chain` and `project` cost
# nothing themselves.
_SHOWN = {word.strip(",:") for label in MEMBERS for word in label.split()}
for _name, _row in FIRST.items():
    if _name in _SHOWN | {"chain", "project"}:
        continue
    if _row.kind in ("clip", "step", "projection"):
        _make = _after if _row.kind == "projection" else _before
        MEMBERS[_name] = _make(_name, _row.make(GLOBAL))


def weigh(member: Member, platform: str, tree: str, dtype: str) -> Row:
    """Compile a step for one device; sizes are in units of the parameters' own."""
    device = SingleDeviceSharding(devices_of(platform)[0])
    params = shapes_of(tree, dtype, lambda *_: device)
    size = sum(x.size * x.dtype.itemsize for x in params.values())
    cost, on_tpu = (
        compile_step(platform, member.step.ours, params),
        PLATFORMS[platform].compiler == "tpu",
    )
    known = dtype == "float32"  # the goals are those of float32
    cells: dict[str, Figure | str] = {
        "bytes": Figure(
            cost.bytes / size, (member.tpu if on_tpu else member.gpu) if known else None
        ),
        "scratch": Figure(
            cost.temporaries / size, member.scratch if known and on_tpu else None
        ),
        "kernels": "" if on_tpu else str(cost.kernels),
        "CPU s": f"{cost.compile_seconds:.2g}",
    }
    return Row((member.step.label, PLATFORMS[platform].label, tree, dtype), cells)
