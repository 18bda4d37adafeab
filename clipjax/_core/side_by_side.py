"""Computations for many leaves that compile and run about as fast as for one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.devices import on_single_device
from clipjax._core.mesh import split_by_type, varying


def by_kind(
    function: Callable[..., Sequence[Any]], kinds: Sequence[Any], *columns: Sequence[Any]
) -> list[Any]:
    """Apply `function(kind, *columns)` to the leaves of each kind, and return the results in leaf order."""
    found: list[Any] = [None] * len(kinds)
    for kind in dict.fromkeys(kinds):
        places = [i for i, other in enumerate(kinds) if other == kind]
        results = function(kind, *([column[i] for i in places] for column in columns))
        for i, result in zip(places, results, strict=True):
            found[i] = result
    return found


def side_by_side(function: Callable[..., Any], *columns: Sequence[jax.Array]) -> list[Any]:
    """Apply an elementwise function to small arrays of many leaves; on one accelerator, to all at once.

    Hundreds of small computations are slow to compile for a TPU, where each float64 operation becomes dozens,
    and become as many kernels on a GPU. For a CPU, compiling hundreds of slices would take longer.

    Args:
      function: maps one array from each column, all of the same shape, to a tree of arrays of that shape.
      *columns: each has an array for each leaf.
    """

    def apart(*columns: Sequence[jax.Array]) -> list[Any]:
        return [function(*leaf) for leaf in zip(*columns, strict=True)]

    def of_a_kind(_: Any, *columns: Sequence[jax.Array]) -> list[Any]:
        found = function(*(jnp.concatenate([x.ravel() for x in column]) for column in columns))
        shapes = [x.shape for x in columns[0]]
        ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()

        def leaf(start: int, end: int, shape: tuple[int, ...]) -> Any:
            return jax.tree.map(lambda x: lax.slice_in_dim(x, start, end).reshape(shape), found)

        return [leaf(*each) for each in zip([0, *ends[:-1]], ends, shapes, strict=True)]

    def together(*columns: Sequence[jax.Array]) -> list[Any]:
        return by_kind(
            of_a_kind, [tuple(map(varying, leaf)) for leaf in zip(*columns, strict=True)], *columns
        )

    if len(columns[0]) < 2 or any(split_by_type(x) or not isinstance(x.size, int) for x in columns[0]):
        return apart(*columns)
    return lax.platform_dependent(
        *(list(column) for column in columns),
        cpu=apart,
        default=lambda *columns: lax.cond(on_single_device(), together, apart, *columns),
    )
