"""Projections of single elements: onto boxes, and onto the non-negative numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from clipjax._core.aliases import Bounds, Step
from clipjax._core.bounds import (
    are_given,
    check_bounds,
    check_order,
    check_order_by_path,
)
from clipjax._core.clip import clip_entries
from clipjax._core.leaves import (
    Leaves,
    a_few,
    check_patterns,
    first_matches,
    is_inexact,
    short_repr,
)
from clipjax.weights.projection import Projection, projection

Where: TypeAlias = str | Sequence[str] | Callable[[Any, Any], bool] | None


def box(low: Bounds, high: Bounds, *, where: Where = None) -> Projection:
    """Project each element onto an interval.

        min(max(w, low), high)

    Use it when a parameter must stay in a range, such as a temperature, a mixing weight
    or a scale, or to clip weights, as Wasserstein GANs do.

    Args:
      low: the lower bound, a `Bound` of any sign, or a mapping from path patterns to
        such bounds. The first pattern that matches a leaf counts, and a leaf that no
        pattern matches has no lower bound. An array broadcasts to every leaf.
      high: the upper bound, in the same forms.
      where: the leaves that are projected: one or several path patterns, or a rule
        `(key path, leaf) -> bool`. None, the default, means all float leaves.

    Returns:
      A :class:`Projection`, which you apply directly, or put at the end of a chain.

    Raises:
      TypeError: `low` or `high` is a list or a tuple; in `init` or `apply`, a leaf is
        complex.
      ValueError: `low` is above `high`; in `init` or `apply`, `where` chooses no leaf.

    Equals `optax.projections.projection_box` with numbers, except that a bound which
    the dtype of a leaf cannot represent is rounded toward the inside of the interval,
    and that -0.0 stays as it is. Optax also takes a tree of bounds; in its place, pass
    a mapping.

    References:
      Elsayed et al., 2024, Weight clipping for deep continual and reinforcement
      learning, arXiv:2407.01704.

    See Also:
      :func:`non_negative` has the lower bound 0 and no upper bound;
      :func:`clip_by_value` clips elements of gradients.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> bias, scale = jnp.array([3.0, -3.0]), jnp.array([3.0, 0.5])
      >>> params = {"bias": bias, "scale": scale}
      >>> projected = clipjax.box(0.0, 1.0, where="scale").apply(params)
      >>> print(projected["bias"], projected["scale"])
      [ 3. -3.] [1.  0.5]
    """
    return _box("clipjax.box", low, high, where)


def non_negative(*, where: Where = None) -> Projection:
    """Project each element onto the non-negative numbers.

        max(w, 0)

    Use it for parameters that are amounts or counts, and for networks that must be
    monotone or convex in their inputs. Followed by :func:`max_norm` it projects onto
    the non-negative part of the ball.

    Args:
      where: the leaves that are projected, as in :func:`box`. None, the default, means
        all float leaves.

    Returns:
      A :class:`Projection`, which you apply directly, or put at the end of a chain.

    Raises:
      TypeError: in `init` or `apply`, a leaf is complex.
      ValueError: in `init` or `apply`, `where` chooses no leaf.

    Equals `keras.constraints.NonNeg`, and `optax.projections.projection_non_negative`
    except that -0.0, which Optax makes 0.0, stays as it is.

    See Also:
      :func:`box` has both bounds.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> print(clipjax.non_negative().apply(jnp.array([-1.0, 0.0, 2.0])))
      [0. 0. 2.]
    """
    return _box("clipjax.non_negative", 0.0, np.inf, where)


def _box(name: str, low: Any, high: Any, where: Where) -> Projection:
    lows = check_bounds("low", low, "[-inf, inf]", other=-np.inf)
    highs = check_bounds("high", high, "[-inf, inf]", other=np.inf)
    check_order(low, high)
    choose = _choice(where)

    def clip(weights: Leaves, step: Step) -> list[Any]:
        given = are_given([lows, highs], weights)
        chosen = [a and b for a, b in zip(choose(weights), given, strict=True)]
        check_order_by_path(lows, highs, weights, chosen)
        limits = zip(lows.of(weights, step), highs.of(weights, step), strict=True)
        rows = zip(weights.each, limits, chosen, strict=True)
        return [
            clip_entries(leaf, *both) if is_chosen else leaf.value
            for leaf, both, is_chosen in rows
        ]

    return projection(name, clip, scheduled=lows.scheduled or highs.scheduled)


def _choice(where: Any) -> Callable[[Leaves], list[bool]]:
    """Return the function that tells for each of the leaves whether it is chosen."""
    rule = (lambda path, leaf: True) if where is None else where
    patterns = None if callable(rule) else check_patterns("where", rule)

    def choose(leaves: Leaves) -> list[bool]:
        if patterns is None:
            found = [rule(leaf.path, leaf.value) for leaf in leaves.each]
        else:
            matched = first_matches("where", patterns, leaves, in_order=False)
            found = [pattern is not None for pattern in matched]
        pairs = zip(found, leaves.values, strict=True)
        chosen = [bool(wanted) and is_inexact(x) for wanted, x in pairs]
        if where is not None and leaves.inexact and not any(chosen):
            raise ValueError(
                f"where: {short_repr(where)} chooses no float leaf of: "
                f"{a_few(leaves.each, 5)}"
            )
        return chosen

    return choose
