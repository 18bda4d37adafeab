"""`hyperball`: steps of a known length on the sphere of the initial norm."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import clipjax
from tests.support.oracles import exact_norm, exact_slack, ulp
from tests.support.trees import DTYPES, same_bits
from tests.support.weights import every_kind, exact

SHAPE = (40, 24)  # for every test in a dtype, so that few programs are compiled


@functools.cache
def step(axes: Any = None) -> Any:
    """One step at a traced rate: the weights after it, and the state."""

    def run(w: Any, u: Any, state: Any, rate: Any) -> Any:
        tx = clipjax.hyperball(rate, axes=axes)
        updates, state = tx.update(u, state, w)
        return optax.apply_updates(w, updates), state

    return jax.jit(run)


def start(w: Any, axes: Any = None) -> Any:
    return clipjax.hyperball(1.0, axes=axes).init(w)


def stepped(w: Any, u: Any, radius: Any, rate: float, axes: Any = None) -> np.ndarray:
    """R N(w - rate R N(u)) in float64, of arrays of any size."""
    w, u, radius = exact(w), exact(u), np.asarray(radius, np.float64)

    def norm(x: np.ndarray) -> np.ndarray:
        return np.sqrt(np.sum(np.abs(x) ** 2, axis=axes, keepdims=True))

    unit = np.abs(u).max()
    moved = w / radius - rate * (u / unit) / norm(u / unit)
    return radius * moved / norm(moved)


def drawn(seed: int, dtype: Any, size: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    real, imaginary = size * rng.standard_normal((2, *SHAPE))
    return (real + 1j * imaginary if dtype == np.complex64 else real).astype(dtype)


def assert_on_the_sphere(w: Any, radius: Any, axes: Any) -> None:
    """Never above R, and little below."""
    kind = np.float32 if np.iscomplexobj(w) else np.asarray(w).dtype
    norm = exact_norm(w, axes)
    radius = np.asarray(radius, np.longdouble).reshape(norm.shape)
    assert (norm <= radius * (1 + np.longdouble(exact_slack()))).all()
    entries = np.size(w) / norm.size
    subnormal = 6e-8 * math.sqrt(entries) if kind == np.float16 else 0.0
    assert (radius - norm <= 4 * ulp(radius, kind) + subnormal).all()


KINDS = {**DTYPES, "c64": np.complex64}


@pytest.mark.parametrize("axes", [None, 0], ids=["whole", "units"])
@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e30]),
    of_update=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    rate=st.sampled_from([1e-3, 0.02, 0.5]),
)
def test_right_in_every_dtype(
    kind: str, axes: Any, seed: int, size: float, of_update: float, rate: float
) -> None:
    dtype = KINDS[kind]
    if dtype == np.float16:
        size, of_update = (float(np.clip(x, 1e-2, 1e2)) for x in (size, of_update))
    w = drawn(seed, dtype, size)
    state = start(w, axes)
    radius = np.asarray(state.radii[0])
    np.testing.assert_allclose(
        radius.reshape(-1), exact_norm(w, axes).astype(np.float64).reshape(-1), rtol=2e-7
    )
    eps = float(ml_dtypes.finfo(np.float32 if dtype == np.complex64 else dtype).eps)
    for i in (1, 2, 3):
        u, before = drawn(seed + i, dtype, of_update), w
        w, state = step(axes)(w, u, state, np.float32(rate))
        w = np.asarray(w)
        assert w.dtype == dtype
        assert_on_the_sphere(w, radius, axes)
        want = stepped(before, u, radius, float(np.float32(rate)), axes)
        error = np.sqrt(np.sum(np.abs(exact(w) - want) ** 2, axis=axes, keepdims=True))
        assert (error <= 3 * eps * radius).all()
    assert same_bits(state.radii[0], radius)


@every_kind
@pytest.mark.parametrize("axes", [None, 0], ids=["whole", "units"])
def test_where_the_update_or_the_rate_is_zero_nothing_moves(kind: str, axes: Any) -> None:
    w, u = drawn(0, DTYPES[kind]), drawn(1, DTYPES[kind])
    state = start(w, axes)
    for rate in (0.3, 0.01, 0.3):
        for update, none in ((np.zeros_like(u), 0.5), (u, 0.0)):
            assert same_bits(step(axes)(w, update, state, np.float32(none))[0], w)
        w, state = jax.tree.map(np.asarray, step(axes)(w, u, state, np.float32(rate)))
        u = u[::-1].copy()
    away = (1.5 * exact(w)).astype(w.dtype)  # as weights that were changed by hand
    assert same_bits(step(axes)(away, u, state, np.float32(0.0))[0], away)
    assert same_bits(step(axes)(away, np.zeros_like(u), state, np.float32(0.1))[0], away)
    some = u.copy()
    some[:, 3] = 0
    after = np.asarray(step(0)(w, some, start(w, 0), np.float32(0.1))[0])
    assert same_bits(after[:, 3], w[:, 3])
    assert not (after[:, 4] == w[:, 4]).all()


def test_the_norm_does_not_drift() -> None:
    w = drawn(0, np.float32)
    state = start(w)
    tx = clipjax.chain(optax.scale_by_adam(), clipjax.hyperball(lambda step: 0.1 / (1 + step)))

    @jax.jit
    def train(w: Any) -> Any:
        def one(i: Any, carry: Any) -> Any:
            w, state = carry
            grads = jnp.sin(i + jnp.arange(w.size, dtype=w.dtype)).reshape(w.shape)
            updates, state = tx.update(grads, state, w)
            return optax.apply_updates(w, updates), state

        return jax.lax.fori_loop(0, 3000, one, (w, tx.init(w)))

    after, trained = train(w)
    assert_on_the_sphere(after, state.radii[0], None)
    assert same_bits(trained[1].radii, state.radii)
    assert np.vdot(exact(after), exact(w)) < 0.99 * np.vdot(exact(w), exact(w))  # it has turned


def test_a_run_goes_on_with_the_radius_that_it_had() -> None:
    """From a checkpoint with its own; from the weights alone with theirs, which are the same to 4 ulp."""
    w, u = drawn(0, np.float32), drawn(1, np.float32)
    state = start(w)
    after, state = step()(w, u, state, np.float32(0.2))
    anew = start(after)
    np.testing.assert_allclose(anew.radii[0], state.radii[0], rtol=5e-7)
    assert_on_the_sphere(step()(after, u, anew, np.float32(0.2))[0], anew.radii[0], None)
    # Weights that were changed by hand come back.
    assert_on_the_sphere(step()(3 * after, u, state, np.float32(0.2))[0], state.radii[0], None)


# --------------------------------------------------------------------------------------------------
# Which leaves.

TREE = {
    "kernel": drawn(2, np.float32),
    "bias": np.linspace(-1, 1, 24, dtype=np.float32),
    "zeros": np.zeros((3, 4), np.float32),
    "scale": np.float32(2.0),
    "steps": np.int32(3),
}
UPDATE = {
    "kernel": drawn(3, np.float32),
    "bias": np.linspace(3, -2, 24, dtype=np.float32),
    "zeros": np.arange(12, dtype=np.float32).reshape(3, 4),
    "scale": np.float32(-0.5),
    "steps": np.int32(3),
}


def test_what_is_left_alone_takes_the_steps_of_optax() -> None:
    """What `axes` leaves alone, single entries, and weights that are all 0."""
    for rate, axes in ((0.1, {"kernel": None, "zeros": None}), (optax.constant_schedule(0.1), None)):
        tx, plain = clipjax.hyperball(rate, axes=axes), optax.scale_by_learning_rate(rate)
        got, _ = jax.jit(tx.update)(UPDATE, tx.init(TREE), TREE)
        want, _ = plain.update(UPDATE, plain.init(TREE), TREE)
        for name in ("scale", "zeros", *(["bias"] if axes else [])):
            np.testing.assert_array_equal(got[name], want[name])
        assert got["steps"] == 3
        assert np.abs(got["kernel"] - want["kernel"]).max() > 0.01
    for axes in ({"bias": None}, {"kernel": clipjax.SKIP, "*": None}):
        tx = clipjax.hyperball(0.1, axes=axes)
        got, _ = tx.update(UPDATE, tx.init(TREE), TREE)
        np.testing.assert_array_equal(got["kernel"], np.float32(-0.1) * UPDATE["kernel"])
        assert_on_the_sphere(optax.apply_updates(TREE, got)["bias"], tx.init(TREE).radii[0], None)


@every_kind
def test_plain_steps_are_rounded_once(kind: str) -> None:
    u = {"kernel": drawn(0, DTYPES[kind]), "bias": drawn(1, DTYPES[kind])[0]}
    tx = clipjax.hyperball(0.3, axes={"kernel": None})
    got, _ = tx.update(u, tx.init(u), u)
    assert got["bias"].dtype == DTYPES[kind]
    np.testing.assert_array_equal(
        got["bias"], (np.float32(-0.3) * u["bias"].astype(np.float32)).astype(DTYPES[kind])
    )


def test_units_without_a_sphere_take_plain_steps_among_others() -> None:
    w, u = drawn(0, np.float32), drawn(1, np.float32)
    w[:, 5] = 0
    state = start(w, 0)
    assert float(np.asarray(state.radii[0])[0, 5]) == 0
    after = w
    for _ in range(2):
        after, state = step(0)(after, u, state, np.float32(0.1))
    after = np.asarray(after)
    np.testing.assert_allclose(after[:, 5], -0.2 * u[:, 5], rtol=1e-6)
    assert_on_the_sphere(np.delete(after, 5, 1), np.delete(np.asarray(state.radii[0]), 5, 1), 0)


def test_a_stack_has_one_sphere_or_as_many_as_axes_leave() -> None:
    stack = {"layers": {"kernel": np.ones((3, 4, 5), np.float32)}}
    np.testing.assert_allclose(clipjax.hyperball(0.1).init(stack).radii, [math.sqrt(60)], rtol=1e-6)
    state = clipjax.hyperball(0.1, axes=(1, 2)).init(stack)
    np.testing.assert_allclose(state.radii[0].reshape(-1), [math.sqrt(20)] * 3, rtol=1e-6)


# --------------------------------------------------------------------------------------------------
# The place of it, and how it is called.


def test_adam_on_a_sphere_beside_the_formula_in_float64() -> None:
    """AdamH of the authors, written down from the paper: five steps of a matrix and of a bias."""
    rng = np.random.default_rng(5)
    w, b = rng.standard_normal((6, 4)), rng.standard_normal(4)
    b1, b2, eps, rate = 0.9, 0.999, 1e-8, 0.02
    radius = np.linalg.norm(w)
    tx = clipjax.chain(optax.scale_by_adam(b1, b2, eps), clipjax.hyperball(rate, axes={"w": None}))
    params = {"w": w.astype(np.float32), "b": b.astype(np.float32)}
    state, update = tx.init(params), jax.jit(tx.update)
    moments = {name: [np.zeros_like(x), np.zeros_like(x)] for name, x in (("w", w), ("b", b))}
    own = {"w": w, "b": b}
    for t in range(1, 6):
        grads = {name: rng.standard_normal(x.shape) for name, x in own.items()}
        for name, g in grads.items():
            m, v = moments[name]
            m[...], v[...] = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            u = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
            if name == "w":
                moved = own[name] - rate * radius * u / np.linalg.norm(u)
                own[name] = radius * moved / np.linalg.norm(moved)
            else:
                own[name] = own[name] - rate * u
        updates, state = update(jax.tree.map(np.float32, grads), state, params)
        params = optax.apply_updates(params, updates)
    for name, x in own.items():
        np.testing.assert_allclose(params[name], x, atol=2e-6)


@pytest.mark.parametrize("make", ["number", "schedule", "injected", "array"])
def test_the_rate_is_a_number_or_a_schedule(make: str) -> None:
    rates = [0.1, 0.05]
    tx = {
        "number": lambda: clipjax.hyperball(0.1),
        "schedule": lambda: clipjax.hyperball(lambda step: 0.1 / (1 + step)),
        "injected": lambda: optax.inject_hyperparams(clipjax.hyperball)(lambda step: 0.1 / (1 + step)),
        "array": lambda: clipjax.hyperball(jnp.asarray(0.1)),
    }[make]()
    w, u = drawn(0, np.float32), drawn(1, np.float32)
    state, update, radius = tx.init(w), jax.jit(tx.update), np.linalg.norm(exact(w))
    for i in (0, 1):
        updates, state = update(u, state, w)
        want = stepped(w, u, radius, rates[i if make in ("schedule", "injected") else 0])
        w = np.asarray(optax.apply_updates(w, updates))
        np.testing.assert_allclose(w, want, atol=3e-6)


def test_it_goes_last() -> None:
    adam, ball = optax.scale_by_adam(), clipjax.hyperball(1e-2)
    with pytest.raises(
        ValueError, match=r"links\[1\], clipjax.hyperball\(0.01\).*links\[2\] moves them again"
    ):
        clipjax.chain(adam, ball, optax.scale(0.5))
    with pytest.raises(ValueError, match=r"links\[0\], a chain that ends in clipjax.hyperball\(0.01\)"):
        clipjax.chain(clipjax.chain(adam, ball), clipjax.clip_by_norm(1.0))
    with pytest.raises(ValueError, match=r"links\[0\], clipjax.max_norm\(1.0\)"):
        clipjax.chain(clipjax.max_norm(1.0), ball)
    tx = clipjax.bounded(
        clipjax.chain(adam, ball),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.non_negative(),
        nonfinite="skip",
    )
    params = {"kernel": np.ones((4, 3), np.float32)}
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert np.isfinite(updates["kernel"]).all()
    assert {"hyperball/norm", "non_negative/norm"} <= set(clipjax.metrics(state))


def test_metrics() -> None:
    """A step at right angles leads sqrt(1 + rate²) away from the center."""
    w = np.zeros((2, 3), np.float32)
    w[0], u = 2.0, np.zeros((2, 3), np.float32)
    u[1] = 5.0
    state = step(0)(w, u, start(w, 0), np.float32(0.75))[1]
    seen = clipjax.metrics(state)
    np.testing.assert_allclose(seen["hyperball/norm"], 2.5, rtol=1e-6)
    np.testing.assert_allclose(seen["hyperball/norm_after"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(seen["hyperball/scale"], 0.8, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_its_unit(bad: float) -> None:
    w, u = drawn(0, np.float32), drawn(1, np.float32)
    for place in (u, w):
        good = place[1, 2]
        state = start(w, 0)
        place[1, 2] = bad
        after, state = step(0)(w, u, state, np.float32(0.1))
        np.testing.assert_array_equal(np.isnan(after).all(axis=0), np.arange(SHAPE[1]) == 2)
        assert np.isfinite(np.delete(np.asarray(after), 2, 1)).all()
        assert clipjax.metrics(state)["hyperball/nonfinite_count"] == 1
        place[1, 2] = good


def test_a_branch_keeps_16_bits() -> None:
    tx = optax.apply_if_finite(clipjax.chain(optax.scale_by_adam(), clipjax.hyperball(0.1)), 3)
    w, u = drawn(0, ml_dtypes.bfloat16), drawn(1, ml_dtypes.bfloat16)
    state = tx.init(w)
    updates, state = jax.jit(tx.update)(u, state, w)
    assert updates.dtype == ml_dtypes.bfloat16
    after = optax.apply_updates(w, updates)
    assert exact_norm(after) <= np.asarray(optax.tree.get(state, "radii")[0], np.float64)
    assert exact_norm(after) >= 0.98 * exact_norm(w)


def test_derivatives() -> None:
    """Against differences of the formula in float64: in the weights and their norm, the update, the rate."""
    rng = np.random.default_rng(3)
    w, u, dw, du, of = rng.standard_normal((5, 6, 3))
    rate, drate = 0.3, 0.7

    def formula(t: float) -> float:
        weights = w + t * dw
        return float(np.sum(of * stepped(weights, u + t * du, np.linalg.norm(weights), rate + t * drate)))

    def total(w: Any, u: Any, rate: Any) -> Any:
        tx = clipjax.hyperball(rate)
        return jnp.sum(of * optax.apply_updates(w, tx.update(u, tx.init(w), w)[0]))

    with jax.enable_x64(True):
        slopes = map(np.asarray, jax.jit(jax.grad(total, (0, 1, 2)))(w, u, jnp.asarray(rate)))
    expected = (formula(1e-6) - formula(-1e-6)) / 2e-6
    np.testing.assert_allclose(sum(map(np.vdot, slopes, (dw, du, drate))), expected, rtol=1e-7)


def test_float64_at_the_ends_of_its_range() -> None:
    with jax.enable_x64(True):
        for size, of_update in ((1e300, 1.0), (1e-300, 1.0), (1.0, 1e300), (1.0, 1e-300)):
            w, u = np.array([[3.0, 4.0]]) * size, np.array([[-4.0, 3.0]]) * of_update
            after, state = step()(w, u, start(w), 0.75)
            assert state.radii[0].dtype == np.float64
            np.testing.assert_allclose(after / size, [[4.8, 1.4]], rtol=1e-14)


def test_inside_shard_map_units_may_be_split() -> None:
    """`init` inside and outside of it; the radii of units are spread as the units are."""
    mesh, spec = Mesh(np.array(jax.devices()[:1]), "x"), PartitionSpec("x")
    w, u = drawn(0, np.float32), drawn(1, np.float32)
    tx = clipjax.hyperball(0.1, axes=0, specs=spec)
    mapped = functools.partial(jax.shard_map, mesh=mesh)

    def inside(w: Any, u: Any) -> Any:
        return tx.update(u, tx.init(w), w)[0]

    alone = clipjax.hyperball(0.1, axes=0)
    want = jax.jit(lambda w, u: alone.update(u, alone.init(w), w)[0])(w, u)
    got = jax.jit(mapped(inside, in_specs=(spec, spec), out_specs=spec))(w, u)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    outside = mapped(
        lambda w, u, s: tx.update(u, s, w)[0], in_specs=(spec, spec, PartitionSpec()), out_specs=spec
    )
    np.testing.assert_allclose(jax.jit(outside)(w, u, tx.init(w)), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: clipjax.hyperball(-0.1), ValueError, "learning_rate must be at least 0, got -0.1"),
        (lambda: clipjax.hyperball(math.inf), ValueError, "learning_rate must be finite, got inf"),
        (lambda: clipjax.hyperball(math.nan), ValueError, "learning_rate must not be NaN, got nan"),
        (lambda: clipjax.hyperball("0.1"), TypeError, "learning_rate must be a number.*got '0.1'"),
        (lambda: clipjax.hyperball(np.ones(2)), ValueError, "learning_rate must be one number or a schedule"),
        (lambda: clipjax.hyperball(0.1, axes=1.5), TypeError, "axes must be ints.*got 1.5"),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_what_update_needs() -> None:
    tx, tree = clipjax.hyperball(0.1), {"kernel": np.ones((2, 3), np.float32)}
    state = tx.init(tree)
    with pytest.raises(ValueError, match="params: hyperball places the weights: pass them"):
        tx.update(tree, state)
    with pytest.raises(TypeError, match="state: hyperball takes the HyperballState"):
        tx.update(tree, None, tree)
    more = {**tree, "other": tree["kernel"]}
    with pytest.raises(
        ValueError, match="params: hyperball has the radii of 1 leaves from init, but got 2 leaves to place"
    ):
        tx.update(more, state, more)


def test_a_traced_rate_that_is_nan_shows() -> None:
    w = drawn(0, np.float32)
    assert np.isnan(step()(w, w, start(w), np.float32(np.nan))[0]).all()
    assert same_bits(step()(w, w, start(w), np.float32(-1.0))[0], w)  # what is below 0 is 0
