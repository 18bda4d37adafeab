"""Projections as arguments of users, and as links of chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optax

from clipjax._core.arguments import makes_transformations, shown
from clipjax._core.links import Clip, links_of
from clipjax.weights.projections import Projection, project


def projections_of(link: optax.GradientTransformation) -> tuple[Projection, ...]:
    """Return the projections at the end of a chain, if it knows its links."""
    return tuple(inner for inner in links_of(link) if isinstance(inner, Projection))


def as_projections(name: str, value: Any) -> tuple[Projection, ...]:
    """Make a tuple of projections from an argument: a projection, a function, or a sequence of these."""
    if isinstance(value, Projection):
        return (value,)
    if isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{name} must be a projection such as clipjax.max_norm(3.0), a function of the weights, or "
            f"several; got {shown(value)}{_hint(name, value)}"
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(each for item in value for each in as_projections(name, item))
    if not callable(value):
        raise TypeError(
            f"{name} must be a projection such as clipjax.max_norm(3.0), a function of the weights, or "
            f"several; got {shown(value)}"
        )
    if makes_transformations(value):
        raise TypeError(f"{name}: {shown(value)} makes a projection: call it, as in {value.__name__}(…)")
    return (project(value),)


def _hint(name: str, value: Any) -> str:
    """Return a hint for a gradient transformation that is not a projection."""
    if isinstance(value, Clip):
        return ", a clip, which bounded takes as clip=" if name == "project" else ", a clip"
    return ". A chain knows its projections only if clipjax.chain or clipjax.bounded made it"
