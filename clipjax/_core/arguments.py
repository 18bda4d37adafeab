"""Error messages for wrong calls: values shortened to a line, and argument names of other libraries."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import optax

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Our names for arguments of TensorFlow, Keras, PyTorch, Optax and Lightning. The first of them that a
# function has is meant. An empty name stands for the function's first argument.
_OURS = {
    **dict.fromkeys(("axis", "dim", "dims"), ("axes",)),
    **dict.fromkeys(("norm_type", "p", "order"), ("ord",)),
    **dict.fromkeys(("min_value", "clip_value_min", "min", "minimum", "lower"), ("low",)),
    **dict.fromkeys(("max_value", "clip_value_max", "max", "maximum", "upper"), ("high", "")),
    **dict.fromkeys(
        ("clip_norm", "clipnorm", "global_clipnorm", "max_grad_norm", "gradient_clip_val"), ("",)
    ),
    **dict.fromkeys(
        ("max_norm", "radius", "bound", "threshold", "clip_value", "clipvalue", "max_delta"), ("",)
    ),
    **dict.fromkeys(("t_list", "grads", "gradients", "params", "parameters", "updates"), ("tree",)),
    **dict.fromkeys(("tx", "inner", "opt"), ("optimizer",)),
    **dict.fromkeys(("projection", "constraint"), ("project",)),
    **dict.fromkeys(("mask", "filter"), ("where",)),
    "use_norm": ("norm",),
}


def shown(value: Any, most: int = 100) -> str:
    """Format a value for an error message: on one line, shortened if it is long, and functions by name."""
    if callable(value) and hasattr(value, "__name__"):
        kind = "class" if inspect.isclass(value) else "function"
        return "a function" if value.__name__ == "<lambda>" else f"the {kind} {value.__name__}"
    if isinstance(value, optax.GradientTransformation) and not callable(value):
        return "a gradient transformation"
    if isinstance(value, list | tuple) and any(isinstance(x, optax.GradientTransformation) for x in value):
        return f"a {type(value).__name__} of gradient transformations"
    text = " ".join(re.sub(" at 0x[0-9a-f]+", "", repr(jax.tree.map(_outline, value))).split())
    return text if len(text) <= most else f"{text[:most]}… ({type(value).__name__})"


def _outline(leaf: Any) -> Any:
    """Return a leaf, or its shape if it is large: formatting its values would copy them from the device."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if getattr(leaf, "size", 0) > 16 else leaf


def explained(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make `function` name an argument that does not fit, and the one that may be meant instead."""

    @functools.cache  # computed at the first call: at import, this would take longer than all the rest
    def expected() -> tuple[inspect.Signature, bool]:
        signature = inspect.signature(function)
        first = next(iter(signature.parameters.values()), inspect.Parameter.empty)
        return signature, "Mapping" in str(first)

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        misfit = ""
        signature, takes_mapping = expected()
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            misfit = str(error)
        if (
            args
            and not takes_mapping
            and _is_tree(args[0], or_array=bool(misfit))
            and (use := _use(function))
        ):
            raise TypeError(f"{use}, got {shown(args[0])}")
        if misfit:
            raise TypeError(_misfit(function.__name__, signature, kwargs, misfit))
        check_by_pattern("axis_name", kwargs.get("axis_name"), "names", check_names)
        return function(*args, **kwargs)

    return wrapped


def check_names(argument: str, names: Any) -> tuple[str, ...]:
    """Return the names of mesh axes as a tuple, or raise an error if they are not names."""
    if names is None:
        return ()
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be the name of a mesh axis, or several, got {shown(names)}")
    return tuple(names)


def check_by_pattern(argument: str, values: Any, what: str, check: Callable[[str, Any], object]) -> None:
    """Raise an error unless a value, or each value of a mapping from path patterns, passes `check`."""
    if not isinstance(values, Mapping):
        check(argument, values)
        return
    for pattern, value in values.items():
        if not isinstance(pattern, str):
            raise TypeError(f"{argument}: a path pattern must be a string, got {shown(pattern)}")
        of_pattern = f"{argument}[{pattern!r}]"
        if isinstance(value, Mapping):
            path = "/".join([pattern, *map(str, value)][:2])
            raise TypeError(f"{of_pattern} must be {what}, not a mapping: write paths, as {path!r}")
        check(of_pattern, value)


def _is_tree(value: Any, or_array: bool) -> bool:
    """Whether a value is a container of arrays, such as gradients, or an array with at least one axis."""
    leaves = [x for x in jax.tree.leaves(value) if hasattr(x, "dtype")]
    is_leaf = jax.tree_util.all_leaves([value])
    return bool(leaves) and (not is_leaf or (or_array and getattr(value, "ndim", 0) > 0))


def makes_transformations(function: Any) -> bool:
    """Whether a value is a function such as `optax.adam`, which returns a transformation when called."""
    return inspect.isfunction(function) and any(kind in _made(function) for kind in _TRANSFORMATIONS)


_TRANSFORMATIONS = ("GradientTransformation", "Projection", "Chain", "Clip")


def _made(function: Callable[..., Any]) -> str:
    return str(inspect.signature(function).return_annotation)


def _use(function: Callable[..., Any]) -> str:
    """Return a hint where to pass a tree, if `function` returns something that takes trees."""
    name = function.__name__
    if "Projection" in _made(function):
        return f"{name} makes a projection, which takes the weights: {name}(…)(params)"
    if makes_transformations(function):
        return f"{name} makes a gradient transformation; functions that clip a tree are in clipjax.functional"
    return ""


def _misfit(name: str, signature: inspect.Signature, kwargs: dict[str, Any], misfit: str) -> str:
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    call = f"{name}{inspect.Signature(bare)}"
    for given, value in kwargs.items():
        if given not in signature.parameters:
            ours = _ours(given, list(signature.parameters))
            return f"{name} has no argument {given}={shown(value)}{ours and f', but {ours!r}'}: {call}"
    return f"{name}: {misfit}: {call}"


def _ours(given: str, names: Sequence[str]) -> str:
    """Return the argument that may be meant, or an empty string."""
    for ours in _OURS.get(given, ()):
        if not ours or ours in names:
            return ours or next(name for name in names if name not in ("tree", "x"))
    return next(iter(difflib.get_close_matches(given, names, 1)), "")
