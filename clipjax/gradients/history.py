"""Bounds that follow past norms: what the methods for whole trees share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core import clipping, norms, transformation, trees
from clipjax._core.aliases import Scalar, Tree


def clip_by_history(
    name: str,
    bound_of: Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]],
    initial: Callable[[Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of the whole tree to a bound that depends on past norms.

    Args:
      name: the first part of the names of its metrics, which are those of a clip and
        `threshold`, the bound.
      bound_of: a function `bound_of(norm, memory, step) -> (bound, memory)`. For
        derivatives, the memory is a constant, and the norm of this step is not.
      initial: makes the memory before the first step, a NamedTuple of arrays, from the
        dtype of the norm.

    Returns:
      A transformation. A norm that is 0 or not finite does not change its memory.
    """

    def act(updates: Tree, params: Tree, step: Scalar | None, memory: Any) -> Any:
        norm = norms.tree_norm(trees.floats_of(updates))
        bound, new = bound_of(norm, memory, step)
        bound = jnp.asarray(bound, norm.dtype)
        clipped, metrics = clipping.clip_tree(updates, bound, norm=norm)
        return clipped, metrics | {"threshold": bound}, if_counted(norm, new, memory)

    return transformation.with_metrics(
        name, act, lambda params: initial(norm_dtype(params))
    )


def norm_dtype(tree: Any) -> Any:
    """Return the dtype of the norm of all leaves together."""
    norm = trees.eval_shape(lambda tree: norms.tree_norm(trees.floats_of(tree)), tree)
    return norm.dtype


def is_counted(norm: jax.Array) -> jax.Array:
    """Return whether the norm of a step says something about those of others.

    One that is not finite does not, nor does 0, as of a masked batch: it would pull
    thresholds to 0, for good.
    """
    return (norm > 0) & (norm < jnp.inf)


def if_counted(norm: jax.Array, new: Any, old: Any) -> Any:
    """Return the new memory if the norm is counted, else the old one, as a constant."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return lax.stop_gradient(
            jnp.where(is_counted(norm), new.astype(old.dtype), old)
        )

    return jax.tree.map(choose, new, old)
