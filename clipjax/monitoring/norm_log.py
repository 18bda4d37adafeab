"""A record of a run's gradient norms, to choose a threshold by."""

from __future__ import annotations

import functools
import operator
import zipfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax.gradients.adagc import adagc
from clipjax.gradients.outliers import clip_by_lognormal, zclip
from clipjax.gradients.past import check_count
from clipjax.gradients.quantiles import autoclip, clip_by_quantile
from clipjax.gradients.spikes import skip_spikes
from clipjax.monitoring import norm_report as report
from clipjax.monitoring.metrics import metrics

Rules: TypeAlias = Mapping[str, optax.GradientTransformation]

# Norms are fetched so many at a time, and not before as many more are waiting: those are long computed.
_BATCH = 256

# Steps at the end of a run, whose thresholds say what a rule has settled at.
_SETTLED = 100


class Replay(NamedTuple):
    """What a transformation would have done at each of the steps of a log."""

    thresholds: np.ndarray  # float64 (steps,): the norm above which it would have acted
    clipped: np.ndarray  # bool (steps,): whether it did; never where the norm was not finite


class Suggestion(NamedTuple):
    """What a rule makes of a log."""

    threshold: float  # the median of its thresholds in the last 100 steps
    clip_rate: float  # the share of the finite steps that the rule would have clipped


