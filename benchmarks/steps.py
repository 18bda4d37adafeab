"""The steps that are compared: with clipjax, and with Optax or by the formula."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import clipjax
from benchmarks.models import MODELS

# Bounds that the trees of `trees` exceed, so that every step changes something.
RADIUS, RMS, GLOBAL = 0.5, 0.5, 1.0

# Trees on which no other step is run.
OF_ONE_STEP = ("matrix", "heads")


class Recipe(NamedTuple):
    """A train step: an optimizer, and what is done to the new parameters."""

    tx: optax.GradientTransformation
    project: Any = lambda params: params

    def init(self, params: Any) -> Any:
        """Return the state for float32 moments, whatever dtype the parameters have."""
        like = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        # Separate buffers, which can be donated.
        return jax.tree.map(jnp.copy, self.tx.init(like))

    def step(self, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        """Take one step, which is compiled with `params` and `state` donated."""
        updates, state = self.tx.update(grads, state, params)
        # A projection, or a function of the weights.
        project = getattr(self.project, "apply", self.project)
        given = {"old": params} if "old" in getattr(self.project, "needs", ()) else {}
        return project(optax.apply_updates(params, updates), **given), state


class WholeStep(NamedTuple):
    """A train step with a model, which computes its own gradients."""

    recipe: Recipe
    loss: Callable[[Any, Any], jax.Array]

    def init(self, params: Any) -> Any:
        """Return the state of the optimizer."""
        return self.recipe.init(params)

    def step(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        """Take one step for a batch."""
        return self.recipe.step(params, state, jax.grad(self.loss)(params, batch))


def on(tree: str, recipe: Recipe) -> Recipe | WholeStep:
    """Return a step on a tree, with the model if it is one's."""
    return WholeStep(recipe, MODELS[tree].loss) if tree in MODELS else recipe


class Goals(NamedTuple):
    """The largest ratios of ours to theirs; None where there is no goal."""

    time: tuple[float | None, ...]  # on a CPU, for the trees big, gpt and small
    compile: float | None
    bytes: float  # on a TPU
    operations: float  # on a TPU
    kernels: float  # on a GPU
    # all-reduces more, for the largest norm of units that are split over two mesh axes
    maxima: int = 0


class Step(NamedTuple):
    """One row of a table."""

    label: str
    ours: Recipe
    theirs: Recipe
    peer: str
    goals: Goals
    tree: str | None = None  # the only one that it is run on

    def runs_on(self, tree: str) -> bool:
        """Return whether a tree is one for this step."""
        return tree == self.tree if self.tree else tree not in OF_ONE_STEP

    def time_goal(self, tree: str) -> float | None:
        """Return the goal for the time on a tree."""
        return dict(
            zip((self.tree or "big", "gpt", "small"), self.goals.time, strict=True)
        ).get(tree)


def adam() -> optax.GradientTransformation:
    """Return Adam with both moments in float32."""
    return optax.adam(1e-3, mu_dtype=jnp.float32)


def _chain(*links: optax.GradientTransformation) -> Recipe:
    return Recipe(optax.chain(*links))


def _max_norm(params: Any) -> Any:
    """Bound the columns of each matrix, by Keras' formula."""

    def one(w: jax.Array) -> jax.Array:
        if w.ndim < 2:
            return w
        norms = jnp.sqrt(jnp.sum(jnp.square(w), axis=0, keepdims=True))
        return w * (jnp.clip(norms, 0, RADIUS) / (1e-7 + norms))

    return jax.tree.map(one, params)


