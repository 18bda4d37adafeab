"""A projection that caps the singular values of weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from clipjax._core import bounds, clipping, norms, trees, units
from clipjax.weights.projection import Projection, written

Sides: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
Flatten: TypeAlias = Sequence[int | Sequence[int]] | Callable[[Any, Any], Any] | units.Skip | Mapping[str, Any] | None


def spectral_cap(bound: bounds.Bound, *, flatten: Flatten = None) -> Projection:
    """Reduce the singular values above a bound to it, and keep the others: U min(S, bound) Vᴴ.

    Args:
      bound: a number, an array that broadcasts to the stack of matrices of each leaf, or a schedule.
      flatten: how leaves of rank 3 and more are matrices: a pair (axes of rows, axes of columns), each an int
        or a tuple, such as `((0, 1, 2), 3)` for a convolution (h, w, in, out), or `(1, 2)`, rows 1 and columns 2, for
        stacked Dense layers (layer, in, out): the other axes stack matrices. Or a rule `(path, leaf) -> pair`, or a
        mapping from path patterns to these. `clipjax.SKIP` in place of a pair: the leaf is not changed. By
        default, and where no pattern matches, leaves of rank 2 are matrices, lower ranks are not changed, and
        higher ranks are an error.

    Returns:
      A :class:`Projection`. It costs one singular value decomposition of each matrix.

    Raises:
      TypeError, ValueError: `bound` is negative, NaN or not a number, or does not fit the stack; `flatten` is
        not a pair of axes, or applies to no leaf.

    What is capped ends up to 2e-5 below the bound in float32, as decompositions are less exact than norms. An
    entry that is not finite makes its matrix NaN.

    References:
      Yoshida and Miyato, 2017, Spectral norm regularization, arXiv:1705.10941.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.0], [0.0, 0.5]])
      >>> print(clipjax.spectral_cap(1.0)(kernel).round(3))
      [[1.  0. ]
       [0.  0.5]]
    """
    limit, flatten = bounds.as_schedule("bound", bound), _check_flatten(flatten)

    def cap(params: Any, step: Any) -> Any:
        norms.warn_if_local()
        leaves, rebuild = trees.leaves_of(params)
        each = zip(leaves, _sides_of_leaves(params, flatten), strict=True)
        return rebuild([leaf.value if not sides else _capped(leaf, sides, limit(step)) for leaf, sides in each])

    return Projection(written("spectral_cap", bound, flatten=flatten), cap, scheduled=callable(bound))


def _capped(leaf: trees.Leaf, sides: Sides, bound: Any) -> jax.Array:
    """Cap the matrices of a leaf, as one array (*stack, long side, short side)."""
    x = leaf.value
    if not x.size:
        return x
    if norms.mesh_axes(x):
        raise ValueError(
            f"spectral_cap: inside shard_map, {leaf} differs over {norms.mesh_axes(x)}, and its type does not say "
            "which of its axes are split. Project singular values outside shard_map, under jit"
        )
    long, short = sorted(sides, key=lambda side: -math.prod(x.shape[axis] for axis in side))
    stack = tuple(axis for axis in range(x.ndim) if axis not in long + short)
    batch = tuple(x.shape[axis] for axis in stack)
    bounds.check_fits("bound", bound, batch, f"the matrices of {leaf}")
    limits = jnp.broadcast_to(jnp.asarray(bound, norms.sum_dtype(x.dtype)), batch)

    # On explicit mesh axes a matrix must not be split, but a stack may be. Other types name no axes here.
    sharding = jax.typeof(x).sharding
    spec = PartitionSpec(*(name if axis in stack else None for axis, name in enumerate(sharding.spec)))
    split = spec != sharding.spec
    whole = jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec)) if split else x
    moved = jnp.transpose(whole, stack + long + short)
    w = moved.reshape(*batch, *(math.prod(x.shape[axis] for axis in side) for side in (long, short)))
    # A decomposition is less exact than a norm.
    room = clipping.margin(x.dtype) + (2.0**-44 if norms.sum_dtype(x.dtype) == np.float64 else 2.0**-16)
    capped = _cap(w.astype(x.dtype if jnp.iscomplexobj(x) else norms.sum_dtype(x.dtype)), limits, room).astype(x.dtype)
    result = jnp.transpose(capped.reshape(moved.shape), tuple(np.argsort(stack + long + short)))
    return clipping.weak_like(x, jax.sharding.reshard(result, sharding) if split else result)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _cap(w: jax.Array, bound: jax.Array, room: float) -> jax.Array:
    """Cap the singular values of matrices, `room` below the bound, so that they do not change again."""
    return _cap_and_factors(w, bound, room)[0]


def _cap_and_factors(w: jax.Array, bound: jax.Array, room: float) -> tuple[jax.Array, ...]:
    """Return the capped matrices, U, S, Vᴴ, the limit of S, and which matrices are outside and finite."""
    finite = jnp.all(jnp.isfinite(w), axis=(-2, -1), keepdims=True)
    u, s, vh = jnp.linalg.svd(jnp.where(finite, w, 0), full_matrices=False)
    limit = (bound * (1 - room))[..., None]
    outside = ~jnp.all(s <= bound[..., None], axis=-1)[..., None, None]
    result = jnp.where(outside, _product(u * jnp.minimum(s, limit)[..., None, :].astype(u.dtype), vh), w)
    return norms.nan_unless(finite, result), u, s, vh, limit, outside, finite


@_cap.defjvp
def _cap_jvp(room: float, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Differentiate U f(S) Vᴴ by divided differences of f, which are finite where singular values are equal.

    In the bases U and V the Hermitian part of dw is multiplied by (f(s) - f(t)) / (s - t), the other part by
    (f(s) + f(t)) / (s + t), and what is outside the span of U by f(s) / s: Bhatia, 1997, Matrix analysis.
    """
    (w, bound), (dw, dbound) = primals, tangents
    result, u, s, vh, limit, outside, finite = _cap_and_factors(w, bound, room)
    new, above = jnp.minimum(s, limit), s > limit
    row, column = (lambda x: x[..., :, None]), (lambda x: x[..., None, :])
    same, total = row(above) == column(above), row(s) + column(s)
    slope = jnp.where(row(above), 0.0, 1.0)
    odd = jnp.where(same, slope, (row(new) - column(new)) / jnp.where(same, 1, row(s) - column(s)))
    even = jnp.where(total > 0, row(new) + column(new), 1) / jnp.where(total > 0, total, 1)
    ratio = jnp.where(s > 0, new, 1) / jnp.where(s > 0, s, 1)
    by_bound = jnp.where(above, 1 - room, 0.0) * dbound[..., None]
    odd, even, ratio, by_bound = (x.astype(u.dtype) for x in (odd, even, ratio, by_bound))  # complex where w is

    uh, v = _adjoint(u), _adjoint(vh)
    inner = _product(_product(uh, dw), v)
    inside = odd * (inner + _adjoint(inner)) / 2 + even * (inner - _adjoint(inner)) / 2
    rest = _product(dw, v) - _product(u, inner)
    tangent = _product(_product(u, inside) + u * column(by_bound) + rest * column(ratio), vh)
    return result, norms.nan_unless(finite, jnp.where(outside, tangent, dw))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the matrix product in full float32, which accelerators do not use by default."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _sides_of_leaves(tree: Any, flatten: Any) -> list[Sides | None]:
    """Return the axes of rows and of columns of each leaf, None if it is not changed."""
    leaves, rules = trees.leaves_of(tree)[0], trees.per_leaf("flatten", flatten, tree, None)
    if isinstance(flatten, tuple):  # for kernels of higher rank: those of Dense layers beside them are matrices already
        rules = [None if np.ndim(leaf.value) <= 2 else flatten for leaf in leaves]
    sides = [
        _sides_of(rule, leaf) if trees.is_float(leaf.value) else None for rule, leaf in zip(rules, leaves, strict=True)
    ]
    floats = [leaf for leaf in leaves if trees.is_float(leaf.value) and leaf.value.size]
    given = flatten.values() if isinstance(flatten, Mapping) else [flatten]
    asked = callable(flatten) or any(isinstance(each, units.Skip) for each in given)
    if floats and not asked and not any(sides):
        raise ValueError(f"flatten: nothing is changed, since none of these is a matrix: {trees.a_few(floats, 5)}")
    return sides


