"""A projection that is not last: an error where the chain is ours, a metric where it is not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.trees import avals, random_tree, same_bits

BALL, BOX = (
    clipjax.max_norm(1.0),
    clipjax.project(lambda params: jax.tree.map(lambda x: x.clip(-1, 1), params)),
)


def sgd() -> optax.GradientTransformation:
    return optax.sgd(0.5)


MISPLACED: dict[str, tuple[Callable[[], Any], int, str, int]] = {
    "first": (lambda: (BALL, sgd()), 0, "", 1),
    "in the middle": (lambda: (sgd(), BALL, sgd(), sgd()), 1, "", 2),
    "between projections": (lambda: (sgd(), BALL, BOX, sgd()), 2, "", 3),
    "ends a nested chain": (lambda: (clipjax.chain(sgd(), BALL), sgd()), 0, "a chain that ends in ", 1),
    "ends a chain in a chain": (
        lambda: (sgd(), clipjax.chain(sgd(), clipjax.chain(sgd(), BALL)), sgd()),
        1,
        "a chain that ends in ",
        2,
    ),
    "before a nested chain": (lambda: (BALL, clipjax.chain(sgd(), BALL)), 0, "", 1),
    "in bounded": (lambda: (clipjax.bounded(sgd(), project=BALL), sgd()), 0, "a chain that ends in ", 1),
    "in skip_nonfinite": (
        lambda: (clipjax.skip_nonfinite(clipjax.chain(sgd(), BALL)), sgd()),
        0,
        "a chain that ends in ",
        1,
    ),
    "in bounded that skips": (
        lambda: (clipjax.bounded(sgd(), project=[BOX, BALL], nonfinite="skip"), sgd()),
        0,
        "a chain that ends in ",
        1,
    ),
    "a copy": (lambda: (copy.deepcopy(clipjax.chain(sgd(), BALL)), sgd()), 0, "a chain that ends in ", 1),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_a_misplaced_projection_is_an_error_that_says_where(name: str) -> None:
    links, at, what, after = MISPLACED[name]
    with pytest.raises(ValueError, match="put projections last") as caught:
        clipjax.chain(*links())
    message = str(caught.value)
    assert message.startswith(f"links[{at}], {what}clipjax.")
    assert f"links[{after}] moves them again" in message


ORDERED: dict[str, Callable[[], Any]] = {
    "none": lambda: (sgd(),),
    "alone": lambda: (BALL,),
    "last": lambda: (sgd(), BALL),
    "several": lambda: (sgd(), BOX, BALL),
    "nested": lambda: (clipjax.chain(sgd(), BOX), BALL),
    "nested, several": lambda: (sgd(), clipjax.chain(BOX, BALL)),
    "wrapped": lambda: (optax.chain(sgd(), sgd()), optax.masked(BALL, True)),
}


@functools.cache
def two_steps_of_every_order() -> Any:
    """By our chain and by Optax': the updates of two steps and the metrics after them."""

    @jax.jit
    def run(grads: Any, params: Any) -> Any:
        found = {}
        for name, links in ORDERED.items():
            for whose, chain in (("ours", clipjax.chain), ("theirs", optax.chain)):
                tx = chain(*links())
                first, state = tx.update(grads, tx.init(params), params)
                second, state = tx.update(grads, state, optax.apply_updates(params, first))
                # A chain without a transformation of ours has no metrics, which is an error.
                seen = {} if name == "none" else clipjax.metrics(state)
                found[name, whose] = (first, second), seen
        return found

    return run(random_tree(0, scale=4.0), random_tree(1, scale=2.0))


@pytest.mark.parametrize("name", ORDERED)
def test_a_chain_in_the_right_order_equals_optax_chain(name: str) -> None:
    ours, theirs = clipjax.chain(*ORDERED[name]()), optax.chain(*ORDERED[name]())
    params = random_tree(1)
    assert avals(jax.eval_shape(ours.init, params)) == avals(jax.eval_shape(theirs.init, params))
    assert len(ours) == 2
    assert isinstance(ours, optax.GradientTransformationExtraArgs)
    (updates, seen), (expected, expected_seen) = (
        two_steps_of_every_order()[name, whose] for whose in ("ours", "theirs")
    )
    assert same_bits(updates, expected)
    # All that differs is what is not measured where it is known.
    assert list(seen) == list(expected_seen)
    assert same_bits(*({k: v for k, v in s.items() if "violation" not in k} for s in (seen, expected_seen)))


def test_extra_arguments_reach_the_links() -> None:
    tx = clipjax.chain(clipjax.clip_by_global_norm(1.0), optax.polyak_sgd(), BALL)
    params = random_tree(1)

    def update(grads: Any, value: Any) -> Any:
        return tx.update(grads, tx.init(params), params, value=value)[0]

    found = jax.jit(update)
    low, high = (found(random_tree(0), value) for value in (0.2, 0.3))
    assert avals(low) == avals(params)
    assert not same_bits(low, high)


def test_what_is_no_link_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        clipjax.chain()
    with pytest.raises(TypeError, match=r"links\[1\] must be an optax.GradientTransformation, got 3"):
        clipjax.chain(sgd(), 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"links\[1\].*clipjax.project makes"):
        clipjax.chain(sgd(), optax.projections.projection_simplex)
    with pytest.raises(TypeError, match=r"links\[0\].*gradient_transformation\(\)"):
        clipjax.chain(optax.MultiSteps(sgd(), 2), BALL)


