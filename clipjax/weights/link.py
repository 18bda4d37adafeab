"""A projection as a link of a chain: the update that takes the weights to their projection."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.axes import is_measured
from clipjax._core.dtypes import weakly_typed_as
from clipjax._core.mesh import placed_as
from clipjax._core.rounding import exactly, neighbor, rounded, smallest, widened

# Called as outside(end, wanted, after): whether an entry that ends at `end` is on the wrong side of `wanted`,
# where `after` is the value that is projected.
Outside: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def applied(before: Any, update: Any) -> Any:
    """Return what `optax.apply_updates` makes of a parameter, to the last bit."""
    if not is_measured(before):
        return before
    if jnp.iscomplexobj(before) or before.dtype in (np.float32, np.float64):
        return (before + update).astype(before.dtype)
    return exactly(rounded(widened(before) + widened(update), before.dtype), before.dtype)


def short_of(end: jax.Array, wanted: jax.Array, after: jax.Array) -> jax.Array:
    """Whether an entry ends on the same side of `wanted` as `after`, and so short of `wanted`."""
    return jnp.where(after > wanted, end > wanted, end < wanted)


def larger_than(end: jax.Array, wanted: jax.Array, after: jax.Array) -> jax.Array:
    """Whether an entry ends farther from 0 than `wanted`; for bounds on norms, where units may also grow."""
    del after
    return jnp.abs(end) > jnp.abs(wanted)


def step_to(
    before: Any, update: Any, after: jax.Array, wanted: Any, outside: Outside, *, same_dtype: bool
) -> jax.Array:
    """Return the update that takes `before` to `wanted`; entries where `wanted` is `after` keep `update`."""
    before, update = (placed_as(after, jnp.asarray(x)) for x in (before, update))
    wanted = placed_as(after, jnp.asarray(wanted))
    real = functools.partial(_real_step_to, outside=outside)
    if not jnp.iscomplexobj(before):
        dtype = update.dtype if same_dtype else step_dtype(before, update)
        return real(before, update, after, wanted, dtype=dtype)
    parts = [[part(x) for x in (before, update, after, wanted)] for part in (jnp.real, jnp.imag)]
    return lax.complex(*(real(*part, dtype=step_dtype(*part[:2])) for part in parts))


@functools.partial(jax.jit, static_argnames=("dtype", "outside"))
def _real_step_to(
    before: jax.Array, update: jax.Array, after: jax.Array, wanted: jax.Array, *, dtype: Any, outside: Outside
) -> jax.Array:
    """Do the same for real leaves. Rounding happens twice: in the step, and in the sum `before + step`.

    If an entry would end on the wrong side of `wanted`, its step is changed by one unit in the last place, so
    that it ends at or beyond the bound, never short of it.
    """
    step = exactly(rounded(widened(wanted) - widened(before), dtype), dtype)
    end = widened(applied(before, step))
    wrong = outside(end, widened(wanted), widened(after))
    moved_on = _one_further(step, end > widened(wanted))
    step = jnp.where(wanted == after, update.astype(dtype), jnp.where(wrong, moved_on, step))
    return weakly_typed_as(update, step) if step.dtype == update.dtype else step


def _one_further(step: jax.Array, down: jax.Array) -> jax.Array:
    """Return the next smaller step where `down`, else the next larger one."""
    least = jnp.full_like(step, smallest(step.dtype))
    from_zero = jnp.where(down, -least, least)
    return jnp.where(step == 0, from_zero, neighbor(step, (step < 0) == down))


def step_dtype(before: jax.Array, update: jax.Array) -> Any:
    """Return a dtype for the update that is precise enough: at least float32.

    No bfloat16 update takes a weight of 16000 to 1, for example: it ends at 0.
    """
    wide = np.float64 in (before.dtype, update.dtype)
    return np.dtype(np.float64 if wide else np.float32)


def is_branch(given: tuple[Any, ...], result: Any) -> bool:
    """Whether `result` is computed in a branch of `jax.lax.cond` that closes over state and weights.

    `optax.apply_if_finite` and others choose between our updates and zeros by such a branch. There, updates
    have to keep their dtype, as both branches must have the same. A branch that gets state and weights as
    arguments cannot be distinguished from other functions.
    """
    return isinstance(result, jax.core.Tracer) and all(
        getattr(x, "_trace", None) is not result._trace for x in given
    )
