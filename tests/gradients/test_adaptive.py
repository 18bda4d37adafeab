"""Thresholds that adapt: to the weights, and to the norms of past steps.

The oracles are written down from the papers and from how the authors' code behaves, as plain Python over a
list of norms.
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
from clipjax import functional
from tests.core.test_cost import adam_alone, cost, traffic
from tests.support.oracles import exact_norm, exact_tree_norm
from tests.support.trees import flat, same_bits

SHAPES = {"bias": (3,), "kernel": (4, 3), "scale": ()}
STEPS = 160


class Run(NamedTuple):
    """What a transformation did over a sequence of steps; float64 arrays."""

    norms: np.ndarray  # before
    clipped: np.ndarray  # after
    thresholds: np.ndarray
    state: Any


def leaves_of_norm(norms: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """A sequence of trees, stacked, whose global norms are as given; float32."""
    rng = np.random.default_rng(seed)
    parts = {name: rng.standard_normal((len(norms), *shape)) for name, shape in SHAPES.items()}
    flat = np.concatenate([p.reshape(len(norms), -1) for p in parts.values()], axis=1)
    factor = norms / np.linalg.norm(flat, axis=1)
    return {
        name: (p * factor.reshape(-1, *[1] * (p.ndim - 1))).astype(np.float32) for name, p in parts.items()
    }


def measured(stacked: Any) -> np.ndarray:
    parts = [np.asarray(x, np.float64).reshape(len(x), -1) for x in jax.tree.leaves(stacked)]
    return np.linalg.norm(np.concatenate(parts, axis=1), axis=1)


PARAMS = {name: jnp.ones(shape) for name, shape in SHAPES.items()}


def run(tx: Any, stacked: Any, params: Any = PARAMS) -> Run:
    def one(state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return state, (updates, state.threshold)

    state, (updates, thresholds) = jax.jit(lambda s, g: jax.lax.scan(one, s, g))(tx.init(params), stacked)
    return Run(measured(stacked), measured(updates), np.asarray(thresholds, np.float64), state)


def sequence(seed: int, steps: int = STEPS) -> np.ndarray:
    """Norms that drift and vary by a factor, at some scale, with spikes."""
    rng = np.random.default_rng(seed)
    norms = np.exp(
        rng.uniform(-6, 6) + 0.3 * rng.standard_normal(steps) + np.linspace(0, rng.uniform(-1, 1), steps)
    )
    spikes = rng.random(steps) < 0.08
    spikes[0] = seed % 2
    return norms * np.where(spikes, rng.uniform(2, 50, steps), 1)


# --------------------------------------------------------------------------------------------------
# The oracles: what each norm is clipped to.


def autoclip(norms: np.ndarray, percentile: float = 10, window: int = 1000) -> list[float]:
    return [
        min(n, np.percentile(norms[max(0, i + 1 - window) : i + 1], percentile)) for i, n in enumerate(norms)
    ]


def zclip(
    norms: np.ndarray,
    z_threshold: float = 2.5,
    decay: float = 0.97,
    warmup_steps: int = 25,
    max_norm: float | None = None,
    mode: str = "adaptive",
    clip_factor: float = 1.0,
    eps: float = 1e-6,
    update_on_spike: bool = True,
) -> list[float]:
    cap = math.inf if max_norm is None else max_norm
    buffer: list[float] = []
    mean = var = None
    out = []
    for n in norms:
        if mean is None:
            buffer.append(n)
            if len(buffer) >= warmup_steps:
                mean = sum(buffer) / len(buffer)
                var = sum((x - mean) ** 2 for x in buffer) / len(buffer)
            out.append(min(n, cap))
            continue
        std = math.sqrt(var)
        target = None
        if mode == "percentile":
            if n > mean + z_threshold * std:
                target = mean + z_threshold * std
        else:
            z = (n - mean) / (std + eps)
            if z > z_threshold:
                target = (
                    mean if mode == "mean" else (mean + z_threshold * std / (z / z_threshold)) * clip_factor
                )
        out.append(min(n, target if target is not None else n, cap))
        if target is None or update_on_spike:
            x = n if target is None else target
            mean = decay * mean + (1 - decay) * x
            var = decay * var + (1 - decay) * (x - mean) ** 2
    return out


def lognormal(
    norms: np.ndarray,
    std_factor: float = 2.0,
    decay: float = 0.95,
    max_norm: float | None = None,
    eps: float = 1e-8,
) -> list[float]:
    mean = square = 0.0
    out = []
    for t, n in enumerate(norms):
        log, d = math.log(n + eps), min(decay, t / (t + 1))
        mean = d * mean + (1 - d) * log
        square = d * square + (1 - d) * log**2
        std = math.sqrt(max(eps, square - mean**2))
        factor = 1.0 if n < math.exp(mean + std_factor * std) else math.exp(mean) / n
        out.append(n * (factor if max_norm is None else min(factor, max_norm / n)))
    return out


def quantile(
    norms: np.ndarray, quantile: float = 0.5, learning_rate: float = 0.2, initial_max_norm: float = 1.0
) -> list[float]:
    bound, out = initial_max_norm, []
    for n in norms:
        out.append(min(n, bound))
        bound *= math.exp(-learning_rate * ((n <= bound) - quantile))
    return out


def adagc(
    leaves: np.ndarray,
    relative_bound: float = 1.04,
    decay: float = 0.99,
    warmup_steps: int = 100,
    max_norm: float = 1.0,
    warmup_norms: str = "before",
) -> np.ndarray:
    """Over an array (steps, leaves) of norms."""
    gamma = [math.inf] * leaves.shape[1]
    out = []
    for t, norms in enumerate(leaves):
        total = math.sqrt(sum(n * n for n in norms))
        clipped = [n * min(1, max_norm / total) for n in norms]
        if t < warmup_steps:
            gamma = [
                min(g, n) for g, n in zip(gamma, norms if warmup_norms == "before" else clipped, strict=True)
            ]
        else:
            gamma = [n if g == math.inf else g for g, n in zip(gamma, norms, strict=True)]
            clipped = [min(n, relative_bound * g) for g, n in zip(gamma, norms, strict=True)]
            gamma = [decay * g + (1 - decay) * c for g, c in zip(gamma, clipped, strict=True)]
        out.append(clipped)
    return np.array(out)


METHODS: list[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = [
    (clipjax.autoclip, autoclip, {}),
    (clipjax.autoclip, autoclip, {"percentile": 0.0}),
    (clipjax.autoclip, autoclip, {"percentile": 37.5, "window": 7}),
    (clipjax.autoclip, autoclip, {"percentile": 90.0, "window": 64}),
    (clipjax.autoclip, autoclip, {"percentile": 50.0, "window": 2}),
    (clipjax.zclip, zclip, {}),
    (clipjax.zclip, zclip, {"mode": "mean", "z_threshold": 1.5}),
    (clipjax.zclip, zclip, {"mode": "percentile", "z_threshold": 1.0, "decay": 0.9}),
    (clipjax.zclip, zclip, {"clip_factor": 0.6, "warmup_steps": 5}),
    (clipjax.zclip, zclip, {"clip_factor": 1.7, "warmup_steps": 2}),
    (clipjax.zclip, zclip, {"update_on_spike": False}),
    (clipjax.zclip, zclip, {"update_on_spike": False, "mode": "percentile", "warmup_steps": 10}),
    (clipjax.zclip, zclip, {"max_norm": 1.0}),
    (clipjax.zclip, zclip, {"max_norm": 0.5, "mode": "mean", "eps": 0.0}),
    (clipjax.clip_by_lognormal, lognormal, {}),
    (clipjax.clip_by_lognormal, lognormal, {"std_factor": 0.5, "decay": 0.8}),
    (clipjax.clip_by_lognormal, lognormal, {"max_norm": 1.0}),
    (clipjax.clip_by_quantile, quantile, {}),
    (clipjax.clip_by_quantile, quantile, {"quantile": 0.9, "learning_rate": 0.05, "initial_max_norm": 30.0}),
]


def label(value: Any) -> str:
    return str(value) if isinstance(value, dict) else value.__name__


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ours", "oracle", "options"), METHODS, ids=label)
def test_it_follows_its_oracle(ours: Any, oracle: Any, options: dict[str, Any], seed: int) -> None:
    done = run(ours(**options), leaves_of_norm(sequence(seed), seed))
    expected = np.array(oracle(done.norms, **options))
    np.testing.assert_allclose(done.clipped, expected, rtol=1e-5)
    if seed < 2:
        assert (expected < done.norms * (1 - 1e-3)).sum() >= 5, "the sequence asks nothing of it"
    assert (done.clipped <= done.thresholds).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warmup_norms": "after", "warmup_steps": 20},
        {"warmup_steps": 0},
        {"relative_bound": 0.9, "decay": 0.8, "max_norm": 3.0, "warmup_steps": 7},
    ],
)
def test_adagc_follows_its_oracle(options: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    stacked = leaves_of_norm(sequence(seed) / sequence(seed).mean(), seed)
    stacked["kernel"] *= np.float32(np.exp(rng.standard_normal()))

    def one(state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state)
        return state, updates

    def norms(tree: Any) -> np.ndarray:
        return np.stack([measured([leaf]) for leaf in jax.tree.leaves(tree)], axis=1)

    tx = clipjax.adagc(**options)
    state, updates = jax.jit(lambda s, g: jax.lax.scan(one, s, g))(tx.init(PARAMS), stacked)
    expected = adagc(norms(stacked), **options)
    np.testing.assert_allclose(norms(updates), expected, rtol=1e-5)
    assert (expected < norms(stacked) * (1 - 1e-3)).any(axis=1).sum() >= 5
    assert state.gamma.shape == (3,)


def test_the_statistics_are_the_oracle_s_after_the_warm_up() -> None:
    norms = sequence(3, 25)
    state = run(clipjax.zclip(), leaves_of_norm(norms)).state
    np.testing.assert_allclose([state.mean, state.std], [norms.mean(), norms.std()], rtol=1e-6)


def test_a_window_as_long_as_the_run_is_the_whole_history() -> None:
    stacked = leaves_of_norm(sequence(1))
    long, exact = (run(clipjax.autoclip(25.0, window=w), stacked) for w in (10 * STEPS, STEPS))
    np.testing.assert_array_equal(long.clipped, exact.clipped)
    assert exact.state.history.shape == (STEPS,)
    short = run(clipjax.autoclip(25.0, window=STEPS - 1), stacked)
    assert short.clipped[-1] != exact.clipped[-1]


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("start", [0.1, 100.0])
def test_the_quantile_rule_tracks_its_quantile(q: float, start: float) -> None:
    """From a start that is far off, to within 10% after 200 rounds; and so is the share of steps below it."""
    rng = np.random.default_rng(5)
    norms = np.exp(0.2 * rng.standard_normal(3000))
    done = run(clipjax.clip_by_quantile(q, learning_rate=0.2, initial_max_norm=start), leaves_of_norm(norms))
    settled = np.exp(np.mean(np.log(done.thresholds[200:])))
    np.testing.assert_allclose(settled, np.quantile(norms, q), rtol=0.1)
    np.testing.assert_allclose((done.norms <= done.thresholds)[200:].mean(), q, atol=0.03)


# --------------------------------------------------------------------------------------------------
# What is usual is left alone.

EVERY = {
    "autoclip": lambda: clipjax.autoclip(),
    "zclip": lambda: clipjax.zclip(warmup_steps=3),
    "zclip-mean": lambda: clipjax.zclip(warmup_steps=3, mode="mean"),
    "zclip-percentile": lambda: clipjax.zclip(warmup_steps=3, mode="percentile"),
    "lognormal": lambda: clipjax.clip_by_lognormal(),
    "adagc": lambda: clipjax.adagc(warmup_steps=3, max_norm=math.inf),
}
every = pytest.mark.parametrize("make", EVERY.values(), ids=list(EVERY))


@pytest.mark.parametrize("norm", [1e-20, 0.3, 7.77, 1e20])
@every
def test_equal_norms_are_never_clipped(make: Any, norm: float) -> None:
    """Not by a rounding of the statistics either: bit for bit."""
    one = leaves_of_norm(np.array([norm]), 3)
    stacked = jax.tree.map(lambda x: np.repeat(x, 40, axis=0), one)
    done = run(make(), stacked)
    np.testing.assert_array_equal(done.clipped, done.norms)
    assert int(done.state.seen.clipped) == 0


def test_the_hundredth_percentile_never_clips() -> None:
    for tx in (clipjax.autoclip(100.0, window=13), clipjax.autoclip(10.0, window=1)):
        done = run(tx, leaves_of_norm(sequence(0)))
        assert int(done.state.seen.clipped) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@every
def test_a_spike_is_brought_down_to_the_threshold_in_every_dtype(make: Any, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        tx, params = make(), jax.tree.map(lambda x: x.astype(dtype), PARAMS)
        usual = leaves_of_norm(np.exp(0.1 * np.random.default_rng(0).standard_normal(30)))
        stacked = jax.tree.map(lambda x: jnp.asarray(np.concatenate([x, 20 * x[:1]]), dtype), usual)
        done = run(tx, stacked, params)
        assert int(done.state.seen.clipped) >= 1
        assert done.clipped[-1] < 3
        if not isinstance(done.state, clipjax._adagc.AdagcState):  # whose thresholds are those of leaves
            slack = 1e-14 if dtype == "float64" else 0  # of this measurement
            assert (done.clipped <= done.thresholds * (1 + slack)).all()
            assert done.clipped[-1] > 0.97 * done.thresholds[-1]


def test_a_leaf_without_a_gradient_is_not_held_at_zero() -> None:
    """Where gamma could be 0, a leaf that starts to learn later would never move."""
    tx = clipjax.adagc(warmup_steps=5)
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    for i in range(20):
        grads = {**PARAMS, "bias": 0 * PARAMS["bias"] if i % 2 or i > 5 else PARAMS["bias"]}
        _, state = update(grads, state)
    updates, state = update(PARAMS, state)
    assert same_bits(updates["bias"], PARAMS["bias"])
    tx = clipjax.adagc(warmup_steps=2)
    state = tx.init(PARAMS)
    for bias in (0.0, 0.0, 0.0, 3.0, 300.0):
        updates, state = tx.update({**PARAMS, "bias": bias * PARAMS["bias"]}, state)
    np.testing.assert_allclose(jnp.linalg.norm(updates["bias"]), 1.04 * 3 * math.sqrt(3), rtol=1e-6)


# --------------------------------------------------------------------------------------------------
# Relative to the weights.


def agc_oracle(g: np.ndarray, w: np.ndarray, clipping: float, eps: float, axis: Any) -> np.ndarray:
    g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
    bound = clipping * np.maximum(np.sqrt(np.sum(w**2, axis=axis, keepdims=True)), eps)
    norm = np.sqrt(np.sum(g**2, axis=axis, keepdims=True))
    return np.where(norm < bound, g, g * bound / np.maximum(norm, 1e-6))


RANKS = [(), (7,), (5, 4), (3, 5, 4), (3, 3, 5, 4), (2, 3, 3, 5, 4)]


def draw(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    units = np.exp(2 * rng.standard_normal(shape[-1:]))
    return (
        (0.01 * units * rng.standard_normal(shape)).astype(np.float32),
        rng.standard_normal(shape).astype(np.float32),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", RANKS, ids=str)
def test_agc_follows_its_oracle(shape: tuple[int, ...], seed: int) -> None:
    g, w = draw(shape, seed)
    tx = clipjax.adaptive_grad_clip(0.02)
    updates, state = jax.jit(tx.update)({"w": g}, tx.init({"w": w}), {"w": w})
    axis = tuple(range(len(shape) - 1)) if len(shape) > 1 else None
    np.testing.assert_allclose(updates["w"], agc_oracle(g, w, 0.02, 1e-3, axis), rtol=2e-6)
    bounds = 0.02 * np.maximum(np.asarray(exact_norm(w, axis), np.float64), 1e-3)
    np.testing.assert_allclose(state.threshold, np.min(bounds), rtol=1e-6)
    assert state.threshold >= np.min(bounds) * (1 - 1e-14)
    assert (np.asarray(exact_norm(updates["w"], axis)) <= bounds).all()


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 3, 5, 4), (2, 3, 3, 5, 4)], ids=str)
def test_agc_equals_optax(shape: tuple[int, ...]) -> None:
    g, w = draw(shape, 11)
    ours, theirs = clipjax.adaptive_grad_clip(0.01), optax.adaptive_grad_clip(0.01)
    np.testing.assert_allclose(
        ours.update(g, ours.init(w), w)[0], theirs.update(g, theirs.init(w), w)[0], rtol=3e-6
    )


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 3, 5, 4)], ids=str)
def test_agc_is_the_one_of_output_first_layouts(shape: tuple[int, ...]) -> None:
    """Where kernels are (out, in) and (out, in, h, w), norms are over all axes but the first."""
    g, w = draw(shape, 12)
    first = [len(shape) - 1, *([len(shape) - 2] if len(shape) > 1 else []), *range(len(shape) - 2)]
    axis = tuple(range(1, len(shape))) or None
    there = agc_oracle(g.transpose(first), w.transpose(first), 0.01, 1e-3, axis).transpose(np.argsort(first))
    tx = clipjax.adaptive_grad_clip(0.01)
    np.testing.assert_allclose(tx.update(g, tx.init(w), w)[0], there, rtol=2e-6)


def test_agc_leaves_the_head_out_by_one_entry() -> None:
    params = {"head": {"bias": jnp.ones(3), "kernel": jnp.ones((4, 3))}, "body": {"kernel": jnp.ones((4, 4))}}
    grads = jax.tree.map(lambda x: 100 * x, params)
    tx = clipjax.adaptive_grad_clip(axes={"head/*": clipjax.SKIP, "*": clipjax.fan_in_or_whole})
    updates, _ = tx.update(grads, tx.init(params), params)
    assert same_bits(updates["head"], grads["head"])
    np.testing.assert_allclose(updates["body"]["kernel"], 0.01, rtol=1e-6)


@pytest.mark.parametrize("axes", [None, 0, (0, 1), clipjax.fan_in, {"kernel": 1, "bias": None}])
def test_agc_takes_every_form_of_axes(axes: Any) -> None:
    params = {"bias": jnp.ones((2, 3)), "kernel": jnp.ones((4, 3))}
    grads = jax.tree.map(lambda x: 100 * x, params)
    tx = clipjax.adaptive_grad_clip(0.5, axes=axes)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(flat(updates), 0.5, rtol=1e-6)


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_agc_with_sgd_moves_no_unit_further_than_its_share(rate: float) -> None:
    """|dW_i| <= rate * clipping * max(|W_i|, eps)."""
    clipping, eps = 0.03, 1e-3
    rng = np.random.default_rng(1)
    params = {
        "kernel": jnp.asarray(rng.standard_normal((6, 5)), np.float32).at[:, 0].set(0),
        "bias": jnp.zeros(5),
    }
    tx = optax.chain(clipjax.adaptive_grad_clip(clipping, eps), optax.sgd(rate))
    state, update = tx.init(params), jax.jit(tx.update)
    for i in range(20):
        grads = jax.tree.map(lambda x, i=i: x + 10.0 ** (i % 7 - 3), random_like(params, i))
        updates, state = update(grads, state, params)
        for name, axis in (("kernel", 0), ("bias", None)):
            moved, weight = (
                np.asarray(exact_norm(tree[name], axis), np.float64) for tree in (updates, params)
            )
            # SGD rounds rate * update once.
            assert (moved <= rate * clipping * np.maximum(weight, eps) * (1 + 2.0**-23)).all()
        params = optax.apply_updates(params, updates)


def random_like(tree: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def test_agc_needs_params() -> None:
    tx = clipjax.adaptive_grad_clip()
    with pytest.raises(ValueError, match=r"adaptive_grad_clip.*params"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_agc_shows_weights_that_are_not_finite() -> None:
    weights = jnp.ones((4, 3)).at[0, 1].set(jnp.nan)
    tx = clipjax.adaptive_grad_clip()
    updates, _ = tx.update(jnp.ones((4, 3)), tx.init(weights), weights)
    assert np.isnan(updates).any(axis=0).tolist() == [False, True, False]
    for clipping in (0.0, math.inf):
        tx = clipjax.adaptive_grad_clip(clipping, eps=0.0)
        updates, _ = tx.update(jnp.ones((4, 3)), tx.init(weights), jnp.zeros((4, 3)))
        np.testing.assert_array_equal(updates, clipping > 0)


# --------------------------------------------------------------------------------------------------
# Arguments.

BAD = [
    ("autoclip", "percentile", -1, ValueError),
    ("autoclip", "percentile", 101.0, ValueError),
    ("autoclip", "percentile", math.nan, ValueError),
    ("autoclip", "percentile", "10", TypeError),
    ("autoclip", "percentile", np.ones(2), ValueError),
    ("autoclip", "percentile", optax.constant_schedule(1.0), TypeError),
    ("autoclip", "window", 0, ValueError),
    ("autoclip", "window", 10.0, TypeError),
    ("autoclip", "window", True, TypeError),
    ("zclip", "z_threshold", -0.1, ValueError),
    ("zclip", "decay", 1.0, ValueError),
    ("zclip", "decay", -0.1, ValueError),
    ("zclip", "warmup_steps", -1, ValueError),
    ("zclip", "warmup_steps", 2.5, TypeError),
    ("zclip", "max_norm", -1.0, ValueError),
    ("zclip", "mode", "zscore", ValueError),
    ("zclip", "mode", None, ValueError),
    ("zclip", "clip_factor", -1.0, ValueError),
    ("zclip", "eps", -1e-6, ValueError),
    ("zclip", "update_on_spike", 1, TypeError),
    ("adagc", "relative_bound", -1.0, ValueError),
    ("adagc", "decay", 1, ValueError),
    ("adagc", "warmup_steps", -5, ValueError),
    ("adagc", "max_norm", math.nan, ValueError),
    ("adagc", "warmup_norms", "both", ValueError),
    ("clip_by_lognormal", "std_factor", -2.0, ValueError),
    ("clip_by_lognormal", "decay", 1.5, ValueError),
    ("clip_by_lognormal", "max_norm", "1", TypeError),
    ("clip_by_lognormal", "eps", 0.0, ValueError),
    ("clip_by_quantile", "quantile", 0.0, ValueError),
    ("clip_by_quantile", "quantile", 1.0, ValueError),
    ("clip_by_quantile", "learning_rate", 0, ValueError),
    ("clip_by_quantile", "initial_max_norm", 0.0, ValueError),
    ("clip_by_quantile", "initial_max_norm", math.inf, ValueError),
    ("adaptive_grad_clip", "clipping", -0.01, ValueError),
    ("adaptive_grad_clip", "eps", math.nan, ValueError),
    ("adaptive_grad_clip", "axes", 0.5, TypeError),
]


@pytest.mark.parametrize(("name", "argument", "value", "error"), BAD)
def test_bad_arguments_raise_when_built(name: str, argument: str, value: Any, error: type) -> None:
    with pytest.raises(error) as caught:
        getattr(clipjax, name)(**{argument: value})
    assert argument in str(caught.value)
    assert repr(value) in str(caught.value)


def test_adagc_names_other_leaves_than_it_started_with() -> None:
    tx = clipjax.adagc()
    with pytest.raises(ValueError, match=r"adagc.* 1 .*3"):
        tx.update({"a": jnp.ones(2)}, tx.init(PARAMS))


def test_bounds_may_be_schedules() -> None:
    falling = optax.linear_schedule(2.0, 0.0, 10)
    stacked = leaves_of_norm(np.full(12, 5.0))
    for tx in (
        clipjax.zclip(max_norm=falling),
        clipjax.clip_by_lognormal(max_norm=falling),
        clipjax.adagc(max_norm=falling),
    ):
        done = run(tx, stacked)
        np.testing.assert_allclose(done.clipped, np.maximum(2 - 0.2 * np.arange(12), 0), rtol=1e-5, atol=1e-6)


def test_hyperparameters_can_be_injected_and_changed() -> None:
    tx = optax.inject_hyperparams(clipjax.autoclip)(
        percentile=optax.linear_schedule(0.0, 100.0, 2), window=16
    )
    grads = [leaves_of_norm(np.array([n])) for n in (3.0, 1.0, 4.0)]
    state, update = tx.init(grads[0]), jax.jit(tx.update)
    clipped = []
    for g in grads:
        updates, state = update(g, state)
        clipped.append(float(exact_tree_norm(updates)))
    np.testing.assert_allclose(clipped, [3, 1, 4], rtol=1e-6)  # percentiles 0, 50 and 100
    tx = optax.inject_hyperparams(clipjax.zclip)(warmup_steps=3)
    state = tx.init(grads[0])
    state.hyperparams["z_threshold"] = jnp.asarray(0.0)
    for g in (*grads, leaves_of_norm(np.array([9.0]))):
        updates, state = jax.jit(tx.update)(g, state)
    np.testing.assert_allclose(exact_tree_norm(updates), 8 / 3, rtol=1e-5)


def test_a_traced_window_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"window.*static_args"):
        jax.eval_shape(lambda n: clipjax.autoclip(window=n).init(PARAMS), 5)


# --------------------------------------------------------------------------------------------------
# Groups of paths, and what shares a norm.


def test_groups_of_paths_have_thresholds_of_their_own() -> None:
    params = {"embed": jnp.ones((4, 3)), "body": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}}
    labels = {"embed": "embed", "body": "rest"}
    tx = optax.partition({"embed": clipjax.autoclip(50.0), "rest": clipjax.zclip(warmup_steps=4)}, labels)
    chained = optax.chain(
        optax.masked(clipjax.autoclip(50.0), {"embed": True, "body": False}),
        optax.masked(clipjax.zclip(warmup_steps=4), {"embed": False, "body": True}),
    )
    alone = {"embed": clipjax.autoclip(50.0), "body": clipjax.zclip(warmup_steps=4)}
    states = [tx.init(params), chained.init(params), {k: t.init(params[k]) for k, t in alone.items()}]
    for i in range(12):
        grads = jax.tree.map(lambda x, i=i: x * math.exp(math.sin(3 * i)) * (30 if i == 9 else 1), params)
        grads["embed"] *= 100
        one, states[0] = tx.update(grads, states[0], params)
        two, states[1] = chained.update(grads, states[1], params)
        three = {}
        for k, t in alone.items():
            three[k], states[2][k] = t.update(grads[k], states[2][k], params[k])
        assert same_bits(one, three)
        assert same_bits(two, three)
    for state in states[:2]:
        seen = clipjax.metrics(state)
        assert same_bits(seen["autoclip/threshold"], states[2]["embed"].threshold)
        assert same_bits(seen["zclip/threshold"], states[2]["body"].threshold)
        assert seen["autoclip/threshold"] > 10 * seen["zclip/threshold"]


LARGE = {f"kernel_{i}": jax.ShapeDtypeStruct((1024, 1024), np.float32) for i in range(3)}


def passes(function: Any, *args: Any) -> float:
    """How often a program reads or writes all of LARGE."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return traffic(text, 1024 * 1024) / (4 * len(LARGE) * 1024 * 1024)


CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the counts are those of XLA on CPU")


@CPU
def test_who_looks_at_the_same_tree_shares_one_norm() -> None:
    several = [
        clipjax.autoclip(),
        clipjax.zclip(),
        clipjax.clip_by_quantile(),
        clipjax.clip_by_global_norm(1.0),
    ]
    states = [jax.eval_shape(tx.init, LARGE) for tx in several]

    def look(grads: Any, states: Any) -> Any:
        return functional.global_norm(grads), [
            tx.update(grads, state)[1] for tx, state in zip(several, states, strict=True)
        ]

    alone = passes(functional.global_norm, LARGE)
    assert 1 <= alone < 1.2
    assert passes(look, LARGE, states) == alone


WHOLE = {
    "autoclip": clipjax.autoclip,
    "zclip": clipjax.zclip,
    "clip_by_lognormal": clipjax.clip_by_lognormal,
    "clip_by_quantile": clipjax.clip_by_quantile,
}


@CPU
@pytest.mark.parametrize("make", WHOLE.values(), ids=list(WHOLE))
def test_a_threshold_that_adapts_costs_no_pass_more(make: Any) -> None:
    adam = optax.adam(1e-3, mu_dtype=jnp.float32)
    fixed, adaptive = (cost(optax.chain(tx, adam)) for tx in (clipjax.clip_by_global_norm(1.0), make()))
    assert adaptive.passes == fixed.passes > adam_alone("float32").passes
    assert adaptive.temporary <= fixed.temporary + 0.001  # a window


