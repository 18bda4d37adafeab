"""`spectral_cap`: which leaves are matrices, and how; stacks of them; NaN and infinity; derivatives."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import clipjax
from tests.support.trees import same_bits
from tests.support.weights import capped, exact, largest_singular_value, singular_values

METHODS = ("svd", "newton_schulz")
every_method = pytest.mark.parametrize("method", METHODS)

SHAPES = {
    "attention": {"query": (6, 2, 3), "left": (6, 2, 3)},
    "conv": {"kernel": (2, 2, 3, 5)},
    "dense": {"kernel": (4, 5), "bias": (5,)},
}
FLATTEN: dict[str, Any] = {
    "query": (0, (1, 2)),
    "left": clipjax.SKIP,
    "conv/kernel": ((0, 1, 2), 3),
}


def tree() -> Any:
    rng = np.random.default_rng(6)
    return jax.tree.map(
        lambda shape: 3 * rng.standard_normal(shape).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def test_flatten_says_what_a_matrix_is() -> None:
    params = tree()
    result = jax.device_get(jax.jit(clipjax.spectral_cap(1.0, flatten=FLATTEN).__call__)(params))
    flat = [
        (params["attention"]["query"].reshape(6, 6), result["attention"]["query"].reshape(6, 6)),
        (params["conv"]["kernel"].reshape(12, 5), result["conv"]["kernel"].reshape(12, 5)),
        (params["dense"]["kernel"], result["dense"]["kernel"]),  # which no pattern matches
    ]
    for before, after in flat:
        assert largest_singular_value(after) <= 1.0
        np.testing.assert_allclose(exact(after), capped(before, 1.0), atol=2e-6)
    assert same_bits(params["dense"]["bias"], result["dense"]["bias"])
    assert same_bits(params["attention"]["left"], result["attention"]["left"])


def test_skip_leaves_all_alone() -> None:
    params = tree()
    assert same_bits(clipjax.spectral_cap(1.0, flatten=clipjax.SKIP)(params), params)


# Heads in the middle, and layers first: the stack is in the order of its axes, wherever they are.
STACKS: dict[str, Any] = {"heads": (0, 2), "scanned/*": lambda path, leaf: (-2, -1)}


@functools.cache
def of_stacks(method: str) -> Any:
    """Each matrix of a stack with a bound of its own."""
    # By the products only what is scanned: where the axes are does not concern the method.
    flatten = STACKS if method == "svd" else (1, 2)
    return jax.jit(
        lambda stacks, bounds: clipjax.spectral_cap(bounds, method=method, flatten=flatten)(stacks)
    )


def stacks(method: str = "svd") -> Any:
    rng = np.random.default_rng(7)
    scanned, heads = rng.standard_normal((3, 5, 4)), rng.standard_normal((6, 3, 4))
    found = {"scanned": {"kernel": scanned.astype(np.float32)}}
    return found | ({"heads": heads.astype(np.float32)} if method == "svd" else {})


@every_method
def test_a_stack_has_one_bound_for_each_matrix(method: str) -> None:
    bounds = np.array([0.5, 1.0, np.inf], np.float32)
    before = stacks(method)
    after = jax.device_get(of_stacks(method)(before, bounds))
    for i, bound in enumerate(bounds):
        pairs = [(before["scanned"]["kernel"][i], after["scanned"]["kernel"][i])]
        if method == "svd":
            pairs.append((before["heads"][:, i], after["heads"][:, i]))
        for old, new in pairs:
            assert largest_singular_value(new) <= bound
            atol = 2e-6 if method == "svd" else 1e-3 * min(bound, 1)
            np.testing.assert_allclose(exact(new), capped(old, bound), atol=atol)
    with pytest.raises(ValueError, match=r"bound must broadcast.* of shape \(4,\)"):
        of_stacks(method)(before, np.ones(4, np.float32))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_method
def test_nonfinite_entries_show_in_their_matrix_only(method: str, bad: float) -> None:
    before, ones = stacks(method), np.ones(3, np.float32)
    clean = of_stacks(method)(before, ones)
    before["scanned"]["kernel"][1, 2, 3] = bad
    result = of_stacks(method)(before, ones)
    kernel = np.asarray(result["scanned"]["kernel"])
    assert np.isnan(kernel[1]).all()
    np.testing.assert_array_equal(kernel[[0, 2]], np.asarray(clean["scanned"]["kernel"])[[0, 2]])
    for name in before.keys() - {"scanned"}:
        np.testing.assert_array_equal(result[name], clean[name])


def test_what_cannot_be_flattened_is_an_error() -> None:
    params = tree()

    def call(**options: Any) -> None:
        jax.eval_shape(clipjax.spectral_cap(1.0, **options).__call__, params)

    with pytest.raises(ValueError, match=r"'attention/left' of shape \(6, 2, 3\)(?s:.*)flatten="):
        call()
    with pytest.raises(ValueError, match="'conv/kernel'"):
        call(flatten={"query": (0, (1, 2)), "left": clipjax.SKIP})
    with pytest.raises(ValueError, match="matches no leaf"):
        call(flatten={"quarry": (0, 1)})
    with pytest.raises(ValueError, match="4 is out of range"):
        call(flatten={**FLATTEN, "conv/kernel": (0, 4)})
    with pytest.raises(ValueError, match="names an axis twice"):
        call(flatten={**FLATTEN, "conv/kernel": ((0, 3), -1)})
    for bad in (0, "01", (0, 1, 2), (0, 1.5), (True, 1), {0: (0, 1)}, {"a": {"b": (0, 1)}}):
        with pytest.raises(TypeError, match="flatten"):
            clipjax.spectral_cap(1.0, flatten=bad)
    with pytest.raises(ValueError, match="method must be one of 'svd', 'newton_schulz', got 'qr'"):
        clipjax.spectral_cap(1.0, method="qr")  # type: ignore[arg-type]


def test_stacks_may_be_split_and_matrices_not() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), "x")
    w, ones = stacks(), np.ones(3, np.float32)
    scanned = w["scanned"]["kernel"]

    def mapped(spec: Any, given: Any) -> Any:
        cap = clipjax.spectral_cap(1.0, flatten=(1, 2), specs=given)
        return jax.jit(jax.shard_map(cap.__call__, mesh=mesh, in_specs=spec, out_specs=spec))

    layers, rows = PartitionSpec("x"), PartitionSpec(None, "x")
    np.testing.assert_array_equal(
        mapped(layers, layers)(scanned), of_stacks("svd")(w, ones)["scanned"]["kernel"]
    )
    with pytest.raises(ValueError, match="split over the mesh axes"):
        mapped(rows, rows).lower(scanned)
    with pytest.raises(ValueError, match="specs"):
        mapped(layers, None).lower(scanned)


# --------------------------------------------------------------------------------------------------
# Derivatives.


@functools.cache
def derivatives(method: str) -> Any:
    """Along a direction, and of a weighted sum by the matrix and by the bound."""

    def of(w: Any, bound: Any, along: Any, weights: Any) -> Any:
        def cap(w: Any, bound: Any) -> Any:
            return clipjax.spectral_cap(bound, method=method)(w)

        forward = jax.jvp(cap, (w, bound), (along, jnp.zeros_like(bound)))[1]
        return forward, *jax.vjp(cap, w, bound)[1](weights)

    return jax.jit(of)


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("svd", (4, 4)),
        ("newton_schulz", (5, 3)),
        ("svd", (3, 6)),
        pytest.param("svd", (5, 3), marks=pytest.mark.full),
        pytest.param("newton_schulz", (4, 4), marks=pytest.mark.full),
        pytest.param("newton_schulz", (3, 6), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_derivatives_agree_with_finite_differences(method: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(11)
    w, dw, weights = (rng.standard_normal(shape) for _ in range(3))
    bound, h = 1.5, 1e-6
    assert largest_singular_value(w) > bound > singular_values(w).min()
    along = (capped(w + h * dw, bound) - capped(w - h * dw, bound)) / (2 * h)
    along_bound = (capped(w, bound + h) - capped(w, bound - h)) / (2 * h)

    forward, *reverse = derivatives(method)(*(np.asarray(x, np.float32) for x in (w, bound, dw, weights)))
    np.testing.assert_allclose(forward, along, atol=5e-6)
    np.testing.assert_allclose(np.sum(np.asarray(reverse[0]) * dw), np.sum(weights * along), atol=2e-5)
    np.testing.assert_allclose(reverse[1], np.sum(weights * along_bound), atol=2e-5)


@pytest.mark.parametrize(
    "matrix",
    [
        np.zeros((4, 4)),
        np.eye(4),
        2 * np.eye(4),
        np.ones((4, 4)),
        np.diag([2.0, 2.0, 0.5, 0.5]),
        np.zeros((3, 6)),
    ],
    ids=["zero", "at the bound", "ties outside", "rank one", "ties", "zero wide"],
)
def test_derivatives_are_finite_at_ties(matrix: np.ndarray) -> None:
    w, weights = np.asarray(matrix, np.float32), np.cos(matrix).astype(np.float32)
    found = derivatives("svd")(w, np.float32(1.0), np.ones_like(w), weights)
    for each in found:
        assert np.isfinite(np.asarray(each)).all()
    if not matrix.any():  # inside, it is the identity
        np.testing.assert_allclose(found[1], np.ones_like(matrix), atol=1e-6)
