"""What a transformation would have done in a run whose gradient norms are known."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.links import check_transformation
from clipjax.gradients.adagc import adagc
from clipjax.gradients.outliers import clip_by_lognormal, zclip
from clipjax.gradients.quantiles import autoclip, clip_by_quantile
from clipjax.gradients.spikes import skip_spikes
from clipjax.monitoring.metrics import metrics

# The number of steps at the end of a run from which the settled threshold of a rule is taken.
_SETTLED = 100


class Replay(NamedTuple):
    """What a transformation would have done at each of the steps of a log.

    Attributes:
      thresholds: the norm above which it would have acted at each step, float64 of shape (steps,).
      clipped: whether it would have acted at each step, bool of shape (steps,); never at a norm that is not
        finite.
    """

    thresholds: np.ndarray
    clipped: np.ndarray


# The keys are the names of the rules.
Rules: TypeAlias = Mapping[str, optax.GradientTransformation | Replay]


class Suggestion(NamedTuple):
    """The threshold that a rule suggests for a log.

    Attributes:
      threshold: the median of the rule's thresholds in the last 100 steps.
      clip_rate: the share of the steps with a finite norm that the rule would have clipped.
    """

    threshold: float
    clip_rate: float


@functools.cache  # returns the same objects each time, so that each rule is compiled once
def default_rules() -> Rules:
    """Return every rule that follows the norm, with its default arguments; `adagc` sees a single leaf."""
    return {
        "autoclip": autoclip(),
        "clip_by_quantile": clip_by_quantile(),
        "clip_by_lognormal": clip_by_lognormal(),
        "zclip": zclip(),
        "adagc": adagc(),
        "skip_spikes": skip_spikes(optax.identity()),
    }


def replayed(tx: optax.GradientTransformation, norms: np.ndarray) -> Replay:
    """Run a transformation over gradients with these norms."""
    check_transformation("transformation", tx)
    state = tx.init(jnp.zeros(()))
    try:
        keys = [key for key in metrics(state) if key.endswith("/threshold")]
    except ValueError:  # not a state of clipjax
        keys = []
    if len(keys) != 1:
        raise ValueError(f"transformation must show one threshold in its metrics, got {keys}")
    thresholds, clipped = _run(tx, keys[0], jnp.asarray(norms), state)
    return Replay(np.asarray(thresholds, np.float64), np.asarray(clipped))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(tx: optax.GradientTransformation, key: str, norms: jax.Array, state: Any) -> Any:
    def step(state: Any, norm: jax.Array) -> Any:
        update, state = tx.update(norm, state, jnp.zeros(()))
        return state, (metrics(state)[key], update < norm)

    return jax.lax.scan(step, state, norms)[1]


def suggestion(replay: Replay, norms: np.ndarray) -> Suggestion:
    """Return the threshold that a rule has settled at, and how often it clipped."""
    return Suggestion(
        threshold=float(np.median(replay.thresholds[-_SETTLED:])),
        clip_rate=float(np.mean(replay.clipped[np.isfinite(norms)])),
    )
