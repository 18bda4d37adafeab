"""A record of a run's gradient norms, to choose a threshold from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from numpy.typing import ArrayLike

from clipjax import _checks
from clipjax._core import bounds
from clipjax._core.messages import short_repr
from clipjax.gradients.quantiles import autoclip, clip_by_quantile
from clipjax.gradients.zclip import clip_by_lognormal, zclip
from clipjax.monitoring.metrics import metrics

# Norms are fetched this many at a time, when as many newer ones are waiting: by then
# they are computed.
_BATCH = 256


class NormLog:
    """Keep the gradient norms of a run, and tell what a threshold would have done.

    Appending does not wait for the device, and copies, so that the optimizer state may
    be donated. A step that a transformation did not take, since it was skipped or is
    accumulated, adds no norm of this transformation. All norms that came, with those of
    skipped steps, are those of `"skip_nonfinite"` or `"skip_spikes"`.

    Args:
      name: which norm to take from `clipjax.metrics`: a transformation, such as
        `"zclip"`, or a whole key. Not needed if only one key ends with `"/norm"`.

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

    def __init__(self, name: str | None = None) -> None:
        if not isinstance(name, str | None):
            raise TypeError(f"name must be a str or None, got {short_repr(name)}")
        self.name = name
        self._waiting: list[
            Any
        ] = []  # norms on the device, with the numbers of their steps if known
        self._chunks = [np.zeros(0)]  # fetched
        self._last = (0, 0.0)  # the step and norm of the last one

    def __repr__(self) -> str:
        return f"NormLog({'' if self.name is None else repr(self.name)}) of {len(self)} norms"

    def append(self, norm: Any) -> None:
        """Add the norm of one step: a number, a scalar array, or what `clipjax.metrics` returns."""
        self._add(norm, rank=0)

    def extend(self, norms: Any) -> None:
        """Add the norms of many steps: an array of shape `(steps,)`, or metrics that a `scan` has stacked."""
        self._add(norms, rank=1)

    def _add(self, norms: Any, rank: int) -> None:
        norms, steps = (
            _chosen(norms, self.name) if isinstance(norms, Mapping) else (norms, None)
        )
        if isinstance(norms, jax.core.Tracer):
            raise TypeError(
                "norms must be known: return them from the compiled function, then "
                "log them"
            )
        given = norms
        try:
            norms = jnp.copy(norms) if isinstance(norms, jax.Array) else np.array(norms)
            real = bounds.is_real(norms)
        except ValueError:  # of rows that are not equally long
            real = False
        if not real:
            raise TypeError(
                "norms must be real numbers or clipjax.metrics(state), got "
                f"{short_repr(given)}"
            )
        if norms.ndim != rank:
            raise ValueError(
                "append takes a scalar, and extend shape (steps,); got shape "
                f"{norms.shape}"
            )
        self._waiting.append((norms, steps))
        if len(self._waiting) >= 2 * _BATCH:
            self._fetch(_BATCH)

    def _fetch(self, count: int) -> None:
        """Fetch the first norms that wait."""
        batch, self._waiting = (
            jax.device_get(self._waiting[:count]),
            self._waiting[count:],
        )
        for norms, steps in batch:
            new = np.ravel(norms).astype(np.float64)
            if (
                steps is not None and new.size
            ):  # a transformation that took no step shows its last norm again
                steps, every = (
                    np.append(self._last[0], steps),
                    np.append(self._last[1], new),
                )
                is_new = (np.diff(steps) != 0) | (
                    np.diff(every.view(np.int64)) != 0
                )  # NaN may be the same NaN
                new, self._last = new[is_new], (steps[-1], every[-1])
            self._chunks.append(new)

    @property
    def norms(self) -> np.ndarray:
        """The norms, float64 of shape `(len(log),)`, with those that are not finite."""
        self._fetch(len(self._waiting))
        self._chunks = [np.concatenate(self._chunks)]
        return self._chunks[0].copy()

    @property
    def nonfinite_count(self) -> int:
        """How many of the norms are NaN or infinite."""
        return int(np.sum(~np.isfinite(self.norms)))

    def __len__(self) -> int:
        """Return how many norms there are."""
        return len(self.norms)

    def _finite(self) -> np.ndarray:
        norms = self.norms
        if not np.isfinite(norms).any():
            raise ValueError(f"the log has no finite norm, among {len(self)}")
        return norms[np.isfinite(norms)]

    def quantiles(self, q: ArrayLike) -> np.ndarray:
        """Return quantiles of the finite norms, interpolated linearly, in the shape of `q`."""
        shares = _real_numbers("q", q)
        if not np.all((shares >= 0) & (shares <= 1)):
            raise ValueError(f"q must be in [0, 1], got {short_repr(q)}")
        return np.asarray(np.quantile(self._finite(), shares))

    def clip_rate(self, thresholds: ArrayLike) -> np.ndarray:
        """Return the share of the finite norms that is above each threshold, in the shape of `thresholds`."""
        limits, norms = _real_numbers("thresholds", thresholds), np.sort(self._finite())
        return np.asarray(1 - np.searchsorted(norms, limits, side="right") / len(norms))

    def suggest(
        self, rules: Mapping[str, optax.GradientTransformation] | None = None
    ) -> dict[str, dict[str, float]]:
        """Replay the finite norms through rules that follow the past, and return where each has settled.

        Args:
          rules: transformations with a metric `threshold`, by name. None: `autoclip`,
            `zclip`, `clip_by_quantile` and `clip_by_lognormal` with their defaults.

        Returns:
          For each rule `"threshold"`, the median of its finite thresholds over the last
          quarter of the steps (infinity if there are none), and `"clip_rate"`, the
          share of the steps that it would have clipped. The norms are those of the run,
          although another clip would have led to others.
        """
        if rules is None:
            rules = {
                make.__name__: make()
                for make in (autoclip, zclip, clip_by_quantile, clip_by_lognormal)
            }
        if not isinstance(rules, Mapping):
            raise TypeError(
                "rules must be a mapping from names to transformations, got "
                f"{short_repr(rules)}"
            )
        return {name: _replayed(name, tx, self._finite()) for name, tx in rules.items()}

    def save(self, path: str | Path) -> None:
        """Write the log to a file in NumPy's `.npz` format, at exactly this path."""
        with Path(path).open("wb") as file:
            np.savez_compressed(
                file, norms=self.norms, name=self.name or "", last=self._last
            )

    @classmethod
    def load(cls, path: str | Path) -> NormLog:
        """Read a log that :meth:`save` wrote; it can be appended to."""
        with np.load(path, allow_pickle=False) as file:
            log = cls(str(file["name"]) or None)
            log.extend(file["norms"])
            log._fetch(1)
            log._last = tuple(file["last"].tolist())
        return log


