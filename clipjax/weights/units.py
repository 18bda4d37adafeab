"""Projections that rescale units by a rule: called, and as a link, leaf after leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from clipjax._core.axes import Axes, Skip, resolve_axes
from clipjax._core.dtypes import as_arrays, in_float64
from clipjax._core.mesh import AxisName
from clipjax._core.norms import norms_of
from clipjax._core.platforms import stored
from clipjax._core.rescale import Scale, rescale
from clipjax._core.trees import Report, Rule, Unit, decide, report_of, rescale_units, units_of
from clipjax._core.xla_cpu import Turn, also_read, in_turns
from clipjax.weights.checks import check_are_weights
from clipjax.weights.link import applied


class OfUnits(NamedTuple):
    """A projection that measures and rescales the units of each leaf by a rule."""

    rule_at: Callable[[Any], Rule]  # from the step to the rule
    axes: Axes
    specs: Any
    axis_name: AxisName

    def check(self, params: Any) -> None:
        """Raise an error if the weights, or the axes for them, are invalid."""
        resolved = resolve_axes(self.axes, params)
        check_are_weights(params, [i for i, axes in enumerate(resolved) if not isinstance(axes, Skip)])

    def constrain(self, params: Any, step: Any) -> tuple[Any, Report]:
        """Apply the rule to all leaves."""
        params = as_arrays(params)
        self.check(params)
        return rescale_units(params, self.rule_at(step), self.axes, 2.0, self.specs, self.axis_name)


@in_float64
def steps_of_units(
    how: OfUnits,
    before: list[Any],
    updates: list[Any],
    treedef: Any,
    at_step: Any,
    ready: jax.Array,  # any number from the state
    step_of: Callable[..., Any],
    moved_by: Callable[[Sequence[Unit], list[Any]], list[Any]] = lambda _, updates: updates,
) -> tuple[list[Any], Report]:
    """Return the updates of all leaves, and a report of their units; large leaves are computed in turn.

    `moved_by(units, updates)` may first replace the updates of some leaves.
    """
    rule, leaves = how.rule_at(at_step), list(updates)
    norms: list[jax.Array] = []
    scales: list[Scale] = []
    done: list[Unit] = []

    def step(places: Sequence[int], turn: Turn) -> None:
        units, news, terms = [every[i] for i in places], [], []
        updates = moved_by(units, [stored(leaves[unit.position], turn) for unit in units])
        for unit, update in zip(units, updates, strict=True):
            old = before[unit.position]
            after = applied(old, update)
            is_sum = after.dtype == update.dtype and after.dtype.itemsize >= 4
            news.append((old, update, after))
            terms.append((old, update) if is_sum else (after,))
        found = norms_of(terms, [unit.reduced for unit in units], 2.0, [unit.names for unit in units])
        exact, down = decide(
            rule, [u._replace(leaf=new[2]) for u, new in zip(units, news, strict=True)], found
        )
        for unit, new, scale in zip(units, news, down, strict=True):
            leaves[unit.position] = step_of(*new, rescale(new[2], scale))
        norms.extend(found)
        scales.extend(exact)
        done.extend(units)

    def new(i: int) -> jax.Array:
        old = every[i].leaf
        return (old + leaves[every[i].position]).astype(old.dtype)  # as Optax adds them

    every = units_of(treedef.unflatten(before), how.axes, how.specs, how.axis_name)
    turn = in_turns([unit.leaf for unit in every], ready, step, new)
    report = report_of(norms, scales, done)
    return leaves, report._replace(scale=also_read(turn, report.scale))
