"""Bounds among frozen parameters and groups: what a clip does not see does not share its norm."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import optax
import pytest

from tests.support.oracles import exact_tree_norm
from tests.support.trees import same_bits
from tests.support.updates import (
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

FROZEN = {"zeros": 0.0, "huge": 1e30, "nan": np.nan}
TRAINED = {"head": True, "body": False, "bias": True}


def trained_part(params: Tree) -> Tree:
    return {k: v for k, v in params.items() if TRAINED[k]}


@functools.cache
def frozen_body(how: str, nonfinite: Any) -> tuple[Any, Any]:
    inside, outside = bounded(nonfinite=nonfinite), optax.set_to_zero()
    if how == "partition":
        labels = {k: "train" if trained else "freeze" for k, trained in TRAINED.items()}
        tx = optax.partition({"train": inside, "freeze": outside}, labels)
    else:
        frozen = {k: not trained for k, trained in TRAINED.items()}
        tx = optax.chain(optax.masked(inside, TRAINED), optax.masked(outside, frozen))
    return tx, stepper(tx)


@pytest.mark.parametrize("kind", FROZEN)
@pytest.mark.parametrize(
    ("how", "nonfinite"),
    [
        ("partition", "skip"),
        ("masked", "propagate"),
        pytest.param("partition", "propagate", marks=pytest.mark.full),
        pytest.param("masked", "skip", marks=pytest.mark.full),
    ],
)
def test_frozen_parameters_do_not_count(how: str, nonfinite: str, kind: str) -> None:
    tx, step = frozen_body(how, nonfinite)
    params = start()
    micro = [{**tree(i, 3.0), "body": np.full_like(params["body"], FROZEN[kind])} for i in range(2)]
    expected = in_float64(trained_part(params))
    for (after, seen), grads in zip(train(tx, params, micro, step), micro, strict=True):
        trained = trained_part(grads)
        expected = projected(descend(expected, clipped(trained)))
        assert same_bits(after["body"], params["body"])
        assert_close(trained_part(after), expected)
        np.testing.assert_allclose(seen["clip_by_global_norm/norm"], exact_tree_norm(trained), rtol=1e-6)


def test_parameters_that_are_none_do_not_count() -> None:
    """As Equinox' `partition` and NNX' filters leave them."""
    params, grads = {**start(), "body": None}, {**tree(0, 3.0), "body": None}
    after, seen = last(train(bounded(), params, [grads]))
    expected = projected(descend(trained_part(params), clipped(trained_part(grads))))
    assert_close(trained_part(after), expected)
    assert after["body"] is None
    np.testing.assert_allclose(seen["clip_by_global_norm/norm"], exact_tree_norm(grads), rtol=1e-6)


# --------------------------------------------------------------------------------------------------
# Groups: where the clip stands says what shares a norm.

LABELS = {"head": "a", "body": "b", "bias": "b"}
RATES = {"a": 0.5, "b": 0.25}


def group(params: Tree, label: str) -> Tree:
    return {k: v for k, v in params.items() if LABELS[k] == label}


def norms(seen: dict[str, Any]) -> list[Any]:
    return [v for k, v in seen.items() if k.startswith("clip") and k.endswith("/norm")]


def test_around_the_partition_all_groups_share_one_norm() -> None:
    grads = tree(0, 3.0)
    tx = bounded(optax.partition({label: optax.sgd(rate) for label, rate in RATES.items()}, LABELS))
    after, seen = last(train(tx, start(), [grads]))
    shared = clipped(grads)
    expected: Tree = {}
    for label, rate in RATES.items():
        expected |= projected(descend(group(start(), label), group(shared, label), rate))
    assert_close(after, expected)
    np.testing.assert_allclose(norms(seen), [exact_tree_norm(grads)], rtol=1e-6)


def test_inside_the_partition_each_group_has_its_own_norm() -> None:
    grads = tree(0, 3.0)
    tx = optax.partition({label: bounded(optax.sgd(rate)) for label, rate in RATES.items()}, LABELS)
    after, seen = last(train(tx, start(), [grads]))
    expected: Tree = {}
    for label, rate in RATES.items():
        expected |= projected(descend(group(start(), label), clipped(group(grads, label)), rate))
    assert_close(after, expected)
    np.testing.assert_allclose(
        norms(seen), [exact_tree_norm(group(grads, label)) for label in RATES], rtol=1e-6
    )
