"""States have constant shapes; bounds may be 0, infinite and schedules."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.contract.members import CLIPS, MATRIX, PROJECTIONS, ROWS, WEIGHTS, Row
from tests.contract.test_ends import BOUND
from tests.support.programs import is_transformation, run, tree_of, weights_of
from tests.support.tolerances import tolerance_of
from tests.support.trees import changed, draw, exact

TREE = draw("normal", 0, {"a": (3, 5), "c": (64, 2)}, ["float32"])
STATELESS = [row for row in CLIPS if not row.remembers]
WITH_STATE = [
    row
    for row in ROWS
    if (is_transformation(row) or row.kind == "projection") and row.tree != "heads"
]
# Rows whose bound must be a number, and why.
NUMBERS = {
    "clip_by_quantile": "it is the threshold before the first step",
    "clip_by_value low, high": "the row computes two bounds of one, which is a number",
    "min_max_norm low": "likewise",
    "box": "likewise",
    "project": "the user's function gets no step",
}


def takes_schedule(row: Row) -> bool:
    """Return whether the bound of a row is passed on, and its oracle depends on it."""
    if row.warm or row.id in NUMBERS:
        return False
    results = [row.oracle(MATRIX, WEIGHTS, bound)["a"] for bound in (0.5, 2.0)]
    return bool((results[0] != results[1]).any())


SCHEDULED = [row for row in WITH_STATE if takes_schedule(row)]
# The first threshold of `clip_by_quantile` is above 0 and finite.
HAS_NO_ENDS = {"clip_by_quantile"}


def bound_at(step: Any) -> Any:
    """Fall from infinity to 0, and below, where it counts as 0."""
    return jnp.array([jnp.inf, BOUND, 0.0, -1.0])[step]


@pytest.mark.parametrize("row", WITH_STATE, ids=lambda row: row.id)
def test_shapes_and_dtypes_of_states_are_constant(row: Row) -> None:
    tree = tree_of(row)
    for bound in [BOUND, lambda step: BOUND] if row in SCHEDULED else [BOUND]:
        tx = row.make(bound)
        first = jax.eval_shape(tx.init, tree)
        # What other transformations take may have any name.
        others = {"step": 3, "memory": 1.0, "args": 2, "old": None}
        update = functools.partial(tx.update, **others)
        _, second = jax.eval_shape(update, tree, first, tree)
        assert jax.tree.structure(first) == jax.tree.structure(second)
        described = [
            [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(s)]
            for s in (first, second)
        ]
        assert described[0] == described[1]


@pytest.mark.parametrize("row", WITH_STATE, ids=lambda row: row.id)
def test_shapes_make_the_state_that_arrays_make(row: Row) -> None:
    """As in Optax: the weights of a large model may be on no device yet."""
    tree = tree_of(row)
    tx = row.make(BOUND)
    made = tx.init(jax.eval_shape(lambda: tree)), tx.init(tree)
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        assert isinstance(a, jax.Array)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "row", [row for row in WITH_STATE if is_transformation(row)], ids=lambda row: row.id
)
def test_states_share_no_buffers(row: Row) -> None:
    """A buffer can be donated only once."""
    leaves = jax.tree.leaves(row.make(BOUND).init(TREE))
    assert all(isinstance(x, jax.Array) for x in leaves)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_without_a_state_they_clip_the_same() -> None:
    """As Optax's stateless clips, whose state is `EmptyState()`."""

    @jax.jit
    def program(tree: Any, bound: Any) -> Any:
        found = []
        for row in STATELESS:
            tx = row.make(bound)
            for state in (None, optax.EmptyState(), tx.init(tree)):
                clipped, after = tx.update(tree, state, tree)
                found.append(clipped)
                assert after is state or isinstance(state, type(tx.init(tree)))
        return found

    found = program(TREE, BOUND)
    for row, *each in zip(STATELESS, found[::3], found[1::3], found[2::3], strict=True):
        assert not changed(each[2], each[0]), row.id
        assert not changed(each[2], each[1]), row.id


@pytest.mark.parametrize("row", CLIPS, ids=lambda row: row.id)
def test_metrics_of_a_clip(row: Row) -> None:
    found = clipjax.metrics(row.make(BOUND).init(TREE))
    keys = {
        "norm",
        "norm_after",
        "scale",
        "clipped_fraction",
        "nonfinite_count",
        "steps",
    }
    assert {f"{row.name}/{key}" for key in keys} <= set(found)
    assert list(found) == sorted(found)  # as after a jitted step
    assert all(x.shape == () for x in found.values())
    assert ("threshold" in {key.split("/")[-1] for key in found}) == (
        row not in STATELESS
    )


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in ROWS
        if row.bounds and row.keeps and not row.warm and row.name not in HAS_NO_ENDS
    ],
    ids=lambda row: row.id,
)
def test_bounds_of_0_and_infinity(row: Row) -> None:
    tree, params = tree_of(row), weights_of(row)
    assert not changed(tree, run(row, tree, np.inf, params)[0])
    zeros = exact(run(row, tree, 0.0, params)[0])
    want = row.oracle(exact(tree), {} if params is None else exact(params), 0.0)
    for name, x in zeros.items():
        np.testing.assert_array_equal(x, want[name], err_msg=name)


MOVING = {row.id: row for row in SCHEDULED}


@functools.cache
def scheduled_results() -> Any:
    """Run four steps of all members, as one program."""
    each = {name: (row, row.make(bound_at)) for name, row in MOVING.items()}

    @jax.jit
    def step(tree: Any, states: Any) -> Any:
        done = {}
        for name, (row, made) in each.items():
            params = tree if row.params else None
            done[name] = (
                made.update(tree, states[name], params)
                if is_transformation(row)
                else (made.apply(tree, step=states[name]), states[name] + 1)
            )
        return done

    states = {
        name: made.init(TREE) if is_transformation(row) else np.zeros((), np.int32)
        for name, (row, made) in each.items()
    }
    steps = []
    for _ in range(4):
        steps.append(step(TREE, states))
        states = {name: state for name, (_, state) in steps[-1].items()}
    return steps


@pytest.mark.parametrize("row", MOVING.values(), ids=lambda row: row.id)
def test_a_schedule_that_reaches_0(row: Row) -> None:
    for bound, done in zip((np.inf, BOUND, 0.0, 0.0), scheduled_results(), strict=True):
        want = row.oracle(exact(TREE), exact(TREE), bound)
        error, least = tolerance_of(row, np.float32), 5e-6 * (bound == BOUND)
        for name, x in exact(done[row.id][0]).items():
            np.testing.assert_allclose(
                x, want[name], rtol=error, atol=least, err_msg=name
            )


def test_a_link_counts_the_steps_of_its_schedule() -> None:
    scheduled = {row.id: row for row in SCHEDULED if row in PROJECTIONS}
    links = {name: row.make(bound_at) for name, row in scheduled.items()}

    @jax.jit
    def counted(tree: Any) -> Any:
        each = {name: (link, link.init(tree)) for name, link in links.items()}
        return {
            name: (state, link.update(tree, state, tree)[1])
            for name, (link, state) in each.items()
        }

    for name, (first, second) in counted(TREE).items():
        assert [x.dtype for x in jax.tree.leaves(first)] == [np.int32], name
        assert jax.tree.leaves(second) == [1], name
        assert not jax.tree.leaves(scheduled[name].make(1.0).init(TREE)), name
