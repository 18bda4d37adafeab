"""What `python -m benchmarks --compiled` compiles: functions of ours, what each is compared with, and limits.

The naive formulas are what one would write without a library: norms in float32, a division, `jnp.where`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import clipjax
from benchmarks import trees
from benchmarks.steps import STEPS, Recipe, adam, chain, naive_max_norm, start

# The bounds: of programs that are never run.
AT = trees.Limits(value=0.5, rms=0.5, leaf_norm=1.0, global_norm=1.0, radius=0.5)
TREES: Mapping[str, Callable[[], trees.Shapes]] = {
    **trees.TREES,
    "leaves": lambda: trees.square(200, 64),
}
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


class Task(NamedTuple):
    """What is compiled: a function, its arguments' shapes, and which of them are donated."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()


class Row(NamedTuple):
    """One function of ours beside another, as a function of the parameters' shapes."""

    name: str
    label: str
    ours: Callable[[Any], Task]
    baseline: Callable[[Any], Task]
    baseline_label: str
    floor: float | None = None  # the bytes for each parameter, in float32, that it cannot do without


class Limit(NamedTuple):
    """What the figures of a row may be at most, on a platform with a tree; see `compiled.figures`."""

    platform: str
    tree: str
    dtype: str
    name: str
    at_most: dict[str, float]


def shapes_of(tree: str, dtype: str) -> dict[str, Any]:
    """The parameters of a tree, without their values."""
    return {
        key: jax.ShapeDtypeStruct(shape, jnp.dtype(DTYPES[dtype])) for key, shape in TREES[tree]().items()
    }


def step(recipe: Recipe, *, wide: bool = True) -> Callable[[Any], Task]:
    """A train step from the gradients on, whose parameters and state are donated.

    The state is float32, or if it is not `wide`, in the parameters' dtype.
    """

    def task(params: Any) -> Task:
        init = (lambda p: start(recipe, p)) if wide else recipe.tx.init
        state = jax.eval_shape(init, params)
        return Task(recipe.step, (params, state, params), (0, 1))

    return task


def called(function: Callable[[Any], Any]) -> Callable[[Any], Task]:
    """A function of the parameters, which are donated."""
    return lambda params: Task(function, (params,), (0,))


def measured(function: Callable[[Any], Any]) -> Callable[[Any], Task]:
    """A function that reads a tree and leaves it."""
    return lambda params: Task(function, (params,))


def _units(x: Any) -> tuple[int, ...]:
    return tuple(range(x.ndim - 1))


def _plain_norms(x: Any) -> Any:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=_units(x), keepdims=True))


def _scaled_max_norm(params: Any, radius: float) -> Any:
    """Max-norm as the shortest formula; without the choice for each entry."""

    def one(w: Any) -> Any:
        return w * jnp.minimum(1, radius / _plain_norms(w)).astype(w.dtype) if w.ndim > 1 else w

    return jax.tree.map(one, params)


def _naive_unit_norm(params: Any) -> Any:
    return jax.tree.map(lambda w: w / _plain_norms(w).astype(w.dtype) if w.ndim > 1 else w, params)


