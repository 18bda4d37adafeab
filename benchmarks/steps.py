"""The contestants: train steps with a bound, as clipjax and as Optax write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax
from benchmarks.trees import Limits


class Recipe(NamedTuple):
    """A train step from the gradients on: an optimizer, and what is done to the new parameters."""

    tx: optax.GradientTransformation
    project: Callable[[Any], Any] | None = None

    def step(self, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        """Take one step; meant to be compiled with `params` and `state` donated."""
        updates, state = self.tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (self.project(params) if self.project else params), state


class Step(NamedTuple):
    """One row of the table."""

    name: str
    label: str
    ours: Callable[[Limits], Recipe]
    peer: Callable[[Limits], Recipe]
    peer_label: str
    reads: int  # passes over the gradients that it needs beyond Adam's
    sweeps: int  # passes (a read or a write) over the parameters beyond Adam's
    target: float  # highest ratio to Adam alone, on two CPU cores
    is_link: bool = False  # emits an update from the parameters it wants
    baseline: Callable[[Limits], Recipe] | None = None  # the same passes, nothing exact: see `baseline_scale`


# The highest ratios allowed on two CPU cores, for cases that a step's own target does not cover.
SMALL_TARGET = 1.35
LINK_TARGET_MEMORY_SCHEDULER = 1.7
COMPILE_TARGET = 1.5
SCRATCH_TARGET = 0.01  # of the parameters' bytes, for projections by a direct call


def adam() -> optax.GradientTransformation:
    """Adam with both moments in float32, whatever the gradients are: see :func:`start`."""
    return optax.adam(1e-3, mu_dtype=jnp.float32)


def start(recipe: Recipe, params: Any) -> Any:
    """Initialize the state from float32 shapes.

    Optax has `mu_dtype` but keeps the second moment in the dtype that `init` sees, and bfloat16
    would be too coarse for 0.999 of it.
    """
    return jax.jit(lambda p: recipe.tx.init(jax.tree.map(lambda x: x.astype(np.float32), p)))(params)


def bytes_moved(step: Step | None, dtype: str) -> int:
    """The bytes per parameter that a step cannot do without, each array passed once."""
    width = np.dtype(jnp.dtype(dtype)).itemsize
    adam_alone = 3 * width + 4 * 4  # parameters in and out, gradients; two float32 moments in and out
    return adam_alone + (step.reads + step.sweeps) * width if step else adam_alone


def chain(*links: optax.GradientTransformation) -> Recipe:
    """A recipe that is a chain and nothing else."""
    return Recipe(optax.chain(*links))


def naive_max_norm(params: Any, radius: float) -> Any:
    """Max-norm as the formula reads."""

    def one(w: jax.Array) -> jax.Array:
        if w.ndim < 2:
            return w
        norm = jnp.sqrt(jnp.sum(jnp.square(w), axis=tuple(range(w.ndim - 1)), keepdims=True))
        return jnp.where(norm > radius, w * (radius / norm), w)

    return jax.tree.map(one, params)


def naive_link(radius: float) -> optax.GradientTransformation:
    """Max-norm as the last link, as the formula reads."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        wanted = naive_max_norm(optax.apply_updates(params, updates), radius)
        return jax.tree.map(lambda w, p: w - p, wanted, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def clip_each_leaf(bound: float) -> optax.GradientTransformation:
    """Optax's ball projection, applied to each leaf of the gradients."""

    def one(g: jax.Array) -> jax.Array:
        return optax.projections.projection_l2_ball(g, scale=bound)

    return optax.stateless(lambda updates, _: jax.tree.map(one, updates))


def baseline_scale(tree: Any, bound: float, units: Callable[[jax.Array], Any]) -> Any:
    """Scale every unit by its plain float32 norm: what the passes alone cost.

    This is neither exact nor safe, and keeps no metrics. What is inside the bound may be changed.
    """

    def one(x: jax.Array) -> jax.Array:
        norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=units(x), keepdims=True))
        return x * jnp.minimum(1.0, bound / norm)

    return jax.tree.map(one, tree)


def baseline_clip(bound: float) -> optax.GradientTransformation:
    """The passes of a clip of every leaf."""
    return optax.stateless(lambda updates, _: baseline_scale(updates, bound, lambda _: None))


def baseline_global_clip(bound: float) -> optax.GradientTransformation:
    """The passes of a clip by global norm."""

    def update(updates: Any, _: Any) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(updates)))
        factor = jnp.minimum(1.0, bound / norm)
        return jax.tree.map(lambda g: g * factor, updates)

    return optax.stateless(update)


