"""The statistics in the state of a transformation: scalars that are updated at each step."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.dtypes import as_arrays, in_float64, norm_dtype
from clipjax._core.trees import Report


class Stats(NamedTuple):
    """What a transformation has measured and done: scalars, each in its own buffer, so they can be donated.

    No field has the name of a field in Optax's states, so `optax.tree.get` still finds those.
    """

    norm: jax.Array  # float: the norm before clipping at the last step (the largest, if several)
    after: jax.Array  # float: the norm after clipping at the last step (the largest, if several)
    factor: jax.Array  # float: the factor applied at the last step (the smallest, if several)
    steps: jax.Array  # int32: steps so far
    clipped: jax.Array  # int32: steps at which anything was clipped
    nonfinite: jax.Array  # int32: steps at which a norm was not finite


def start(params: Any) -> Stats:
    """Return the statistics before the first step; norms are float64 if a leaf is, else float32."""
    floats = norm_dtype(jax.tree.leaves(as_arrays(params)))
    return Stats(
        norm=jnp.zeros((), floats),
        after=jnp.zeros((), floats),
        factor=jnp.ones((), floats),
        steps=jnp.zeros((), jnp.int32),
        clipped=jnp.zeros((), jnp.int32),
        nonfinite=jnp.zeros((), jnp.int32),
    )


@in_float64
def observe(stats: Stats, report: Report) -> Stats:
    """Update the statistics with the report of one step."""
    finite = jnp.isfinite(report.norm)
    return Stats(
        norm=lax.convert_element_type(report.norm, stats.norm.dtype),
        after=lax.convert_element_type(report.after, stats.after.dtype),
        factor=lax.convert_element_type(report.scale, stats.factor.dtype),
        steps=count(stats.steps, jnp.ones((), bool)),
        clipped=count(stats.clipped, report.clipped & finite),
        nonfinite=count(stats.nonfinite, ~finite),
    )


def count(counter: jax.Array, event: jax.Array) -> jax.Array:
    """Add a bool or an int32 number of events to an int32 counter, which saturates."""
    room = np.int32(np.iinfo(np.int32).max) - counter
    return counter + jnp.minimum(lax.convert_element_type(event, np.int32), room)


def name_of(state: type) -> str:
    """Return the name of the transformation of a state: `clip_by_norm` for `ClipByNormState`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", state.__name__.removesuffix("State")).lower()
