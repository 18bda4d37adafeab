"""Projections of single entries of weights: onto boxes, and onto the non-negative numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax

from clipjax import _core
from clipjax.weights.projection import Projection

Where = str | Sequence[str] | Callable[[Any, Any], bool] | None


def box(
    low: optax.ScalarOrSchedule | Mapping[str, optax.ScalarOrSchedule],
    high: optax.ScalarOrSchedule | Mapping[str, optax.ScalarOrSchedule],
    *,
    where: Where = None,
) -> Projection:
    """Project each entry onto `[low, high]`: min(max(w, low), high).

    Args:
      low: the lower limit: a number of any sign, an array that broadcasts to every leaf, a schedule
        `step -> limit`, or a mapping from path patterns to these, where the first match wins and other leaves
        have no lower limit.
      high: the upper limit, likewise.
      where: which leaves are projected: one or several path patterns, or a rule `(key path, leaf) -> bool`. None is
        all float leaves.

    Returns:
      A :class:`Projection`.

    Raises:
      TypeError, ValueError: a limit is NaN or not a number; `low` is above `high`; `where` is invalid, or chooses
        no leaf; a pattern matches no leaf; a leaf is complex.

    Equals `optax.projections.projection_box` with numbers; its trees of limits are mappings here. A limit that a
    leaf's dtype cannot represent is rounded inward.

    References:
      Elsayed et al., 2024, Weight clipping for deep continual and reinforcement learning, arXiv:2407.01704.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> bias, scale = jnp.array([3.0, -3.0]), jnp.array([3.0, 0.5])
      >>> params = {"bias": bias, "scale": scale}
      >>> projected = clipjax.box(0.0, 1.0, where="scale")(params)
      >>> print(projected["bias"], projected["scale"])
      [ 3. -3.] [1.  0.5]
    """
    return _box(f"clipjax.box({_core.short_repr(low)}, {_core.short_repr(high)})", low, high, where)


def non_negative(*, where: Where = None) -> Projection:
    """Project each entry onto the non-negative numbers: max(w, 0).

    Args:
      where: which leaves are projected, as in :func:`box`.

    Returns:
      A :class:`Projection`.

    Raises:
      TypeError, ValueError: as :func:`box`, for `where`.

    Equals `keras.constraints.NonNeg` and `optax.projections.projection_non_negative`. Followed by
    :func:`max_norm` it projects onto the non-negative part of the ball.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> print(clipjax.non_negative()(jnp.array([-1.0, 0.0, 2.0])))
      [0. 0. 2.]
    """
    return _box("clipjax.non_negative()", 0.0, np.inf, where)


def _box(name: str, low: Any, high: Any, where: Where) -> Projection:
    lower, upper = _limits("low", low), _limits("high", high)
    by_path = isinstance(low, Mapping) or isinstance(high, Mapping)
    if not by_path:
        _core.check_order(low, high)
    chosen = _choice(where)
    limits = [x for each in (low, high) for x in (each.values() if isinstance(each, Mapping) else [each])]
    counts = any(map(callable, limits))

    def constrain(params: Any, step: Any) -> Any:
        leaves, rebuild = _core.leaves_of(params)
        values = [leaf.value for leaf in leaves]
        each = zip(leaves, chosen(params), lower(params), upper(params), strict=True)
        for i, (leaf, yes, bottom_at, top_at) in enumerate(each):
            if yes and (bottom_at or top_at):
                bottom = bottom_at(step) if bottom_at else -np.inf
                top = top_at(step) if top_at else np.inf
                if by_path and not counts:
                    _core.check_order(bottom, top, leaf)
                values[i] = _core.clip_entries(leaf, bottom, top)
        return rebuild(values)

    return Projection(name, constrain, counts=counts)


def _limits(name: str, limit: Any) -> Callable[[Any], list[Callable[[Any], Any] | None]]:
    """Return the function from a tree to the limit of each leaf, as a function of the step; None for no limit."""
    if isinstance(limit, list | tuple):
        raise TypeError(f"{name} must be a number, an array, a schedule or a mapping, got {_core.short_repr(limit)}")
    if not isinstance(limit, Mapping):
        everywhere = _core.as_schedule(name, limit, -np.inf)
        return lambda tree: [everywhere] * len(_core.leaves_of(tree)[0])
    patterns = _core.check_patterns(name, tuple(limit))
    each: dict[str | None, Any] = {p: _core.as_schedule(f"{name}[{p!r}]", limit[p], -np.inf) for p in patterns}
    return lambda tree: [each.get(pattern) for pattern in _core.first_matches(name, patterns, tree)]


def _choice(where: Any) -> Callable[[Any], list[bool]]:
    """Return the function from a tree to whether each leaf is chosen."""
    patterns = None if where is None or callable(where) else _core.check_patterns("where", where)

    def choose(tree: Any) -> list[bool]:
        leaves, _ = _core.leaves_of(tree)
        if where is None:
            found = [True] * len(leaves)
        elif patterns is None:
            found = [bool(where(leaf.path, leaf.value)) for leaf in leaves]
        else:
            found = [pattern is not None for pattern in _core.first_matches("where", patterns, tree, in_order=False)]
        chosen = [yes and _core.is_float(leaf.value) for yes, leaf in zip(found, leaves, strict=True)]
        if where is not None and any(_core.is_float(leaf.value) for leaf in leaves) and not any(chosen):
            raise ValueError(f"where: {_core.short_repr(where)} chooses no float leaf of: {_core.a_few(leaves, 5)}")
        return chosen

    return choose
