"""NaN and infinity spread over a norm, are counted, and enter no memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.contract.members import CLIPS, ROWS, Row
from tests.contract.test_ends import BOUND
from tests.support import oracles
from tests.support.programs import put, run, start, tree_of, weights_of
from tests.support.trees import bits, exact

NAN, INF, HUGE = float("nan"), float("inf"), 1e20  # 1e20 has no square in float32


def spoiled(row: Row, value: float) -> dict[str, Any]:
    tree = tree_of(row)
    return tree | {"c_float32": put(tree["c_float32"], (0, 0), value)}


def reached(row: Row, name: str, x: np.ndarray) -> np.ndarray:
    """Return which entries share a norm with the first one of the leaf c_float32."""
    found, here = np.zeros(x.shape, bool), name == "c_float32"
    together = {"tree": True, "group": name.startswith("c_"), "leaf": here}
    if row.shares in together:
        found[...] = together[row.shares]
    elif here:
        found[(slice(None), 0) if row.shares == "unit" else (0, 0)] = True
    return found


def squares(row: Row) -> bool:
    """Return whether a row squares elements, or cubes them: 1e20 then has no norm."""
    is_power = row.ord in (2, 3) and row.shares != "entry"
    return is_power and row.oracle is not oracles.of_singular_values


SPREADING = [
    pytest.param(row, value, id=f"{row.id} {value}")
    for row in ROWS
    if row.shares not in ("none", "entry")
    for value in (NAN, INF, HUGE)
    if value != HUGE or squares(row)
]


@pytest.mark.parametrize(("row", "value"), SPREADING)
def test_all_that_shares_the_norm_becomes_nan(row: Row, value: float) -> None:
    result, _ = run(row, spoiled(row, value), BOUND * row.times, weights_of(row))
    for name, x in exact(result).items():
        np.testing.assert_array_equal(np.isnan(x), reached(row, name, x), err_msg=name)
        assert np.isfinite(x[~np.isnan(x)]).all()


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.shares == "entry"], ids=lambda row: row.id
)
def test_entries_that_are_infinite_end_at_the_limit(row: Row) -> None:
    for value in (NAN, INF, HUGE, -INF):
        tree = spoiled(row, value)
        result = exact(run(row, tree, BOUND)[0])
        want = row.oracle(exact(tree), {}, BOUND)
        for name, x in result.items():
            np.testing.assert_allclose(
                x,
                want[name],
                rtol=1e-2 if "f" in name else 0,
                err_msg=f"{name} {value}",
            )


@pytest.mark.parametrize("row", CLIPS, ids=lambda row: row.id)
def test_it_is_counted_and_the_past_stays(row: Row) -> None:
    params, bound = weights_of(row), BOUND * row.times
    state = start(row, tree_of(row), params, bound)
    _, state = run(row, tree_of(row, seed=3), bound, params, state)
    before = [bits(x) for x in jax.tree.leaves(state.memory)]

    def clipped_steps(found: Any) -> int:
        fraction, steps = (
            found[f"{row.name}/{x}"] for x in ("clipped_fraction", "steps")
        )
        return round(float(fraction * steps))

    clipped = clipped_steps(clipjax.metrics(state))
    huge = HUGE if squares(row) else INF
    for count, value in enumerate((NAN, INF, huge), 1):
        _, state = run(row, spoiled(row, value), bound, params, state)
        found = clipjax.metrics(state)
        assert found[f"{row.name}/nonfinite_count"] == count
        assert not np.isfinite(found[f"{row.name}/norm"])
        assert np.isnan(
            [found[f"{row.name}/norm_after"], found[f"{row.name}/scale"]]
        ).all()
        assert clipped_steps(found) == clipped
        assert [bits(x) for x in jax.tree.leaves(state.memory)] == before


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.skips], ids=lambda row: row.id
)
def test_a_skipped_step_changes_nothing(row: Row) -> None:
    _, state = run(row, tree_of(row), BOUND)
    kept = [bits(x) for x in jax.tree.leaves(state.memory._replace(in_a_row=0))]
    for count, value in enumerate((NAN, INF, HUGE), 1):
        result, state = run(row, spoiled(row, value), BOUND, state=state)
        assert not any(np.asarray(x).any() for x in result.values())
        assert [
            bits(x) for x in jax.tree.leaves(state.memory._replace(in_a_row=0))
        ] == kept
        found = clipjax.metrics(state)
        assert (
            found[f"{row.name}/nonfinite_count"]
            == found[f"{row.name}/skipped"]
            == count
        )


POLICIES = [
    ("propagate", NAN, NAN),
    ("propagate", HUGE, NAN),
    ("zero", NAN, 1.0),
    ("zero", INF, 1.0),
    ("zero", HUGE, 0.0),
    ("skip", NAN, 0.0),
    ("skip", INF, 0.0),
    ("skip", HUGE, 0.0),
]


@functools.cache
def bounded_by(policy: Any) -> Any:
    tx = clipjax.bounded(
        optax.identity(), clip=clipjax.clip_by_global_norm(1.0), nonfinite=policy
    )
    return jax.jit(lambda grads: tx.update(grads, tx.init(grads)))


@pytest.mark.parametrize(("policy", "value", "expected"), POLICIES)
def test_policies_of_bounded(policy: Any, value: float, expected: float) -> None:
    """A norm of 1e20 is not finite in float32, and its entries are."""
    grads = {"bad": np.float32([value]), "good": np.array([5.0], jnp.bfloat16)}
    updates, state = bounded_by(policy)(grads)
    np.testing.assert_allclose(exact(updates)["good"], [expected], rtol=1e-2)
    found = clipjax.metrics(state)
    counts = ("nonfinite_count", "zeroed_entries")
    counted = sum(int(x) for key, x in found.items() if key.endswith(counts))
    # The norm, and two entries.
    assert counted == (3 if (policy, value) == ("zero", HUGE) else 1)
