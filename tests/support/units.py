"""The units of a layer, told by its derivative: the entries of a parameter on which one output depends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Units = set[frozenset[int]]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_weights(init: Callable[..., Any], *args: Any) -> Any:
    """Weights of the structure that `init` would return, which is not run: only its shapes are asked for.

    No weight is 0, as biases are at the start: it would hide what an output depends on.
    """
    leaves, treedef = jax.tree.flatten(jax.eval_shape(init, *args))
    return treedef.unflatten([random(*leaf.shape, seed=i) for i, leaf in enumerate(leaves)])


def units(shape: tuple[int, ...], reduced: tuple[int, ...]) -> Units:
    """The units that the reduced axes make, each as the flat indices of its entries."""
    entries: dict[tuple[int, ...], set[int]] = {}
    for flat, index in enumerate(np.ndindex(*shape)):
        unit = tuple(i for axis, i in enumerate(index) if axis not in reduced)
        entries.setdefault(unit, set()).add(flat)
    return {frozenset(unit) for unit in entries.values()}


def depends(function: Callable[[Any], Any], weights: Any, outputs: tuple[int, ...]) -> list[frozenset[int]]:
    """For each output, told apart by its indices along the axes `outputs`, the entries it depends on."""
    # Which entries are 0 does not need fast code, and compiling it without optimization halves the time.
    unoptimized = {"xla_backend_optimization_level": 0}
    jacobian = np.asarray(jax.jit(jax.jacobian(function), compiler_options=unoptimized)(jnp.asarray(weights)))
    rank = jacobian.ndim - weights.ndim
    others = tuple(axis for axis in range(rank) if axis - rank not in outputs)
    used = (jacobian != 0).any(axis=others).reshape(-1, weights.size)
    return [frozenset(np.flatnonzero(row).tolist()) for row in used]


class Layer(NamedTuple):
    """A layer, a parameter of it, and which axes of the output tell its units apart, from the right."""

    layer: Any
    inputs: tuple[Any, ...]
    number: int  # of units, by hand
    param: str = "kernel"
    outputs: tuple[int, ...] = (-1,)
    captured: str = ""  # the submodule whose output it is
    gates: int = 1  # units on which one output depends

    def check(self, function: Callable[[Any], Any], weights: Any, reduced: Any) -> None:
        """Assert that the reduced axes make the units that the derivative of `function` shows."""
        found = depends(function, weights, self.outputs)
        claimed = units(weights.shape, reduced)
        assert len(claimed) == self.number
        assert len(found) * self.gates == self.number
        if self.gates == 1:
            assert set(found) == claimed
        for output in found:
            parts = [unit for unit in claimed if unit & output]
            assert len(parts) == self.gates
            assert frozenset().union(*parts) == output


IMAGE = (random(2, 5, 5, 4),)
CARRY = random(3, 4, seed=1)
HEADS = {"outputs": (-2, -1)}


def lstm(cell: Any, **rest: Any) -> Layer:
    """An LSTM cell of 4 features, whose output is the second part of its carry."""
    return Layer(cell, ((CARRY, random(3, 4, seed=2)), random(3, 5)), 4, **rest)


def output_of(result: Any) -> Any:
    """The output of a layer; of a recurrent cell, which returns its carry besides, the output alone."""
    return result[1] if isinstance(result, tuple) else result
