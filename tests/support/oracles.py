"""What members should return, in NumPy float64, written from the formulas and not from
the library.

Trees are dicts of float64 arrays. An oracle is a function `(tree, params, bound) ->
tree`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Tree = dict[str, np.ndarray]
Oracle = Callable[[Tree, Tree, float], Tree]


def norm(
    x: np.ndarray, axes: tuple[int, ...] | None = None, ord: float = 2
) -> np.ndarray:
    """Measure along axes, which stay with size 1; None is all of them."""
    axes = tuple(range(x.ndim)) if axes is None else axes
    size = np.abs(x)
    if not axes:
        return size
    if np.isinf(ord):
        return size.max(axis=axes, keepdims=True, initial=0)
    powers = {1: size, 2: size * size}.get(ord)
    return np.sum(
        size**ord if powers is None else powers, axis=axes, keepdims=True
    ) ** (1 / ord)


def tree_norm(tree: Tree, ord: float = 2) -> float:
    """Measure all leaves as one vector."""
    return float(
        norm(
            np.array([norm(x, None, ord).item() for x in tree.values()]), None, ord
        ).item()
    )


def fan_in(x: np.ndarray) -> tuple[int, ...] | None:
    """Return the axes of a unit: all but the last; None for vectors and scalars."""
    return tuple(range(x.ndim - 1)) if x.ndim >= 2 else None


def shrink(x: np.ndarray, size: Any, bound: Any) -> np.ndarray:
    """Multiply by min(1, bound / size)."""
    size = np.asarray(size, np.float64)
    outside = size > bound
    return x * np.where(outside, bound, 1) / np.where(outside, size, 1)


def of_tree(ord: float = 2) -> Oracle:
    """Clip the norm of all leaves."""
    return lambda tree, params, bound: {
        k: shrink(x, tree_norm(tree, ord), bound) for k, x in tree.items()
    }


def of_groups(prefix: str) -> Oracle:
    """Clip the norm of leaves whose names start with a prefix, and of the others."""

    def clip(tree: Tree, params: Tree, bound: float) -> Tree:
        inner = {k: x for k, x in tree.items() if k.startswith(prefix)}
        outer = {k: x for k, x in tree.items() if k not in inner}
        clipped = of_tree()(inner, params, bound) | of_tree()(outer, params, bound)
        return {k: clipped[k] for k in tree}

    return clip


def of_leaves(ord: float = 2, *, rms: bool = False) -> Oracle:
    """Clip the norm, or the root mean square, of each leaf."""

    def clip(tree: Tree, params: Tree, bound: float) -> Tree:
        roots = {k: max(x.size, 1) ** 0.5 if rms else 1 for k, x in tree.items()}
        return {
            k: shrink(x, norm(x, None, ord) / roots[k], bound) for k, x in tree.items()
        }

    return clip


def of_units(
    ord: float = 2, *, rms: bool = False, relative_to: float | None = None
) -> Oracle:
    """Clip each column; vectors stay, unless it is relative to weights."""

    def clip(tree: Tree, params: Tree, bound: float) -> Tree:
        clipped = dict(tree)
        for k, x in tree.items():
            axes, size = fan_in(x), np.ones(())
            if relative_to is not None:
                size = np.maximum(norm(params[k], axes), relative_to)
            elif axes is None:
                continue
            if rms:
                size = np.sqrt(np.prod([x.shape[axis] for axis in axes or ()]))
            clipped[k] = shrink(x, norm(x, axes, ord) / size, bound)
        return clipped

    return clip


def between(low: Callable[[float], float], high: Callable[[float], float]) -> Oracle:
    """Bring the norm of each column between two; 0 stays."""

    def bring(x: np.ndarray, bound: float) -> np.ndarray:
        axes = fan_in(x)
        if axes is None:
            return x
        size = norm(x, axes)
        wanted = np.where(size > 0, np.clip(size, low(bound), high(bound)), 1)
        return x * np.where(size == wanted, 1, wanted / np.where(size > 0, size, 1))

    return lambda tree, params, bound: {k: bring(x, bound) for k, x in tree.items()}


def of_entries(low: Callable[[float], float], high: Callable[[float], float]) -> Oracle:
    """Clip each entry."""
    return lambda tree, params, bound: {
        k: np.clip(x, low(bound), high(bound)) for k, x in tree.items()
    }


def of_singular_values(tree: Tree, params: Tree, bound: float) -> Tree:
    """Cap the singular values of each matrix."""

    def cap(x: np.ndarray) -> np.ndarray:
        if x.ndim < 2:
            return x
        u, s, vh = np.linalg.svd(x, full_matrices=False)
        return x if s.max() <= bound else (u * np.minimum(s, bound)) @ vh

    return {k: cap(x) for k, x in tree.items()}


def of_cone(tree: Tree, params: Tree, bound: float) -> Tree:
    """Remove what a step against the gradient would push outward on the sphere."""

    def remove(g: np.ndarray, w: np.ndarray) -> np.ndarray:
        if g.ndim < 2:
            return g
        size = norm(w, fan_in(w))
        inner = np.sum((g * np.conj(w)).real, axis=fan_in(w), keepdims=True)
        outward = (size >= bound) & (inner < 0)
        return g - w * np.where(outward, inner, 0) / np.where(size > 0, size, 1) ** 2

    return {k: remove(x, params[k]) for k, x in tree.items()}


def of_norms(tree: Tree, params: Tree, bound: float) -> Tree:
    """Give each matrix the norm of its weights; 0 stays, and gives none."""

    def give(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        size, wanted = norm(x), norm(w)
        if x.ndim < 2 or not size.all() or not wanted.all():
            return x
        return x * (wanted / size)

    return {k: give(x, params[k]) for k, x in tree.items()}


def of_heads(excess: Any) -> Oracle:
    """Multiply each head, the last axis but one, by sqrt(min(1, 1 / excess))."""
    factor = np.sqrt(np.minimum(1, 1 / np.asarray(excess, np.float64)))
    return lambda tree, params, bound: {k: x * factor[:, None] for k, x in tree.items()}


def times(factor: float) -> Oracle:
    """Multiply by a number."""
    return lambda tree, params, bound: {k: factor * x for k, x in tree.items()}


def gradient(loss: Callable[[Tree], float], at: Tree, step: float = 1e-4) -> Tree:
    """Differentiate a function of a tree by central differences."""

    def moved(name: str, place: tuple[int, ...], by: float) -> float:
        x = at[name].copy()
        x[place] += by
        return loss(at | {name: x})

    slopes = {k: np.zeros_like(x) for k, x in at.items()}
    for name, slope in slopes.items():
        for place in np.ndindex(slope.shape):
            slope[place] = (moved(name, place, step) - moved(name, place, -step)) / (
                2 * step
            )
    return slopes
