"""A projection that caps the singular values of weights."""

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
from clipjax._core.dtypes import as_arrays, in_float64, strong, weakly_typed_as, wide
from clipjax._core.mesh import on_auto_axes
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
    violation: jax.Array  # float: by how much the incoming weights were out of bounds


@explained
def spectral_cap(
    bound: Bound,
    *,
    method: Method = "svd",
    flatten: Flatten = None,
    specs: Any = None,
) -> Projection:
    """Reduce the singular values above `bound` to it, and keep the others: U min(S, bound) Vᴴ.

    Args:
      bound: a number, an array that broadcasts to the stack of matrices of each leaf, or a schedule
        `step -> bound`.
      method: "svd" is exact; "newton_schulz" uses only matrix products (Newton-Schulz iterations).
        On a TPU both use products. Which is faster depends on the machine and the shape: see
        docs/spectral.md.
      flatten: how leaves are read as matrices. Leaves of rank 2 are matrices, and leaves of lower rank are
        left alone. For a higher rank, give a pair (axes of rows, axes of columns), each an int or a tuple:
        `((0, 1, 2), 3)` for a convolution's kernel (h, w, in, out), `(1, 2)` for scanned Dense layers
        (layer, in, out). The other axes stack matrices, each with its own singular values. Or give a rule
        `(path, leaf) -> pair`, or a mapping from path patterns to these: the first match wins, and a leaf
        that no pattern matches is treated as by default. `clipjax.SKIP` instead of a pair leaves a leaf
        alone.
      specs: inside `shard_map`, the `PartitionSpec` tree of the parameters. Matrices must not be split over
        devices, but stacks of them may be.

    Returns:
      A :class:`Projection`: a function `params -> params` that can also be the last link of a chain,
      where `update` needs `params`. The metric `norm` is an estimate from below of the largest singular value
      (power iteration); it is above the bound exactly if a matrix was not proven to be inside.

    Raises:
      TypeError, ValueError: `bound` is not a number, is negative or is NaN; `method` is unknown; `flatten` is
      not a pair of axes. When called, or in `init`: it is not known how to flatten a leaf of rank > 2, no
      leaf is bounded, or a leaf that is not a weight would be changed. As a link: `update` gets no `params`.

    Guarantees: no singular value, computed by an SVD in float64, is above `bound`, both after a call and
    after `optax.apply_updates`, in any dtype and from any weights: the rounded result is made smaller until
    it is proven to be inside. A matrix that is proven to be inside is unchanged, bit for bit, so projecting
    twice is the same as projecting once. If its norm is closer to the bound than a share d of it, this cannot
    be proven, and the matrix is projected; d is (m + n) min(m, n) 2e-16 for a matrix (m, n), and on a TPU
    2e-6 sqrt(min(m, n)). A capped singular value ends below the bound by less than 4 d, or by twice the
    rounding of a matrix to its dtype if that is more ("svd": some ulp); "newton_schulz" adds a thousandth.
    Smaller singular values of that matrix shrink by the same factor, but without the thousandth. An
    entry that is not finite makes its matrix NaN. Derivatives are those of the exact cap, one-sided where a
    singular value equals the bound; they need an SVD.

    A matrix that is inside costs one product and a Cholesky factorization; any other costs some 40 products
    ("newton_schulz") or the eigenvectors of its Gram matrix.

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
    """Run a function of weights and a step in float64; Python numbers first become arrays of their dtypes."""
    return lambda params, step: in_float64(function)(as_arrays(params), step)


@jax.custom_jvp
def _settled(
    before: jax.Array, after: jax.Array, wanted: jax.Array, update: jax.Array, bound: jax.Array
) -> jax.Array:
    """Return an update for which the rounded sum `before + update` is proven to be inside.

    Each entry of the sum is a neighbor of the wanted one, so the matrix may be outside by some ulp.
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
        """Return the update that leads to (1 - s) * wanted."""
        step = wide(wanted) * (1 - wide(s)) - wide(before)
        return jnp.where(s == 0, update, lax.convert_element_type(step, update.dtype))

    moved = jnp.any(after != wanted)
    return first_inside(real, moved, smaller, functools.partial(applied, before), update, bound)
