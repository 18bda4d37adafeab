"""Transformations that combine others in the right order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.aliases import State, Tree
from clipjax._core.bounds import as_list, check_count, check_transformation, check_word
from clipjax._core.leaves import flatten, is_inexact
from clipjax._core.states import check_state
from clipjax.gradients.nonfinite import skip_nonfinite, zero_nonfinite
from clipjax.gradients.skipping import SkipTransformation, unless
from clipjax.monitoring.record_norms import Recorder
from clipjax.weights.projection import Projection, as_projection


def bounded(
    optimizer: optax.GradientTransformation,
    *,
    clip: optax.GradientTransformation
    | Sequence[optax.GradientTransformation]
    | None = None,
    project: Projection
    | Callable[[Any], Any]
    | Sequence[Projection | Callable[[Any], Any]]
    | None = None,
    nonfinite: Literal["propagate", "zero", "skip"] = "propagate",
    accumulate: SupportsIndex = 1,
) -> optax.GradientTransformationExtraArgs:
    """Clip, optimize and project, in this order.

    Use it to add clipjax to any optimizer in one call, with a policy for NaN and with
    accumulation that clips the mean gradient once.

    Args:
      optimizer: any gradient transformation, such as `optax.adam(1e-3)`.
      clip: one or several gradient transformations that come before the optimizer, such
        as `clipjax.clip_by_global_norm(1.0)`. None, the default, means no clip.
      project: one or several projections that come after the optimizer, such as
        `clipjax.max_norm(3.0)`, or functions of the weights. If there are several, the
        last projection decides: the weights end within its bound. None, the default,
        means no projection.
      nonfinite: the policy for gradients that are not finite. With "propagate", the
        default, clips spread NaN to all elements that share a norm. With "zero",
        :func:`zero_nonfinite` replaces elements that are not finite by 0 and counts
        them, before the clips, and again after them, since a norm may overflow. With
        "skip", the step is skipped as by :func:`skip_nonfinite`, so that weights and
        state stay as they were.
      accumulate: the number of micro-batches that share one clip and one step, for
        their mean gradient, as with `optax.MultiSteps`; 1 by default. With
        `nonfinite="skip"`, a micro-batch that is not finite is left out and counted,
        and the next one takes its place.

    Returns:
      A gradient transformation; :func:`metrics` reads what all of its parts did.

    Raises:
      TypeError: an argument is not a gradient transformation or, for `project`, not a
        function of the weights.
      ValueError: `nonfinite` is not one of the three words; a projection or a skip is
        passed as `clip` or `optimizer`; with `nonfinite="skip"`, a `record_norms` is
        passed as `clip`, where it would be frozen at skipped steps.

    A skip belongs around all of this, because momentum would otherwise move the weights
    at a skipped step, and because a clipped gradient is never an outlier: write
    `nonfinite="skip"`, or `skip_spikes(bounded(...))`. Without the skip, the same chain
    by hand is `optax.chain(clip, optimizer, project)`.

    See Also:
      :func:`skip_spikes` also skips outlier steps; :func:`violations` finds what a
      wrong order in a chain of your own lets through.

    Example:
      >>> import clipjax, jax.numpy as jnp, optax
      >>> tx = clipjax.bounded(
      ...     optax.adam(1e-3),
      ...     clip=clipjax.clip_by_global_norm(1.0),
      ...     project=clipjax.max_norm(3.0),
      ...     nonfinite="skip",
      ... )
      >>> params = jnp.array([[3.0], [4.0]])
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(f"{jnp.linalg.norm(params):.3f}")
      3.000
    """
    check_word("nonfinite", nonfinite, ("propagate", "zero", "skip"))
    micro_batches = check_count("accumulate", accumulate, 1, static=True)
    clips = [] if clip is None else as_list(clip)
    before = [_check_before("clip", each) for each in clips]
    if nonfinite == "skip" and any(isinstance(each, Recorder) for each in before):
        raise ValueError(
            "clip: record_norms would be frozen at the steps that are skipped: put it "
            "in front, as in optax.chain(record_norms(...), bounded(...))"
        )
    # A norm may overflow although all elements are finite.
    if nonfinite == "zero" and before:
        before.append(zero_nonfinite())
    projections = [] if project is None else as_list(project)
    after = [as_projection("project", each) for each in projections]
    tx = optax.chain(*before, _check_before("optimizer", optimizer), *after)
    if micro_batches > 1:
        tx = _accumulating(tx, micro_batches)
    if nonfinite == "zero":
        return optax.chain(zero_nonfinite(), tx)
    return skip_nonfinite(tx) if nonfinite == "skip" else tx


def _accumulating(
    tx: optax.GradientTransformation, micro_batches: int
) -> optax.GradientTransformationExtraArgs:
    """Give a transformation the mean gradient of several micro-batches.

    The state is the `optax.MultiStepsState` that trainers know. `optax.MultiSteps`
    itself takes neither key nor `float0` leaves, and fails in a `shard_map` that is
    manual over a part of the mesh (Optax 0.2.8).
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Tree) -> optax.MultiStepsState:
        leaves = flatten(params)
        # The mean is float64, or complex128, where that is enabled.
        mean = [
            jnp.zeros_like(x, dtype=complex if jnp.iscomplexobj(x) else float)
            if is_inexact(x)
            else jnp.zeros(np.shape(x))
            for x in leaves.values
        ]
        first, steps = jnp.zeros((), np.int32), jnp.zeros((), np.int32)
        state = inner.init(leaves.rebuild(leaves.values))
        return optax.MultiStepsState(first, steps, state, leaves.rebuild(mean), ())

    def update(updates: Tree, state: State, params: Tree = None, **extra: Any) -> Any:
        check_state("bounded with accumulate=", state, optax.MultiStepsState)
        leaves = flatten(updates)
        flatten(params)  # raises its errors
        grads = leaves.rebuild(leaves.values)
        place = state.mini_step

        def next_mean(x: Any, mean: Any) -> Any:
            count = (place + 1).astype(mean.dtype)
            return (
                mean + (x.astype(mean.dtype) - mean) / count if is_inexact(x) else mean
            )

        means = jax.tree.map(next_mean, grads, state.acc_grads)
        # Leaves without a norm have no mean: the leaves of the last micro-batch are
        # used.
        given = jax.tree.map(
            lambda x, mean: mean.astype(x.dtype) if is_inexact(x) else x, grads, means
        )
        taken, after = inner.update(given, state.inner_opt_state, params, **extra)
        waits = place < micro_batches - 1
        changed, kept = unless(waits, taken, state.inner_opt_state, after)
        return changed, optax.MultiStepsState(
            mini_step=(place + 1) % micro_batches,
            gradient_step=jnp.where(
                waits, state.gradient_step, optax.safe_increment(state.gradient_step)
            ),
            inner_opt_state=kept,
            acc_grads=jax.tree.map(
                lambda mean: jnp.where(waits, mean, jnp.zeros_like(mean)), means
            ),
            skip_state=(),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check_before(name: str, value: Any) -> Any:
    """Return a transformation, or raise an error for what belongs elsewhere."""
    if isinstance(value, Projection):
        raise ValueError(
            f"{name}: {value!r} is a projection: pass it to bounded as project="
        )
    if isinstance(value, SkipTransformation):
        raise ValueError(
            f"{name}: a skip belongs around bounded, so that it judges the gradient "
            "before the clip, and freezes all of the state: write "
            "skip_spikes(bounded(...)), or nonfinite='skip'"
        )
    return check_transformation(name, value)
