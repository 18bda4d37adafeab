"""One norm and one bound for each group of leaves."""

from collections.abc import Mapping
from typing import Any

import optax

from clipjax import _checks
from clipjax._core import bounds, clipping, norms, transformation, trees
from clipjax._core.aliases import Metrics, Scalar, Tree
from clipjax._core.messages import short_repr


def clip_by_group_norm(
    max_norms: Mapping[str, bounds.Bound], *, ord: bounds.Ord = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of each group of leaves: x * min(1, max_norm / norm of its group).

    Args:
      max_norms: a mapping from path patterns to bounds: numbers, scalar arrays or
        schedules. A leaf belongs to the first pattern that matches it; leaves that none
        matches are not changed. `{"encoder/*": 1.0, "*": 0.1}` clips the encoder, and
        all the rest together.
      ord: the order of the norms: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A transformation with the metrics of a clip (the largest norm, the smallest
      scale), and those of each group as `<pattern>/norm`, `<pattern>/scale` and so on.

    Equals one :func:`clip_by_global_norm` for each group.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_group_norm({"encoder/*": 1.0})
      >>> encoder = {"w": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> grads = {"encoder": encoder, "head": jnp.array([9.0])}
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> print(clipped["encoder"]["w"].round(3), clipped["head"])
      [0.6] [9.]
      >>> print(clipjax.metrics(state)["clip_by_group_norm/encoder/*/norm"])
      5.0
    """
    if not isinstance(max_norms, Mapping):
        raise TypeError(
            "max_norms must be a mapping from path patterns to bounds, got "
            f"{short_repr(max_norms)}"
        )
    _checks.check_patterns("max_norms", tuple(max_norms))
    max_norm_at = {
        pattern: bounds.as_schedule(f"max_norms[{pattern!r}]", bound, scalar=True)
        for pattern, bound in max_norms.items()
    }
    order = _checks.check_ord(ord)

    def act(updates: Tree, params: Tree, step: Scalar | None, memory: Any) -> Any:
        leaves, rebuild = trees.leaves_of(updates)
        groups = trees.first_matches("max_norms", tuple(max_norm_at), updates)
        values = {i: leaf.value for i, leaf in enumerate(leaves)}
        of_groups = {}
        for pattern, bound_at in max_norm_at.items():
            members = {i: x for i, x in values.items() if groups[i] == pattern}
            clipped, of_groups[pattern] = clipping.clip_tree(
                members, bound_at(step), order
            )
            values |= clipped
        metrics = _together(list(of_groups.values()))
        for pattern, of_group in of_groups.items():
            metrics |= {f"{pattern}/{key}": x for key, x in of_group.items()}
        return rebuild(list(values.values())), metrics, memory

    return transformation.with_metrics("clip_by_group_norm", act)


def _together(of_groups: list[Metrics]) -> Metrics:
    """Return the metrics of all groups: the largest norms, and the smallest scale."""
    norm = norms.largest(each["norm"] for each in of_groups)
    after = norms.largest(each["norm_after"] for each in of_groups)
    scale = clipping.smallest_scale([each["scale"] for each in of_groups])
    return clipping.metrics_of(norm, scale, after)
