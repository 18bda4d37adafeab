"""Optax's clips, norms and projections, replaced by ours of the same meaning."""

from __future__ import annotations

from typing import Any

import clipjax
from clipjax import functional
from tests.outside.swap import counted, replace


def swap() -> None:
    """Replace them in every module of Optax."""
    import optax

    # As they are: where arguments have other names, a test says so.
    drop_in = {
        optax.clip: clipjax.clip_by_value,
        optax.clip_by_global_norm: clipjax.clip_by_global_norm,
        optax.clip_by_block_rms: clipjax.clip_by_rms,
        optax.adaptive_grad_clip: clipjax.adaptive_grad_clip,
        optax.keep_params_nonnegative: clipjax.non_negative,
        optax.zero_nans: clipjax.zero_nonfinite,
        optax.apply_if_finite: _skip_nonfinite,
        optax.tree.norm: _norm,
    }
    projections = optax.projections
    as_called = {
        projections.projection_non_negative: lambda tree: clipjax.non_negative()(tree),
        projections.projection_box: lambda tree, low, high: clipjax.box(low, high)(tree),
        projections.projection_hypercube: lambda tree, scale=1.0: clipjax.box(0.0, scale)(tree),
        projections.projection_l2_ball: lambda tree, scale=1.0: functional.clip_by_global_norm(tree, scale)[
            0
        ],
        projections.projection_linf_ball: lambda tree, scale=1.0: functional.clip_by_value(
            tree, -scale, scale
        ),
    }
    others = [
        projection
        for name, projection in vars(projections).items()
        if name.startswith("projection_") and projection not in as_called
    ]
    for theirs, ours in (drop_in | as_called).items():
        replace("optax", theirs, counted(ours))
    for theirs in others:
        replace("optax", theirs, counted(_through_project(theirs), theirs))


def _skip_nonfinite(inner: Any, max_consecutive_errors: int) -> Any:
    """`optax.apply_if_finite`, by the names of ours."""
    return clipjax.skip_nonfinite(inner, max_consecutive=max_consecutive_errors)


def _norm(tree: Any, ord: Any = None, *, squared: bool = False) -> Any:  # noqa: A002
    """`optax.tree.norm`, which spells orders in other ways, and gives the square, too."""
    norm = functional.global_norm(tree, 2 if ord is None else float(ord))
    return norm**2 if squared else norm


def _through_project(theirs: Any) -> Any:
    """A projection of Optax that has no counterpart here, as `clipjax.project` makes a link of it."""

    def call(tree: Any, *args: Any, **kwargs: Any) -> Any:
        return clipjax.project(lambda weights: theirs(weights, *args, **kwargs))(tree)

    return call
