"""Projections of single entries of weights: onto boxes, and onto the non-negative numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from clipjax import _checks
from clipjax._core import bounds, clipping, trees
from clipjax.weights import limits
from clipjax.weights.projection import Projection, written

Where = str | Sequence[str] | Callable[[Any, Any], bool] | None


def box(low: limits.Limit, high: limits.Limit, *, where: Where = None) -> Projection:
    """Project each entry onto `[low, high]`: min(max(w, low), high).

    Args:
      low: the lower limit: a number of any sign, an array that broadcasts to every
        leaf, a schedule `step -> limit`, or a mapping from path patterns to these,
        where the first match wins and other leaves have no lower limit.
      high: the upper limit, likewise.
      where: which leaves are projected: one or several path patterns, or a rule `(key
        path, leaf) -> bool`. None is all float leaves.

    Raises:
      TypeError, ValueError: `low` is above `high`; `where` chooses no leaf; a leaf is
        complex.

    Equals `optax.projections.projection_box` with numbers; its trees of limits are
    mappings here. A limit that a leaf's dtype cannot represent is rounded inward.

    References:
      Elsayed et al., 2024, Weight clipping for deep continual and reinforcement
      learning, arXiv:2407.01704.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> bias, scale = jnp.array([3.0, -3.0]), jnp.array([3.0, 0.5])
      >>> params = {"bias": bias, "scale": scale}
      >>> projected = clipjax.box(0.0, 1.0, where="scale")(params)
      >>> print(projected["bias"], projected["scale"])
      [ 3. -3.] [1.  0.5]
    """
    return _box(written("box", low, high, where=(where, None)), low, high, where)


def non_negative(*, where: Where = None) -> Projection:
    """Project each entry onto the non-negative numbers: max(w, 0).

    Args:
      where: which leaves are projected, as in :func:`box`.

    Equals `keras.constraints.NonNeg` and `optax.projections.projection_non_negative`.
    Followed by :func:`max_norm` it projects onto the non-negative part of the ball.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> print(clipjax.non_negative()(jnp.array([-1.0, 0.0, 2.0])))
      [0. 0. 2.]
    """
    return _box(written("non_negative", where=(where, None)), 0.0, np.inf, where)


def _box(name: str, low: Any, high: Any, where: Where) -> Projection:
    for limit, value in (("low", low), ("high", high)):
        if isinstance(value, list | tuple):
            wanted = "a number, an array, a schedule or a mapping"
            raise TypeError(f"{limit} must be {wanted}, got {bounds.short_repr(value)}")
    lower, upper = (
        limits.by_leaf("low", low, -np.inf),
        limits.by_leaf("high", high, -np.inf),
    )
    by_path = isinstance(low, Mapping) or isinstance(high, Mapping)
    if not by_path:
        _checks.check_order(low, high)
    choose = _choice(where)

    def clip(params: Any, step: Any) -> Any:
        leaves, rebuild = trees.leaves_of(params)
        values, bottoms, tops = (
            [leaf.value for leaf in leaves],
            lower.at(step),
            upper.at(step),
        )
        each = zip(
            leaves,
            choose(params),
            lower.patterns(params),
            upper.patterns(params),
            strict=True,
        )
        for i, (leaf, chosen, of_low, of_high) in enumerate(each):
            if chosen and (of_low, of_high) != (None, None):
                bottom, top = bottoms.get(of_low, -np.inf), tops.get(of_high, np.inf)
                if (
                    by_path
                    and of_low not in lower.scheduled
                    and of_high not in upper.scheduled
                ):
                    _checks.check_order(bottom, top, leaf)
                values[i] = clipping.clip_entries(leaf, bottom, top)
        return rebuild(values)

    return Projection(name, clip, scheduled=bool(lower.scheduled or upper.scheduled))


def _choice(where: Any) -> Callable[[Any], list[bool]]:
    """Return the function from a tree to whether each leaf is chosen."""
    rule = (lambda path, leaf: True) if where is None else where
    patterns = None if callable(rule) else _checks.check_patterns("where", rule)

    def choose(tree: Any) -> list[bool]:
        leaves, _ = trees.leaves_of(tree)
        if patterns is None:
            found = [bool(rule(leaf.path, leaf.value)) for leaf in leaves]
        else:
            found = [
                pattern is not None
                for pattern in trees.first_matches(
                    "where", patterns, tree, in_order=False
                )
            ]
        chosen = [
            yes and trees.is_float(leaf.value)
            for yes, leaf in zip(found, leaves, strict=True)
        ]
        if (
            where is not None
            and any(trees.is_float(leaf.value) for leaf in leaves)
            and not any(chosen)
        ):
            raise ValueError(
                f"where: {bounds.short_repr(where)} chooses no float leaf of: "
                f"{trees.a_few(leaves, 5)}"
            )
        return chosen

    return choose
