"""`verify` against NumPy in float64, and what it says of averages and casts."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import clipjax
from tests.support.oracles import exact_norm
from tests.support.trees import DTYPES, random_tree


def kernel(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# The shape, the axes, and those that are kept.
UNITS = [
    ((7, 5), clipjax.fan_in, (1,)),
    ((7, 5), 1, (0,)),
    ((7, 5), None, ()),
    ((2, 3, 4, 5), clipjax.fan_in, (3,)),
    ((2, 3, 4), (1,), (0, 2)),
]


@pytest.mark.parametrize(
    ("shape", "axes", "kept", "dtype"),
    [
        # Every kind of unit in float32, and two in 16 bits.
        pytest.param(*units, DTYPES[kind], marks=[] if kind in kinds else pytest.mark.full, id=f"{kind}-{i}")
        for i, (units, kinds) in enumerate(
            zip(UNITS, [("f32", "bf16"), ("f32",), ("f32",), ("f32",), ("f32", "f16")], strict=True)
        )
        for kind in DTYPES
    ],
)
def test_the_units_and_their_norms_are_those_of_numpy(
    shape: tuple[int, ...], axes: Any, kept: tuple[int, ...], dtype: Any
) -> None:
    leaf = kernel(*shape, dtype=dtype)
    reduced = None if axes is None else tuple(i for i in range(len(shape)) if i not in kept)
    norms = np.asarray(exact_norm(leaf, reduced), np.float64)
    radius = float(np.median(norms)) if norms.size > 1 else float(norms) / 2
    expected = {at: norms[at] for at in np.ndindex(norms.shape) if norms[at] > radius}
    assert expected

    found = clipjax.verify({"layer": {"kernel": leaf}}, clipjax.max_norm(radius, axes=axes))
    assert {v.unit for v in found} == set(expected)
    assert [v.excess for v in found] == sorted((v.excess for v in found), reverse=True)
    for v in found:
        assert (v.path, v.low, v.high) == ("layer/kernel", 0.0, radius)
        assert type(v.value) is float
        np.testing.assert_allclose(v.value, expected[v.unit], rtol=1e-14)
        assert v.excess == v.value - radius
    ball = clipjax.max_norm(radius, axes=axes)
    assert not clipjax.verify({"layer": {"kernel": jax.jit(ball.__call__)(leaf)}}, ball)


def test_one_ulp_is_seen() -> None:
    """In float32 arithmetic this norm is 1; in float64 it is not."""
    leaf = np.array([[1.0], [2.0**-13]], np.float32)
    assert float(np.linalg.norm(leaf)) == 1.0
    (found,) = clipjax.verify(leaf, clipjax.max_norm(1.0))
    np.testing.assert_allclose(found.value, math.sqrt(1 + 2.0**-26), rtol=1e-15)


def test_it_reads_well() -> None:
    leaf = np.array([[3.0, 0.3], [4.0, 0.4]], np.float32)
    (found,) = clipjax.verify({"dense": {"kernel": leaf}}, clipjax.max_norm(1.0))
    assert str(found) == "dense/kernel, unit (0,): 5, above 1 by 4"
    assert repr(found) == "Violation(path='dense/kernel', unit=(0,), value=5.0, low=0.0, high=1.0)"
    (whole,) = clipjax.verify({"kernel": leaf[:, 0]}, clipjax.max_norm(1.0, axes=None))
    assert str(whole) == "kernel: 5, above 1 by 4"


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_what_is_not_finite_does_not_obey(bad: float) -> None:
    leaf = kernel(4, 3)
    leaf[1, 2], leaf[:, 0] = bad, 100.0
    found = clipjax.verify({"k": leaf}, clipjax.max_norm(1e9))
    assert [v.unit for v in found] == [(2,)]
    found = clipjax.verify({"k": leaf}, clipjax.max_norm(10.0))
    assert [v.unit for v in found] == [(2,), (0,)]  # the worst first
    assert not found[0].excess < 100


# --------------------------------------------------------------------------------------------------
# What it is for.


def trained(steps: int = 20) -> tuple[Any, Any]:
    """Weights on the sphere, after steps that turn them, and their moving average."""
    tx = clipjax.chain(optax.sgd(0.3), clipjax.max_norm(1.0))
    ema = optax.ema(0.9, debias=False)
    params = jax.jit(clipjax.max_norm(1.0).__call__)(random_tree(1, scale=2.0))
    state, averaging = tx.init(params), ema.init(params)
    averaging = averaging._replace(ema=params)

    @jax.jit
    def step(params: Any, state: Any, averaging: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        average, averaging = ema.update(params, averaging)
        return params, state, averaging, average

    average = params
    for i in range(steps):
        params, state, averaging, average = step(params, state, averaging, random_tree(i))
        assert not clipjax.verify(params, tx)
        assert not clipjax.verify(average, tx)
    return params, average


def test_an_average_of_weights_inside_a_ball_is_inside_it() -> None:
    """A ball is convex: an exponential moving average needs no projection of its own."""
    params, average = trained()
    norms = exact_norm(average["dense"]["kernel"], 0)
    assert (norms <= 1).all()
    assert (norms < exact_norm(params["dense"]["kernel"], 0)).any()


def test_a_cast_to_bfloat16_may_leave_the_ball() -> None:
    """Each entry is rounded to the nearest, and so the norm grows as often as it shrinks."""
    ball = clipjax.max_norm(1.0)
    project = jax.jit(ball.__call__)
    params = {"kernel": np.asarray(project(10 * kernel(64, 8)))}
    assert not clipjax.verify(params, ball)
    cast = {"kernel": params["kernel"].astype(ml_dtypes.bfloat16)}
    found = clipjax.verify(cast, ball)
    norms = np.asarray(exact_norm(cast["kernel"], 0), np.float64)
    assert {v.unit[0]: v.value for v in found} == pytest.approx(
        {i: n for i, n in enumerate(norms) if n > 1}, rel=1e-14
    )
    assert 0 < len(found) < 8
    assert 0 < found[0].excess < 2.0**-9  # half an ulp of each entry, at the most
    assert not clipjax.verify(project(cast), ball)


def test_any_function_of_the_weights() -> None:
    """The value is how far it would move the leaf."""
    box = clipjax.project(lambda params: jax.tree.map(lambda x: jnp.clip(x, -1, 1), params))
    params = {"a": np.array([4.0, 0.5, -5.0], np.float32), "b": np.ones(2, np.float32)}
    for each in (box, lambda params: box(params)):
        (found,) = clipjax.verify(params, each)
        assert found == ("a", (), 5.0, 0.0, 0.0)
    assert not clipjax.verify(box(params), box)
    simplex = optax.projections.projection_simplex
    (found,) = clipjax.verify(np.array([2.0, 0.0], np.float32), jax.jit(simplex))
    assert (found.path, found.value) == ("", 1.0)


def test_several_projections_and_chains() -> None:
    ball, whole = clipjax.max_norm(1.0), clipjax.max_norm(3.0, axes=None)
    params = {"k": 2 * np.ones((4, 2), np.float32)}
    found = clipjax.verify(params, [ball, whole])
    assert [(v.unit, v.high) for v in found] == [((0,), 1.0), ((1,), 1.0), ((), 3.0)]
    for tx in (
        clipjax.chain(optax.sgd(1.0), clipjax.chain(ball, whole)),
        clipjax.bounded(optax.sgd(1.0), project=[ball, whole]),
        clipjax.bounded(optax.sgd(1.0), project=(ball, whole), nonfinite="skip"),
    ):
        assert clipjax.verify(params, tx) == found


def test_a_schedule_needs_the_step() -> None:
    ball = clipjax.max_norm(lambda step: 4.0 - step)
    params = {"k": np.array([[2.5], [0.0]], np.float32)}
    assert not clipjax.verify(params, ball, step=1)
    (found,) = clipjax.verify(params, ball, step=2)
    assert (found.value, found.high) == (2.5, 2.0)
    with pytest.raises(ValueError, match="radius is a schedule"):
        clipjax.verify(params, ball)
    # As a chain left it: the step is the last one.
    tx = clipjax.chain(optax.sgd(1.0), ball)
    state = tx.init(params)

    @jax.jit
    def advance(state: Any, params: Any) -> Any:
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
        return state, optax.apply_updates(params, updates)

    for _ in range(3):
        state, params = advance(state, params)
        assert not clipjax.verify(params, tx, step=clipjax.metrics(state)["max_norm/steps"] - 1)


def test_a_limit_below() -> None:
    """Measured by hand: the projections that have one come with their own tests."""
    measured = [
        clipjax.weights.projections.Measured(
            "k", np.array([0.5, 1.0, 3.0]), np.full(3, 0.75), np.full(3, 2.0)
        )
    ]
    shell = clipjax.max_norm(2.0)
    shell = copy_with(shell, measure=lambda params, step: measured)
    found = clipjax.verify({"k": np.ones(3, np.float32)}, shell)
    assert [(v.unit, v.excess) for v in found] == [((2,), 1.0), ((0,), 0.25)]
    assert str(found[1]) == "k, unit (0,): 0.5, below 0.75 by 0.25"


def copy_with(projection: Any, *, measure: Any) -> Any:
    changed = clipjax.max_norm(1.0)
    changed.constrain, changed.measure = projection.constrain, measure
    return changed


# --------------------------------------------------------------------------------------------------
# What may be given.


def test_odd_leaves_are_left_out() -> None:
    params = {
        "kernel": 2 * np.ones((2, 2), np.float32),
        "step": np.arange(3),
        "key": jax.random.key(0),
        "none": None,
        "masked": optax.MaskedNode(),
        "python": 1.0,
        "empty": np.zeros((0, 3), np.float32),
        "function": jax.nn.relu,
        "name": "dense",
    }
    assert {v.path for v in clipjax.verify(params, clipjax.max_norm(1.0))} == {"kernel"}
    assert not clipjax.verify({}, clipjax.max_norm(1.0))


def test_it_is_for_concrete_weights() -> None:
    with pytest.raises(TypeError, match=r"params.*traced: call it outside jit"):
        jax.jit(lambda p: clipjax.verify(p, clipjax.max_norm(1.0)))(np.ones((2, 2)))
    with pytest.raises(TypeError, match="bound is traced"):
        jax.jit(lambda r: clipjax.verify(np.ones((2, 2), np.float32), clipjax.max_norm(r)))(1.0)
    assert clipjax.verify(np.ones((2, 2), np.float32), clipjax.max_norm(1.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (optax.sgd(1.0), "projection must be a projection.*got a gradient transformation"),
        (3.0, "projection must be a projection.*got 3.0"),
        ("max_norm", "projection must be a projection.*got 'max_norm'"),
        ([3.0], "projection must be a projection.*got 3.0"),
    ],
)
def test_what_is_no_projection_is_an_error(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        clipjax.verify({}, given)


def test_a_chain_without_a_projection_is_an_error() -> None:
    with pytest.raises(ValueError, match="this chain has no projection"):
        clipjax.verify({}, clipjax.bounded(optax.sgd(1.0)))
    with pytest.raises(ValueError, match="projection: there is no projection"):
        clipjax.verify({}, [])


def test_linen_and_nnx() -> None:
    nn, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    ball = clipjax.max_norm(0.01)
    shapes = jax.eval_shape(nn.Dense(4).init, jax.random.key(0), np.ones((2, 3), np.float32))
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    found = clipjax.verify(params, ball)
    assert {v.path for v in found} == {"params/kernel"}
    assert {v.unit for v in found} == {(i,) for i in range(4)}
    project = jax.jit(ball.__call__)
    assert not clipjax.verify(project(params), ball)

    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    assert len(clipjax.verify(nnx.state(model, nnx.Param), ball)) == 4
    assert len(clipjax.verify(model, ball)) == 4
    nnx.update(model, project(nnx.state(model, nnx.Param)))
    assert not clipjax.verify(nnx.state(model, nnx.Param), ball)


@pytest.mark.peer
def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 4, 5, 1, key=jax.random.key(0))
    rows = clipjax.max_norm(0.01, axes={"weight": 1})
    found = clipjax.verify(model, rows)
    assert {(v.path, v.unit) for v in found} == {
        *((("layers/0/weight"), (i,)) for i in range(5)),
        *((("layers/1/weight"), (i,)) for i in range(4)),
    }
    weights, rest = eqx.partition(model, eqx.is_inexact_array)
    assert not clipjax.verify(eqx.combine(rows(weights), rest), rows)