@CPU
def test_adagc_measures_every_leaf_once() -> None:
    adam = optax.adam(1e-3, mu_dtype=jnp.float32)
    fixed, adaptive = (cost(optax.chain(tx, adam)) for tx in (clipjax.clip_by_norm(1.0), clipjax.adagc()))
    assert adaptive.passes == fixed.passes


# --------------------------------------------------------------------------------------------------
# Derivatives.


@pytest.mark.parametrize(
    "make",
    [
        lambda: clipjax.autoclip(95.0, window=8),
        lambda: clipjax.zclip(warmup_steps=6),
        lambda: clipjax.zclip(warmup_steps=6, mode="percentile"),
        lambda: clipjax.clip_by_lognormal(0.5),
        lambda: clipjax.clip_by_quantile(),
        lambda: clipjax.adagc(warmup_steps=4),
    ],
    ids=["autoclip", "zclip", "zclip-percentile", "lognormal", "quantile", "adagc"],
)
def test_derivatives_are_those_of_the_step(make: Callable[[], Any]) -> None:
    """Through the step's own norm, which moves the bound as well; against central differences, in float64."""
    with jax.enable_x64(True):
        tx = make()
        params = jax.tree.map(lambda x: x.astype(np.float64), PARAMS)
        usual = leaves_of_norm(np.exp(0.3 * np.random.default_rng(2).standard_normal(8)))
        state = run(tx, jax.tree.map(lambda x: x.astype(np.float64), usual), params).state
        spike = jax.tree.map(lambda x: jnp.asarray(x[0], np.float64) * 4, usual)
        weights = random_like(spike, 9)

        @jax.jit
        def loss(t: Any) -> jax.Array:
            updates, _ = tx.update(jax.tree.map(lambda g, d: g + t * d, spike, weights), state, params)
            return sum(jnp.sum(jnp.sin(u)) for u in jax.tree.leaves(updates))

        assert int(tx.update(spike, state, params)[1].seen.clipped) > int(state.seen.clipped)
        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        np.testing.assert_allclose(jax.grad(loss)(0.0), slope, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(jax.jvp(loss, (0.0,), (1.0,))[1], slope, rtol=1e-6, atol=1e-8)


def test_a_whole_run_can_be_differentiated() -> None:
    for make in EVERY.values():
        tx = make()
        stacked = leaves_of_norm(sequence(1, 12))

        @functools.partial(jax.jit, static_argnums=1)
        def loss(scale: Any, tx: Any, stacked: Any = stacked) -> jax.Array:
            def one(state: Any, grads: Any) -> Any:
                updates, state = tx.update(jax.tree.map(lambda g: scale * g, grads), state)
                return state, sum(jnp.sum(u) for u in jax.tree.leaves(updates))

            return jnp.sum(jax.lax.scan(one, tx.init(PARAMS), stacked)[1])

        for scale in (0.0, 1.0):
            assert np.isfinite(jax.grad(loss)(scale, tx))


def test_metrics_show_the_threshold() -> None:
    tx = clipjax.autoclip(0.0)
    state = tx.init(PARAMS)
    for norm in (2.0, 3.0):
        grads = jax.tree.map(lambda x: x[0], leaves_of_norm(np.array([norm])))
        _, state = tx.update(grads, state)
    seen = {key: float(value) for key, value in clipjax.metrics(state).items()}
    assert seen["autoclip/threshold"] == pytest.approx(2.0)
    assert seen["autoclip/norm"] == pytest.approx(3.0)
    assert seen["autoclip/scale"] == pytest.approx(2 / 3)
    assert seen["autoclip/clipped_fraction"] == 0.5
    assert not any(re.search("history|gamma", key) for key in seen)
