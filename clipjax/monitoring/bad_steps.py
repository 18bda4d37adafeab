"""The bad steps that a recorder keeps, read from its state."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from clipjax._core.aliases import Tree
from clipjax._core.messages import a_few, short_repr
from clipjax._core.states import NO_LOSS, BadSteps, Table
from clipjax.monitoring.metrics import as_array, states_in


class BadStep(NamedTuple):
    """A step whose norm or loss was not finite, or a spike; `print` says what it was.

    What is not known is NaN or infinity: the loss if `update` got none, the threshold
    in the first steps.
    """

    step: int  # how many updates there were before it
    norm: float  # that of all leaves
    threshold: float  # up to which norm a step is no spike
    loss: float
    groups: dict[str, float]  # the norm of each group, by name
    # The norms that probes saw, in the order of the model; infinite where an element is
    # not finite. Empty if there are no probes, or their taps were not given.
    forward: dict[str, float] = {}  # noqa: RUF012
    backward: dict[str, float] = {}  # noqa: RUF012

    @property
    def is_of_loss(self) -> bool:
        """Whether the norm is a usual one, and only the loss is bad."""
        return self.norm <= self.threshold and self.norm < math.inf

    def __str__(self) -> str:
        of_loss = self.is_of_loss
        text = f"step {self.step}: "
        text += f"loss {self.loss:.2g}; " if of_loss else ""
        text += f"norm {self.norm:.2g}"
        text += (
            f", usual up to {self.threshold:.2g}" if self.threshold < math.inf else ""
        )
        origin = self._origin()
        is_told = of_loss or not self.groups or (origin and self._no_group_is_finite)
        where = "" if is_told else self._where()
        return "; ".join(filter(None, (text, origin, where)))

    @property
    def _no_group_is_finite(self) -> bool:
        return len(self.groups) > 1 and not any(
            map(math.isfinite, self.groups.values())
        )

    def _origin(self) -> str:
        """Say what probes tell of the place where it began, "" for nothing.

        The forward pass goes from the first layer to the last, and the backward pass
        back: what is first in time is the place.
        """
        bad_forward, bad_backward = (
            [name for name, norm in norms.items() if not math.isfinite(norm)]
            for norms in (self.forward, self.backward)
        )
        if bad_forward:
            return f"first in the forward pass, at {bad_forward[0]}"
        if not bad_backward:
            return _largest_step(self.forward)
        place = bad_backward[-1]
        if place != list(self.backward)[-1] or any(
            map(math.isfinite, self.groups.values())
        ):
            return f"in the backward pass, at {place}"
        if self._no_group_is_finite:
            return f"in the loss, or behind {place}"
        # Of fewer than two groups none may show that the loss is fine.
        return f"in the loss, or at {place} or behind it in the backward pass"

    def _where(self) -> str:
        bad = [name for name, norm in self.groups.items() if not math.isfinite(norm)]
        if self._no_group_is_finite:
            return "no group is finite: it broke in the loss or in the forward pass"
        if bad:
            return _boundary(list(self.groups), bad)
        name, largest = max(self.groups.items(), key=lambda item: item[1])
        if not math.isfinite(self.norm):
            return f"largest in {name}"
        # Of squares, which add up to that of the norm.
        return f"{(largest / self.norm) ** 2:.0%} of it in {name}"


# By how much a norm is more than that of the layer before, so that it is told.
_TOLD = 10


def _largest_step(norms: dict[str, float]) -> str:
    """Say at which layer the norms that probes saw grew most, "" if at none."""
    pairs = itertools.pairwise(norms.items())
    growths = [(now / was, name) for (_, was), (name, now) in pairs if was > 0]
    most, name = max(growths, default=(0.0, ""))
    text = f"{most:.0f} times larger at {name}, in the forward pass"
    return text if most > _TOLD else ""


_LAST_NUMBER = re.compile(r"(.*?)(\d+)(\D*)")


def _boundary(names: list[str], bad: list[str]) -> str:
    """Say which groups are not finite, and from which layer on they are fine.

    The backward pass goes from the last layer to the first. Where it breaks down, the
    gradients of that layer, or of those before it, are not finite, and those of the
    layers behind it are fine. Names that differ in a number are layers in its order.
    """
    layers: dict[Any, dict[int, str]] = {}
    for name in names:
        found = _LAST_NUMBER.fullmatch(name)
        before, number, after = found.groups() if found else (name, "0", "")
        layers.setdefault((before, after, bool(found)), {})[int(number)] = name
    broken, fine = [], []
    for stack in layers.values():
        in_order = [stack[number] for number in sorted(stack)]
        of_stack = [name for name in in_order if name in bad]
        if not of_stack:
            continue
        count = len(of_stack)
        is_start = of_stack == in_order[:count]
        is_range = is_start and count > 1
        between = "and" if count == 2 else "to"
        ends = f"{of_stack[0]} {between} {of_stack[-1]}"
        broken += [ends] if is_range else of_stack
        fine += in_order[count : count + 1] if is_start else []
    text = f"not finite in {a_few(broken, 3)}"
    return f"{text}; fine from {a_few(fine, 3)} on" if fine else text


def bad_steps(opt_state: Tree) -> list[BadStep]:
    """Return the last bad steps that `record_norms(keep=n)` has kept, oldest first.

    Args:
      opt_state: an optimizer state, or a tree that contains one, such as a checkpoint,
        as in :func:`metrics`.

    Returns:
      A list of `BadStep(step, norm, threshold, loss, groups, forward, backward)`, empty
      if there was none.
      `step` counts the updates before it, as schedules do; `groups` maps names to
      norms. `print` of one names the group with the largest part of the squared norm.
      If the norm is not finite, it names the groups that are not finite, and the layer
      from which on all are fine: the backward pass broke down at the layer before. If
      no group is finite, it says that the step broke in the loss or in the forward
      pass, of which gradients do not tell the layer. Probes do: `forward` and
      `backward` have what they saw, and the text says in which pass and at which layer
      it began.

    Raises:
      ValueError: no recorder in `opt_state` keeps steps; the state is stacked, as
        `vmap` makes it.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> tx = optax.chain(
      ...     clipjax.record_norms("leaf", keep=8),
      ...     clipjax.bounded(optax.adam(1e-3), nonfinite="skip"),
      ... )
      >>> params = {"body": jnp.ones(2), "head": jnp.ones(2)}
      >>> state = tx.init(params)
      >>> for size in (1.0, 2.0, jnp.nan):
      ...     grads = {"body": jnp.ones(2), "head": jnp.array([size, 0.0])}
      ...     _, state = tx.update(grads, state, params)
      >>> for each in clipjax.bad_steps(state):
      ...     print(each)
      step 2: norm nan; not finite in head
    """
    kept = [
        (name, BadSteps(**bad) if isinstance(bad, Mapping) else bad, table)
        for state in states_in(opt_state)
        for table in state.metrics.values()
        if isinstance(table, Table) and isinstance(state.memory, Mapping)
        for name, bad in state.memory.items()
        if isinstance(bad, BadSteps)
        or (isinstance(bad, Mapping) and set(BadSteps._fields) == set(bad))
    ]
    if not kept:
        raise ValueError(
            "opt_state: no recorder in it keeps bad steps. Put one in front of the "
            "optimizer, outside of a skip: optax.chain(clipjax.record_norms('leaf', "
            "keep=16), clipjax.bounded(...))"
        )
    found = itertools.chain.from_iterable(itertools.starmap(_steps_in, kept))
    return sorted(found, key=lambda each: each.step)


def _steps_in(name: str, kept: BadSteps, table: Table) -> list[BadStep]:
    """Return the steps that are kept of updates that are called `name`."""
    arrays = [as_array(x) for x in (kept.held, kept.steps, kept.rows)]
    for x in arrays:
        is_traced = isinstance(x, jax.core.Tracer)
        if is_traced or not isinstance(x, jax.Array | np.ndarray | np.generic):
            raise TypeError(
                "opt_state: it must have known arrays: call bad_steps outside jit, got "
                f"{short_repr(x)}"
            )
    count, steps, rows = jax.device_get(arrays)
    if np.ndim(count):
        raise ValueError(
            f"opt_state: it is stacked, of shape {np.shape(count)}; take one, as in "
            "jax.tree.map(lambda x: x[0], opt_state)"
        )
    names = [name for each in table.known_names for name in each]
    found = []
    for place in range(len(steps) - count, len(steps)):
        norm, threshold, loss, *norms = map(float, rows[place])
        loss = math.nan if loss == NO_LOSS else loss
        named = dict(zip(names, norms, strict=True))
        of_probes = [_groups_of(of, named) for of in ("forward", "backward")]
        given = any(any(seen.values()) for seen in of_probes)
        numbers = norm, threshold, loss, _groups_of(name, named)
        both = of_probes if given else [{}, {}]
        found.append(BadStep(int(steps[place]), *numbers, *both))
    return found


def _groups_of(name: str, norms: dict[str, float]) -> dict[str, float]:
    """Return the norms of groups of updates that are called `name`."""
    own = {
        key[len(name) + 1 :]: norm
        for key, norm in norms.items()
        if f"{key}/".startswith(f"{name}/")
    }
    # Beside stacks, other leaves have the name of the updates. Alone they are no group.
    return {} if list(own) == [""] else {key or name: x for key, x in own.items()}
