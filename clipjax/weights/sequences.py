"""Projections, as users give them and as chains hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optax

from clipjax._core.links import links_of
from clipjax.weights.projections import Projection, project


def projections_of(link: optax.GradientTransformation) -> tuple[Projection, ...]:
    """The projections that a chain is known to end in."""
    return tuple(inner for inner in links_of(link) if isinstance(inner, Projection))


def as_projections(name: str, value: Any) -> tuple[Projection, ...]:
    """Make projections of what a user gives as one: a projection, a function, or a sequence of these."""
    if isinstance(value, Projection):
        return (value,)
    if isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{name} must be a projection or a function of the weights, or a sequence of these, got the "
            f"gradient transformation {value!r}"
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(each for item in value for each in as_projections(name, item))
    if not callable(value):
        raise TypeError(f"{name} must be a projection, a function of the weights, or several, got {value!r}")
    return (project(value),)