def _real_numbers(name: str, values: ArrayLike) -> np.ndarray:
    array = np.asarray(values)
    if not bounds.is_real(array) or np.isnan(array).any():
        raise ValueError(
            f"{name} must be real numbers, not NaN, got {short_repr(values)}"
        )
    return array


def _chosen(seen: Mapping[str, Any], name: str | None) -> tuple[Any, Any]:
    """Return a norm of metrics, and the number of its step if they have it."""
    every = [key for key in seen if key.endswith("/norm")]
    found = [
        key
        for key in (every if name is None else [name, f"{name}/norm"])
        if key in seen
    ]
    if len(found) != 1:
        every += [
            key
            for key in seen
            if key.startswith("record_norms") and not key.endswith("/steps")
        ]
        raise ValueError(
            f"name must say which norm to log, of {every or list(seen)}; it is {name!r}"
        )
    counters = (
        f"{found[0][:i]}/steps" for i, letter in enumerate(found[0]) if letter == "/"
    )
    steps = next((seen[key] for key in counters if key in seen), None)
    return seen[found[0]], jnp.copy(steps) if isinstance(steps, jax.Array) else steps


def _replayed(
    name: str, tx: optax.GradientTransformation, norms: np.ndarray
) -> dict[str, float]:
    zero = jnp.zeros((), np.float32)
    state = _checks.check_transformation(f"rules[{name!r}]", tx).init(zero)
    try:
        keys = [key for key in metrics(state) if key.endswith("/threshold")]
    except ValueError:  # it is no transformation of clipjax
        keys = []
    if len(keys) != 1:
        raise ValueError(f"rules[{name!r}] must have one metric threshold, got {keys}")

    def step(state: Any, norm: jax.Array) -> Any:
        _, state = tx.update(norm, state, zero)
        threshold = metrics(state)[keys[0]]
        return state, (threshold, norm > threshold)

    thresholds, clipped = jax.jit(lambda *args: lax.scan(step, *args)[1])(
        state, norms.astype(np.float32)
    )
    last = np.asarray(thresholds)[-max(1, len(norms) // 4) :]
    settled = np.median(last[np.isfinite(last)]) if np.isfinite(last).any() else np.inf
    return {"threshold": float(settled), "clip_rate": float(np.mean(clipped))}
