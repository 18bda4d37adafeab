"""Checks that no projection changes the statistics in a tree with all variables of a Flax model."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from typing import Any

import jax

from clipjax._core.axes import is_measured
from clipjax._core.paths import described, leaves_with_paths, path_name

# The collections and variable types that hold no weights; any others may hold some.
_COLLECTIONS = ("batch_stats", "cache", "intermediates", "perturbations")
_VARIABLES = ("BatchStat", "Cache", "Intermediate", "Perturbation")


def check_are_weights(tree: Any, positions: Container[int]) -> None:
    """Raise an error if a leaf at one of these positions is known not to be a weight."""
    kinds = _kinds_of_nnx(tree)
    whole = isinstance(tree, Mapping) and "params" in tree
    for i, (path, leaf) in enumerate(leaves_with_paths(tree)):
        if i in positions and is_measured(leaf):
            collection = path_name(path[:1])
            if whole and collection in _COLLECTIONS:
                raise _no_weight(described(path, leaf), f"in {collection!r}", "variables['params']")
            if kinds and kinds[i]:
                raise _no_weight(described(path, leaf), f"an nnx.{kinds[i]}", "nnx.state(model, nnx.Param)")


def _no_weight(leaf: str, kind: str, weights: str) -> ValueError:
    return ValueError(
        f"params: the leaf {leaf}, {kind}, is not a weight, but would be changed: pass only the weights, "
        f"as in {weights}"
    )


def _kinds_of_nnx(tree: Any) -> list[str]:
    """For each leaf, return the name of the NNX type in `_VARIABLES` that it is in, or an empty string."""
    nnx = sys.modules.get("flax.nnx")
    types = tuple(getattr(nnx, name) for name in _VARIABLES if hasattr(nnx, name))
    kinds: list[str] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, types)):
        inside = isinstance(node, types)
        kinds += [type(node).__name__ if inside else ""] * (len(jax.tree.leaves(node)) if inside else 1)
    return kinds
