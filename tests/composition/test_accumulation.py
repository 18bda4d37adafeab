"""Bounds around accumulated gradients: the mean is clipped once, and a bad micro batch can be kept out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest

import clipjax
from tests.support.oracles import exact_tree_norm
from tests.support.trees import flat, same_bits
from tests.support.updates import (
    CLIP,
    RATE,
    Tree,
    assert_close,
    bounded,
    clipped,
    descend,
    in_float64,
    last,
    projected,
    start,
    stepper,
    train,
    tree,
)

EVERY = 3

ACCUMULATED: dict[str, Callable[[], Any]] = {
    **{
        nonfinite: lambda nonfinite=nonfinite: optax.MultiSteps(bounded(nonfinite=nonfinite), EVERY)
        for nonfinite in ("propagate", "zero", "skip")
    },
    "should_skip_update_fn": lambda: optax.MultiSteps(
        bounded(), EVERY, should_skip_update_fn=optax.skip_not_finite
    ),
    "skip_nonfinite": lambda: clipjax.skip_nonfinite(
        optax.MultiSteps(bounded(), EVERY).gradient_transformation()
    ),
}


@functools.cache
def accumulated(name: str) -> tuple[Any, Any]:
    tx = ACCUMULATED[name]()
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    return tx, stepper(tx)


def run(name: str, micro: list[Tree]) -> Any:
    tx, step = accumulated(name)
    return train(tx, start(), micro, step)


def poisoned(grads: Tree) -> Tree:
    body = grads["body"].copy()
    body[0, 0] = np.nan
    return {**grads, "body": body}


def mean(trees: list[Tree]) -> Tree:
    return {k: sum(t[k] for t in map(in_float64, trees)) / len(trees) for k in trees[0]}


@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "skip"])
def test_accumulated_gradients_are_clipped_once(nonfinite: str) -> None:
    micro = [tree(i, 3.0) for i in range(3 * EVERY)]
    expected = in_float64(start())
    for i, (after, seen) in enumerate(run(nonfinite, micro)):
        if i % EVERY == EVERY - 1:
            part = micro[i + 1 - EVERY : i + 1]
            once = projected(descend(expected, clipped(mean(part))))
            # This is not what clipping each micro batch does.
            each = projected(descend(expected, mean([clipped(grads) for grads in part])))
            assert np.abs(flat(once) - flat(each)).max() > 0.01
            assert float(exact_tree_norm(mean(part))) > CLIP
            expected = once
            assert seen["clip_by_global_norm/steps"] == (i + 1) // EVERY
            np.testing.assert_allclose(
                seen["clip_by_global_norm/norm"], exact_tree_norm(mean(part)), rtol=1e-6
            )
        assert_close(after, expected)


@pytest.mark.parametrize("name", ["optimizer", "clip"])
@pytest.mark.parametrize("which", ["object", "transformation"])
def test_accumulating_inside_bounded_is_an_error(name: str, which: str) -> None:
    inside = optax.MultiSteps(optax.sgd(RATE), EVERY)
    given = inside if which == "object" else inside.gradient_transformation()
    arguments = {"optimizer": optax.sgd(RATE), name: given}
    with pytest.raises(
        ValueError, match=rf"^{name}: .*put it outside, as in optax.MultiSteps\(clipjax.bounded"
    ):
        clipjax.bounded(**arguments)


@pytest.mark.parametrize("how", ["should_skip_update_fn", "skip_nonfinite"])
def test_a_bad_micro_batch_can_be_kept_out(how: str) -> None:
    """As if it had never been there."""
    good = [tree(i, 3.0) for i in range(2 * EVERY)]
    after, seen = last(run(how, [good[0], poisoned(good[1]), *good[1:]]))
    assert same_bits(after, last(run(how, good))[0])
    assert seen["clip_by_global_norm/steps"] == 2


def test_a_bad_micro_batch_stays_in_the_accumulator() -> None:
    """Why it must be kept out: what has become NaN is multiplied by 0, and is NaN still."""
    after, seen = last(run("skip", [poisoned(tree(0)), *(tree(i) for i in range(1, 4 * EVERY))]))
    assert same_bits(after, start())
    assert seen["skip_nonfinite/skipped"] == 4
