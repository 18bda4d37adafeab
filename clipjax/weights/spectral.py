"""A projection that caps the singular values of weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._core.aliases import Bounds, Skip, Step
from clipjax._core.bounds import are_given, check_bounds, check_fits
from clipjax._core.clip import rounding, weak_like
from clipjax._core.leaves import (
    Leaf,
    Leaves,
    a_few,
    is_inexact,
    of_each_leaf,
    short_repr,
)
from clipjax._core.norms import check_whole, positive_axes, sum_dtype
from clipjax.weights import singular_values
from clipjax.weights.projection import Projection, projection

Sides: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
Flatten: TypeAlias = (
    Sequence[int | Sequence[int]]
    | Callable[[Any, Any], Any]
    | Skip
    | Mapping[str, Any]
    | None
)


def spectral_cap(bound: Bounds, *, flatten: Flatten = None) -> Projection:
    """Reduce each singular value above a bound to the bound.

        U min(S, bound) Vᴴ,  where the matrix is U S Vᴴ

    Use it to bound the Lipschitz constant of layers, or to keep the singular values of
    weights from growing during long training. It takes 45 matrix products where the
    largest singular value is at most about twice the bound, and 42 more for each
    further factor of about 2.5, so apply it every 10 or 100 steps.

    Args:
      bound: the bound on singular values, a `Bound`, or a mapping from path patterns to
        such bounds, of which the first that matches a leaf counts; other leaves are not
        changed. An array broadcasts to the stack of matrices of each leaf.
      flatten: how to read leaves of rank 3 and more as matrices: a pair (axes of rows,
        axes of columns), each an int or a tuple. Along all other axes the leaf is a
        stack of matrices. `((0, 1, 2), 3)` is for a convolution (h, w, in, out), and
        `(1, 2)`, rows 1 and columns 2, for stacked Dense layers (layer, in, out). It
        may also be a rule `(path, leaf) -> pair`, or a mapping from path patterns to
        these, with `clipjax.SKIP` for a leaf that stays as it is. None stands for
        leaves of rank 2, which are matrices; it leaves lower ranks as they are, and
        raises an error for higher ones.

    Returns:
      A :class:`Projection`, which you apply directly, or put at the end of a chain.

    Raises:
      TypeError: `flatten` is not a pair of axes.
      ValueError: in `init` or `apply`, axes do not fit a leaf, no leaf is a matrix, or
        `flatten` is missing for a leaf of rank 3 or more.

    In float32, the largest singular value of a changed matrix is never above the bound,
    and below it by at most 2e-5 of the bound. In 16 bits, where all elements are
    rounded once more, it is above the bound by at most one rounding. A matrix comes
    back bit for bit if its singular values are all below the bound by at least 2e-5 of
    the bound. Small singular values are accurate to a rounding of the largest one. An
    element that is not finite makes its matrix NaN.

    References:
      Yoshida and Miyato, 2017, Spectral norm regularization, arXiv:1705.10941; Newhouse
      et al., 2025, Training transformers with enforced Lipschitz constants,
      arXiv:2507.13338.

    See Also:
      :func:`max_norm` bounds the norms of output units and costs far less;
      :func:`qk_clip` bounds attention logits.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.0], [0.0, 0.5]])
      >>> print(clipjax.spectral_cap(1.0).apply(kernel).round(3))
      [[1.  0. ]
       [0.  0.5]]
    """
    bounds = check_bounds("bound", bound)
    flatten = _check_flatten(flatten)

    def cap(weights: Leaves, step: Step) -> list[Any]:
        sides = _sides_of_leaves(weights, flatten, are_given([bounds], weights))
        rows = zip(weights.each, sides, bounds.of(weights, step), strict=True)
        return [
            _capped(leaf, of, most) if of else leaf.value for leaf, of, most in rows
        ]

    return projection("clipjax.spectral_cap", cap, scheduled=bounds.scheduled)


def _capped(leaf: Leaf, sides: Sides, bound: Any) -> jax.Array:
    """Cap the matrices of a leaf, as one array (*stack, long side, short side)."""
    x = leaf.value
    if not x.size:
        return x
    check_whole("spectral_cap", leaf)
    long, short = sorted(sides, key=lambda side: -_size(x, side))
    stack = tuple(axis for axis in range(x.ndim) if axis not in long + short)
    order = stack + long + short
    batch = tuple(x.shape[axis] for axis in stack)
    check_fits("bound", bound, batch, f"the matrices of {leaf}")
    real = sum_dtype(x.dtype)

    def cap(x: jax.Array, bound: jax.Array) -> jax.Array:
        moved = jnp.transpose(x, order)
        w = moved.reshape(*batch, _size(x, long), _size(x, short))
        w = w if jnp.iscomplexobj(x) else w.astype(real)
        capped = singular_values.cap(
            w, jnp.broadcast_to(bound, batch), rounding(x.dtype)
        )
        back = capped.astype(x.dtype).reshape(moved.shape)
        return jnp.transpose(back, tuple(np.argsort(order)))

    sharding = jax.typeof(x).sharding
    # On explicit mesh axes products would need shardings; XLA infers them by itself.
    if any(sharding.spec):
        cap = jax.sharding.auto_axes(cap, out_sharding=sharding)
    return weak_like(x, cap(x, jnp.asarray(bound, real)))


def _size(x: jax.Array, side: tuple[int, ...]) -> int:
    return math.prod(x.shape[axis] for axis in side)


def _sides_of_leaves(
    leaves: Leaves, flatten: Any, chosen: Sequence[bool]
) -> list[Sides | None]:
    """Return the axes of rows and columns of each leaf, None if it is not changed."""
    rules = of_each_leaf("flatten", flatten, leaves, None)
    sides: list[Sides | None] = []
    matrices = []
    for leaf, rule, is_chosen in zip(leaves.each, rules, chosen, strict=True):
        counts = is_chosen and is_inexact(leaf.value)
        # One pair for all leaves is for kernels of higher rank. Kernels of Dense layers
        # beside them are matrices already.
        for_all = isinstance(flatten, tuple) and np.ndim(leaf.value) <= 2
        own_rule = None if for_all else rule
        sides.append(_sides_of(own_rule, leaf) if counts else None)
        if counts and leaf.value.size:
            matrices.append(leaf)
    given = flatten.values() if isinstance(flatten, Mapping) else [flatten]
    asked = callable(flatten) or any(isinstance(each, Skip) for each in given)
    if matrices and not asked and not any(sides):
        raise ValueError(
            "flatten: nothing is changed, since none of these is a matrix: "
            f"{a_few(matrices, 5)}"
        )
    return sides


def _sides_of(rule: Any, leaf: Leaf) -> Sides | None:
    rank = leaf.value.ndim
    if callable(rule):
        name = f"flatten of {leaf.name!r}, by the rule,"
        rule = _check_pair(rule(leaf.path, leaf.value), name)
    if isinstance(rule, Skip) or (rule is None and rank < 2):
        return None
    if rule is None and rank > 2:
        pattern = leaf.name or "*"
        raise ValueError(
            f"flatten: {leaf} may be the kernel of a convolution, of attention heads, "
            f"or a stack of layers. Pass flatten={{{pattern!r}: (rows, columns)}} "
            "with the axes of its rows and columns, such as ((0, 1, 2), 3) for a "
            "convolution (*window, in, out), or clipjax.SKIP in place of the pair"
        )
    rows, columns = ((0,), (1,)) if rule is None else rule
    both = tuple(positive_axes("flatten", rule, rows + columns, leaf))
    return both[: len(rows)], both[len(rows) :]


def _check_flatten(flatten: Any) -> Any:
    """Return `flatten`, with each pair as a pair of tuples."""
    is_mapping = isinstance(flatten, Mapping) and len(flatten) > 0
    if is_mapping and all(isinstance(pattern, str) for pattern in flatten):
        return {
            pattern: _check_pair(each, f"flatten[{pattern!r}]")
            for pattern, each in flatten.items()
        }
    return _check_pair(flatten, "flatten")


def _check_pair(pair: Any, name: str) -> Any:
    """Return a pair as a pair of tuples; return None, SKIP and rules as they are."""
    if pair is None or isinstance(pair, Skip) or callable(pair):
        return pair
    if isinstance(pair, tuple | list) and len(pair) == 2:
        sides = tuple(
            tuple(side) if isinstance(side, tuple | list) else (side,) for side in pair
        )
        if all(map(_is_axis, itertools.chain(*sides))):
            return sides
    raise TypeError(
        f"{name} must be a pair (axes of rows, axes of columns), a rule (path, leaf) "
        "-> pair, a mapping from path patterns to these, or None, got "
        f"{short_repr(pair)}"
    )


def _is_axis(axis: Any) -> bool:
    return isinstance(axis, int | np.integer) and not isinstance(axis, bool)
