"""What every rule that follows past norms keeps to: the usual is left alone, a spike is clipped.

In every dtype, and with the derivatives of the step's own norm.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.norm_rules import PARAMS, Run, leaves_of_norm, measured, runner, sequence
from tests.support.trees import same_bits

EVERY: dict[str, Callable[[], Any]] = {
    "autoclip": lambda: clipjax.autoclip(),
    "zclip": lambda: clipjax.zclip(warmup_steps=3),
    "zclip-mean": lambda: clipjax.zclip(warmup_steps=3, mode="mean"),
    "zclip-percentile": lambda: clipjax.zclip(warmup_steps=3, mode="percentile"),
    "lognormal": lambda: clipjax.clip_by_lognormal(),
    "adagc": lambda: clipjax.adagc(warmup_steps=3, max_norm=math.inf),
    "moving-max": lambda: clipjax.clip_by_moving_max(0.99),
}
every = pytest.mark.parametrize("name", EVERY)

KERNEL = {"kernel": PARAMS["kernel"]}


def kernels_of_norm(norms: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """A sequence of trees of one leaf, stacked, whose norms are as given."""
    kernels = leaves_of_norm(np.ones(len(norms)), seed)["kernel"]
    sizes = np.asarray(norms) / measured(kernels)
    return {"kernel": (kernels * sizes[:, None, None]).astype(np.float32)}


@functools.cache
def in_float32() -> Callable[[Any], dict[str, Run]]:
    return runner({name: make() for name, make in EVERY.items()}, KERNEL)


@functools.cache
def over_equal_norms(norm: float) -> dict[str, Run]:
    one = kernels_of_norm([norm], 3)
    return in_float32()(jax.tree.map(lambda x: np.repeat(x, 31, axis=0), one))


@pytest.mark.parametrize("norm", [1e-20, 0.3, 7.77, 1e20])
@every
def test_equal_norms_are_never_clipped(name: str, norm: float) -> None:
    """Not by a rounding of the statistics either: bit for bit."""
    done = over_equal_norms(norm)[name]
    np.testing.assert_array_equal(done.clipped, done.norms)
    assert done.steps_clipped == 0


OTHER_DTYPES = {
    "bfloat16": ("autoclip", "adagc"),
    "float16": ("zclip-percentile", "lognormal"),
    "float64": ("zclip", "zclip-mean", "adagc"),
}


@functools.cache
def up_to_a_spike(dtype: str, names: tuple[str, ...]) -> dict[str, Run]:
    """Thirty usual norms, and one that is twenty times as large."""
    usual = kernels_of_norm(np.exp(0.1 * np.random.default_rng(0).standard_normal(30)))
    stacked = jax.tree.map(lambda x: np.concatenate([x, 20 * x[:1]]), usual)
    if dtype == "float32":
        return in_float32()(stacked)
    with jax.enable_x64(dtype == "float64"):
        params, stacked = (jax.tree.map(lambda x: x.astype(dtype), tree) for tree in (KERNEL, stacked))
        return runner({name: EVERY[name]() for name in names}, params)(stacked)


# Whatever the leaves are, what differs between the rules is computed in float64.
IN_DTYPES = [
    pytest.param(name, dtype, marks=() if name in OTHER_DTYPES.get(dtype, EVERY) else pytest.mark.full)
    for name in EVERY
    for dtype in ("float32", *OTHER_DTYPES)
]


@pytest.mark.parametrize(("name", "dtype"), IN_DTYPES)
def test_a_spike_is_brought_down_to_the_threshold_in_every_dtype(name: str, dtype: str) -> None:
    together = OTHER_DTYPES.get(dtype, ())
    done = up_to_a_spike(dtype, together if name in together else (name,))[name]
    assert {x.dtype.name for x in jax.tree.leaves(done.updates)} == {dtype}
    assert done.steps_clipped >= 1
    assert done.clipped[-1] < 3
    if name not in ("adagc", "moving-max"):  # whose thresholds are those of leaves, and of entries
        slack = 1e-14 if dtype == "float64" else 0  # of this measurement
        assert (done.clipped <= done.thresholds * (1 + slack)).all()
        assert done.clipped[-1] > 0.97 * done.thresholds[-1]


# --------------------------------------------------------------------------------------------------
# Derivatives.

SLOPED: dict[str, Callable[[], Any]] = {
    "autoclip": lambda: clipjax.autoclip(95.0, window=8),
    "zclip": lambda: clipjax.zclip(warmup_steps=6),
    "zclip-percentile": lambda: clipjax.zclip(warmup_steps=6, mode="percentile"),
    "lognormal": lambda: clipjax.clip_by_lognormal(0.5),
    "quantile": lambda: clipjax.clip_by_quantile(),
    "adagc": lambda: clipjax.adagc(warmup_steps=4),
    "moving-max": lambda: clipjax.clip_by_moving_max(0.9),
    "moving-norm": lambda: clipjax.normalize_by_moving_norm(),
}


class Slopes(NamedTuple):
    """Of each rule, at a step that is clipped: derivatives of a loss along a direction."""

    clipped: dict[str, bool]
    difference: dict[str, float]  # central
    backward: dict[str, float]
    forward: dict[str, float]
    memory: dict[str, Any]  # of what is remembered, along the same direction
    past: dict[str, Any]  # of the loss, to what was remembered before


@functools.cache
def slopes() -> Slopes:
    rules = {name: make() for name, make in SLOPED.items()}
    usual = leaves_of_norm(np.exp(0.3 * np.random.default_rng(2).standard_normal(8)))
    rng = np.random.default_rng(9)
    with jax.enable_x64(True):
        usual, params = (jax.tree.map(lambda x: x.astype(np.float64), tree) for tree in (usual, PARAMS))
        spike = {name: 4 * x[0] for name, x in usual.items()}
        direction = {name: rng.standard_normal(x.shape) for name, x in spike.items()}

        def step(ts: Any, states: Any, grads: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            """The loss and the new state of each rule, the gradients moved by its t along the direction."""
            losses, after = {}, {}
            for name, tx in rules.items():
                moved = jax.tree.map(lambda g, d, t=ts[name]: g + t * d, grads, direction)
                updates, after[name] = tx.update(moved, states[name], params)
                losses[name] = sum(jnp.sum(jnp.sin(u)) for u in jax.tree.leaves(updates))
            return losses, after

        @jax.jit
        def derivatives(t: Any, states: Any, grads: Any) -> Any:
            """The losses and new states, and the derivatives: backward, and forward of both."""
            ts = dict.fromkeys(rules, t)
            found, forward = jax.jvp(
                lambda ts: step(ts, states, grads), (ts,), (dict.fromkeys(rules, jnp.ones(())),)
            )

            def total(ts: Any, states: Any) -> Any:
                return sum(step(ts, states, grads)[0].values())

            return found, *jax.grad(total, argnums=(0, 1), allow_int=True)(ts, states), forward

        states = {name: tx.init(params) for name, tx in rules.items()}
        for i in range(8):
            (_, states), *_ = derivatives(0.0, states, {name: x[i] for name, x in usual.items()})
        (_, after), backward, of_past, (forward, forgotten) = derivatives(0.0, states, spike)
        above, below = (derivatives(t, states, spike)[0][0] for t in (1e-5, -1e-5))
        return Slopes(
            {name: int(after[name][0].clipped) > int(states[name][0].clipped) for name in rules},
            {name: float(above[name] - below[name]) / 2e-5 for name in rules},
            backward,
            forward,
            {name: state._replace(**{state._fields[0]: None}) for name, state in forgotten.items()},
            of_past,
        )


@pytest.mark.parametrize("name", SLOPED)
def test_derivatives_are_those_of_the_step(name: str) -> None:
    """Through the step's own norm, which moves the bound as well; against central differences, in float64."""
    found = slopes()
    assert found.clipped[name], "the step is not clipped"
    for derivative in (found.backward, found.forward):
        np.testing.assert_allclose(derivative[name], found.difference[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", SLOPED)
def test_what_is_remembered_has_no_derivative(name: str) -> None:
    """To each step, the norms of the others are constants."""
    found = slopes()
    for derivatives in (found.memory[name], found.past[name]):
        floats = [x for x in jax.tree.leaves(derivatives) if x.dtype != jax.dtypes.float0]
        assert floats
        assert all(not np.any(x) for x in floats)


@pytest.mark.parametrize(
    "names",
    [
        ("autoclip", "zclip", "adagc"),
        pytest.param(("lognormal", "zclip-mean", "zclip-percentile"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_whole_run_can_be_differentiated(names: tuple[str, ...]) -> None:
    stacked, rules = kernels_of_norm(sequence(1, 12)), {name: EVERY[name]() for name in names}

    @jax.jit
    @jax.grad
    def derivatives(scales: Any) -> Any:
        def one(states: Any, grads: Any) -> Any:
            done = {
                name: tx.update(jax.tree.map(lambda g, s=scales[name]: s * g, grads), states[name])
                for name, tx in rules.items()
            }
            total = sum(jnp.sum(u) for u in jax.tree.leaves([updates for updates, _ in done.values()]))
            return {name: state for name, (_, state) in done.items()}, total

        start = {name: tx.init(KERNEL) for name, tx in rules.items()}
        return jnp.sum(jax.lax.scan(one, start, stacked)[1])

    for scale in (0.0, 1.0):
        found = derivatives(dict.fromkeys(rules, scale))
        assert all(np.isfinite(x) and x != 0 for x in found.values()), found


# --------------------------------------------------------------------------------------------------
# Groups of paths, and what is shown.


def test_groups_of_paths_have_thresholds_of_their_own() -> None:
    ones = functools.partial(np.ones, dtype=np.float32)
    params = {"embed": ones((4, 3)), "body": {"kernel": ones((4, 3)), "bias": ones(3)}}
    embed, body = clipjax.autoclip(50.0, window=16), clipjax.zclip(warmup_steps=4)
    whole = {
        "partition": optax.partition({"embed": embed, "rest": body}, {"embed": "embed", "body": "rest"}),
        "masked": optax.chain(
            optax.masked(embed, {"embed": True, "body": False}),
            optax.masked(body, {"embed": False, "body": True}),
        ),
    }
    alone = {"embed": embed, "body": body}

    @jax.jit
    def step(states: Any, grads: Any) -> Any:
        done = {name: tx.update(grads, states[name], params) for name, tx in whole.items()}
        done |= {k: tx.update(grads[k], states[k], params[k]) for k, tx in alone.items()}
        return {k: updates for k, (updates, _) in done.items()}, {k: state for k, (_, state) in done.items()}

    states = {name: tx.init(params) for name, tx in whole.items()}
    states |= {k: tx.init(params[k]) for k, tx in alone.items()}
    for i in range(12):
        size = np.float32(math.exp(math.sin(3 * i)) * (30 if i == 9 else 1))
        grads = jax.tree.map(lambda x, size=size: size * x, params)
        grads["embed"] *= 100
        updates, states = step(states, grads)
        for name in whole:
            assert same_bits(updates[name], {k: updates[k] for k in alone})
    for name in whole:
        seen = clipjax.metrics(states[name])
        assert same_bits(seen["autoclip/threshold"], states["embed"].threshold)
        assert same_bits(seen["zclip/threshold"], states["body"].threshold)
        assert seen["autoclip/threshold"] > 10 * seen["zclip/threshold"]


def test_metrics_show_the_threshold() -> None:
    tx = clipjax.autoclip(0.0, window=16)
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    stacked = leaves_of_norm([2.0, 3.0])
    for i in range(2):
        _, state = update(jax.tree.map(lambda x, i=i: x[i], stacked), state)
    seen = {key: float(value) for key, value in clipjax.metrics(state).items()}
    assert seen["autoclip/threshold"] == pytest.approx(2.0)
    assert seen["autoclip/norm"] == pytest.approx(3.0)
    assert seen["autoclip/scale"] == pytest.approx(2 / 3)
    assert seen["autoclip/clipped_fraction"] == 0.5
    assert not any(re.search("history|gamma", key) for key in seen)
