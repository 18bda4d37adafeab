"""A clip of the singular values of gradients and updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import optax

from clipjax._core.arguments import explained, shown
from clipjax._core.bounds import Bound, bound_at
from clipjax._core.members import Acted, Memory, with_stats
from clipjax._core.norms import only_arrays
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

    The singular vectors stay, so that a few large directions come down and the others are left: clipping
    by a norm scales all of them. First in a chain it clips gradients; behind an optimizer and before the
    learning rate, updates.

    Args:
      bound: a number, an array that broadcasts to the stack of matrices of each leaf, or a schedule
        `step -> bound`.
      soft: whether sigma becomes sigma / sqrt(1 + sigma² / bound²). That is smooth: every singular value
        comes down, one far below the bound by a share of sigma² / (2 bound²), and none reaches it.
      method: "newton_schulz" makes do with matrix products, which accelerators are made for; "svd" takes
        eigenvectors, which is more exact where not soft. Which is faster depends on the machine and the
        shape: see docs/spectral.md.
      flatten: how leaves are matrices, as in :func:`clipjax.spectral_cap`. Those of rank 2 are, as they are.
        Those of lower rank are no matrices and pass as they are: another clip, with its `where`, is for
        biases and scales. A higher rank needs to be told.
      specs: inside `shard_map`, the `PartitionSpec` tree of the updates. Matrices must not be split, stacks
        of them may be.
      where: which leaves are clipped, and count: path patterns, a rule or a tree of bools, as in
        :func:`clipjax.box`; the others may hold anything, and pass as they are. None: all.

    Returns:
      A transformation whose state holds scalars. `norm` is an estimate from below of the largest singular
      value (power iteration), `scale` what became of it as a share, at the least of all matrices, and
      `clipped_fraction` counts steps at which one was above the bound (where not soft: was not proven to be
      inside).

    Raises:
      TypeError, ValueError: `bound` is no number, negative or NaN; `soft` is no bool; `method` is neither;
      `flatten` is no pair of axes. In `init` and `update`: nothing says how to flatten a leaf of rank > 2, or
      no leaf is a matrix where not `clipjax.SKIP` asks for that.

    Guarantees: no singular value of the result, computed by an SVD in float64, is above `bound`, in any dtype
    and for any gradients: the rounded result is proven to be inside, and made smaller until it is. Where not
    soft, what is proven to be inside stays bit for bit; how close to the bound that is, and how little the
    others end below it, is as of :func:`clipjax.spectral_cap`. Softly, all values are right to the rounding
    of a matrix to its dtype, however far above the bound the largest is (on a TPU to 2e-5 of the bound for
    values up to some hundred times the bound, to some hundredths at 10⁶ times; from 10¹⁰ times on, those far
    below the largest are lost). A bound of 0 makes zeros, and one of infinity changes no bit. Entries that
    are not finite make their matrix NaN. Gradients through it are right, finite at 0, and one side's where a
    singular value ties with the bound; they take an SVD.

    The hard clip is published for gradients, by an SVD. The soft one is published for updates, between the
    optimizer and its learning rate, and optionally for gradients too; its authors run 10 Newton-Schulz steps
    in bfloat16 or float32, which do not converge far above the bound, and bound vectors by their norms. Here
    the iterations run until they have converged.

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
