"""The links of a chain: what a chain knows of them, and which of them are gradient transformations."""

from __future__ import annotations

from typing import Any

import optax

from clipjax._core.arguments import makes_transformations, shown


class Clip(optax.GradientTransformationExtraArgs):
    """A transformation that bounds gradients, and is no optimizer."""


class Recorder(Clip):
    """A transformation that only measures: the updates come back as they are."""


class Placing(optax.GradientTransformationExtraArgs):
    """An optimizer's last step, which places the weights: only a projection may move them after it."""

    name: str = "a transformation that places the weights"  # where `jax.tree.map` made it anew

    def __repr__(self) -> str:
        return self.name


class Chain(optax.GradientTransformationExtraArgs):
    """A gradient transformation that knows its links, those of nested chains in place of the chains.

    To Optax it is one of two fields. `optax.chain` and Optax' wrappers return one that does not know.
    """

    links: tuple[optax.GradientTransformation, ...] = ()  # none where `jax.tree.map` made it anew


def knowing(tx: optax.GradientTransformation, *links: optax.GradientTransformation) -> Chain:
    """Give a transformation the knowledge of its links."""
    known = Chain(*optax.with_extra_args_support(tx))
    known.links = links
    return known


def placing(name: str, tx: optax.GradientTransformation) -> Placing:
    """Make the last step of an optimizer of a transformation, called `name` in errors."""
    made = Placing(*optax.with_extra_args_support(tx))
    made.name = name
    return made


def links_of(link: optax.GradientTransformation) -> tuple[optax.GradientTransformation, ...]:
    """The links of a chain that knows them; else the one."""
    return (isinstance(link, Chain) and link.links) or (link,)


def check_transformation(name: str, value: Any) -> optax.GradientTransformation:
    """Return `value` if it is a gradient transformation, else say what it should be."""
    if isinstance(value, optax.GradientTransformation):
        return value
    hint = ""
    if isinstance(value, list | tuple):
        hint = ": clipjax.chain(*links) makes one of several"
    elif name == "clip" and isinstance(value, int | float):
        hint = ": as clipjax.clip_by_global_norm(1.0)"
    elif isinstance(value, optax.MultiSteps):
        hint = ": take its gradient_transformation(), or put it around the whole"
    elif makes_transformations(value):
        hint = f": call it, as in {value.__name__}(…)"
    elif callable(value):
        hint = ": clipjax.project makes a projection of a function of the weights"
    raise TypeError(f"{name} must be an optax.GradientTransformation, got {shown(value)}{hint}")


def check_optimizer(name: str, value: Any) -> optax.GradientTransformation:
    """Return `value` if it may be an optimizer: neither a mere clip nor a projection."""
    if is_projection(value):
        raise ValueError(
            f"{name}: {value!r} projects weights: it goes last in a chain, and into bounded as project="
        )
    return check_transformation(name, value)


def is_projection(value: Any) -> bool:
    """Whether a value is a projection: a gradient transformation that can be called on weights, too."""
    return isinstance(value, optax.GradientTransformation) and callable(value)
