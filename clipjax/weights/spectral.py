"""A cap on the singular values of weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import Skip
from clipjax._core.bounds import Bound, bound_at
from clipjax._core.mesh import on_auto_axes
from clipjax._core.norms import as_arrays, in_float64, strong, weakly_typed_as, wide
from clipjax._core.stats import Stats
from clipjax._core.trees import Report
from clipjax._matrices.flatten import Flatten, Matrices, Resolved, check_flatten, matrices_of, sides_of
from clipjax._matrices.leaves import Limited, Method, bound_matrices, each, limits_for, way
from clipjax._matrices.proof import by_platform, first_inside, is_inside
from clipjax._matrices.singular import largest_singular_value
from clipjax.weights.checks import check_are_weights
from clipjax.weights.link import applied
from clipjax.weights.projections import How, Measured, Projection


class SpectralCapState(NamedTuple):
    """State of :func:`spectral_cap` as a link; `norm` is an estimate of the largest singular value."""

    spectral_cap: Stats
    violation: jax.Array  # float: by how much the weights that came in were out of bounds


@explained
def spectral_cap(
    bound: Bound,
    *,
    method: Method = "svd",
    flatten: Flatten = None,
    specs: Any = None,
) -> Projection:
    """Bring the singular values above `bound` down to it, and leave the others: U min(S, bound) Vᴴ.

    Args:
      bound: a number, an array that broadcasts to the stack of matrices of each leaf, or a schedule
        `step -> bound`.
      method: "svd" is exact; "newton_schulz" makes do with matrix products (Newton-Schulz iterations),
        and on a TPU both do. Which is faster depends on the machine and the shape: see docs/spectral.md.
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
      pair of axes. When called, or in `init`: nothing says how to flatten a leaf of rank > 2, no leaf is
      bounded, or one that is no weight would be. As a link: no `params` in `update`.

    Guarantees: no singular value, computed by an SVD in float64, is above `bound`, by the call and after
    `optax.apply_updates`, in any dtype and from any weights: the rounded result is proven to be inside, and
    made smaller until it is. What is proven to be inside stays bit for bit, so that projecting twice is
    projecting once; a norm closer to the bound than a share d of it is not proven, and projected. d is
    (m + n) min(m, n) 2e-16 for a matrix (m, n), on a TPU 2e-6 sqrt(min(m, n)). What is capped ends below the
    bound by less than 4 d, or twice the rounding of a matrix to its dtype if that is more ("svd": some ulp),
    and "newton_schulz" adds a thousandth; what is below comes down by the same factor, but for the
    thousandth. Entries that are not finite make their matrix NaN. Derivatives are those of the exact cap,
    with one side's where a singular value ties with the bound; they take an SVD.

    A matrix costs a product and a Cholesky factorisation where it is inside, and some 40 products
    ("newton_schulz") or the eigenvectors of its Gram matrix where it is not.

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
    bound_of, flatten, how_to = bound_at("bound", bound), check_flatten(flatten), way(method)

    def check(params: Any) -> list[Resolved]:
        sides = sides_of(params, flatten)
        check_are_weights(params, [i for i, both in enumerate(sides) if not isinstance(both, Skip)])
        return sides

    def limits_of(params: Any, step: Any) -> Limited:
        return limits_for(matrices_of("spectral_cap", params, check(params), specs), bound_of(step))

    @_of_arrays
    def constrain(params: Any, step: Any) -> tuple[Any, Report]:
        return bound_matrices(params, limits_of(params, step), how_to)

    @_of_arrays
    def measure(params: Any, step: Any) -> list[Measured]:
        measured = []
        for m, limits in limits_of(params, step):

            def of_leaf(leaf: Any, limits: jax.Array, m: Matrices = m) -> jax.Array:
                stack = m.stacked(strong(leaf))
                return each(largest_singular_value, stack, limits, each(is_inside, stack, limits))

            norms = on_auto_axes(of_leaf, limits, m.leaf, limits)
            measured.append(Measured(m.path, norms, jnp.zeros_like(limits), limits))
        return measured

    @in_float64
    def settle(before: Any, after: Any, wanted: Any, updates: Any, step: Any) -> Any:
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        befores, afters, wanteds = (treedef.flatten_up_to(tree) for tree in (before, after, wanted))
        for m, limits in limits_of(treedef.unflatten(befores), step):
            i = m.position

            def of_leaf(limits: jax.Array, *four: Any, m: Matrices = m) -> jax.Array:
                return m.restored(each(_settled, *(m.stacked(strong(x)) for x in four), limits))

            settled = on_auto_axes(of_leaf, leaves[i], limits, befores[i], afters[i], wanteds[i], leaves[i])
            leaves[i] = weakly_typed_as(leaves[i], settled)
        return treedef.unflatten(leaves)

    how = How(settle=settle, check=check)
    return Projection(f"clipjax.spectral_cap({shown(bound)})", SpectralCapState, constrain, measure, how)


def _of_arrays(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Run a function of weights and a step in float64, which takes away what a Python number was."""
    return lambda params, step: in_float64(function)(as_arrays(params), step)


@jax.custom_jvp
def _settled(
    before: jax.Array, after: jax.Array, wanted: jax.Array, update: jax.Array, bound: jax.Array
) -> jax.Array:
    """The update after which the sum of both, as it is rounded, is proven to be inside.

    Entry by entry the sum is next to what is wanted, and that can be outside by some ulp.
    """
    settled: jax.Array = _settled_by_platform(before, after, wanted, update, bound)
    return settled


@_settled.defjvp
def _settled_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    settled, update = _settled(*primals), primals[3]
    to_wanted, d_update = tangents[2].astype(update.dtype) - tangents[0].astype(update.dtype), tangents[3]
    return settled, jnp.where(jnp.any(settled != update), to_wanted, d_update)


@by_platform
def _settled_by_platform(
    real: Any, before: jax.Array, after: jax.Array, wanted: jax.Array, update: jax.Array, bound: jax.Array
) -> jax.Array:
    def smaller(s: jax.Array) -> jax.Array:
        """The update that leads to 1 - s times what is wanted."""
        step = wide(wanted) * (1 - wide(s)) - wide(before)
        return jnp.where(s == 0, update, lax.convert_element_type(step, update.dtype))

    moved = jnp.any(after != wanted)
    return first_inside(real, moved, smaller, functools.partial(applied, before), update, bound)
