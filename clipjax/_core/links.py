"""The links of chains, and the types of gradient transformations that chains distinguish."""

from __future__ import annotations

from typing import Any

import optax

from clipjax._core.arguments import makes_transformations, shown


class Clip(optax.GradientTransformationExtraArgs):
    """A transformation that bounds gradients and is not an optimizer."""


class Recorder(Clip):
    """A transformation that only measures, and returns the updates unchanged."""


class Placing(optax.GradientTransformationExtraArgs):
    """The last step of an optimizer that places the weights itself: only a projection may follow it."""

    name: str = "a transformation that places the weights"  # if `jax.tree.map` rebuilt it

    def __repr__(self) -> str:
        return self.name


class Chain(optax.GradientTransformationExtraArgs):
    """A gradient transformation that knows its links; nested chains are replaced by their links.

    Optax sees a gradient transformation with two fields. Those of `optax.chain` and Optax's wrappers do not
    know their links.
    """

    links: tuple[optax.GradientTransformation, ...] = ()  # none if `jax.tree.map` rebuilt it


def knowing(tx: optax.GradientTransformation, *links: optax.GradientTransformation) -> Chain:
    """Make a chain of a transformation that consists of these links."""
    known = Chain(*optax.with_extra_args_support(tx))
    known.links = links
    return known


def placing(name: str, tx: optax.GradientTransformation) -> Placing:
    """Make a :class:`Placing` of a transformation, called `name` in errors."""
    made = Placing(*optax.with_extra_args_support(tx))
    made.name = name
    return made


def links_of(link: optax.GradientTransformation) -> tuple[optax.GradientTransformation, ...]:
    """Return the links of a chain that knows them, else the link itself."""
    return (isinstance(link, Chain) and link.links) or (link,)


def check_transformation(name: str, value: Any) -> optax.GradientTransformation:
    """Return `value` if it is a gradient transformation, else raise an error with a hint."""
    if isinstance(value, optax.GradientTransformation):
        return value
    hint = ""
    if isinstance(value, list | tuple):
        hint = ": clipjax.chain(*links) combines several into one"
    elif name == "clip" and isinstance(value, int | float):
        hint = ": for example clipjax.clip_by_global_norm(1.0)"
    elif isinstance(value, optax.MultiSteps):
        hint = ": use its gradient_transformation(), or wrap it around the whole chain"
    elif makes_transformations(value):
        hint = f": call it, as in {value.__name__}(…)"
    elif callable(value):
        hint = ": clipjax.project makes a projection from a function of the weights"
    raise TypeError(f"{name} must be an optax.GradientTransformation, got {shown(value)}{hint}")


def check_optimizer(name: str, value: Any) -> optax.GradientTransformation:
    """Return `value` if it may be an optimizer: a gradient transformation that is not a projection."""
    if is_projection(value):
        raise ValueError(
            f"{name}: {value!r} projects weights: put it last in a chain, or pass it to bounded as project="
        )
    return check_transformation(name, value)


def is_projection(value: Any) -> bool:
    """Whether a value is a projection: a gradient transformation that can also be called on weights."""
    return isinstance(value, optax.GradientTransformation) and callable(value)
