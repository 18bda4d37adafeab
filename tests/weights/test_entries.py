"""`box` and `non_negative`: entries end inside their limits, in the leaves that `where` names."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clipjax
from tests.support.oracles import ulp
from tests.support.properties import Trial, draw
from tests.support.trees import DTYPES, same_bits
from tests.support.weights import every_kind, like, step_with, wide_jit

seeds = st.integers(0, 2**30)
trials = st.builds(
    Trial,
    mixture=st.sampled_from(["f32", "bf16", "f16"]),
    seed=seeds,
    place=st.floats(0, 1, width=16),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    bound=st.just(1.0),
    sparse=st.booleans(),
)
boxed = wide_jit(lambda limits, w: clipjax.box(*limits)(w))
boxed_as_link = wide_jit(lambda limits, w, u: step_with(clipjax.box(*limits), w, u))


@given(
    trials, st.sampled_from([(-1.0, 1.0), (0.0, 1.0), (0.1, 0.3), (-0.7, -0.1), (0.1, 0.1), (0.0, math.inf)])
)
def test_entries_end_inside_their_limits(trial: Trial, limits: tuple[float, float]) -> None:
    """By the call from anywhere; as a link from inside, as it left them."""
    far = draw(trial)["kernel"]
    kind = trial.mixture
    rng = np.random.default_rng(trial.seed)
    once = np.asarray(boxed(limits, far))
    assert same_bits(boxed(limits, once), once)
    near = np.asarray(boxed(limits, rng.standard_normal(far.shape).astype(DTYPES[kind])))
    update = (10.0 ** rng.uniform(-9, 2, far.shape) * rng.standard_normal(far.shape)).astype(DTYPES[kind])
    linked = np.asarray(boxed_as_link(limits, near, update))
    moved = np.asarray(optax.apply_updates(near, update))
    # A limit that the dtype does not hold is rounded inwards; 0.1 and 0.1 leave it nothing to hold.
    low, high = limits
    if low == high:
        assert (np.abs(np.asarray(once, np.float64) - low) <= ulp(low, DTYPES[kind])).all()
        return
    for name, before, after in (("call", far, once), ("link", moved, linked)):
        before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
        assert ((after >= low) & (after <= high)).all(), name
        inside = (before >= low) & (before <= high)
        np.testing.assert_array_equal(after[inside], before[inside])
        # A link's step is a float32, and as coarse as the way it goes.
        coarse = ulp(low, DTYPES[kind]) + ulp(high if math.isfinite(high) else 0.0, DTYPES[kind]) + 2.0**-22
        np.testing.assert_allclose(
            after, np.clip(before, low, high), rtol=0, atol=coarse if name == "link" else coarse - 2.0**-22
        )


@every_kind
@given(seeds, st.sampled_from([(0.0, math.inf), (-0.5, 0.25)]))
def test_projections_of_entries_are_non_expansive(kind: str, seed: int, limits: tuple[float, float]) -> None:
    """Rounding to nearest is monotone, so that this holds to the last bit."""
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, 7, 3)).astype(DTYPES[kind])
    px, py = (np.asarray(boxed(limits, v), np.float64) for v in (x, y))
    assert (np.abs(px - py) <= np.abs(x.astype(np.float64) - y.astype(np.float64))).all()


positive = jax.jit(clipjax.non_negative().__call__)
positive_as_link = jax.jit(functools.partial(step_with, clipjax.non_negative()))


@every_kind
def test_non_negative(kind: str) -> None:
    w = np.array([-1.0, -0.0, 0.0, 2.0, math.inf, -math.inf, math.nan, -1e-7], DTYPES[kind])
    expected = np.array([0.0, 0.0, 0.0, 2.0, math.inf, 0.0, math.nan, 0.0], DTYPES[kind])
    assert same_bits(positive(w), expected)
    if kind == "f32":
        small = positive(np.full(8, -1e-40, np.float32))  # -0.0 and subnormals, too
        assert not np.asarray(small).any()
        assert not np.signbit(small).any()
    for start in (1e-7, 0.3, 1.0, 300.0):
        p = np.full((4,), start, DTYPES[kind])
        u = (-np.array([0.5, 1.0, 1.001, 3.0]) * start).astype(DTYPES[kind])
        end = np.asarray(positive_as_link(p, u), np.float64)
        assert (end >= 0).all()
        assert (end[-2:] == 0).all()


# --------------------------------------------------------------------------------------------------
# Which leaves.

TREE = {
    "first": {"kernel": -np.ones((2, 2), np.float32), "bias": -np.ones(2, np.float32)},
    "second": {"kernel": -np.ones((2, 2), np.float32), "steps": np.array(-3, np.int32)},
}
WHERE: dict[str, tuple[Any, set[str]]] = {
    "all": (None, {"first/kernel", "first/bias", "second/kernel"}),
    "a name": ("kernel", {"first/kernel", "second/kernel"}),
    "a folder": ("first/*", {"first/kernel", "first/bias"}),
    "several": (["second/kernel", "bias"], {"first/bias", "second/kernel"}),
    "a glob": (("*",), {"first/kernel", "first/bias", "second/kernel"}),
    "a rule": (lambda path, leaf: leaf.ndim == 1, {"first/bias"}),
    "a tree": ({"first": True, "second": {"kernel": False, "steps": True}}, {"first/kernel", "first/bias"}),
}


def of_entries(where: Any) -> list[Any]:
    return [clipjax.non_negative(where=where), clipjax.box(0.0, 1.0, where=where)]


@functools.cache
def chosen_by_each() -> Any:
    """What each `where` makes of the tree, by the call and as a link."""

    def of(tree: Any) -> Any:
        return {
            name: [(project(tree), step_with(project, tree, like(tree, 0))) for project in of_entries(where)]
            for name, (where, _) in WHERE.items()
        }

    return jax.jit(of)(TREE)


@pytest.mark.parametrize("name", list(WHERE))
def test_where_chooses_leaves(name: str) -> None:
    where, chosen = WHERE[name]
    for project, results in zip(of_entries(where), chosen_by_each()[name], strict=True):
        for after in results:
            changed = {
                jax.tree_util.keystr(path, simple=True, separator="/")
                for path, leaf in jax.tree_util.tree_flatten_with_path(after)[0]
                if np.all(np.asarray(leaf) == 0)
            }
            assert changed == chosen
        measured: list[Any] = []
        jax.eval_shape(lambda tree, p=project, into=measured: into.extend(p.measure(tree, None)), TREE)
        assert {m.path for m in measured} == chosen


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        (3, TypeError, "where must be path patterns.*got 3"),
        ([1], TypeError, r"where must be path patterns.*got \[1\]"),
        ({"kernel": 1}, TypeError, "where must be path patterns.*got {'kernel': 1}"),
        ([], ValueError, r"where must name at least one path pattern, got \[\]"),
    ],
)
def test_a_bad_where_raises_when_built(where: Any, error: type[Exception], text: str) -> None:
    for make in (clipjax.non_negative, functools.partial(clipjax.box, 0, 1)):
        with pytest.raises(error, match=text):
            make(where=where)


def test_a_bad_where_raises_when_called() -> None:
    with pytest.raises(ValueError, match=r"where: the pattern 'kernels' matches no leaf(.|\n)*first/kernel"):
        clipjax.non_negative(where=["bias", "kernels"])(TREE)
    with pytest.raises(
        TypeError, match=r"where: a rule must return a bool, got \(0,\) for leaf 'first/kernel'"
    ):
        clipjax.non_negative(
            where=lambda path, leaf: clipjax.fan_in(path, leaf) if leaf.ndim == 2 else False
        )(TREE)
    masked = optax.masked(clipjax.non_negative(where="bias"), {"first": False, "second": True})
    with pytest.raises(ValueError, match="'bias' matches no leaf"):
        jax.eval_shape(lambda tree: masked.update(tree, masked.init(tree), tree), TREE)
    for project in (clipjax.box(0.0, 1.0), clipjax.non_negative()):
        with pytest.raises(TypeError, match="complex, of dtype complex64"):
            project(np.ones(2, np.complex64))
    positive = jax.jit(clipjax.non_negative(where="x").__call__)
    left = positive({"x": np.ones(1, np.float32), "z": np.complex64(1j)})["z"]
    assert same_bits(left, np.complex64(1j))
