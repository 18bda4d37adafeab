"""Histories: what `metrics` returned at each step of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from clipjax._core.aliases import State
from clipjax._core.bounds import check_transformation, is_real
from clipjax._core.leaves import a_few, short_repr
from clipjax.gradients.quantiles import autoclip, clip_by_quantile
from clipjax.gradients.zclip import clip_by_lognormal, zclip
from clipjax.monitoring.metrics import metrics, states_in

History: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def series(history: History, name: str) -> np.ndarray:
    """Return one metric of a run at all steps.

    Use it to draw a metric, or to choose a threshold from the norms of a run, such as
    `np.nanquantile(values, 0.99)`.

    Args:
      history: what :func:`metrics` returned at each step: a list of dicts, or one dict
        that a `scan` stacked. A loss, and other entries of yours, may be among them,
        also at some steps only.
      name: the name of a metric, such as `"zclip/threshold"`, or of a transformation,
        such as `"zclip"`, which stands for its `norm`.

    Returns:
      A float64 array `(steps,)` of NumPy. A step that the transformation did not see is
      NaN, because it was skipped, its gradients were only accumulated, or the chain did
      not have the transformation. With accumulation, the first value of a tail, such as
      `history[-50:]`, may be that of an earlier step. The names `"skip_nonfinite"` and
      `"skip_spikes"` give the norms of all steps, skipped ones too.

    Raises:
      TypeError: `history` has neither of the two forms, as when it is the dict of one
        step, or is traced; the metric is not a real number at each step.
      ValueError: no metric has this name, or its steps have several numbers each.

    See Also:
      :func:`suggest` replays the norms; :func:`metrics` returns a row of a history.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx, history = clipjax.clip_by_global_norm(jnp.inf), []
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 2.0, 4.0):
      ...     _, state = tx.update(jnp.array([norm, 0.0]), state)
      ...     history.append(clipjax.metrics(state))
      >>> print(clipjax.series(history, "clip_by_global_norm"))
      [1. 2. 4.]
    """
    columns = columns_of(history)
    key = key_of(columns, name)
    return np.where(steps_taken(columns, key), per_step(columns, key), np.nan)


def suggest(
    norms: ArrayLike | Sequence[float],
    rules: Mapping[str, optax.GradientTransformation] | None = None,
) -> dict[str, dict[str, float]]:
    """Replay the norms of a run through clips that follow past norms.

    Use it to compare clips before the next run: which threshold each would have had,
    and how many steps it would have clipped. It is a first guess, because a run with
    another clip would have had other norms.

    Args:
      norms: the norms, real numbers `(steps,)`, as :func:`series` returns them; those
        that are not finite are left out.
      rules: a mapping from names to transformations with one metric `threshold`. None,
        the default, means `autoclip`, `zclip`, `clip_by_quantile` and
        `clip_by_lognormal` with their default arguments.

    Returns:
      For each rule a dict. Its `"threshold"` is the median of the finite thresholds
      over the last quarter of the steps, infinity if there is none, and `"clip_rate"`
      is the fraction of the steps that the rule would have clipped.

    Raises:
      TypeError: `norms` are not real numbers; `rules` is not a mapping; a rule is not a
        gradient transformation.
      ValueError: `norms` do not have the shape `(steps,)`, or none is finite; a rule
        does not have one metric `threshold`.

    See Also:
      :func:`series` reads the norms of a run.

    Example:
      >>> import clipjax
      >>> rules = {"median": clipjax.autoclip(50.0)}
      >>> found = clipjax.suggest([1.0, 2.0, 3.0] * 50, rules)
      >>> print(found["median"]["threshold"])
      2.0
    """
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite
        values = _numbers("norms", norms).astype(np.float32)
    values = values[np.isfinite(values)]
    if not values.size:
        raise ValueError(f"norms: none is finite, of {np.size(norms)}")
    if rules is None:
        makers = (autoclip, zclip, clip_by_quantile, clip_by_lognormal)
        rules = {make.__name__: make() for make in makers}
    if not isinstance(rules, Mapping):
        raise TypeError(
            "rules must be a mapping from names to transformations, got "
            f"{short_repr(rules)}"
        )
    return {name: _replayed(name, tx, values) for name, tx in rules.items()}


def columns_of(history: Any) -> Mapping[str, Any]:
    """Return the values of a history at all steps, by name."""
    is_list = isinstance(history, Sequence)
    rows = list(history) if is_list else [history]
    named = all(
        isinstance(row, Mapping) and all(isinstance(key, str) for key in row)
        for row in rows
    )
    if not named:
        raise TypeError(
            "history must be a list of what clipjax.metrics returned at each step, or "
            f"a dict that a scan stacked, got {short_repr(history)}"
        )
    if not is_list:
        return rows[0]
    # A chain may have changed during the run, and a row may have entries of its own.
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key, np.nan) for row in rows] for key in keys}


def key_of(columns: Mapping[str, Any], name: str) -> str:
    """Return the key that a name means: itself, or the norm of a transformation."""
    if isinstance(name, str):
        for key in (name, f"{name}/norm"):
            if key in columns:
                return key
    raise ValueError(
        f"name must be a transformation or a key of history, got {short_repr(name)}; "
        f"it has {a_few(list(columns)) or 'none'}"
    )


def per_step(
    columns: Mapping[str, Any], key: str, like: str | None = None
) -> np.ndarray:
    """Return the values of a metric at all steps; raise if `like` has more or fewer."""
    given = columns[key]
    if not isinstance(given, Sequence) and np.ndim(given) == 0:
        raise TypeError(
            f"history[{key!r}] must have all steps: pass the list of what "
            f"clipjax.metrics returned at each step, got {short_repr(given)}"
        )
    values = _numbers(f"history[{key!r}]", given)
    if like is not None and values.size != (steps := len(columns[like])):
        raise ValueError(
            f"history[{key!r}] must have {steps} steps, as {like!r} has, got "
            f"{values.size}"
        )
    return values


# What is in front of the metrics of a recorder: the first one in a key.
RECORDER = r"(?:.*?/)??record_norms(?:_\d+)?"


def label_of(columns: Mapping[str, Any], key: str) -> str | None:
    """Return the name of the transformation of a metric, or None if it has none."""
    # A user may have put something before its name, such as "train/", and may count
    # "train/steps". In `record_norms` a group, too, may be called so.
    starts = (key[:i] for i, letter in enumerate(key) if letter == "/")
    labels = [start for start in starts if f"{start}/steps" in columns]
    recorders = [label for label in labels if re.fullmatch(RECORDER, label)]
    return next(iter([*recorders, *reversed(labels)]), None)


def steps_taken(columns: Mapping[str, Any], key: str) -> np.ndarray:
    """Return for each step whether the counter of a metric's transformation rose."""
    label = label_of(columns, key)
    if label is None:
        return np.ones(per_step(columns, key).shape, bool)
    steps = per_step(columns, f"{label}/steps", key)
    taken = np.isfinite(steps)
    taken[taken] = np.diff(steps[taken], prepend=0) != 0
    return taken


