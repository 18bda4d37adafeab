"""What the clips of the global norm with a threshold from past norms share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core.aliases import Memory, Step, Tree
from clipjax._core.clip import clip_by_tree_norm
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, shapes_of
from clipjax._core.norms import tree_norm


def clip_by_past_norms(
    name: str,
    bound_of: Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]],
    initial: Callable[[Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of the whole tree to a threshold that depends on past norms.

    Args:
      name: the first part of the names of its metrics, which are those of a clip and
        `threshold`.
      bound_of: a function `bound_of(norm, memory, step) -> (threshold, next memory)`.
        Derivatives take the memory for a constant, and the norm of this step for a
        variable.
      initial: makes the memory before the first step, a NamedTuple of arrays, from the
        dtype of the norm.

    Returns:
      A gradient transformation. A norm that is 0 or not finite does not change its
      memory.
    """

    def act(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **_: Any
    ) -> Any:
        norm = tree_norm(updates.inexact)
        bound, new = bound_of(norm, memory, step)
        bound = jnp.asarray(bound, norm.dtype)
        clipped, metrics = clip_by_tree_norm(updates, bound, norm=norm)
        return clipped, metrics | {"threshold": bound}, if_counted(norm, memory, new)

    return transformation(name, act, lambda params: initial(norm_dtype(params)))


def norm_dtype(leaves: Leaves) -> Any:
    """Return the dtype of the norm of all leaves together."""
    return shapes_of(lambda leaves: tree_norm(leaves.inexact), leaves).dtype


def is_counted(norm: jax.Array) -> jax.Array:
    """Return whether statistics take in the norm of a step.

    They leave out a norm that is not finite, and a norm of 0, as masked batches have
    it: it says nothing of the level of the others, and would pull thresholds to 0 for
    good.
    """
    return (norm > 0) & (norm < jnp.inf)


def average(old: jax.Array, new: jax.Array, rate: Any) -> jax.Array:
    """Return (1 - rate) * old + rate * new, as a step from the one that counts more.

    In the formula itself, the two factors of a long average do not add up to 1 in
    float32. A step of nearly the whole way from a far larger `old` would end at 0.
    """
    away = new - old
    return jnp.where(rate <= 0.5, old + rate * away, new - (1 - rate) * away)


def if_counted(norm: jax.Array, old: Any, new: Any) -> Any:
    """Return the new memory if the norm is counted, else the old one, as constants."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return lax.stop_gradient(
            jnp.where(is_counted(norm), new.astype(old.dtype), old)
        )

    return jax.tree.map(choose, new, old)
