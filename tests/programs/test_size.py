"""Programs of many leaves stay small: each leaf adds few instructions, or tracing and
compiling take minutes.

Instructions and equations are counted, since compile times depend on the machine.
Nothing else would notice, for example, that an operation follows the division of a
factor, which XLA then repeats for every entry of every leaf.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import clipjax

LEAVES = {
    f"leaf_{i:02}": jax.ShapeDtypeStruct((64, 48), jnp.float32) for i in range(60)
}

# The instructions that are counted are XLA's own; LLVM, which takes most of the time,
# comes after it.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def traced(tx: optax.GradientTransformation) -> Any:
    """Trace the update of 60 leaves."""
    state = jax.eval_shape(tx.init, LEAVES)
    return jax.jit(lambda *args: tx.update(*args)).trace(LEAVES, state, LEAVES)


@functools.cache
def instructions(tx: optax.GradientTransformation) -> int:
    """Return how many instructions the compiled update of 60 leaves has; other lines
    say where they come from.
    """
    text = traced(tx).lower().compile(compiler_options=FAST).as_text()
    return sum(line.startswith("  ") and " = " in line for line in text.splitlines())


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
    "adaptive_grad_clip": (
        clipjax.adaptive_grad_clip(),
        optax.adaptive_grad_clip(0.01),
        2.0,
    ),
    # An entry inside is chosen, not multiplied.
    "max_norm": (
        clipjax.max_norm(1.0),
        by_hand(1.0),
        1.7,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_programs_of_sixty_leaves_are_hardly_longer_than_others(name: str) -> None:
    ours, theirs, limit = CASES[name]
    assert instructions(ours) <= limit * instructions(theirs)


@pytest.mark.parametrize("name", CASES)
def test_jax_traces_no_more_of_a_leaf_than_with_others(name: str) -> None:
    """A leaf is traced once for each shape; metrics may have an equation a leaf."""
    ours, theirs, _ = CASES[name]
    assert len(traced(ours).jaxpr.eqns) <= len(traced(theirs).jaxpr.eqns) + len(LEAVES)
