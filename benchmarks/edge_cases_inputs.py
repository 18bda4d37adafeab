"""Inputs at the edges of precision, range and type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax
from clipjax import functional

Case = tuple[str, Callable[[], str] | None, Callable[[], str] | None]


class Library(NamedTuple):
    """The same things under each library's names."""

    global_norm: Callable[[Any], Any]
    clip_by_global_norm: Callable[[Any], optax.GradientTransformation]
    clip_by_rms: Callable[[Any], optax.GradientTransformation]
    clip_by_value: Callable[[Any], optax.GradientTransformation]
    to_ball: Callable[[Any, float], Any]


OURS = Library(
    functional.global_norm,
    clipjax.clip_by_global_norm,
    clipjax.clip_by_rms,
    clipjax.clip_by_value,
    lambda params, radius: clipjax.max_norm(radius, axes=None)(params),
)
OPTAX = Library(
    optax.tree.norm,
    optax.clip_by_global_norm,
    optax.clip_by_block_rms,
    optax.clip,
    lambda params, radius: jax.tree.map(
        lambda w: optax.projections.projection_l2_ball(w, scale=radius), params
    ),
)


def norm64(tree: Any) -> float:
    """The norm of all leaves together, in NumPy's float64."""
    leaves = [np.asarray(leaf).astype(np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return float(np.linalg.norm(np.concatenate(leaves))) if leaves else 0.0


def update(tx: optax.GradientTransformation, grads: Any) -> Any:
    """One update from a fresh state."""
    return jax.jit(tx.update)(grads, tx.init(grads))[0]


def shown(tree: Any) -> str:
    """The entries of small leaves, three digits each."""
    return " ".join(
        "[" + " ".join(f"{x:.3g}" for x in np.asarray(leaf).astype(np.float64).ravel()) + "]"
        for leaf in jax.tree.leaves(tree)
    )


def both(given: str, ask: Callable[[Library], str]) -> Case:
    """One input for both libraries."""
    return given, lambda: ask(OURS), lambda: ask(OPTAX)


def _norm_and_clipped(grads: Any, bound: float) -> Callable[[Library], str]:
    def ask(of: Library) -> str:
        clipped = update(of.clip_by_global_norm(bound), grads)
        return f"norm {float(of.global_norm(grads)):.6g}; clipped to {norm64(clipped):.6g}"

    return ask


def _clipped(make: Callable[[Library], Any], grads: Any) -> Callable[[Library], str]:
    return lambda of: shown(update(make(of), grads))


def _dtypes(of: Library) -> str:
    grads = [jnp.full(4, 3, jnp.bfloat16), jnp.full(4, 3.0), jnp.full(4, 3, jnp.float16)]
    clipped = update(of.clip_by_global_norm(1.0), grads)
    return f"{' '.join(str(x.dtype) for x in clipped)}; clipped to {norm64(clipped):.6g}"


def _int_leaf(of: Library) -> str:
    grads = [jnp.array([3.0, 4.0]), jnp.array([100])]
    clipped = update(of.clip_by_global_norm(1.0), grads)
    return f"{shown(clipped)}; norm {float(of.global_norm(grads)):.4g}"


def _array_bound(of: Library) -> str:
    grads = jnp.array([3, 4], jnp.bfloat16)
    clipped = update(of.clip_by_global_norm(jnp.float32(1.0)), grads)
    return f"{shown(clipped)} {clipped.dtype}"


def _schedule_to_zero(of: Library) -> str:
    tx = of.clip_by_global_norm(optax.linear_schedule(1.0, 0.0, 1))
    grads = jnp.array([3.0, 0.0])
    state = tx.init(grads)
    first, state = tx.update(grads, state)
    second, state = tx.update(grads, state)
    return f"{shown(first)}, then {shown(second)}, then {shown(tx.update(0 * grads, state)[0])}"


def _transformer_like(dtype: Any) -> list[jax.Array]:
    """385 leaves, of the sizes that 32 layers have."""
    keys = jax.random.split(jax.random.key(0), 385)
    return [jax.random.normal(k, (64 * 64 if i % 2 else 64,), dtype) for i, k in enumerate(keys)]


_PAIR = (jnp.array([3.0, 4.0]), jnp.array([1.0]))

BASIC: list[Case] = [
    both(
        "bf16, 1000 leaves of 1000 ones, bound 1",
        _norm_and_clipped([jnp.ones(1000, jnp.bfloat16)] * 1000, 1.0),
    ),
    both(
        "bf16, 385 leaves like a transformer's, bound 0.1",
        _norm_and_clipped(_transformer_like(jnp.bfloat16), 0.1),
    ),
    both("f32, 100 entries of 1e20, bound 1", _norm_and_clipped(jnp.full(100, 1e20), 1.0)),
    both("f32, 100 entries of 1e-25, bound 1e-26", _norm_and_clipped(jnp.full(100, 1e-25), 1e-26)),
    both("f16, 100 entries of 50, bound 1", _norm_and_clipped(jnp.full(100, 50, jnp.float16), 1.0)),
    both("f16, 10 entries of 1e-4, bound 1e-4", _norm_and_clipped(jnp.full(10, 1e-4, jnp.float16), 1e-4)),
    both(
        "f32, one subnormal entry 1e-40, bound 1",
        _clipped(lambda of: of.clip_by_global_norm(1.0), jnp.array([1e-40])),
    ),
    both("bf16, f32 and f16 leaves in one tree", _dtypes),
    both(
        "a NaN: [NaN 4] [1], bound 1",
        _clipped(lambda of: of.clip_by_global_norm(1.0), (jnp.array([jnp.nan, 4.0]), _PAIR[1])),
    ),
    both(
        "an inf: [inf 4] [1], bound 1",
        _clipped(lambda of: of.clip_by_global_norm(1.0), (jnp.array([jnp.inf, 4.0]), _PAIR[1])),
    ),
    both(
        "a -inf: [-inf 4] [1], bound 1",
        _clipped(lambda of: of.clip_by_global_norm(1.0), (jnp.array([-jnp.inf, 4.0]), _PAIR[1])),
    ),
    both(
        "an inf, each leaf's RMS: [inf 4] [1], bound 0.5",
        _clipped(lambda of: of.clip_by_rms(0.5), (jnp.array([jnp.inf, 4.0]), _PAIR[1])),
    ),
    both(
        "NaN, inf, -inf, clipped by value to 1",
        _clipped(lambda of: of.clip_by_value(1.0), jnp.array([jnp.nan, jnp.inf, -jnp.inf])),
    ),
    (
        "zeroed first: [NaN inf -inf 3]",
        lambda: shown(update(clipjax.zero_nonfinite(), jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3.0]))),
        lambda: shown(update(optax.zero_nans(), jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3.0]))),
    ),
    both("norm 0, bound 0", _clipped(lambda of: of.clip_by_global_norm(0.0), jnp.zeros(2))),
    both("norm 5, bound 0", _clipped(lambda of: of.clip_by_global_norm(0.0), _PAIR[0])),
    both("RMS 0, bound 0", _clipped(lambda of: of.clip_by_rms(0.0), jnp.zeros(2))),
    both("weights 0, ball of radius 0", lambda of: shown(of.to_ball(jnp.zeros(2), 0.0))),
    both("norm 5, bound inf", _clipped(lambda of: of.clip_by_global_norm(jnp.inf), _PAIR[0])),
    both("norm 5, bound -1", _clipped(lambda of: of.clip_by_global_norm(-1.0), _PAIR[0])),
    both("norm 5, bound NaN", _clipped(lambda of: of.clip_by_global_norm(jnp.nan), _PAIR[0])),
    both("norm 5, bound '1'", _clipped(lambda of: of.clip_by_global_norm("1"), _PAIR[0])),
    both("norm 5, bound True", _clipped(lambda of: of.clip_by_global_norm(True), _PAIR[0])),
    both("a schedule from 1 to 0 as bound: norm 3, 3, 0", _schedule_to_zero),
    both("bf16 gradients, a float32 array as bound", _array_bound),
    both("an int leaf: [3 4] [100], bound 1", _int_leaf),
    both(
        "a zero-size leaf: [3 4] [], bound 1",
        _clipped(lambda of: of.clip_by_global_norm(1.0), (_PAIR[0], jnp.zeros((0, 3)))),
    ),
    both(
        "a zero-size leaf, clipped by RMS 1",
        _clipped(lambda of: of.clip_by_rms(1.0), (_PAIR[0], jnp.zeros((0, 3)))),
    ),
    both("an empty tree, bound 1", lambda of: f"{update(of.clip_by_global_norm(1.0), {})}"),
    both(
        "a complex leaf [3+4j], bound 1",
        lambda of: str(np.asarray(update(of.clip_by_global_norm(1.0), jnp.array([3 + 4j])))),
    ),
]