def _max_norm_link() -> optax.GradientTransformation:
    """Return the same as a link: the wanted parameters less the old ones."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        wanted = _max_norm(optax.apply_updates(params, updates))
        return jax.tree.map(jnp.subtract, wanted, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def _tangent_cone() -> optax.GradientTransformation:
    """Return two passes by hand: measure columns, take a multiple of weights away."""

    def one(g: jax.Array, w: jax.Array) -> jax.Array:
        if g.ndim < 2:
            return g
        squares = jnp.sum(jnp.square(w), axis=0, keepdims=True)
        product = jnp.sum(g * w, axis=0, keepdims=True)
        outward = (squares >= RADIUS**2) & (product < 0)
        return g - w * jnp.where(outward, product / squares, 0)

    return optax.stateless(lambda updates, params: jax.tree.map(one, updates, params))


def _spectral_cap(params: Any) -> Any:
    """Cap singular values by a decomposition."""

    def one(w: jax.Array) -> jax.Array:
        u, s, vh = jnp.linalg.svd(w, full_matrices=False)
        return (u * jnp.minimum(s, RADIUS)) @ vh

    return jax.tree.map(one, params)


# The largest of each head.
LOGITS = {f"layer_{i:02}": jnp.linspace(50.0, 200.0, 16) for i in range(12)}


def _qk_clip(params: Any) -> Any:
    """Scale the heads of queries and keys."""
    scales = {
        layer: jnp.sqrt(jnp.minimum(1, 100 / each))[:, None]
        for layer, each in LOGITS.items()
    }
    return {
        name: x if "value" in name else x * scales[name.split("/")[0]]
        for name, x in params.items()
    }


SPECTRAL_CAP = clipjax.spectral_cap(RADIUS)
QK_CLIP = functools.partial(clipjax.qk_clip().apply, max_logits=LOGITS)


def _skipping() -> Recipe:
    link = optax.chain(optax.clip_by_global_norm(GLOBAL), adam(), _max_norm_link())
    return Recipe(optax.apply_if_finite(link, max_consecutive_errors=5))


_BOUNDED = clipjax.bounded(
    adam(),
    clip=clipjax.clip_by_global_norm(GLOBAL),
    project=clipjax.max_norm(RADIUS),
    nonfinite="skip",
)

STEPS: dict[str, Step] = {
    "global": Step(
        "clip_by_global_norm + Adam",
        _chain(clipjax.clip_by_global_norm(GLOBAL), adam()),
        _chain(optax.clip_by_global_norm(GLOBAL), adam()),
        "optax.clip_by_global_norm",
        Goals((0.6, 0.7, 1.0), 1.2, 1.01, 1.1, 1.1),
    ),
    "rms": Step(
        "clip_by_rms + Adam",
        _chain(clipjax.clip_by_rms(RMS), adam()),
        _chain(optax.clip_by_block_rms(RMS), adam()),
        "optax.clip_by_block_rms",
        Goals((1.05, 1.05, 1.1), 2.0, 1.2, 1.1, 1.2),
    ),
    "agc": Step(
        "adaptive_grad_clip + Adam",
        _chain(clipjax.adaptive_grad_clip(0.01), adam()),
        _chain(optax.adaptive_grad_clip(0.01), adam()),
        "optax.adaptive_grad_clip",
        Goals((1.0, 1.1, 1.15), 2.0, 1.05, 1.1, 1.1, maxima=2),
    ),
    "called": Step(
        "Adam, then max_norm called",
        Recipe(adam(), clipjax.max_norm(RADIUS)),
        Recipe(adam(), _max_norm),
        "Keras' formula by hand",
        Goals((1.05, 1.05, 1.1), 1.5, 1.01, 1.1, 1.1),
    ),
    "link": Step(
        "Adam + max_norm as a link",
        _chain(adam(), clipjax.max_norm(RADIUS)),
        _chain(adam(), _max_norm_link()),
        "Keras' formula in a link",
        Goals((1.05, 1.05, 1.1), 1.5, 1.01, 1.4, 1.1),
    ),
    "bounded": Step(
        "bounded: clip, Adam, max_norm, skip",
        Recipe(_BOUNDED),
        _skipping(),
        "optax.apply_if_finite",
        Goals((1.45, 1.45, 1.1), 1.5, 1.05, 1.2, 1.2),
    ),
    "zclip": Step(
        "zclip + Adam",
        _chain(clipjax.zclip(), adam()),
        _chain(optax.clip_by_global_norm(GLOBAL), adam()),
        "optax.clip_by_global_norm",
        Goals((0.65, 0.75, 1.1), 1.5, 1.02, 1.1, 1.2),
    ),
    "cone": Step(
        "tangent_cone + Adam",
        _chain(clipjax.tangent_cone(RADIUS), adam()),
        _chain(_tangent_cone(), adam()),
        "two passes by hand",
        Goals((1.1, 1.1, 1.1), 1.7, 1.2, 1.2, 1.2, maxima=2),
    ),
}

ALONE: dict[str, Step] = {
    "called-clip": Step(
        "clip + Adam, max_norm called",
        Recipe(
            optax.chain(clipjax.clip_by_global_norm(GLOBAL), adam()),
            clipjax.max_norm(RADIUS),
        ),
        Recipe(optax.chain(optax.clip_by_global_norm(GLOBAL), adam()), _max_norm),
        "Optax's clip, Keras' formula",
        Goals((None, None, None), None, 1, 1, 1),
    ),
    "spectral": Step(
        "Adam, then spectral_cap called",
        Recipe(adam(), SPECTRAL_CAP),
        Recipe(adam(), _spectral_cap),
        "a decomposition by hand",
        Goals((2.0, 2.0, 2.0), None, 1, 1, 1),
        "matrix",
    ),
    "qk": Step(
        "Adam, then qk_clip called",
        Recipe(adam(), QK_CLIP),
        Recipe(adam(), _qk_clip),
        "the formula by hand",
        Goals((1.05, 1.05, 1.1), 1.5, 1, 1, 1),
        "heads",
    ),
}
