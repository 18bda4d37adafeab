"""A record of a run's gradient norms, for choosing a threshold."""

from __future__ import annotations

import operator
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.arguments import shown
from clipjax._core.bounds import check_count
from clipjax.monitoring import norm_report
from clipjax.monitoring.replay import Replay, Rules, Suggestion, default_rules, replayed, suggestion

# Norms are fetched this many at a time, once as many newer ones are waiting: by then they are computed.
_BATCH = 256


class NormLog:
    """Record the gradient norms of a run, and tell what a threshold would have done.

    Appending does not wait for the device: norms stay there until they have long been computed, and are then
    fetched 256 at a time. The log keeps copies, so the state may be donated.

    Args:
      name: which norm to take from `clipjax.metrics`, such as `"clip_by_global_norm"`. Needed if there are
        several; norms of weights do not count.
      capacity: how many of the last norms to keep, 8 bytes each, a whole number above 0; None keeps all.

    Attributes:
      dropped: how many norms there were before the first one kept.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx, log = clipjax.clip_by_global_norm(jnp.inf), clipjax.NormLog()
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 2.0, 3.0, 4.0):
      ...     _, state = tx.update(jnp.array([norm, 0.0]), state)
      ...     log.append(clipjax.metrics(state))
      >>> print(log.norms, log.quantiles(0.5), log.clip_rate([1.0, 3.5]))
      [1. 2. 3. 4.] 2.5 [0.75 0.25]
    """

    def __init__(self, name: str | None = None, *, capacity: int | None = None) -> None:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str, got {shown(name)}")
        self.name = name
        self.capacity: int | None = None if capacity is None else check_count("capacity", capacity, 1)
        self.dropped: int = 0
        self._waiting: list[Any] = []  # on the device
        self._chunks: list[np.ndarray] = []

    def append(self, norm: Any) -> None:
        """Add the norm of one step: a number, a scalar array, or what `clipjax.metrics` returns.

        Raises:
          TypeError, ValueError: the argument is not a norm, contains no norm or, without a `name`, contains
            several.
        """
        norm = self._picked(norm)
        if np.ndim(norm):
            raise ValueError(f"norm must be a scalar, got shape {np.shape(norm)}: use extend for many")
        self._take(norm)

    def extend(self, norms: Any) -> None:
        """Add the norms of many steps: an array of shape `(steps,)`, or metrics stacked by a `scan`.

        Raises:
          TypeError, ValueError: as for :meth:`append`.
        """
        norms = self._picked(norms)
        if np.ndim(norms) != 1:
            raise ValueError(f"norms must have shape (steps,), got {np.shape(norms)}: append takes one norm")
        self._take(norms)

    def _picked(self, metrics: Any) -> Any:
        """Return the norm among metrics; anything else is returned as it is."""
        if hasattr(metrics, "_fields"):
            raise TypeError(f"norm: a {type(metrics).__name__} is a state: append clipjax.metrics(state)")
        if not isinstance(metrics, Mapping):
            return metrics
        return metrics[key_of_norm(metrics, self.name)]

    def _take(self, norms: Any) -> None:
        if isinstance(norms, jax.core.Tracer):
            raise TypeError(
                "norms must be known: return them from the compiled function, and log them outside"
            )
        if isinstance(norms, jax.Array):
            norms = jnp.copy(norms)  # the buffer of the state may be donated
        elif not any(jnp.issubdtype(np.asarray(norms).dtype, kind) for kind in (jnp.floating, jnp.integer)):
            raise TypeError(f"norms must be real numbers, got {shown(norms)}")
        self._waiting.append(norms)
        if len(self._waiting) >= 2 * _BATCH:
            self._fetch(_BATCH)

    def _fetch(self, count: int) -> None:
        """Fetch the first `count` waiting norms to the host, and drop the oldest beyond the capacity."""
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        if batch:
            arrays = [np.ravel(x) for x in jax.device_get(batch)]
            self._chunks.append(np.concatenate(arrays, dtype=np.float64))
        excess = sum(map(len, self._chunks)) - self.capacity if self.capacity is not None else 0
        if excess > 0:
            self._chunks = [np.concatenate(self._chunks)[excess:]]
            self.dropped += excess

    @property
    def norms(self) -> np.ndarray:
        """The norms kept, float64 of shape `(len(log),)`, including non-finite ones."""
        self._fetch(len(self._waiting))
        self._chunks = [np.concatenate([np.zeros(0), *self._chunks])]
        return self._chunks[0].copy()

    @property
    def nonfinite_count(self) -> int:
        """How many of the norms kept are NaN or infinite."""
        return int(np.sum(~np.isfinite(self.norms)))

    def __len__(self) -> int:
        """Return how many norms are kept."""
        return len(self.norms)

    def _finite(self) -> np.ndarray:
        norms = self.norms
        finite: np.ndarray = norms[np.isfinite(norms)]
        if not len(finite):
            raise ValueError(f"the log has no finite norm, of {len(norms)}")
        return finite

    def quantiles(self, q: float | Sequence[float] = (0.01, 0.1, 0.5, 0.9, 0.95, 0.99)) -> np.ndarray:
        """Return quantiles of the finite norms, interpolated linearly, in the shape of `q`."""
        if not all(0 <= each <= 1 for each in np.ravel(q)):
            raise ValueError(f"q must be between 0 and 1, got {q!r}")
        return np.asarray(np.quantile(self._finite(), q))

    def clip_rate(self, thresholds: float | Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the share of the finite norms above each threshold, in the shape of `thresholds`."""
        ascending, limits = np.sort(self._finite()), np.asarray(thresholds, np.float64)
        if np.isnan(limits).any():
            raise ValueError(f"thresholds must not be NaN, got {shown(thresholds)}")
        return np.asarray(1 - np.searchsorted(ascending, limits, side="right") / len(ascending))

    def replay(self, transformation: optax.GradientTransformation) -> Replay:
        """Run a transformation, such as `clipjax.autoclip(25.0)`, over gradients with these norms.

        The norms are used as recorded, although a different clip would have led to other weights and norms.

        Raises:
          TypeError, ValueError: the argument is not a transformation, or its metrics have no threshold or
            several.
        """
        return replayed(transformation, self.norms)

    def suggest(self, rules: Rules | None = None) -> dict[str, Suggestion]:
        """Return the threshold that each rule has settled at, and how often it would have clipped.

        The threshold can serve as the bound of `clipjax.clip_by_global_norm`; :meth:`clip_rate` returns how
        often that constant would clip.

        Args:
          rules: a mapping from names to transformations to :meth:`replay`, or to the results of
            :meth:`replay`. None is every rule that follows the norm.
        """
        self._finite()
        return {name: suggestion(replay, self.norms) for name, replay in replays_of(self, rules).items()}

    def summary(self, rules: Rules | None = None) -> str:
        """Return the quantiles and the suggestions, as a table for the terminal."""
        return norm_report.table(self, self.suggest(rules))

    def __str__(self) -> str:
        """Return the summary with the default rules."""
        return self.summary()

    def plot(self, target: Any, rules: Rules | None = None) -> None:
        """Draw the norms over the steps, and the thresholds of each rule; needs Matplotlib.

        Args:
          target: the path of a figure to write, with :func:`clipjax.plots.thresholds` beside
            :func:`clipjax.plots.threshold_rates`; or Matplotlib axes, on which only the former is drawn.
          rules: as in :meth:`suggest`.

        Raises:
          ImportError: Matplotlib is not installed.
        """
        from clipjax import plots

        self._finite()
        if isinstance(target, str | os.PathLike):
            plots.write_log(self, rules, Path(target))
        else:
            plots.thresholds(self, rules, ax=target)

    def save(self, path: str | Path) -> None:
        """Write the log to a file in NumPy's `.npz` format, at exactly this path."""
        norms, name, capacity = self.norms, self.name or "", self.capacity or 0
        with Path(path).open("wb") as file:
            np.savez_compressed(file, norms=norms, name=name, dropped=self.dropped, capacity=capacity)

    @classmethod
    def load(cls, path: str | Path) -> NormLog:
        """Read a log that :meth:`save` wrote; it can be appended to.

        Raises:
          OSError: the file cannot be read.
          ValueError: the file was not written by :meth:`save`.
        """
        try:
            with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                norms, name = np.asarray(file["norms"], np.float64), str(file["name"])
                dropped, capacity = operator.index(file["dropped"]), operator.index(file["capacity"])
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"path: {path} was not written by NormLog.save") from error
        log = cls(name or None, capacity=capacity or None)
        log.extend(norms)
        log.dropped = dropped
        return log


def key_of_norm(metrics: Mapping[str, Any], name: str | None) -> str:
    """Return the metric that is the norm of the given name, or the only norm of a gradient."""
    if name is None:
        keys = [key for key in metrics if key.endswith("/norm")]
        # Only projections measure a violation; their norms are those of weights.
        keys = [key for key in keys if f"{key.removesuffix('norm')}violation" not in metrics]
        if len(keys) != 1:
            raise ValueError(f"name: the metrics must hold one norm, or name must say which; got {keys}")
        return keys[0]
    for key in (name, f"{name}/norm"):
        if key in metrics:
            return key
    raise ValueError(f"name: {name!r} has no norm in the metrics {list(metrics)}")


def replays_of(log: NormLog, rules: Rules | None) -> dict[str, Replay]:
    """Return what each of these rules would have done."""
    rules = default_rules() if rules is None else rules
    if not isinstance(rules, Mapping):
        raise TypeError(
            f"rules must be a mapping from names to transformations, got a {type(rules).__name__}"
        )
    return {name: tx if isinstance(tx, Replay) else log.replay(tx) for name, tx in rules.items()}
