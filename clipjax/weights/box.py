"""Projections of single entries: onto boxes, and onto the non-negative numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clipjax import _checks
from clipjax._core import entries, trees
from clipjax._core.aliases import Tree
from clipjax._core.messages import a_few, short_repr
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
    return _box(written(box, low, high, where=where), low, high, where)


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
    return _box(written(non_negative, where=where), 0.0, np.inf, where)


def _box(name: str, low: Any, high: Any, where: Where) -> Projection:
    for limit, value in (("low", low), ("high", high)):
        if isinstance(value, list | tuple):
            raise TypeError(
                f"{limit} must be a number, an array, a schedule or a mapping, got "
                f"{short_repr(value)}"
            )
    lows = limits.by_leaf("low", low, -np.inf, other=-np.inf)
    highs = limits.by_leaf("high", high, -np.inf, other=np.inf)
    _checks.check_order(low, high)
    choose = _choice(where)

    def clip(params: Tree, step: Any) -> Tree:
        leaves, rebuild = trees.leaves_of(params)
        values = [leaf.value for leaf in leaves]
        both = zip(choose(params), limits.are_given([lows, highs], params), strict=True)
        places = [i for i, (chosen, given) in enumerate(both) if chosen and given]
        limits.check_order_by_path(lows, highs, params, places)
        bottoms = lows.at(params, step)
        tops = highs.at(params, step)
        for i in places:
            values[i] = entries.clip_entries(leaves[i], bottoms[i], tops[i])
        return rebuild(values)

    return Projection(name, clip, scheduled=lows.scheduled or highs.scheduled)


def _choice(where: Any) -> Callable[[Tree], list[bool]]:
    """Return the function from a tree to whether each leaf is chosen."""
    rule = (lambda path, leaf: True) if where is None else where
    patterns = None if callable(rule) else _checks.check_patterns("where", rule)

    def choose(tree: Tree) -> list[bool]:
        leaves, _ = trees.leaves_of(tree)
        floats = [trees.is_float(leaf.value) for leaf in leaves]
        if patterns is None:
            found = [bool(rule(leaf.path, leaf.value)) for leaf in leaves]
        else:
            matched = trees.first_matches("where", patterns, tree, in_order=False)
            found = [pattern is not None for pattern in matched]
        chosen = [a and b for a, b in zip(found, floats, strict=True)]
        if where is not None and any(floats) and not any(chosen):
            raise ValueError(
                f"where: {short_repr(where)} chooses no float leaf of: "
                f"{a_few(leaves, 5)}"
            )
        return chosen

    return choose
