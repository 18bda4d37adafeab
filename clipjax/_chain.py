"""A chain that checks where its projections stand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import optax

from clipjax.weights.projections import Projection, project


class Chain(optax.GradientTransformationExtraArgs):
    """A gradient transformation that knows its links, those of nested chains in place of the chains.

    To Optax it is one of two fields. `optax.chain` and Optax' wrappers return one that does not know.
    """

    links: tuple[optax.GradientTransformation, ...] = ()


def chain(*links: optax.GradientTransformation) -> Chain:
    """Chain transformations as `optax.chain` does, and check that projections come last.

    A projection bounds the weights that the update leads to. A link after it changes that update, and
    the bound is gone, silently in `optax.chain`.

    Args:
      *links: gradient transformations; the last of them may be projections.

    Returns:
      A transformation with the state of `optax.chain`. Its projections need not measure the weights that
      come in, which saves one pass over them, and their metric `violation` stays 0.

    Raises:
      ValueError: there are no links, or a projection is not last, be it the end of a chain that this
        function or `clipjax.bounded` made.
      TypeError: a link is no gradient transformation.

    Equals `optax.chain` of the same links, bit for bit. What Optax' own wrappers hide (`optax.chain`,
    `masked`, …) cannot be checked: a projection in them shows by its metric `violation`, see
    :class:`clipjax.Projection`. What this function returns shows nothing in an `optax.chain` that goes on
    after it: let that be a `clipjax.chain`, too.

    Example:
      >>> import clipjax, optax
      >>> tx = clipjax.chain(clipjax.clip_by_global_norm(1.0), optax.adam(1e-3), clipjax.max_norm(3.0))
      >>> clipjax.chain(clipjax.max_norm(3.0), optax.adam(1e-3))
      Traceback (most recent call last):
      ...
      ValueError: links[0], clipjax.max_norm(3.0), projects the weights, but links[1] moves them again: \
put projections last
    """
    if not links:
        raise ValueError("links: a chain needs at least one")
    for i, link in enumerate(links):
        check_transformation(f"links[{i}]", link)
    flat = [(i, inner) for i, link in enumerate(links) for inner in links_of(link)]
    for (i, link), (j, after) in itertools.pairwise(flat):
        if isinstance(link, Projection) and not isinstance(after, Projection):
            end = "" if link is links[i] else "a chain that ends in "
            raise ValueError(
                f"links[{i}], {end}{link!r}, projects the weights, but links[{j}] moves them again: "
                f"put projections last"
            )
    checked = (link.last if isinstance(link, Projection) else link for link in links)
    return knowing(optax.chain(*checked), *(link for _, link in flat))


def knowing(tx: optax.GradientTransformation, *links: optax.GradientTransformation) -> Chain:
    """Give a transformation the knowledge of its links."""
    known = Chain(*optax.with_extra_args_support(tx))
    known.links = links
    return known


def links_of(link: optax.GradientTransformation) -> tuple[optax.GradientTransformation, ...]:
    """The links of a chain that knows them; else the one."""
    return link.links if isinstance(link, Chain) else (link,)


def projections_of(link: optax.GradientTransformation) -> tuple[Projection, ...]:
    """The projections that a chain is known to end in."""
    return tuple(inner for inner in links_of(link) if isinstance(inner, Projection))


def check_transformation(name: str, value: Any) -> optax.GradientTransformation:
    """Return `value` if it is a gradient transformation, else say what it should be."""
    if isinstance(value, optax.GradientTransformation):
        return value
    hint = ""
    if isinstance(value, optax.MultiSteps):
        hint = ": take its gradient_transformation(), or put it around the whole"
    elif callable(value):
        hint = ": clipjax.project makes a projection of a function of the weights"
    raise TypeError(f"{name} must be an optax.GradientTransformation, got {value!r}{hint}")


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
