"""A projection that is not last: an error where the chain is ours, a metric where it is not."""

from __future__ import annotations

import copy
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


@pytest.mark.parametrize(
    "links",
    [
        pytest.param(lambda: (sgd(),), id="none"),
        pytest.param(lambda: (BALL,), id="alone"),
        pytest.param(lambda: (sgd(), BALL), id="last"),
        pytest.param(lambda: (sgd(), BOX, BALL), id="several"),
        pytest.param(lambda: (clipjax.chain(sgd(), BOX), BALL), id="nested"),
        pytest.param(lambda: (sgd(), clipjax.chain(BOX, BALL)), id="nested, several"),
        pytest.param(lambda: (optax.chain(sgd(), sgd()), optax.masked(BALL, True)), id="wrapped"),
    ],
)
def test_a_chain_in_the_right_order_equals_optax_chain(links: Any) -> None:
    ours, theirs = clipjax.chain(*links()), optax.chain(*links())
    grads, params = random_tree(0, scale=4.0), random_tree(1, scale=2.0)
    state, expected_state = ours.init(params), theirs.init(params)
    assert avals(state) == avals(expected_state)
    assert len(ours) == 2
    assert isinstance(ours, optax.GradientTransformationExtraArgs)
    update, expected_update = jax.jit(ours.update), jax.jit(theirs.update)
    for _ in range(2):
        updates, state = update(grads, state, params)
        expected, expected_state = expected_update(grads, expected_state, params)
        assert same_bits(updates, expected)
        params = optax.apply_updates(params, updates)
    # All that differs is what is not measured where it is known.
    seen, expected_seen = clipjax.metrics(state), clipjax.metrics(expected_state)
    assert list(seen) == list(expected_seen)
    assert same_bits(*({k: v for k, v in s.items() if "violation" not in k} for s in (seen, expected_seen)))


def test_extra_arguments_reach_the_links() -> None:
    tx = clipjax.chain(clipjax.clip_by_global_norm(1.0), optax.polyak_sgd(), BALL)
    grads, params = random_tree(0), random_tree(1)
    updates, _ = tx.update(grads, tx.init(params), params, value=jnp.asarray(2.0))
    assert jax.tree.structure(updates) == jax.tree.structure(params)


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
# What a chain of Optax' cannot check: the metric shows it.

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


def violations(tx: Any, steps: int = 4, *, jit: bool = True) -> list[float]:
    """The metric after each step, for weights that are inside the ball when training starts."""
    params = clipjax.max_norm(1.0)(random_tree(1, scale=2.0))
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    found = []
    for i in range(steps):
        updates, state = update(random_tree(i), state, params)
        params = optax.apply_updates(params, updates)
        (seen,) = (v for k, v in clipjax.metrics(state).items() if k.endswith("/violation"))
        found.append(float(seen))
    return found


@pytest.mark.parametrize(("name", "jit"), [("chain", False), *((name, True) for name in WRAPPERS)], ids=str)
def test_the_metric_shows_a_misplaced_projection(name: str, jit: bool) -> None:
    wrap = WRAPPERS[name]
    wrong = violations(wrap(optax.chain(clipjax.max_norm(1.0), optax.adam(0.1))), jit=jit)
    assert wrong[0] == 0
    assert wrong[-1] > 0.01
    assert violations(wrap(optax.chain(optax.adam(0.1), clipjax.max_norm(1.0))), jit=jit) == [0.0] * 4


def test_the_metric_says_by_how_much() -> None:
    tx = optax.chain(clipjax.max_norm(1.0), optax.scale(3.0))
    params = {"kernel": jnp.array([[0.0, 0.5], [0.0, 0.8]])}
    still = jax.tree.map(jnp.zeros_like, params)
    state = tx.init(params)
    _, state = tx.update(still, state, params)
    assert clipjax.metrics(state)["max_norm/violation"] == 0
    outside = {"kernel": jnp.array([[0.0, 1.5], [3.0, 2.0]])}
    _, state = jax.jit(tx.update)(still, state, outside)
    assert clipjax.metrics(state)["max_norm/violation"] == 2.0
    _, state = jax.jit(tx.update)(still, state, {"kernel": outside["kernel"].at[0, 0].set(jnp.nan)})
    assert np.isnan(clipjax.metrics(state)["max_norm/violation"])


def test_a_shrinking_bound_is_no_violation() -> None:
    """The weights that come in obeyed the bound of their own step."""

    def radius(step: Any) -> Any:
        return 1.0 / (1 + step)

    seen = violations(optax.chain(optax.sgd(0.1), clipjax.max_norm(radius)))
    assert seen == [0.0] * 4
    assert violations(optax.chain(clipjax.max_norm(radius), optax.sgd(0.1)))[-1] > 0


def test_where_the_place_is_checked_nothing_is_measured() -> None:
    """Weights that were outside from the start are no concern of a link that is known to be last."""
    params, grads = random_tree(1, scale=9.0), random_tree(0)
    for tx, measures in (
        (optax.chain(sgd(), BALL), True),
        (clipjax.chain(sgd(), BALL), False),
        (clipjax.bounded(sgd(), project=BALL), False),
    ):
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
        assert (float(clipjax.metrics(state)["max_norm/violation"]) > 0) == measures
