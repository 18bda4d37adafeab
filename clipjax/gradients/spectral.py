"""A clip of the singular values of gradients and updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import optax

from clipjax._core.arguments import explained, shown
from clipjax._core.bounds import Bound, bound_at
from clipjax._core.dtypes import only_arrays
from clipjax._core.members import Acted, Memory, with_stats
from clipjax._core.stats import Stats
from clipjax._core.where import Where
from clipjax._matrices.flatten import Flatten, check_flatten, matrices_of, sides_of
from clipjax._matrices.leaves import Method, bound_matrices, limits_for, way


class ClipBySpectralNormState(NamedTuple):
    """State of :func:`clip_by_spectral_norm`; `norm` is an estimate of the largest singular value."""

    clip_by_spectral_norm: Stats


@explained
def clip_by_spectral_norm(
    bound: Bound,
    *,
    soft: bool = False,
    method: Method = "newton_schulz",
    flatten: Flatten = None,
    specs: Any = None,
    where: Where = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the singular values of each matrix: sigma to min(sigma, bound), or softly to less than `bound`.

    The singular vectors stay, so only the few large directions shrink, whereas clipping by a norm scales all
    directions. First in a chain it clips gradients; after an optimizer and before the learning rate, updates.

    Args:
      bound: a number, an array that broadcasts to the stack of matrices of each leaf, or a schedule
        `step -> bound`.
      soft: whether sigma becomes sigma / sqrt(1 + sigma² / bound²). This is smooth: every singular value
        shrinks, one far below the bound by a share of sigma² / (2 bound²), and none reaches the bound.
      method: "newton_schulz" uses only matrix products, which accelerators are made for; "svd" uses
        eigenvectors, which is more exact if not `soft`. Which is faster depends on the machine and the shape:
        see docs/spectral.md.
      flatten: how leaves become matrices, as in :func:`clipjax.spectral_cap`. Leaves of rank 2 are matrices
        already. Leaves of lower rank are not matrices and pass unchanged: use another clip, with its `where`,
        for biases and scales. Leaves of higher rank need this argument.
      specs: inside `shard_map`, the `PartitionSpec` tree of the updates. Matrices must not be split, but
        stacks of them may be.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.

    Returns:
      A transformation whose state holds scalars. `norm` is an estimate from below (by power iteration) of the
      largest singular value, `scale` the share of it that is left, the smallest of all matrices, and
      `clipped_fraction` is the share of steps at which a matrix was above the bound (if not `soft`: was not
      proven to be within it).

    Raises:
      TypeError, ValueError: `bound` is negative, NaN or not a number; `soft` is not a bool; `method` is
        neither of the two; `flatten` is not a pair of axes. In `init` and `update`: nothing says how to
        flatten a leaf of rank > 2; no leaf is a matrix, unless `clipjax.SKIP` asks for that.

    Guarantees: no singular value of the result, computed by an SVD in float64, is above `bound`, in any dtype
    and for any gradients: the rounded result is made smaller until it is proven to be within the bound. If
    not `soft`, a matrix that is proven to be within the bound is unchanged, bit for bit; how close to the
    bound a proof succeeds, and how little the other results end below it, is as for
    :func:`clipjax.spectral_cap`. If `soft`, all singular values are accurate to the rounding of a matrix to
    its dtype, however far the largest is above the bound (on a TPU to 2e-5 of the bound for values up to some
    hundred times the bound, and to a few hundredths at 10⁶ times; from 10¹⁰ times on, values far below the
    largest are lost). A bound of 0 gives zeros, and an infinite one changes no bit. Entries that are not
    finite make their matrix NaN. Derivatives are correct, finite at 0, and one-sided where a singular value
    equals the bound; they need an SVD.

    The hard clip was published for gradients, computed by an SVD. The soft clip was published for updates,
    between the optimizer and its learning rate, and optionally also for gradients. Its authors run 10
    Newton-Schulz steps in bfloat16 or float32, which do not converge far above the bound, and clip vectors by
    their norms. Here the iterations run until they have converged.

    References:
      Yukhimchuk et al., 2026, Gradient clipping beyond vector norms: a spectral approach for matrix-valued
      parameters, arXiv:2605.11838; Jiang, Semenov and Stich, 2026, Enhancing LLM training via spectral
      clipping (SPECTRA), arXiv:2603.14315.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> grads = {"kernel": jnp.array([[3.0, 0.0], [0.0, 0.5]])}
      >>> for soft in (False, True):
      ...     tx = clipjax.clip_by_spectral_norm(1.0, soft=soft)
      ...     print(tx.update(grads, tx.init(grads))[0]["kernel"].round(2))
      [[1.  0. ]
       [0.  0.5]]
      [[0.95 0.  ]
       [0.   0.45]]
    """
    bound_of, flatten = bound_at("bound", bound), check_flatten(flatten)
    if not isinstance(soft, bool):
        raise TypeError(f"soft must be True or False, got {shown(soft)}")
    how = way(method, soft=soft)

    def first(params: Any, stats: Stats) -> Memory:
        del stats
        sides_of(only_arrays(params), flatten)
        return ()

    def act(updates: Any, memory: Memory, params: Any, step: Any, **extra_args: Any) -> Acted:
        del params, extra_args
        matrices = matrices_of("clip_by_spectral_norm", updates, sides_of(updates, flatten), specs)
        return *bound_matrices(updates, limits_for(matrices, bound_of(step)), how), memory

    return with_stats(ClipBySpectralNormState, act, first, where=where)
