"""A projection that caps the singular values of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._core import bounds, clipping, norms, trees, units
from clipjax.weights import limits, singular_values
from clipjax.weights.projection import Projection, written

Sides: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
Flatten: TypeAlias = (
    Sequence[int | Sequence[int]]
    | Callable[[Any, Any], Any]
    | units.Skip
    | Mapping[str, Any]
    | None
)


def spectral_cap(bound: limits.Limit, *, flatten: Flatten = None) -> Projection:
    """Reduce the singular values above a bound to it, and keep the others: U min(S, bound) Vᴴ.

    Args:
      bound: a number, an array that broadcasts to the stack of matrices of each leaf, a
        schedule, or a mapping from path patterns to these, where the first match wins
        and other leaves are not changed.
      flatten: how leaves of rank 3 and more are matrices: a pair (axes of rows, axes of
        columns), each an int or a tuple, such as `((0, 1, 2), 3)` for a convolution (h,
        w, in, out), or `(1, 2)`, rows 1 and columns 2, for stacked Dense layers (layer,
        in, out): the other axes stack matrices. Or a rule `(path, leaf) -> pair`, or a
        mapping from path patterns to these. `clipjax.SKIP` in place of a pair: the leaf
        is not changed. By default, and where no pattern matches, leaves of rank 2 are
        matrices, lower ranks are not changed, and higher ranks are an error.

    Returns:
      A :class:`Projection`. A call costs 42 products of n³, n the shorter side, and 3
      of the matrix itself: again for each factor of 2.5 by which the largest singular
      value may be above, and in 16 bits once more where one is.

    Raises:
      TypeError, ValueError: `flatten` is not a pair of axes, or applies to no leaf.

    In float32 the largest singular value ends at most 2e-5 below the bound and never
    above; in 16 bits, where all entries are rounded once more, at most one rounding
    above. A matrix 1e-5 inside comes back bit for bit. Small singular values are known
    to a rounding of the largest. An entry that is not finite makes its matrix NaN.

    References:
      Yoshida and Miyato, 2017, Spectral norm regularization, arXiv:1705.10941; Newhouse
      et al., 2025, Training transformers with enforced Lipschitz constants,
      arXiv:2507.13338.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.0], [0.0, 0.5]])
      >>> print(clipjax.spectral_cap(1.0)(kernel).round(3))
      [[1.  0. ]
       [0.  0.5]]
    """
    limit, flatten = limits.by_leaf("bound", bound), _check_flatten(flatten)

    def project(params: Any, step: Any) -> Any:
        norms.warn_if_local()
        leaves, rebuild = trees.leaves_of(params)
        now, patterns = limit.at(step), limit.patterns(params)
        sides = _sides_of_leaves(
            params, flatten, [pattern is not None for pattern in patterns]
        )
        each = zip(leaves, sides, patterns, strict=True)
        return rebuild(
            [
                _capped(leaf, of, now[pattern]) if of else leaf.value
                for leaf, of, pattern in each
            ]
        )

    return Projection(
        written("spectral_cap", bound, flatten=(flatten, None)),
        project,
        scheduled=bool(limit.scheduled),
    )


def _capped(leaf: trees.Leaf, sides: Sides, bound: Any) -> jax.Array:
    """Cap the matrices of a leaf, as one array (*stack, long side, short side)."""
    x = leaf.value
    if not x.size:
        return x
    units.check_whole("spectral_cap", leaf)
    long, short = sorted(
        sides, key=lambda side: -math.prod(x.shape[axis] for axis in side)
    )
    stack = tuple(axis for axis in range(x.ndim) if axis not in long + short)
    order, batch = stack + long + short, tuple(x.shape[axis] for axis in stack)
    bounds.check_fits("bound", bound, batch, f"the matrices of {leaf}")
    info, dtype = (
        jnp.finfo(x.dtype),
        x.dtype if jnp.iscomplexobj(x) else norms.sum_dtype(x.dtype),
    )
    rounding = float(info.eps) / 2 if info.bits < 32 else 0.0

    def cap(x: jax.Array, bound: jax.Array) -> jax.Array:
        moved = jnp.transpose(x, order)
        w = moved.reshape(
            *batch,
            *(math.prod(x.shape[axis] for axis in side) for side in (long, short)),
        )
        capped = singular_values.cap(
            w.astype(dtype), jnp.broadcast_to(bound, batch), rounding
        ).astype(x.dtype)
        return jnp.transpose(capped.reshape(moved.shape), tuple(np.argsort(order)))

    sharding = jax.typeof(x).sharding
    if any(
        sharding.spec
        # on explicit mesh axes, where products would need names; XLA finds them by
        # itself
    ):
        cap = jax.sharding.auto_axes(cap, out_sharding=sharding)
    return clipping.weak_like(x, cap(x, jnp.asarray(bound, norms.sum_dtype(x.dtype))))


def _sides_of_leaves(tree: Any, flatten: Any, chosen: list[bool]) -> list[Sides | None]:
    """Return the axes of rows and of columns of each leaf, None if it is not changed, as those are not chosen."""
    leaves, rules = (
        trees.leaves_of(tree)[0],
        trees.per_leaf("flatten", flatten, tree, None),
    )
    if isinstance(
        flatten,
        tuple,
        # for kernels of higher rank: those of Dense layers beside them are matrices
        # already
    ):
        rules = [None if np.ndim(leaf.value) <= 2 else flatten for leaf in leaves]
    counts = [
        trees.is_float(leaf.value) and is_chosen
        for leaf, is_chosen in zip(leaves, chosen, strict=True)
    ]
    each = zip(rules, leaves, counts, strict=True)
    sides = [_sides_of(rule, leaf) if counted else None for rule, leaf, counted in each]
    floats = [
        leaf
        for leaf, counted in zip(leaves, counts, strict=True)
        if counted and leaf.value.size
    ]
    given = flatten.values() if isinstance(flatten, Mapping) else [flatten]
    asked = callable(flatten) or any(isinstance(each, units.Skip) for each in given)
    if floats and not asked and not any(sides):
        raise ValueError(
            "flatten: nothing is changed, since none of these is a matrix: "
            f"{trees.a_few(floats, 5)}"
        )
    return sides


def _sides_of(rule: Any, leaf: trees.Leaf) -> Sides | None:
    rank = leaf.value.ndim
    if callable(rule):
        rule = _check_flatten(
            rule(leaf.path, leaf.value), f"flatten of {leaf.name!r}, by the rule,"
        )
    if isinstance(rule, units.Skip) or (rule is None and rank < 2):
        return None
    if rule is None and rank > 2:
        raise ValueError(
            f"flatten: {leaf} may be the kernel of a convolution, of attention heads, "
            f"or a stack of layers. Pass flatten={{{leaf.name!r}: (rows, columns)}} "
            "with the axes of its rows and columns, such as ((0, 1, 2), 3) for a "
            "convolution (*window, in, out), or clipjax.SKIP in place of the pair"
        )
    pair = ((0,), (1,)) if rule is None else rule
    if any(not -rank <= axis < rank for side in pair for axis in side):
        raise ValueError(f"flatten: {rule} is out of range for {leaf}")
    rows, columns = (tuple(axis % rank for axis in side) for side in pair)
    if len({*rows, *columns}) < len(rows + columns):
        raise ValueError(f"flatten: {rule} names an axis twice for {leaf}")
    return rows, columns


def _check_flatten(flatten: Any, name: str = "flatten") -> Any:
    """Return `flatten`, with pairs as pairs of tuples, or raise an error if it is invalid for any tree."""
    if (
        isinstance(flatten, Mapping)
        and flatten
        and all(isinstance(pattern, str) for pattern in flatten)
    ):
        return {
            pattern: _check_flatten(each, f"{name}[{pattern!r}]")
            for pattern, each in flatten.items()
        }
    if flatten is None or callable(flatten) or isinstance(flatten, units.Skip):
        return flatten
    if isinstance(flatten, tuple | list) and len(flatten) == 2:
        sides = tuple(
            tuple(side) if isinstance(side, tuple | list) else (side,)
            for side in flatten
        )
        if all(
            isinstance(axis, int | np.integer) and not isinstance(axis, bool)
            for side in sides
            for axis in side
        ):
            return sides
    raise TypeError(
        f"{name} must be a pair (axes of rows, axes of columns), a rule (path, leaf) "
        "-> pair, a mapping from path patterns to these, or None, got "
        f"{bounds.short_repr(flatten)}"
    )
