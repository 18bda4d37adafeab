"""Compiled programs of many leaves stay small: each leaf adds few instructions, or compiling takes minutes.

Lines are counted, since compile times depend on the machine. Nothing else would notice, for example, that an
operation follows the division of a factor, which XLA then repeats for every entry of every leaf.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import clipjax

LEAVES = {f"leaf_{i:02}": jax.ShapeDtypeStruct((64, 48), jnp.float32) for i in range(60)}

# The lines that are counted are XLA's own; LLVM, which takes most of the time, comes after it.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def lines(tx: optax.GradientTransformation) -> int:
    """Return the lines of the compiled update of 60 leaves."""
    state = jax.eval_shape(tx.init, LEAVES)
    lowered = jax.jit(lambda *args: tx.update(*args)).lower(LEAVES, state, LEAVES)
    return len(lowered.compile(compiler_options=FAST).as_text().splitlines())


def by_hand(radius: float) -> optax.GradientTransformation:
    """Return max-norm as a link, by the formula."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        def one(u: jax.Array, w: jax.Array) -> jax.Array:
            norms = jnp.sqrt(jnp.sum(jnp.square(w + u), axis=0, keepdims=True))
            return (w + u) * jnp.minimum(1, radius / norms) - w

        return jax.tree.map(one, updates, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


GLOBAL = optax.clip_by_global_norm(1.0)
LEAF = optax.clip_by_block_rms(1.0)
CASES = {
    "clip_by_global_norm": (clipjax.clip_by_global_norm(1.0), GLOBAL, 1.2),
    "zclip": (clipjax.zclip(), GLOBAL, 1.2),
    "autoclip": (clipjax.autoclip(), GLOBAL, 1.3),  # sorts its window
    "clip_by_rms": (clipjax.clip_by_rms(1.0), LEAF, 2.0),
    "clip_by_norm": (clipjax.clip_by_norm(1.0), LEAF, 2.0),
    "adaptive_grad_clip": (clipjax.adaptive_grad_clip(), optax.adaptive_grad_clip(0.01), 2.0),
    "max_norm": (clipjax.max_norm(1.0), by_hand(1.0), 1.5),
}


@pytest.mark.parametrize("name", CASES)
def test_programs_of_sixty_leaves_are_hardly_longer_than_others(name: str) -> None:
    ours, theirs, limit = CASES[name]
    assert lines(ours) <= limit * lines(theirs)
