"""Patterns and what is masked out: they may match what others are left with, and what is None."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.trees import same_bits

pytest.importorskip("flax")
from tests.support.containers import AXES, CONTAINERS, LayerTuple, ModelTuple, arrays, expected, of, of_dicts


def masked_trees() -> dict[str, tuple[Any, Any]]:
    """Trees of which a mask keeps the head only, and the mask."""
    state = CONTAINERS["nnx.State"](*arrays())
    by_leaf = of_dicts(False, False, True, True)
    return {
        "leaves": (of_dicts(*arrays()), by_leaf),
        "a-subtree": (of_dicts(*arrays()), {"encoder": False, "head": True}),
        "tuples": (CONTAINERS["NamedTuple"](*arrays()), of(ModelTuple, LayerTuple)(False, False, True, True)),
        "nnx.State": (state, jax.tree.unflatten(jax.tree.structure(state), [False, False, True, True])),
    }


def masked_link(wrapper: str, mask: Any) -> Any:
    projection = clipjax.max_norm(1.0, axes=AXES)
    if wrapper == "masked":
        return optax.masked(projection, mask)
    labels = jax.tree.map(lambda keep: "trained" if keep else "frozen", mask)
    return optax.partition({"trained": projection, "frozen": optax.set_to_zero()}, labels)


@functools.cache
def masked_links() -> dict[tuple[str, str], Any]:
    """The leaves after a step of every link of every tree, from one compiled program."""

    @jax.jit
    def step(trees: Any) -> Any:
        found = {}
        for kind, (_, mask) in masked_trees().items():
            for wrapper in ("masked", "partition"):
                params, tx = trees[kind], masked_link(wrapper, mask)
                still = jax.tree.map(jnp.zeros_like, params)
                updates, _ = tx.update(still, tx.init(params), params)
                found[wrapper, kind] = jax.tree.leaves(optax.apply_updates(params, updates))
        return found

    return step({kind: params for kind, (params, _) in masked_trees().items()})


@pytest.mark.parametrize("kind", list(masked_trees()))
@pytest.mark.parametrize("wrapper", ["masked", "partition"])
def test_a_pattern_may_match_what_is_masked_out(kind: str, wrapper: str) -> None:
    leaves = masked_links()[wrapper, kind]
    assert same_bits(leaves[:2], arrays()[:2])
    np.testing.assert_allclose(leaves[3], expected(1.0)[3], rtol=1e-6)


@pytest.mark.parametrize("kind", list(masked_trees()))
def test_a_pattern_that_matches_neither_is_an_error_still(kind: str) -> None:
    params, mask = masked_trees()[kind]
    tx = optax.masked(clipjax.max_norm(1.0, axes={"decoder/kernel": 0}), mask)
    with pytest.raises(ValueError, match="decoder/kernel' matches no leaf"):
        tx.update(params, tx.init(params), params)


def test_a_whole_tree_that_is_masked_out() -> None:
    params = of_dicts(*arrays())
    tx = optax.masked(clipjax.max_norm(1.0, axes=AXES), False)
    assert same_bits(tx.update(params, tx.init(params), params)[0], params)


def test_none_counts_as_left_out() -> None:
    """As what `equinox.partition` leaves of a model."""
    bias, kernel, _, _ = arrays()
    tree = {"encoder": {"bias": bias, "kernel": kernel}, "head": {"bias": None, "kernel": None}}
    projected = clipjax.max_norm(1.0, axes=AXES)(tree)
    np.testing.assert_allclose(projected["encoder"]["kernel"], expected(1.0)[1], rtol=1e-6)
    with pytest.raises(ValueError, match="matches no leaf"):
        clipjax.max_norm(1.0, axes={"head/scale": 0})(tree)