def _numbers(name: str, values: Any) -> np.ndarray:
    """Return real numbers, one for each step, or raise an error."""
    try:
        array = np.asarray(jax.device_get(values))
    except (TypeError, ValueError) as error:  # of tracers, and of rows of other lengths
        raise TypeError(
            f"{name} must be known numbers, one for each step, got {short_repr(values)}"
        ) from error
    if not (is_real(array) or array.dtype == bool):
        raise TypeError(
            f"{name} must be real numbers, one for each step, got {short_repr(values)}"
        )
    if array.ndim != 1:
        hint = (
            "; take one of many runs, as in x[0], or x[:, 0] if the steps come first; "
            "join nested scans by x.reshape(-1)"
        )
        raise ValueError(
            f"{name} must have shape (steps,), got {array.shape}"
            f"{hint if array.ndim > 1 else ''}"
        )
    return array.astype(np.float64)


def _replayed(
    name: str, tx: optax.GradientTransformation, norms: np.ndarray
) -> dict[str, float]:
    zero = jnp.zeros((), np.float32)
    state = check_transformation(f"rules[{name!r}]", tx).init(zero)
    logged = metrics(state) if states_in(state) else {}
    keys = [key for key in logged if key.endswith("/threshold")]
    if len(keys) != 1:
        raise ValueError(
            f"rules[{name!r}] must have one metric threshold, got {keys}. A fixed "
            "threshold would clip the fraction np.mean(norms > threshold) of the steps"
        )

    def step(state: State, norm: jax.Array) -> Any:
        _, state = tx.update(norm, state, zero)
        threshold = metrics(state)[keys[0]]
        return state, (threshold, norm > threshold)

    run = jax.jit(lambda *args: lax.scan(step, *args)[1])
    thresholds, clipped = jax.device_get(run(state, norms))
    last = thresholds[-max(1, len(norms) // 4) :]
    finite = last[np.isfinite(last)]
    settled = np.median(finite) if finite.size else np.inf
    return {"threshold": float(settled), "clip_rate": float(np.mean(clipped))}