# --------------------------------------------------------------------------------------------------
# What a chain of Optax's cannot check: the metric shows it.

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "chain": lambda tx: tx,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "masked": lambda tx: optax.masked(tx, {"dense": True, "scale": False}),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "skip_nonfinite": clipjax.skip_nonfinite,
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.set_to_zero()}, {"dense": "a", "scale": "b"}
    ),
}


def violation(state: Any) -> Any:
    (found,) = (v for k, v in clipjax.metrics(state).items() if k.endswith("/violation"))
    return found


def violations(update: Callable[..., Any], state: Any, steps: int = 4) -> list[Any]:
    """The metric after each step, for weights that are inside the ball when training starts."""
    params, found = INSIDE, []
    for i in range(steps):
        updates, state = update(random_tree(i), state, params)
        params = jax.tree.map(lambda w, u: np.asarray(w) + np.asarray(u), params, updates)
        found.append(jax.tree.map(float, violation(state)))
    return found


INSIDE = jax.tree.map(lambda w: np.asarray(w) / 4, random_tree(1))


def in_both_places(name: str) -> dict[str, Any]:
    """A wrapped chain with its projection in the wrong and in the right place."""
    wrap, step = WRAPPERS[name], optax.sgd(3.0)
    return {
        "wrong": wrap(optax.chain(clipjax.max_norm(1.0), step)),
        "right": wrap(optax.chain(step, clipjax.max_norm(1.0))),
    }


@functools.cache
def violations_in_both_places() -> dict[str, dict[str, list[float]]]:
    """For every wrapper, from one compiled step of all of them."""
    txs = {name: in_both_places(name) for name in WRAPPERS}

    def each(function: Callable[..., Any], *trees: Any) -> Any:
        return {
            name: {place: function(tx, *(t[name][place] for t in trees)) for place, tx in places.items()}
            for name, places in txs.items()
        }

    @jax.jit
    def step(grads: Any, states: Any, params: Any) -> Any:
        found = each(lambda tx, state, w: tx.update(grads, state, w), states, params)
        params = each(lambda tx, update, w: optax.apply_updates(w, update[0]), found, params)
        states = each(lambda tx, update: update[1], found)
        return states, params, each(lambda tx, state: violation(state), states)

    states, params = each(lambda tx: tx.init(INSIDE)), each(lambda tx: INSIDE)
    seen = []
    for i in range(4):
        states, params, now = step(random_tree(i), states, params)
        seen.append(now)
    return each(lambda tx, *values: [float(v) for v in values], *seen)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_metric_shows_a_misplaced_projection(name: str) -> None:
    found = violations_in_both_places()[name]
    assert found["wrong"][0] == 0
    assert found["wrong"][-1] > 0.01
    assert found["right"] == [0.0] * 4


@pytest.mark.full  # hundreds of operations, one by one
def test_the_metric_shows_it_outside_of_jit() -> None:
    found = {place: violations(tx.update, tx.init(INSIDE)) for place, tx in in_both_places("chain").items()}
    assert found["wrong"][0] == 0
    assert found["wrong"][-1] > 0.01
    assert found["right"] == [0.0] * 4


def test_the_metric_says_by_how_much() -> None:
    tx = optax.chain(clipjax.max_norm(1.0), optax.scale(3.0))

    @jax.jit
    def seen(kernel: Any, steps: Any) -> Any:
        still = {"kernel": jnp.zeros_like(kernel)}
        state = tx.init({"kernel": kernel})
        state = jax.lax.cond(
            steps > 0, lambda: tx.update(still, state, {"kernel": 0 * still["kernel"]})[1], lambda: state
        )
        return violation(tx.update(still, state, {"kernel": kernel})[1])

    outside = np.float32([[0.0, 1.5], [3.0, 2.0]])
    assert seen(np.float32([[0.0, 0.5], [0.0, 0.8]]), 0) == 0
    assert seen(outside, 1) == 2.0
    outside[0, 0] = np.nan
    assert np.isnan(seen(outside, 1))


def test_a_shrinking_bound_is_no_violation() -> None:
    """The weights that come in obeyed the bound of their own step."""

    def radius(step: Any) -> Any:
        return 1.0 / (1 + step)

    right = optax.chain(optax.sgd(0.1), clipjax.max_norm(radius))
    wrong = optax.chain(clipjax.max_norm(radius), optax.sgd(0.1))
    assert violations(jax.jit(right.update), right.init(INSIDE)) == [0.0] * 4
    assert violations(jax.jit(wrong.update), wrong.init(INSIDE))[-1] > 0


def test_where_the_place_is_checked_nothing_is_measured() -> None:
    """Weights that were outside from the start are no concern of a link that is known to be last."""
    params, grads = random_tree(1, scale=9.0), random_tree(0)
    txs = {
        "unchecked": optax.chain(sgd(), BALL),
        "chain": clipjax.chain(sgd(), BALL),
        "bounded": clipjax.bounded(sgd(), project=BALL),
    }

    @jax.jit
    def seen(grads: Any, params: Any) -> Any:
        return {name: violation(tx.update(grads, tx.init(params), params)[1]) for name, tx in txs.items()}

    found = {name: float(value) > 0 for name, value in seen(grads, params).items()}
    assert found == {"unchecked": True, "chain": False, "bounded": False}
