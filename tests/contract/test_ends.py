"""Measured in float64, what is outside ends at or just below its bound."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.contract.members import PROJECTIONS, ROWS, Row
from tests.support import oracles
from tests.support.programs import run, tree_of, weights_of
from tests.support.tolerances import below_of, tolerance, tolerance_of
from tests.support.trees import DTYPES, SHAPES, draw, exact

# Kinds of entries and their sizes, as powers of 2, with units of 3 to 16,384 entries in
# each tree.
RUNS = [
    ("normal", 0),
    ("constant", 6),
    ("lognormal", 0),
    ("lognormal", -6),
    ("normal", 50),
    ("constant", -50),
]
BOUND = 0.6875  # exact in all dtypes
# Sums of products round relative to the largest element of the input, or of the result.
ROUNDS_LIKE_THE_LARGEST = {"tangent_cone": "input", "spectral_cap": "result"}
# Its metric `norm` is that of all leaves, beside a bound for each.
LOGS_NORM_OF_TREE = {"adagc"}
# Its metric `norm` is a root mean square: a multiple of a norm.
LOGS_NO_NORM = {"clip_by_rms"}


def measured(row: Row, x: np.ndarray) -> np.ndarray:
    """Measure what a row bounds."""
    if row.oracle is oracles.of_singular_values:
        return np.linalg.norm(x, 2) if x.ndim == 2 else np.zeros(())
    axes = {"entry": (), "unit": oracles.fan_in(x)}.get(row.shares)
    return oracles.norm(x, axes, row.ord)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_ends_at_or_just_below_the_bound(row: Row) -> None:
    params = weights_of(row)
    for kind, exponent in RUNS if row.wide else RUNS[:4]:
        bound = BOUND * row.times * 2.0**exponent
        tree = tree_of(row, kind, exponent)
        result, state = run(row, tree, bound, params)
        weights = {} if params is None else exact(params)
        expected, after = row.oracle(exact(tree), weights, bound), exact(result)
        for name, want in expected.items():
            dtype = tree[name].dtype
            least = (
                0
                if jnp.finfo(dtype).bits >= 32
                else float(jnp.finfo(dtype).smallest_subnormal)
            )
            error = tolerance_of(row, dtype)
            if like := ROUNDS_LIKE_THE_LARGEST.get(row.name):
                largest = want if like == "result" else exact(tree)[name]
                least += (error + tolerance(dtype)) * np.abs(largest).max()
            np.testing.assert_allclose(
                after[name],
                want,
                rtol=error,
                atol=least,
                err_msg=f"{name} {kind} {exponent}",
            )
            if row.bounds:
                now, most = measured(row, after[name]), measured(row, want)
                share = below_of(row, dtype)
                assert (now <= most).all(), (
                    name,
                    kind,
                    exponent,
                    (now - most).max(),
                    most.max(),
                )
                assert (now >= most * (1 - share)).all(), (
                    name,
                    kind,
                    exponent,
                    (now - most).min(),
                    most.max(),
                )
        if row.kind == "clip":
            check_metrics(row, state, exact(tree), expected, weights, bound)


def check_metrics(
    row: Row, state: Any, tree: Any, expected: Any, params: Any, bound: float
) -> None:
    """Compare the metrics of a clip with those of the oracle."""
    found = {
        key.removeprefix(f"{row.name}/"): float(x)
        for key, x in clipjax.metrics(state).items()
    }
    ratios = [
        np.abs(x).max() / np.abs(tree[k]).max()
        for k, x in expected.items()
        if tree[k].any()
    ]
    outside = any((expected[k] != tree[k]).any() for k in tree)
    assert found["nonfinite_count"] == 0
    assert (found["scale"] < 1) == outside
    assert row.warm or found["clipped_fraction"] == outside
    of_tree = row.name in LOGS_NORM_OF_TREE
    after = oracles.tree_norm(expected) if of_tree else found["norm"] * found["scale"]
    np.testing.assert_allclose(
        found["norm_after"], after, rtol=tolerance(np.float32, 16384)
    )
    if of_tree or row.shares == "tree":
        np.testing.assert_allclose(
            found["norm"],
            oracles.tree_norm(tree, row.ord),
            rtol=tolerance(np.float32, 16384),
        )
    elif row.shares in ("leaf", "entry") and row.name not in LOGS_NO_NORM:
        most = max(float(measured(row, x).max()) for x in tree.values())
        np.testing.assert_allclose(
            found["norm"], most, rtol=tolerance(np.float32, 16384)
        )
    if row.shares == "tree":
        np.testing.assert_allclose(
            found["scale"], min(ratios), rtol=tolerance(np.float32, 16384)
        )


LINKS = {row.id: row for row in PROJECTIONS if row.tree != "heads" and not row.params}


@jax.jit
def linked(params: Any, updates: Any, bound: Any) -> Any:
    """Return the sums of weights and updates after each projection as a link."""
    moved = {}
    for name, row in LINKS.items():
        link, at = row.make(bound), params[name]
        u, _ = link.update(updates[row.tree], link.init(at), at)
        moved[name] = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), at, u)
    return moved


@functools.cache
def all_last_links(kind: str, exponent: int) -> Any:
    """Return weights inside, updates, and what the links make of them."""
    bound = BOUND * 2.0**exponent
    params = {
        name: run(row, tree_of(row, kind, exponent), bound)[0]
        for name, row in LINKS.items()
    }
    updates = {
        row.tree: tree_of(row, "normal", exponent, seed=2) for row in LINKS.values()
    }
    return params, updates, linked(params, updates, bound)


@pytest.mark.parametrize("row", LINKS.values(), ids=lambda row: row.id)
def test_the_last_link_ends_within_one_rounding(row: Row) -> None:
    """From inside, p + u rounds each entry once: by half an ulp of it, or of p."""
    for kind, exponent in RUNS[:3]:
        bound = BOUND * 2.0**exponent
        params, updates, moved = all_last_links(kind, exponent)
        params, updates = exact(params[row.id]), exact(updates[row.tree])
        for name, x in moved[row.id].items():
            info = jnp.finfo(x.dtype)
            want = row.oracle({name: params[name] + updates[name]}, {}, bound)[name]
            now, most = measured(row, exact({"x": x})["x"]), measured(row, want)
            largest = np.maximum(most, measured(row, np.abs(params[name])))
            room = float(info.eps) * largest + float(info.smallest_subnormal)
            assert (now <= most + room).all(), (
                name,
                kind,
                exponent,
                (now - most).max(),
            )


ORDERS = (1, 2, 3, np.inf)


@jax.jit
def measure(tree: Any) -> Any:
    measures = (
        functional.global_norm,
        functional.leaf_norms,
        functools.partial(functional.unitwise_norms, axes=0),
    )
    return [[each(tree, ord=p) for each in measures] for p in ORDERS]


@pytest.mark.parametrize("kind", ["normal", "constant", "lognormal"])
def test_norms_are_right(kind: str) -> None:
    tree = draw(kind, 0, SHAPES, DTYPES)
    for p, (together, each, units) in zip(ORDERS, measure(tree), strict=True):
        want, error = exact(tree), tolerance(np.float32, 16384)
        np.testing.assert_allclose(together, oracles.tree_norm(want, p), rtol=error)
        for name, x in want.items():
            assert each[name].dtype == units[name].dtype == np.float32
            np.testing.assert_allclose(
                each[name], oracles.norm(x, None, p).item(), rtol=error
            )
            np.testing.assert_allclose(
                units[name], oracles.norm(x, (0,), p)[0], rtol=error
            )


def test_norms_have_ends() -> None:
    """From entries of 1.1e-19, whose square is the smallest normal number, to 2^64."""
    tree = [np.full(4, x, np.float32) for x in (1.2e-19, 0.9e19, 0.93e19)]
    found = jax.jit(functional.leaf_norms)(tree)
    np.testing.assert_allclose(found, [2.4e-19, 1.8e19, np.inf], rtol=1e-6)