class NormLog:
    """Record the gradient norms of a run, and tell what a threshold would have done.

    Appending waits for nothing: a norm stays on the device until it has long been computed, and is
    then fetched with 255 others. What it keeps is its own, so that the state may be donated.

    Args:
      name: which norm to pick from `clipjax.metrics`, as `"clip_by_global_norm"`. Needed where there
        are several; those of weights do not count.
      capacity: how many of the last norms to keep, 8 bytes each; None keeps all.

    Attributes:
      dropped: how many norms there were before the first one kept.

    Raises:
      TypeError, ValueError: `capacity` is no whole number above 0.

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
            raise TypeError(f"name must be a str, got {name!r}")
        self.name = name
        self.capacity = None if capacity is None else check_count("capacity", capacity, 1)
        self.dropped = 0
        self._waiting: list[Any] = []
        self._chunks: deque[np.ndarray] = deque()

    def append(self, norm: Any) -> None:
        """Take in the norm of one step.

        Args:
          norm: what `clipjax.metrics` returns, or a norm: a number or a scalar array.

        Raises:
          TypeError, ValueError: it is no norm, has no norm or, without a `name`, several.
        """
        if isinstance(norm, Mapping):
            norm = norm[self._key(norm)]
        if np.ndim(norm):
            raise ValueError(f"norm must be a scalar, got shape {np.shape(norm)}: use extend for many")
        self._take(norm)

    def extend(self, norms: Any) -> None:
        """Take in the norms of many steps, as a `scan` returns them: an array of shape `(steps,)`.

        Args:
          norms: the array, or the dict of `clipjax.metrics` with arrays in it.

        Raises:
          TypeError, ValueError: it holds no norms or, without a `name`, several kinds of them.
        """
        if isinstance(norms, Mapping):
            norms = norms[self._key(norms)]
        if np.ndim(norms) != 1:
            raise ValueError(f"norms must have shape (steps,), got {np.shape(norms)}")
        self._take(norms)

    def _key(self, seen: Mapping[str, Any]) -> str:
        if self.name is None:
            keys = [key for key in seen if key.endswith("/norm")]
            # A projection's norm is that of weights; only projections tell by how much it was violated.
            keys = [key for key in keys if f"{key.removesuffix('norm')}violation" not in seen]
            if len(keys) != 1:
                raise ValueError(
                    f"name: the metrics must hold one norm, or a name must say which; got {keys}"
                )
            return keys[0]
        for key in (self.name, f"{self.name}/norm"):
            if key in seen:
                return key
        raise ValueError(f"name: {self.name!r} has no norm in the metrics {list(seen)}")

    def _take(self, norms: Any) -> None:
        if isinstance(norms, jax.core.Tracer):
            raise TypeError(
                "norms must be known: return them from the compiled function, and log them outside"
            )
        if isinstance(norms, jax.Array):
            norms = jnp.copy(norms)  # a buffer of its own: that of the state may be donated
        elif not any(jnp.issubdtype(np.asarray(norms).dtype, kind) for kind in (jnp.floating, jnp.integer)):
            raise TypeError(f"norms must be real numbers, got {norms!r}")
        self._waiting.append(norms)
        if len(self._waiting) >= 2 * _BATCH:
            self._fetch(_BATCH)

    def _fetch(self, count: int) -> None:
        """Bring the first of the waiting norms here."""
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        if batch:
            self._chunks.append(
                np.concatenate([np.ravel(x) for x in jax.device_get(batch)], dtype=np.float64)
            )
        excess = sum(map(len, self._chunks)) - self.capacity if self.capacity is not None else 0
        while excess > 0:
            first = self._chunks.popleft()
            if len(first) > excess:
                self._chunks.appendleft(first[excess:])
            self.dropped += min(excess, len(first))
            excess -= len(first)

    @property
    def norms(self) -> np.ndarray:
        """The norms kept, float64 of shape `(len(log),)`, non-finite ones among them."""
        self._fetch(len(self._waiting))
        if len(self._chunks) > 1:
            self._chunks = deque([np.concatenate(self._chunks)])
        return self._chunks[0].copy() if self._chunks else np.zeros(0)

    @property
    def nonfinite_count(self) -> int:
        """How many of the norms kept are NaN or infinite."""
        return int(np.sum(~np.isfinite(self.norms)))

    def __len__(self) -> int:
        """How many norms are kept."""
        return len(self.norms)

    def _finite(self) -> np.ndarray:
        norms = self.norms
        finite: np.ndarray = norms[np.isfinite(norms)]
        if not len(finite):
            raise ValueError(f"the log has no finite norm, of {len(norms)}")
        return finite

    def quantiles(self, q: float | Sequence[float] = (0.01, 0.1, 0.5, 0.9, 0.95, 0.99)) -> np.ndarray:
        """Quantiles of the finite norms, interpolated linearly, in the shape of `q`."""
        return np.asarray(np.quantile(self._finite(), q))

    def clip_rate(self, thresholds: float | Sequence[float] | np.ndarray) -> np.ndarray:
        """The share of the finite norms that are above each of these, in the shape of `thresholds`."""
        ascending, limits = np.sort(self._finite()), np.asarray(thresholds, np.float64)
        if np.isnan(limits).any():
            raise ValueError(f"thresholds must not be NaN, got {thresholds!r}")
        return np.asarray(1 - np.searchsorted(ascending, limits, side="right") / len(ascending))

    def replay(self, transformation: optax.GradientTransformation) -> Replay:
        """What a transformation would have done: it is run over gradients of these norms.

        The norms stay what they were, although other clipping would have led to other weights.

        Args:
          transformation: one whose metrics show a threshold, as `clipjax.autoclip(25.0)`.

        Raises:
          TypeError, ValueError: it is no transformation, or shows no threshold, or several.
        """
        if not isinstance(transformation, optax.GradientTransformation):
            raise TypeError(f"transformation must be an optax.GradientTransformation, got {transformation!r}")
        state = transformation.init(jnp.zeros(()))
        keys = [key for key in metrics(state) if key.endswith("/threshold")]
        if len(keys) != 1:
            raise ValueError(f"transformation must show one threshold in its metrics, got {keys}")
        thresholds, clipped = _replay(transformation, keys[0], jnp.asarray(self.norms), state)
        return Replay(np.asarray(thresholds, np.float64), np.asarray(clipped))

    def suggest(self, rules: Rules | None = None) -> dict[str, Suggestion]:
        """The threshold that each rule has come to, and how often it would have clipped.

        Args:
          rules: transformations to :meth:`replay`, by name; None is :func:`default_rules`.

        Returns:
          A :class:`Suggestion` for each. Its threshold, as a constant, is a bound for
          `clipjax.clip_by_global_norm`; :meth:`clip_rate` tells how often that would clip.
        """
        self._finite()
        return {name: suggestion(replay, self.norms) for name, replay in self._replays(rules).items()}

    def _replays(self, rules: Rules | None) -> dict[str, Replay]:
        return {name: self.replay(tx) for name, tx in (default_rules() if rules is None else rules).items()}

    def summary(self, rules: Rules | None = None) -> str:
        """The quantiles and the suggestions, as a table for the terminal."""
        return report.table(self, self.suggest(rules))

    def __str__(self) -> str:
        """The summary with the default rules."""
        return self.summary()

    def plot(self, target: Any, rules: Rules | None = None) -> None:
        """Draw the norms over the steps, and the thresholds of each rule; needs matplotlib.

        Args:
          target: the path of a figure to write, which also shows the clip rate of every constant
            threshold; or matplotlib axes to draw the norms on.
          rules: as in :meth:`suggest`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        report.plot(self, target, self._replays(rules))

    def save(self, path: str | Path) -> None:
        """Write the log to a file in NumPy's `.npz` format, at just this path."""
        with Path(path).open("wb") as file:
            name = self.name or ""
            np.savez_compressed(
                file, norms=self.norms, name=name, dropped=self.dropped, capacity=self.capacity or 0
            )

    @classmethod
    def load(cls, path: str | Path) -> NormLog:
        """Read what :meth:`save` wrote; what is appended then goes on from there.

        Raises:
          OSError: the file cannot be read.
          ValueError: it is no such file.
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


@functools.cache  # as other objects they would be compiled anew for each replay
def default_rules() -> Mapping[str, optax.GradientTransformation]:
    """Every rule that follows the norm, with the arguments it has by default; `adagc` as for one leaf."""
    return {
        "autoclip": autoclip(),
        "clip_by_quantile": clip_by_quantile(),
        "clip_by_lognormal": clip_by_lognormal(),
        "zclip": zclip(),
        "adagc": adagc(),
        "skip_spikes": skip_spikes(optax.identity()),
    }


def suggestion(replay: Replay, norms: np.ndarray) -> Suggestion:
    """What a replay of these norms has come to."""
    return Suggestion(
        threshold=float(np.median(replay.thresholds[-_SETTLED:])),
        clip_rate=float(np.mean(replay.clipped[np.isfinite(norms)])),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _replay(tx: optax.GradientTransformation, key: str, norms: jax.Array, state: Any) -> Any:
    def one(state: Any, norm: jax.Array) -> Any:
        update, state = tx.update(norm, state, jnp.zeros(()))
        return state, (metrics(state)[key], update < norm)

    return jax.lax.scan(one, state, norms)[1]
