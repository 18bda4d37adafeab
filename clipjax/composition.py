"""Chains in the correct order: clip, optimize, project."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import optax

from clipjax._core.arguments import explained, shown
from clipjax._core.links import (
    Chain,
    Clip,
    Placing,
    Recorder,
    check_optimizer,
    check_transformation,
    knowing,
    links_of,
)
from clipjax._core.mesh import AxisName
from clipjax.gradients.nonfinite import skip_nonfinite, zero_nonfinite
from clipjax.weights.projections import Projection
from clipjax.weights.sequences import as_projections, projections_of

Nonfinite = Literal["propagate", "zero", "skip"]


@explained
def chain(*links: optax.GradientTransformation) -> Chain:
    """Chain transformations as `optax.chain` does, and check that projections come last.

    A projection bounds the weights that result from the update. A link after it changes the update and breaks
    the bound, which `optax.chain` does not report.

    Args:
      *links: gradient transformations; the last of them may be projections, and :func:`record_norms`.

    Returns:
      A transformation with the state of `optax.chain`. Its projections need not measure the incoming weights,
      which saves one pass over them, and their metric `violation` stays 0.

    Raises:
      ValueError: there are no links, or a projection is not last, even one at the end of a chain that this
        function or `clipjax.bounded` made.
      TypeError: a link is not a gradient transformation.

    Equals `optax.chain` of the same links, bit for bit. Links inside Optax's own wrappers (`optax.chain`,
    `masked`, …) cannot be checked; the metric `violation` of a projection in them shows whether it is last,
    see :class:`clipjax.Projection`. If an `optax.chain` adds links after the result of this function, neither
    a check nor `violation` reveals it: make that outer chain with `clipjax.chain`, too.

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
    moving = [(i, link) for i, link in flat if not isinstance(link, Recorder)]
    for (i, link), (j, after) in itertools.pairwise(moving):
        if isinstance(link, Projection | Placing) and not isinstance(after, Projection):
            end = "" if link is links[i] else "a chain that ends in "
            raise ValueError(
                f"links[{i}], {end}{link!r}, projects the weights, but links[{j}] moves them again: "
                f"put projections last"
            )
    checked = (link.last if isinstance(link, Projection) else link for link in links)
    return knowing(optax.chain(*checked), *(link for _, link in flat))


@explained
def bounded(
    optimizer: optax.GradientTransformation,
    *,
    clip: optax.GradientTransformation | None = None,
    project: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    nonfinite: Nonfinite = "propagate",
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Put bounds around an optimizer, in the correct order: clip, optimize, project.

    Args:
      optimizer: any gradient transformation, such as `optax.adam(1e-3)`.
      clip: a gradient transformation to apply before it, such as `clipjax.clip_by_global_norm(1.0)`.
      project: a projection to apply after it, such as `clipjax.max_norm(3.0)`, or any function of the
        weights; or a sequence of these, applied in order (the bound of the last one is sure to hold, the
        bounds of the others only if it does not move the weights out of them).
      nonfinite: what happens to NaN and infinite gradient entries. `"propagate"`: they spread, as NaN.
        `"zero"`: they become 0 and are counted (:func:`clipjax.zero_nonfinite`). `"skip"`: the step is
        skipped and the whole state stays as it was (:func:`skip_nonfinite`).
      axis_name: the mesh axes whose devices zero or skip together, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation; `clipjax.metrics` reads what all of its parts did.

    Raises:
      TypeError, ValueError: an argument is of the wrong kind, or in the wrong place: a projection as
        `optimizer` or `clip`, or `optax.MultiSteps` as `optimizer`.

    Accumulate gradients outside, so that their mean is clipped once:
    `optax.MultiSteps(bounded(…), every_k_schedule=4)`. A NaN would stay in the sum of `MultiSteps` forever:
    keep it out with `should_skip_update_fn=optax.skip_not_finite`, or with :func:`skip_nonfinite` around
    everything.

    Example:
      >>> import clipjax, optax
      >>> tx = clipjax.bounded(
      ...     optax.adam(1e-3),
      ...     clip=clipjax.clip_by_global_norm(1.0),
      ...     project=clipjax.max_norm(3.0),
      ...     nonfinite="skip",
      ... )
    """
    if nonfinite not in get_args(Nonfinite):
        raise ValueError(f"nonfinite must be one of {get_args(Nonfinite)}, got {shown(nonfinite)}")
    links = [_check_before("optimizer", optimizer)]
    if clip is not None:
        links.insert(0, _check_before("clip", clip))
    if nonfinite == "zero":
        links.insert(0, zero_nonfinite(axis_name=axis_name))
    if project is not None:
        links.extend(as_projections("project", project))
    tx = chain(*links)
    return skip_nonfinite(tx, axis_name=axis_name) if nonfinite == "skip" else tx


def _check_before(name: str, value: Any) -> optax.GradientTransformation:
    """Return `value` if it may come before the projections in `bounded`, else raise an error."""
    update = getattr(value, "update", None)
    if isinstance(getattr(update, "__self__", None), optax.MultiSteps):  # the object, or its transformation
        raise ValueError(
            f"{name}: inside bounded, optax.MultiSteps would accumulate gradients that are already clipped: "
            f"put it outside, as in optax.MultiSteps(clipjax.bounded(…), every_k_schedule=k)"
        )
    if name == "optimizer" and all(isinstance(link, Clip) for link in links_of(value)):
        raise ValueError(f"optimizer: this is a clip: pass it to bounded as clip=; got {shown(value)}")
    for projection in projections_of(check_optimizer(name, value)):
        raise ValueError(f"{name}: a chain that ends in {projection!r}: pass that to bounded as project=")
    return value
