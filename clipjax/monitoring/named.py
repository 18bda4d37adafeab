"""Names in front of the metrics of several transformations."""

from __future__ import annotations

from typing import Any

import optax

from clipjax._core.aliases import State, Tree
from clipjax._core.bounds import check_label, check_transformation
from clipjax._core.states import NamedState, check_same, check_state
from clipjax.monitoring.record_norms import Recorder


def named(
    name: str, tx: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Put a name in front of the metrics of a transformation.

    Use it when a run has several transformations of one kind, such as the two
    optimizers of a GAN, the parts of `optax.partition`, or two clips. :func:`metrics`
    then has `"<name>/<transformation>/<metric>"` for everything in `tx`, and
    :func:`series` and `plots` take `"<name>/<transformation>"`.

    Args:
      name: the first part of the names of the metrics, a string without `/`. Names may
        be nested.
      tx: a gradient transformation, usually a whole chain.

    Returns:
      A gradient transformation that does what `tx` does.

    Raises:
      TypeError: `name` is not a string without `/`, or `tx` is not a gradient
        transformation.

    See Also:
      :func:`metrics`, which numbers transformations of one kind that have no name.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.named("critic", clipjax.clip_by_global_norm(1.0))
      >>> _, state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> print(clipjax.metrics(state)["critic/clip_by_global_norm/norm"])
      5.0
    """
    check_label(name)
    inner = optax.with_extra_args_support(check_transformation("tx", tx))

    def init(params: Tree) -> NamedState:
        return NamedState({name: inner.init(params)})

    def update(
        updates: Tree, state: State, params: Tree = None, **extra: Any
    ) -> tuple[Tree, NamedState]:
        check_state(f"named({name!r})", state, NamedState)
        (before,) = state.named
        check_same("name", before, name)
        updates, after = inner.update(updates, state.named[name], params, **extra)
        return updates, NamedState({name: after})

    # `bounded` refuses a recorder as a clip, a named one, too.
    made = optax.GradientTransformationExtraArgs(init, update)
    return Recorder(*made) if isinstance(tx, Recorder) else made
