"""Bounds on the singular values of all matrices of a tree, one for each matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax

from clipjax._core.arguments import shown
from clipjax._core.bounds import check_fits
from clipjax._core.dtypes import in_float64, strong, weakly_typed_as
from clipjax._core.mesh import on_auto_axes
from clipjax._core.trees import Report, summary
from clipjax._matrices.caps import by_newton_schulz, by_svd, softly_by_newton_schulz, softly_by_svd
from clipjax._matrices.flatten import Matrices
from clipjax._matrices.proof import is_inside
from clipjax._matrices.singular import about_largest_singular_value, capped, largest_singular_value, softened

Method = Literal["svd", "newton_schulz"]
Limited: TypeAlias = Sequence[tuple[Matrices, jax.Array]]

_CAPS = {"svd": by_svd, "newton_schulz": by_newton_schulz}
_SOFT_CAPS = {"svd": softly_by_svd, "newton_schulz": softly_by_newton_schulz}


class Way(NamedTuple):
    """A way to bound a stack of matrices, and its effect on the largest singular value of each."""

    bound: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]  # (stack, limits) -> (stack, norms)
    factor: Callable[[jax.Array, jax.Array], jax.Array]  # (norms, limits) -> factors


def way(method: Method, *, soft: bool = False) -> Way:
    """Return the way for a `method`, or raise an error if the method is unknown."""
    if method not in get_args(Method):
        names = ", ".join(map(repr, get_args(Method)))
        raise ValueError(f"method must be one of {names}, got {shown(method)}")

    def softly(stack: jax.Array, limits: jax.Array) -> tuple[jax.Array, jax.Array]:
        norms = each(about_largest_singular_value, lax.stop_gradient(stack), batch=limits.shape)
        return each(functools.partial(softened, cap=_SOFT_CAPS[method]), stack, limits), norms

    def hard(stack: jax.Array, limits: jax.Array) -> tuple[jax.Array, jax.Array]:
        constants = lax.stop_gradient((stack, limits))
        proven = each(is_inside, *constants)
        norms = each(largest_singular_value, *constants, proven)
        return each(functools.partial(capped, cap=_CAPS[method]), stack, limits, proven), norms

    return Way(softly, _soft_factor) if soft else Way(hard, _hard_factor)


def limits_for(matrices: Sequence[Matrices], bound: jax.Array) -> Limited:
    """Return the limits for the matrices of each leaf."""

    def limits(m: Matrices) -> jax.Array:
        return jnp.broadcast_to(check_fits("bound", bound, m.batch, f"the matrices of {m.path!r}"), m.batch)

    return [(m, limits(m)) for m in matrices]


@in_float64
def bound_matrices(tree: Any, limited: Limited, way: Way) -> tuple[Any, Report]:
    """Bound the singular values of all matrices."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    reports = []
    for m, limits in limited:

        def of_leaf(leaf: Any, limits: jax.Array, m: Matrices = m) -> tuple[jax.Array, jax.Array]:
            stack, norms = way.bound(m.stacked(strong(leaf)), limits)
            return m.restored(stack), norms

        result, norms = on_auto_axes(of_leaf, (m.leaf, limits), m.leaf, limits)
        leaves[m.position] = weakly_typed_as(m.leaf, result)
        constants = lax.stop_gradient(limits)
        reports.append(_report(norms, way.factor(norms, constants), constants))
    return treedef.unflatten(leaves), summary(reports)


def each(
    function: Callable[..., jax.Array], *stacks: jax.Array, batch: tuple[int, ...] | None = None
) -> jax.Array:
    """Apply a function of one matrix to stacks, each with a matrix or a number for each matrix.

    `batch` is the shape of the stack, by default that of the last argument.
    """
    batch = stacks[-1].shape if batch is None else batch
    if not batch:  # products of one matrix are faster than those of a stack of one
        return function(*stacks)
    flat = [x.reshape(-1, *x.shape[len(batch) :]) for x in stacks]
    result = jax.vmap(function)(*flat)
    return result.reshape(*batch, *result.shape[1:])


def _hard_factor(norms: jax.Array, limits: jax.Array) -> jax.Array:
    return jnp.where(norms <= limits, 1.0, limits / jnp.where(norms == 0, 1.0, norms))


def _soft_factor(norms: jax.Array, limits: jax.Array) -> jax.Array:
    share = norms / jnp.where(limits > 0, limits, 1.0)
    return jnp.where(limits > 0, lax.rsqrt(1 + jnp.square(share)), jnp.where(norms > 0, 0.0, 1.0))


@in_float64
def _report(norms: jax.Array, factors: jax.Array, limits: jax.Array) -> Report:
    # XLA's CPU compiler may lose NaN in a maximum.
    largest, least, after = (
        jnp.where(jnp.any(jnp.isnan(norms)), jnp.nan, x)
        for x in (jnp.max(norms), jnp.min(factors), jnp.max(norms * factors))
    )
    return Report(largest, least, ~jnp.all(norms <= limits), after)
