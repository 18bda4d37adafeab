"""A cap on the singular values of weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from clipjax._core.bounds import Bound, bound_at, check_fits
from clipjax._core.norms import as_arrays, in_float64, strong, weakly_typed_as, wide
from clipjax._core.reductions import max_of, min_of
from clipjax._core.stats import Stats
from clipjax._core.trees import Report, summary
from clipjax.weights.link import applied
from clipjax.weights.matrices import Flatten, Matrices, check_flatten, matrices_of
from clipjax.weights.projections import How, Measured, Projection
from clipjax.weights.singular import by_products, by_svd, capped, largest_singular_value, least_shrink

_CAPS = {"svd": by_svd, "newton_schulz": by_products}


class SpectralCapState(NamedTuple):
    """State of :func:`spectral_cap` as a link; `stats.norm` is an estimate of the largest singular value."""

    stats: Stats
    violation: jax.Array  # float: by how much the weights that came in were out of bounds


def spectral_cap(
    bound: Bound,
    *,
    method: Literal["svd", "newton_schulz"] = "svd",
    flatten: Flatten = None,
    specs: Any = None,
) -> Projection:
    """Bring the singular values above `bound` down to it, and leave the others: U min(S, bound) Vᴴ.

    Args:
      bound: a number, an array that broadcasts to the stack of matrices of each leaf, or a schedule
        `step -> bound`.
      method: "svd" is exact; "newton_schulz" makes do with matrix products (Newton-Schulz iterations) up to
        10⁴ times the bound, and takes the SVD beyond. Which is faster, and by how much, depends on the
        machine and the shape: see docs/spectral.md.
      flatten: how leaves are matrices. Those of rank 2 are, as they are, and those of lower rank are
        left alone. For a higher rank, a pair (axes of rows, axes of columns), each an int or a tuple: a
        convolution's kernel (h, w, in, out) is `((0, 1, 2), 3)`, scanned Dense layers (layer, in, out)
        are `(1, 2)`. Axes not named count matrices, each with singular values of its own. Or a rule
        `(path, leaf) -> pair`, or a mapping from path patterns to these: the first match wins, and what
        none matches is as without one. `clipjax.SKIP` in the place of a pair leaves a leaf alone.
      specs: inside `shard_map`, the `PartitionSpec` tree of the parameters. Matrices must not be
        split, stacks of them may be.

    Returns:
      A :class:`Projection`: a function `params -> params`, and a link for the end of a chain, which
      needs `params` in `update`. The metric `norm` is an estimate from below of the largest singular value
      (power iteration), which is above the bound exactly if a matrix was not proven to be inside.

    Raises:
      TypeError, ValueError: `bound` is no number, negative or NaN; `method` is neither; `flatten` is no
      pair of axes, or nothing says how to flatten a leaf of rank > 2. As a link: no `params` in `update`.

    Guarantees: no singular value, computed by an SVD in float64, is above `bound`, by the call and after
    `optax.apply_updates`, in any dtype and from any weights: the rounded result is proven to be inside by a
    Cholesky factorisation of bound² I - W Wᴴ, and made smaller until it is. What is proven to be inside
    stays bit for bit, so that projecting twice is projecting once; a norm closer to the bound than
    (m + n) min(m, n) 2e-16 of it is not proven, and projected. Singular values that are capped end below
    the bound by the rounding of a matrix to its dtype and less than twice that ("svd": some ulp), or by
    less than a thousandth ("newton_schulz", float32); those below come down by the same factor, except
    for the products' thousandth. Entries that are not finite make their matrix NaN. Derivatives are those
    of the exact cap, with one side's where a singular value ties with the bound; they take an SVD.

    A matrix costs a product and a Cholesky factorisation in float64 where it is inside, and some 40 products
    ("newton_schulz") or an SVD where it is not.

    References:
      Yoshida and Miyato, 2017, Spectral norm regularization, arXiv:1705.10941; Chen and Chow, 2014, A
      stable scaling of Newton-Schulz; Rump, 2006, Verification of positive definiteness.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.0], [0.0, 0.5]])
      >>> print(clipjax.spectral_cap(1.0)(kernel).round(3))
      [[1.  0. ]
       [0.  0.5]]
      >>> stacked = {"layers": jnp.stack([kernel, 2 * kernel])}  # (layer, in, out)
      >>> print(clipjax.spectral_cap(1.0, flatten=(1, 2))(stacked)["layers"][1].round(3))
      [[1. 0.]
       [0. 1.]]
    """
    bound_of, flatten = bound_at("bound", bound), check_flatten(flatten)
    if method not in _CAPS:
        raise ValueError(f"method must be one of {', '.join(map(repr, _CAPS))}, got {method!r}")
    cap = functools.partial(_each, lambda w, b: capped(w, b, _CAPS[method]))

    def constrain(params: Any, step: Any) -> tuple[Any, Report]:
        return project(as_arrays(params), step)

    @in_float64
    def project(params: Any, step: Any) -> tuple[Any, Report]:
        treedef: Any
        leaves, treedef = jax.tree.flatten(params)
        at_step = bound_of(step)
        reports = []
        for m in matrices_of(params, flatten, specs):
            limits = _limits(m, at_step)
            stack = m.stacked(strong(m.leaf))
            leaves[m.position] = weakly_typed_as(m.leaf, m.restored(cap(stack, limits)))
            norms = _each(largest_singular_value, *lax.stop_gradient((stack, limits)))
            reports.append(_report(norms, lax.stop_gradient(limits)))
        return treedef.unflatten(leaves), summary(reports)

    def measure(params: Any, step: Any) -> list[Measured]:
        return measured_values(as_arrays(params), step)

    @in_float64
    def measured_values(params: Any, step: Any) -> list[Measured]:
        at_step = bound_of(step)
        measured = []
        for m in matrices_of(params, flatten, specs):
            limits = _limits(m, at_step)
            norms = _each(largest_singular_value, m.stacked(strong(m.leaf)), limits)
            measured.append(Measured(m.path, norms, jnp.zeros_like(limits), limits))
        return measured

    @in_float64
    def settle(before: Any, after: Any, wanted: Any, updates: Any, step: Any) -> Any:
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        at_step = bound_of(step)
        befores, afters, wanteds = (treedef.flatten_up_to(tree) for tree in (before, after, wanted))
        for m in matrices_of(treedef.unflatten(befores), flatten, specs):
            i = m.position
            four = [m.stacked(strong(x)) for x in (befores[i], afters[i], wanteds[i], leaves[i])]
            settled = _each(_settled, *four, _limits(m, at_step))
            leaves[i] = weakly_typed_as(leaves[i], m.restored(settled))
        return treedef.unflatten(leaves)

    return Projection(
        f"clipjax.spectral_cap({bound!r})", SpectralCapState, constrain, measure, How(settle=settle)
    )


def _limits(m: Matrices, bound: jax.Array) -> jax.Array:
    """The bound of each matrix of a leaf."""
    return jnp.broadcast_to(check_fits(bound, m.batch, f"the matrices of {m.path!r}"), m.batch)


def _each(function: Callable[..., jax.Array], *stacks: jax.Array) -> jax.Array:
    """Apply a function of matrices, and their bound, to each of a stack."""
    batch = stacks[-1].shape
    if not batch:  # products of one matrix are faster than those of a stack of one
        return function(*stacks)
    flat = [x.reshape(-1, *x.shape[len(batch) :]) for x in stacks]
    result = jax.vmap(function)(*flat)
    return result.reshape(*batch, *result.shape[1:])


@in_float64
def _settled(
    before: jax.Array, after: jax.Array, wanted: jax.Array, update: jax.Array, bound: jax.Array
) -> jax.Array:
    """The update after which the sum of both, as it is rounded, is proven to be inside.

    Entry by entry the sum is next to what is wanted, and that can be outside by some ulp.
    """
    fixed = lax.stop_gradient((before, wanted, update))
    moved = jnp.any(lax.stop_gradient(after) != fixed[1])
    s = least_shrink(
        lambda s: applied(fixed[0], _step_to_smaller(*fixed, s)),
        jnp.where(moved, lax.stop_gradient(bound), jnp.inf),
        float(jnp.finfo(before.dtype).eps),
    )
    return _step_to_smaller(before, wanted, update, s)


def _step_to_smaller(before: jax.Array, wanted: jax.Array, update: jax.Array, s: jax.Array) -> jax.Array:
    """The update that leads to 1 - s times what is wanted."""
    target = wide(wanted) * (1 - s)
    return jnp.where(s == 0, update, lax.convert_element_type(target - wide(before), update.dtype))


@in_float64
def _report(norms: jax.Array, bound: jax.Array) -> Report:
    scale = jnp.where(norms > bound, bound / jnp.where(norms > bound, norms, 1.0), 1.0)
    scale = jnp.where(jnp.isnan(norms), jnp.nan, scale)
    return Report(max_of(norms), min_of(scale), ~jnp.all(norms <= bound))