def _sides_of(rule: Any, leaf: trees.Leaf) -> Sides | None:
    rank = leaf.value.ndim
    if callable(rule):
        rule = _check_flatten(rule(leaf.path, leaf.value), f"flatten of {leaf.name!r}, by the rule,")
    if isinstance(rule, units.Skip) or (rule is None and rank < 2):
        return None
    if rule is None and rank > 2:
        raise ValueError(
            f"flatten: {leaf} may be the kernel of a convolution, of attention heads, or a stack of layers. "
            f"Pass flatten={{{leaf.name!r}: (rows, columns)}} with the axes of its rows and columns, such as "
            "((0, 1, 2), 3) for a convolution (*window, in, out), or clipjax.SKIP in place of the pair"
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
    if isinstance(flatten, Mapping) and flatten and all(isinstance(pattern, str) for pattern in flatten):
        return {pattern: _check_flatten(each, f"{name}[{pattern!r}]") for pattern, each in flatten.items()}
    if flatten is None or callable(flatten) or isinstance(flatten, units.Skip):
        return flatten
    if isinstance(flatten, tuple | list) and len(flatten) == 2:
        sides = tuple(tuple(side) if isinstance(side, tuple | list) else (side,) for side in flatten)
        if all(isinstance(axis, int | np.integer) and not isinstance(axis, bool) for side in sides for axis in side):
            return sides
    raise TypeError(
        f"{name} must be a pair (axes of rows, axes of columns), a rule (path, leaf) -> pair, a mapping from "
        f"path patterns to these, or None, got {bounds.short_repr(flatten)}"
    )