def baseline_value_clip(bound: float) -> optax.GradientTransformation:
    """The passes of a clip by value that also knows the largest entry, which it keeps as its state."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del state, params
        largest = [jnp.max(jnp.abs(g)) for g in jax.tree.leaves(updates)]
        return jax.tree.map(lambda g: jnp.clip(g, -bound, bound), updates), jnp.max(jnp.stack(largest))

    return optax.GradientTransformation(lambda _: jnp.zeros(()), update)


def baseline_projection(radius: float) -> Callable[[Any], Any]:
    """The passes of a max-norm projection of every kernel."""

    def project(params: Any) -> Any:
        kernels = {key: w for key, w in params.items() if w.ndim > 1}
        return params | baseline_scale(kernels, radius, lambda w: tuple(range(w.ndim - 1)))

    return project


ADAM = "adam"

STEPS: tuple[Step, ...] = (
    Step(
        "global_norm",
        "clip_by_global_norm + Adam",
        lambda at: chain(clipjax.clip_by_global_norm(at.global_norm), adam()),
        lambda at: chain(optax.clip_by_global_norm(at.global_norm), adam()),
        "optax.clip_by_global_norm",
        reads=1,
        sweeps=0,
        target=1.2,
        baseline=lambda at: chain(baseline_global_clip(at.global_norm), adam()),
    ),
    Step(
        "value",
        "clip_by_value + Adam",
        lambda at: chain(clipjax.clip_by_value(at.value), adam()),
        lambda at: chain(optax.clip(at.value), adam()),
        "optax.clip",
        reads=0,
        sweeps=0,
        target=1.15,
        baseline=lambda at: chain(baseline_value_clip(at.value), adam()),
    ),
    Step(
        "rms",
        "clip_by_rms + Adam",
        lambda at: chain(clipjax.clip_by_rms(at.rms), adam()),
        lambda at: chain(optax.clip_by_block_rms(at.rms), adam()),
        "optax.clip_by_block_rms",
        reads=1,
        sweeps=0,
        target=1.2,
        baseline=lambda at: chain(baseline_clip(at.leaf_norm), adam()),
    ),
    Step(
        "norm",
        "clip_by_norm + Adam",
        lambda at: chain(clipjax.clip_by_norm(at.leaf_norm), adam()),
        lambda at: chain(clip_each_leaf(at.leaf_norm), adam()),
        "optax projection_l2_ball per leaf",
        reads=1,
        sweeps=0,
        target=1.2,
        baseline=lambda at: chain(baseline_clip(at.leaf_norm), adam()),
    ),
    Step(
        "max_norm",
        "Adam, max_norm called",
        lambda at: Recipe(adam(), clipjax.max_norm(at.radius)),
        lambda at: Recipe(adam(), lambda params: naive_max_norm(params, at.radius)),
        "naive formula, called",
        reads=0,
        sweeps=2,
        target=1.3,
        baseline=lambda at: Recipe(adam(), baseline_projection(at.radius)),
    ),
    Step(
        "clip_max_norm",
        "clip, Adam, max_norm called",
        lambda at: Recipe(
            optax.chain(clipjax.clip_by_global_norm(at.global_norm), adam()), clipjax.max_norm(at.radius)
        ),
        lambda at: Recipe(
            optax.chain(optax.clip_by_global_norm(at.global_norm), adam()),
            lambda params: naive_max_norm(params, at.radius),
        ),
        "optax clip, naive formula",
        reads=1,
        sweeps=2,
        target=1.45,
        baseline=lambda at: Recipe(
            optax.chain(baseline_global_clip(at.global_norm), adam()), baseline_projection(at.radius)
        ),
    ),
    Step(
        "link",
        "Adam, max_norm as last link",
        lambda at: Recipe(clipjax.chain(adam(), clipjax.max_norm(at.radius))),
        lambda at: chain(adam(), naive_link(at.radius)),
        "naive formula as link",
        reads=0,
        sweeps=2,
        target=2.9,
        is_link=True,
    ),
    Step(
        "bounded",
        "bounded(clip, max_norm, skip)",
        lambda at: Recipe(
            clipjax.bounded(
                adam(),
                clip=clipjax.clip_by_global_norm(at.global_norm),
                project=clipjax.max_norm(at.radius),
                nonfinite="skip",
            )
        ),
        lambda at: Recipe(
            optax.apply_if_finite(
                optax.chain(optax.clip_by_global_norm(at.global_norm), adam(), naive_link(at.radius)),
                max_consecutive_errors=100,
            )
        ),
        "optax.apply_if_finite of the same",
        reads=1,
        sweeps=2,
        target=2.9,
        is_link=True,
    ),
)
