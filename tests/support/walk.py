"""The walk over the public transformations, and a value for every argument that they need."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import clipjax

# A value for every required parameter, by its name. A new transformation with a new parameter name
# needs one line here, and nothing else.
ARGUMENTS: dict[str, Any] = {
    "max_norm": 1.0,
    "max_norms": {"*": 1.0},
    "radius": 1.0,
    "bound": 1.0,
    "threshold": 0.25,
    "clipping": 0.01,
    "low": 0.5,
    "clip": clipjax.clip_by_global_norm(1.0),
    "high": 2.0,
    "learning_rate": 0.25,
    # decay=0.5 is exact, so that a fused multiply-add under jit rounds as the eager sum does.
    "optimizer": optax.trace(decay=0.5),
    "function": lambda params: jax.tree.map(
        lambda x: jnp.clip(x, -1, 1) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x, params
    ),
}

# Further values worth a case of their own for optional parameters, by name.
VARIANTS: dict[str, list[Any]] = {
    "axes": [{"*kernel": 0}],
    "ord": [3],
    "rate": [0.5],
    "where": ["kernel"],
    "high": [1.25],
    "nonfinite": ["zero", "skip"],
    "project": [clipjax.max_norm(1.0)],
    "method": ["newton_schulz", "svd"],
    "soft": [True],
    "groups": ["leaf", 1],
    "of": [("updates", "params", "ratio")],
    "every": [2],
}

# The parameters that say how large something may be.
BOUNDS = ("max_norm", "radius", "bound", "threshold", "z_threshold", "clipping", "low", "high")

# What `update` cannot do without a further argument and weights that it fits: tested in its own module.
NEEDS_MORE = ("qk_clip",)

# What has a default, and does nothing without.
NEEDED = {("clip_by_value", "bound"), ("bounded", "clip")}

# Bounds of entries, which may be negative.
SIGNED = {("box", "low"), ("box", "high")}

# What bounds directions, and not lengths: an entry may change its sign.
TURNING = {"clip_by_spectral_norm", "spectral_cap", "tangent_cone", "tangent_space"}


def is_smooth(case: Case) -> bool:
    """Whether what is inside moves too, however little."""
    return bool(case.options.get("soft"))


# What gives each gradient a new norm, small ones too: nothing is inside a bound.
NORMALIZING = {"normalize_by_moving_norm"}


# What measures, and changes nothing.
MEASURING = {"record_norms"}
# What takes the step of an optimizer: its updates are no gradients any more.
STEPPING = {"hyperball"}


class Case(NamedTuple):
    """One transformation: its public name, and the arguments that differ from ARGUMENTS."""

    name: str
    options: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        shown = (f"{k}={getattr(v, '__name__', None) or type_or_value(v)}" for k, v in self.options.items())
        return f"{self.name}({', '.join(shown)})" if self.options else self.name


def type_or_value(value: Any) -> str:
    return type(value).__name__ if isinstance(value, optax.GradientTransformation | dict) else repr(value)


def public_callables() -> dict[str, Callable[..., Any]]:
    public = {name: getattr(clipjax, name) for name in clipjax.__all__}
    return {
        name: value
        for name, value in public.items()
        if callable(value) and not isinstance(value, type | types.ModuleType)
    }


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(clipjax, name)).parameters)


def required(name: str) -> list[str]:
    return [
        key
        for key, parameter in parameters(name).items()
        if (parameter.default is parameter.empty or (name, key) in NEEDED)
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def returns_transformation(function: Callable[..., Any]) -> bool:
    returned = str(inspect.signature(function).return_annotation)
    return "GradientTransformation" in returned or returned.split(".")[-1] == "Projection"


def make(name: str, **options: Any) -> Any:
    """Call a public function with the arguments of the table, except for `options`."""
    function = getattr(clipjax, name)
    positional, named = [], {}
    for key, parameter in parameters(name).items():
        if key in required(name) or key in options:
            value = options[key] if key in options else ARGUMENTS[key]
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[key] = value
    return function(*positional, **named)


def is_transformation(name: str) -> bool:
    """Whether a public callable makes a gradient transformation, by its annotation or by trying."""
    if returns_transformation(public_callables()[name]):
        return True
    if not set(required(name)) <= set(ARGUMENTS):
        return False
    try:
        return isinstance(make(name), optax.GradientTransformation)
    except (TypeError, ValueError):
        return False


def names() -> list[str]:
    return [name for name in public_callables() if is_transformation(name) and name not in NEEDS_MORE]


def cases() -> list[Case]:
    """Every transformation as it is by default."""
    return [Case(name) for name in names() if set(required(name)) <= set(ARGUMENTS)]


def variants() -> list[Case]:
    """Every transformation by default and with each of its optional parameters set."""
    found = cases()
    for case in cases():
        for key, values in VARIANTS.items():
            if key == "where" and not is_projection(make(case.name, **dict(case.options))):
                continue  # contract/test_where.py shows that it changes no bit, in each transformation
            if key in parameters(case.name) and key not in required(case.name):
                default = parameters(case.name)[key].default
                found += [Case(case.name, {key: value}) for value in values if value is not default]
    return found


def bound_parameters(name: str) -> list[str]:
    return [key for key in parameters(name) if key in BOUNDS]


def build(case: Case, **options: Any) -> Any:
    return make(case.name, **{**case.options, **options})


def is_projection(tx: Any) -> bool:
    return isinstance(tx, clipjax.Projection)
