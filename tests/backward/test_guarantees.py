"""What the clips guarantee, of the gradient: the bound is a bound, and inside the bound nothing moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clipjax
from clipjax import functional
from tests.support.backward import CLIPS, back, close, each_dtype, expected, pulled
from tests.support.oracles import INF, exact_norm, exact_tree_norm, ulp
from tests.support.trees import DTYPES, flat, same_bits

Clips = Mapping[str, Callable[..., Any]]

# Besides: entries by their size, complex ones too, and columns of the leaf that a pattern names.
ALL = CLIPS | {
    "size": lambda x, bound: clipjax.clip_gradient_by_value(x, bound),
    "columns of a": lambda x, bound: clipjax.clip_gradient_by_norm(x, bound, axes={"a": 0}),
}
SEEDS = 20


def of_dtype(dtype: Any) -> list[str]:
    """The clips that are of interest: complex entries have no order, and a pattern knows no dtype."""
    left_out = {np.float32: (), np.complex64: ("value", "columns of a")}
    return [name for name in ALL if name not in left_out.get(dtype, ("size", "columns of a"))]


@functools.cache
def clipped(dtype: Any, bound: float | None = None) -> Callable[..., dict[str, Any]]:
    """By every clip, in one program: a function of the gradient, and of the bound if this is not known."""
    if bound is not None:
        return jax.jit(lambda g: {name: pulled(lambda x: ALL[name](x, bound), g) for name in of_dtype(dtype)})  # noqa: B023
    return jax.jit(lambda g, b: {name: pulled(lambda x: ALL[name](x, b), g) for name in of_dtype(dtype)})  # noqa: B023


def gradient(dtype: Any, seed: int, scale: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def leaf(*shape: int, scale: float) -> np.ndarray:
        x = scale * rng.standard_normal(shape)
        return (x + 1j * scale * rng.standard_normal(shape) if dtype is np.complex64 else x).astype(dtype)

    return {"a": leaf(17, 5, scale=scale), "b": leaf(3, scale=scale / 10)}


def judge(before: dict[str, np.ndarray], after: dict[str, dict[str, np.ndarray]], bound: float) -> None:
    dtype = before["a"].dtype
    room = 4 * ulp(bound, np.float32 if dtype == np.complex64 else dtype)

    def held(norms_before: Any, norms_after: Any) -> None:
        # Saturated, or let through: 4 ulp below at the most.
        assert np.all(norms_after <= bound)
        assert np.all(norms_after >= np.minimum(norms_before, bound) - room)

    after = jax.tree.map(np.asarray, after)
    for got in after.values():
        assert all(got[key].dtype == dtype for key in before)
    for key, leaf in before.items():
        held(exact_norm(leaf), exact_norm(after["norm"][key]))
        held(exact_norm(leaf, 0), exact_norm(after["units"][key], 0))
        for entries in {"value", "size"} & set(after):
            held(exact_norm(leaf, ()), exact_norm(after[entries][key], ()))
    if "columns of a" in after:
        held(exact_norm(before["a"], 0), exact_norm(after["columns of a"]["a"], 0))
        assert same_bits(after["columns of a"]["b"], before["b"])
    held(exact_tree_norm(before), exact_tree_norm(after["global"]))


@each_dtype
def test_a_traced_bound_is_a_bound(dtype):
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        bound = float(np.float32(10.0 ** rng.uniform(-3, 2)))
        g = gradient(dtype, seed, 10.0 ** rng.uniform(-3, 3))
        judge(g, clipped(dtype)(g, bound), bound)


# How a known bound comes in does not depend on the dtype. 0.1 is larger when it is rounded to float32.
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (np.float32, 0.1),
        (DTYPES["bf16"], 0.1),
        *(
            pytest.param(dtype, bound, marks=pytest.mark.full)
            for dtype in (*DTYPES.values(), np.complex64)
            for bound in (0.007, 2.3, 70.1)
        ),
    ],
)
def test_a_known_bound_is_a_bound_in_full_precision(dtype, bound):
    for seed in range(SEEDS):
        g = gradient(dtype, seed, 10.0 ** np.random.default_rng(seed).uniform(-3, 3))
        judge(g, clipped(dtype, bound)(g), bound)


@each_dtype
def test_inside_nothing_moves(dtype):
    for seed in range(SEEDS):
        g = gradient(dtype, seed, 10.0 ** np.random.default_rng(seed).uniform(-3, 0))
        for got in clipped(dtype)(g, 100.0).values():
            assert same_bits(got, g)


@each_dtype
def test_on_the_bound_nothing_moves(dtype):
    """The norm of the tree rounded up to float32, and the largest entry itself."""
    for seed in range(SEEDS):
        g = gradient(dtype, seed, 10.0 ** np.random.default_rng(seed).uniform(-3, 3))
        norm = exact_tree_norm(g)
        bound = np.float32(norm)
        bound = bound if bound >= norm else np.nextafter(bound, np.float32(np.inf))
        for got in clipped(dtype)(g, float(bound)).values():
            assert same_bits(got, g)
        if dtype is not np.complex64:
            got = clipped(dtype)(g, float(np.abs(flat(g)).max()))
            assert all(same_bits(got[name], g) for name in ("value", "size") if name in got)


def test_against_numpy():
    for seed in range(SEEDS):
        g, bound = gradient(np.float32, seed, 1.0), np.float32(0.1 + seed)
        got = clipped(np.float32)(g, bound)
        for name in CLIPS:
            close(got[name], expected(name, g, float(bound)))


def test_a_large_range():
    g = gradient(np.float32, 0, 1.0)
    for size in (np.float32(1e-30), np.float32(1e30)):
        got = clipped(np.float32)(jax.tree.map(lambda x: x * size, g), size)  # noqa: B023
        for name in CLIPS:
            close(jax.tree.map(lambda x: np.asarray(x, np.float64) / size, got[name]), expected(name, g, 1.0))  # noqa: B023


def test_bounds_at_the_ends():
    """Of 0 nothing is left, of infinity everything; traced or known."""
    g = gradient(np.float32, 0, 1.0)
    zeros = jax.tree.map(np.zeros_like, g)
    for bound in (0.0, INF):
        got = clipped(np.float32)(g, bound)
        assert same_bits(got.pop("columns of a")["b"], g["b"])  # has no bound
        for tree in (*got.values(), *at_the_ends(g["b"])[bound]):
            assert same_bits(tree, g if isinstance(tree, dict) else g["b"]) if bound else not flat(tree).any()
        for tree in (*clipped(np.float32)(zeros, bound).values(), *at_the_ends(zeros["b"])[bound]):
            assert not flat(tree).any()


@jax.jit
def at_the_ends(g: Any) -> dict[float, list[Any]]:
    clips = [ALL[name] for name in ALL if name != "columns of a"]
    return {bound: [pulled(lambda x: clip(x, bound), g) for clip in clips] for bound in (0.0, INF)}  # noqa: B023


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_entries(bad):
    """They make NaN of what shares their norm, and of nothing else; of single entries only NaN does."""
    g = gradient(np.float32, 0, 1.0)
    g["a"][2, 3] = bad
    got = jax.tree.map(np.asarray, clipped(np.float32)(g, 0.5))
    elsewhere = np.arange(5) != 3
    assert np.isnan(got["norm"]["a"]).all()
    for name in ("units", "columns of a"):
        assert np.isnan(got[name]["a"][:, 3]).all()
        assert np.isfinite(got[name]["a"][:, elsewhere]).all()
    for name in ("norm", "units", "columns of a", "value", "size"):
        assert np.isfinite(got[name]["b"]).all()
    assert np.isnan(flat(got["global"])).all()
    for name in ("value", "size"):
        np.testing.assert_array_equal(got[name]["a"], np.clip(g["a"], -0.5, 0.5))


def test_float64():
    with jax.enable_x64(True):
        g = {"a": np.array([3e200, 4e200]), "b": np.float32(1)}
        got = back(lambda x: clipjax.clip_gradient_by_global_norm(x, 0.1))(g)
        assert got["a"].dtype == np.float64
        assert 0.1 * (1 - 1e-14) <= exact_tree_norm(got) <= 0.1


def test_a_bound_for_each_unit():
    g = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    bounds = np.array([[1.0, 2.0]], np.float32)
    got = back(lambda x: clipjax.clip_gradient_by_norm(x, bounds, 0))(g)
    np.testing.assert_allclose(np.linalg.norm(got, axis=0), [1, 2], rtol=1e-6)


SHAPES = [(), (0,), (3,), (2, 3)]  # few: each is compiled anew
PAIRS = {
    "norm": functional.clip_by_norm,
    "global": lambda g, bound: functional.clip_by_global_norm(g, bound)[0],
    "value": lambda g, bound: functional.clip_by_value(g, -bound, bound),
}


@jax.jit
def by_layers_and_by_functions(g: Any, bound: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    layers = {name: pulled(lambda x: CLIPS[name](x, bound), g) for name in PAIRS}  # noqa: B023
    return layers, {name: function(g, bound) for name, function in PAIRS.items()}


@given(
    shape=st.sampled_from(SHAPES),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e30]),
    bound=st.sampled_from([0.0, 1e-3, 1.0, 1e3, INF]),
    seed=st.integers(0, 2**31),
)
def test_the_same_as_the_function_on_trees(shape, scale, bound, seed):
    g = np.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, np.float32)
    layers, functions = by_layers_and_by_functions(g, bound)
    assert same_bits(layers, functions)
