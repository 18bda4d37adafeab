"""How often a bound is exceeded in random trials, and by how much, measured in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax
from benchmarks.edge_cases_inputs import OPTAX, OURS, Case, Library, update

_TRIALS = 400
_SIZE = 257


def _draw(i: int, dtype: Any) -> np.ndarray:
    random = np.random.default_rng(i)
    values = random.standard_normal(_SIZE) * 10.0 ** random.uniform(-1, 1)
    return np.asarray(jnp.asarray(values, dtype))


def _exceeded(bound_to: Callable[[Any, Any], Any], dtype: Any, bound: float | None = None) -> str:
    """Count the results of `bound_to(x, bound)` whose norm is above the bound."""
    bound_to = jax.jit(bound_to)
    excess = []
    for i in range(_TRIALS):
        x = _draw(i, dtype)
        share = np.random.default_rng(_TRIALS + i).uniform(0.1, 0.9)
        # A float32 is the same number to everyone: none is exceeded for being rounded.
        limit = np.float32(bound or share * np.linalg.norm(x.astype(np.float64)))
        norm = np.linalg.norm(np.asarray(bound_to(x, limit)).astype(np.float64))
        excess.append(norm / np.float64(limit) - 1)
    count = sum(e > 0 for e in excess)
    return f"{count} of {_TRIALS}" + (f", by up to {max(excess):.1e}" if count else "")


def _clip(of: Library) -> Callable[[Any, Any], Any]:
    return lambda x, bound: update(of.clip_by_global_norm(bound), x)


def _clip_to(of: Library, bound: float) -> Callable[[Any, Any], Any]:
    """With a Python number as bound, which is all that Optax takes for 16 bits."""
    return lambda x, _: update(of.clip_by_global_norm(bound), x)


def _after_step(link: Callable[[Any], optax.GradientTransformation]) -> Callable[[Any, Any], Any]:
    """The parameters after a step of SGD whose last link bounds them."""

    def step(x: Any, bound: Any) -> Any:
        tx = optax.chain(optax.sgd(0.1), link(bound))
        params = x * jnp.asarray(0.5, x.dtype)
        updates, _ = tx.update(x * jnp.asarray(-5, x.dtype), tx.init(params), params)
        return optax.apply_updates(params, updates)

    return step


def optax_link(radius: Any) -> optax.GradientTransformation:
    """Optax's projection as the last link, as a user writes it."""

    def to_ball(updates: Any, params: Any) -> Any:
        wanted = optax.projections.projection_l2_ball(optax.apply_updates(params, updates), radius)
        return (wanted - params).astype(updates.dtype)

    return optax.stateless(to_ball)


def _keras(w: Any, desired: Any) -> Any:
    """The formula of Keras's MaxNorm."""
    norm = jnp.sqrt(jnp.sum(jnp.square(w)))
    return (w * (jnp.clip(norm, 0, desired.astype(w.dtype)) / (1e-7 + norm))).astype(w.dtype)


def _moved_inside(bound_to: Callable[[Any], Any]) -> str:
    """How many vectors inside the ball do not come back bit for bit."""
    moved = 0
    for i in range(_TRIALS):
        x = _draw(i, jnp.float32)
        moved += not np.array_equal(np.asarray(bound_to(x)), x)
    return f"{moved} of {_TRIALS} moved"


def _cases(dtype: Any, name: str) -> list[Case]:
    def ball(of: Library) -> Callable[[Any, Any], Any]:
        return lambda x, radius: of.to_ball(x, radius).astype(x.dtype)

    bound = None if name == "f32" else 0.5
    return [
        (
            f"clip by global norm, {name}",
            lambda: _exceeded(_clip(OURS), dtype),
            lambda: _exceeded(_clip(OPTAX) if name == "f32" else _clip_to(OPTAX, 0.5), dtype, bound),
        ),
        (
            f"projection onto a ball, called, {name}",
            lambda: _exceeded(ball(OURS), dtype),
            lambda: _exceeded(ball(OPTAX), dtype),
        ),
        (
            f"projection as the last link, after apply_updates, {name}",
            lambda: _exceeded(_after_step(lambda r: clipjax.max_norm(r, axes=None)), dtype),
            lambda: _exceeded(_after_step(optax_link), dtype),
        ),
        (
            f"max-norm, called, beside the formula of Keras, {name}",
            lambda: _exceeded(ball(OURS), dtype),
            lambda: f"(Keras) {_exceeded(_keras, dtype)}",
        ),
    ]


TRIALS: list[Case] = [
    *_cases(jnp.float32, "f32"),
    *_cases(jnp.bfloat16, "bf16"),
    *_cases(jnp.float16, "f16"),
    (
        "weights inside the ball, f32, max-norm called",
        lambda: _moved_inside(jax.jit(lambda x: clipjax.max_norm(1e3, axes=None)(x))),
        lambda: (
            f"{_moved_inside(jax.jit(lambda x: OPTAX.to_ball(x, 1e3)))}; Keras's formula: "
            + _moved_inside(jax.jit(lambda x: _keras(x, jnp.float32(1e3))))
        ),
    ),
]