def _naive_unit_link() -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        wanted = _naive_unit_norm(optax.apply_updates(params, updates))
        return jax.tree.map(lambda w, p: w - p, wanted, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def _naive_tangent_cone(radius: float) -> optax.GradientTransformation:
    def one(g: Any, w: Any) -> Any:
        if w.ndim < 2:
            return g
        squares = jnp.sum(jnp.square(w), axis=_units(w), keepdims=True)
        inner = jnp.sum(g * w, axis=_units(w), keepdims=True)
        outward = (squares >= radius**2) & (inner < 0)
        return jnp.where(outward, g - w * (inner / squares), g)

    return optax.stateless(lambda updates, params: jax.tree.map(one, updates, params))


def _link_or_call(
    name: str, label: str, projection: clipjax.Projection, optimizer: Any, *, wide: bool
) -> Row:
    return Row(
        name,
        label,
        step(Recipe(clipjax.chain(optimizer, projection)), wide=wide),
        step(Recipe(optimizer, projection), wide=wide),
        "called in the step",
    )


def _transformed(tx: optax.GradientTransformation) -> Callable[[Any], Task]:
    """A transformation alone; the gradients and the state are donated."""

    def task(params: Any) -> Task:
        return Task(tx.update, (params, jax.eval_shape(tx.init, params), params), (0, 1))

    return task


ROWS: tuple[Row, ...] = (
    *(Row(s.name, s.label, step(s.ours(AT)), step(s.peer(AT)), s.peer_label) for s in STEPS),
    Row(
        "max_norm_alone",
        "max_norm called, nothing else",
        called(clipjax.max_norm(AT.radius)),
        called(lambda params: _scaled_max_norm(params, AT.radius)),
        "w * min(1, r / |w|)",
    ),
    Row(
        "max_norm_alone_where",
        "max_norm called, nothing else",
        called(clipjax.max_norm(AT.radius)),
        called(lambda params: naive_max_norm(params, AT.radius)),
        "where(|w| > r, w * (r / |w|), w)",
    ),
    Row(
        "agc",
        "adaptive_grad_clip + Adam",
        step(chain(clipjax.adaptive_grad_clip(0.01), adam())),
        step(chain(optax.adaptive_grad_clip(0.01), adam())),
        "optax.adaptive_grad_clip",
    ),
    Row(
        "unit_norm_link",
        "Adam, unit_norm as last link",
        step(Recipe(clipjax.chain(adam(), clipjax.unit_norm()))),
        step(chain(adam(), _naive_unit_link())),
        "naive formula as link",
    ),
    *(
        _link_or_call(f"{name}_link_or_call{ending}", label, projection, optimizer, wide=wide)
        for name, projection in (
            ("max_norm", clipjax.max_norm(AT.radius)),
            ("unit_norm", clipjax.unit_norm()),
        )
        for ending, label, optimizer, wide in (
            ("", f"Adam, {name} as last link", adam(), True),
            ("_narrow", f"Adam with narrow moments, {name} as last link", optax.adam(1e-3), False),
        )
    ),
    # Adam moves 28 bytes for each parameter; the inner products need one more read of gradients and weights.
    Row(
        "tangent_cone",
        "tangent_cone + Adam",
        step(chain(clipjax.tangent_cone(AT.radius), adam())),
        step(chain(_naive_tangent_cone(AT.radius), adam())),
        "naive formula",
        floor=36,
    ),
    Row(
        "tangent_cone_alone",
        "tangent_cone, nothing else",
        _transformed(clipjax.tangent_cone(AT.radius)),
        _transformed(_naive_tangent_cone(AT.radius)),
        "naive formula",
        floor=20,
    ),
    Row(
        "functional_global_norm",
        "functional.global_norm",
        measured(clipjax.functional.global_norm),
        measured(optax.tree.norm),
        "optax.tree.norm",
    ),
    Row(
        "functional_leaf_norms",
        "functional.leaf_norms",
        measured(clipjax.functional.leaf_norms),
        measured(lambda tree: jax.tree.map(lambda x: jnp.sqrt(jnp.sum(jnp.square(x))), tree)),
        "naive formula",
    ),
    Row(
        "functional_unitwise_norms",
        "functional.unitwise_norms",
        measured(lambda tree: clipjax.functional.unitwise_norms(tree, clipjax.fan_in)),
        measured(lambda tree: jax.tree.map(_plain_norms, tree)),
        "naive formula",
    ),
)


_CLIPS = ("global_norm", "rms", "norm", "value")
_TPU_STEP = {"bytes": 1.05, "operations": 2, "compile": 2.5}
_TPU_CALL = {"bytes": 1.05, "operations": 6, "compile": 2.5}
_SMALL = {"kernels": 1.2, "compile": 2}

LIMITS: tuple[Limit, ...] = (
    *(
        Limit("v5e", tree, "f32", name, at_most)
        for tree in ("big", "transformer")
        for name, at_most in (
            *(("global_norm", _TPU_STEP), ("rms", _TPU_STEP)),
            *(("max_norm_alone", _TPU_CALL), ("max_norm_alone_where", _TPU_CALL)),
        )
    ),
    *(Limit("h100", "big", "f32", name, {"kernels": 1.2}) for name in _CLIPS),
    *(Limit("h100", "leaves", "f32", name, _SMALL) for name in ("agc", "unit_norm_link", "link")),
    Limit("h100", "big", "f32", "tangent_cone", {"floor": 1.5, "scratch": 0.01}),
    *(
        Limit("a100", "big", "bf16", f"{name}_link_or_call{moments}", {"bytes": 1.2, "copies": 0})
        for name in ("max_norm", "unit_norm")
        for moments in ("", "_narrow")
    ),
    *(
        Limit("t4", "big", "f32", f"functional_{name}", {"float64": 0.25})
        for name in ("global_norm", "leaf_norms", "unitwise_norms")
    ),
)
