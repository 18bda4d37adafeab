"""A clip with one norm and one threshold for each group of leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from clipjax._core.aliases import Bound, Memory, Metrics, Ord, Step, Tree
from clipjax._core.bounds import check_bound, check_ord
from clipjax._core.clip import clip, factor_to, metrics_of, smallest_scale
from clipjax._core.door import transformation
from clipjax._core.leaves import (
    Leaves,
    check_patterns,
    first_matches,
    is_inexact,
    short_repr,
)
from clipjax._core.norms import largest, tree_norm


def clip_by_group_norm(
    max_norms: Mapping[str, Bound], *, ord: Ord = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of each group of leaves.

        x * min(1, max_norm / norm of the group of x)

    Use it when the parts of a model have gradients of different sizes, such as an
    encoder and a head, or the policy and the value function of an agent.

    Args:
      max_norms: a mapping from path patterns to thresholds, each a scalar `Bound`. A
        leaf belongs to the first pattern that matches it, and a leaf that no pattern
        matches does not change. `{"encoder/*": 1.0, "*": 0.1}` clips the encoder to
        1.0, and all other leaves together to 0.1.
      ord: the order of the norms: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A gradient transformation with the metrics of a clip, where `norm` is the largest
      norm of a group and `scale` the smallest factor. The metrics of each group are
      `<pattern>/norm`, `<pattern>/scale` and so on.

    Raises:
      TypeError: `max_norms` is not a mapping from path patterns.

    Equals one :func:`clip_by_global_norm` for each group.

    See Also:
      :func:`matching` applies any other transformation to a group, with `optax.masked`;
      :func:`clip_by_norm` clips each leaf alone.

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
    patterns = check_patterns("max_norms", tuple(max_norms))
    bounds = {
        pattern: check_bound(f"max_norms[{pattern!r}]", max_norms[pattern], scalar=True)
        for pattern in patterns
    }
    order = check_ord(ord)

    def act(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **extra: Any
    ) -> Any:
        matched = first_matches("max_norms", patterns, updates)
        groups = [
            pattern if is_inexact(x) else None
            for pattern, x in zip(matched, updates.values, strict=True)
        ]
        pairs = list(zip(groups, updates.values, strict=True))
        norms: dict[Any, Any] = {
            pattern: tree_norm([x for own, x in pairs if own == pattern], order)
            for pattern in patterns
        }
        now: dict[Any, Any] = {own: bound.at(step) for own, bound in bounds.items()}
        values, _ = clip(updates, [*map(norms.get, groups)], [*map(now.get, groups)])
        of_groups = {
            pattern: _metrics_of_group(norm, now[pattern])
            for pattern, norm in norms.items()
        }
        metrics = _together(list(of_groups.values()))
        for pattern, of_group in of_groups.items():
            metrics |= {f"{pattern}/{key}": x for key, x in of_group.items()}
        return updates.rebuild(values), metrics, memory

    return transformation("clip_by_group_norm", act)


def _metrics_of_group(norm: Any, bound: Any) -> Metrics:
    scale = factor_to(bound, norm)
    return metrics_of(norm, scale, norm * scale)


def _together(of_groups: list[Metrics]) -> Metrics:
    """Return the metrics of all groups: the largest norms, and the smallest factor."""
    norm = largest(group["norm"] for group in of_groups)
    after = largest(group["norm_after"] for group in of_groups)
    scale = smallest_scale([group["scale"] for group in of_groups])
    return metrics_of(norm, scale, after)
