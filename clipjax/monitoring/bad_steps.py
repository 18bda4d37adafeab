"""The bad steps that `record_norms` keeps, read from its state."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from clipjax._core.aliases import Tree
from clipjax._core.leaves import as_array
from clipjax._core.messages import a_few, short_repr
from clipjax._core.states import UNKNOWN, BadSteps, MetricsState
from clipjax.monitoring.metrics import labeled_states_in, logged_in, restored


class Place(NamedTuple):
    """Where a step broke; all is "" if that is not known."""

    words: str = ""
    layer: str = ""  # the only one that the words name, or the one with the most norm
    began_in: str = ""  # "forward" or "backward", the pass, or "loss"


class BadStep(NamedTuple):
    """A step that was not finite, or an outlier; `print` says what went wrong."""

    step: int  # the number of updates before it
    norm: float  # the norm of all leaves
    # The norm above which a step is an outlier; infinite in the first steps.
    threshold: float
    loss: float | None  # None if `update` got none
    groups: dict[str, float]  # the norm of each group, by name
    # The norms that probes saw, in the order of the model; infinite if an element is
    # not finite. They are empty if there are no probes, or if their taps were not
    # given.
    forward: dict[str, float] = {}  # noqa: RUF012
    backward: dict[str, float] = {}  # noqa: RUF012
    # The norms that probes saw in the forward pass of the last step, if it was not bad.
    usual: dict[str, float] = {}  # noqa: RUF012
    recorder: str = "record_norms"  # what the metrics of its `record_norms` begin with

    @property
    def is_of_loss(self) -> bool:
        """Whether the norm is within the threshold, so that only the loss is bad."""
        return self.norm <= self.threshold and self.norm < math.inf

    def __str__(self) -> str:
        text = f"step {self.step}: "
        if self.loss is not None and self.is_of_loss:
            why = ", an outlier" if math.isfinite(self.loss) else ""
            text += f"loss {self.loss:.2g}{why}; "
        text += f"norm {self.norm:.2g}"
        text += (
            f", usual up to {self.threshold:.2g}" if self.threshold < math.inf else ""
        )
        words = [place.words for place in places_of(self)]
        return "; ".join(filter(None, (text, *words)))


def places_of(step: BadStep) -> tuple[Place, Place]:
    """Return what probes tell of the place, and what groups tell beyond it."""
    place = place_of_probes(step)
    is_told = place.words and _no_group_is_finite(step)
    if is_told or step.is_of_loss or not step.groups:
        return place, Place()
    return place, _place_of_groups(step)


def _used_in(step: BadStep) -> dict[str, float]:
    """Return the groups whose gradient is not 0, as that of unused weights is.

    A gradient of 0 is finite wherever the step broke.
    """
    return {name: norm for name, norm in step.groups.items() if norm != 0}


def _no_group_is_finite(step: BadStep) -> bool:
    norms = _used_in(step).values()
    return len(norms) > 1 and not any(map(math.isfinite, norms))


def place_of_probes(step: BadStep) -> Place:
    """Return what probes tell of the place where the step broke.

    The forward pass goes from the first layer to the last, and the backward pass
    from the last to the first: the first layer in time that is not finite is the
    place.
    """
    bad_forward, bad_backward = (
        [name for name, norm in norms.items() if not math.isfinite(norm)]
        for norms in (step.forward, step.backward)
    )
    if bad_forward:
        name = bad_forward[0]
        return Place(f"first in the forward pass, at {name}", name, "forward")
    if not bad_backward:
        return _unusual(step.forward, step.usual)
    name = bad_backward[-1]
    if step.loss is not None and not math.isfinite(step.loss):
        return Place(f"in the loss, or after {name}", began_in="loss")
    *_, last = (key for key, norm in step.backward.items() if norm != 0)
    if name != last or any(map(math.isfinite, _used_in(step).values())):
        return Place(f"in the backward pass, at {name}", name, "backward")
    # No weights after the last probe show whether their gradients are finite.
    words = f"in the loss, or in the backward pass from the loss to {name}"
    if step.loss is not None:
        words = f"in the backward pass, from the loss to {name}"
    return Place(words, began_in="loss")


def _place_of_groups(step: BadStep) -> Place:
    """Return what groups tell of the place where the step broke."""
    bad = [name for name, norm in step.groups.items() if not math.isfinite(norm)]
    if _no_group_is_finite(step):
        but = " but those of norm 0" if len(_used_in(step)) < len(step.groups) else ""
        return Place(
            f"no group{but} is finite: it broke in the loss or in the forward pass"
        )
    if bad:
        layer = bad[0] if len(bad) == 1 else ""
        return Place(_boundary(list(_used_in(step)), bad), layer)
    if not math.isfinite(step.norm) and math.hypot(*step.groups.values()) < _MOST:
        return Place("all groups are finite: it broke in weights outside of the groups")
    name, largest = max(step.groups.items(), key=lambda item: item[1])
    if not math.isfinite(step.norm):
        return Place(f"largest in {name}", name)
    # The squares of the norms of all groups add up to the square of the norm.
    return Place(f"{(largest / step.norm) ** 2:.0%} of it in {name}", name)


# The text names a layer at which activations grow this many times more than usual.
_TOLD = 10

# A larger norm of finite elements is infinite in float32.
_MOST = 1.8e19


def _unusual(norms: dict[str, float], usual: dict[str, float]) -> Place:
    """Say at which layer activations grew most, compared with a usual step."""
    times = [1.0]
    for name, norm in norms.items():
        is_known = 0 < usual.get(name, 0) < math.inf
        times.append(norm / usual[name] if is_known else 0.0)
    pairs = zip(itertools.pairwise(times), norms, strict=True)
    growths = [(now / was, name) for (was, now), name in pairs if was > 0]
    most, name = max(growths, default=(0.0, ""))
    if most <= _TOLD:
        return Place()
    # In front of the first layer, nothing is known that it could grow from.
    what = "norm" if name == next(iter(norms)) else "growth"
    words = f"{most:.0f} times its usual {what} at {name}, in the forward pass"
    return Place(words, name, "forward")


_LAST_NUMBER = re.compile(r"(.*?)(\d+)(\D*)")


def _boundary(names: list[str], bad: list[str]) -> str:
    """Say which groups are not finite, and from which layer on groups are finite.

    The backward pass goes from the last layer to the first. Where it breaks, the
    gradients of that layer, or of the layers before it, are not finite, and the
    gradients of the layers after it are finite. Names that differ in a number are
    layers in the order of the number.
    """
    layers: dict[Any, dict[Any, str]] = {}
    for name in names:
        found = _LAST_NUMBER.fullmatch(name)
        before, number, after = found.groups() if found else (name, "0", "")
        of_stack = layers.setdefault((before, after, bool(found)), {})
        of_stack[int(number), number] = name
    broken, fine = [], []
    for stack in layers.values():
        in_order = [stack[number] for number in sorted(stack)]
        some = [name for name in in_order if name in bad]
        if not some:
            continue
        count = len(some)
        is_start = some == in_order[:count]
        is_range = is_start and count > 1
        between = "and" if count == 2 else "to"
        broken += [f"{some[0]} {between} {some[-1]}"] if is_range else some
        fine += in_order[count : count + 1] if is_start else []
    text = f"not finite in {a_few(broken, 3)}"
    return f"{text}; fine from {a_few(fine, 3)} on" if fine else text


def bad_steps(opt_state: Tree) -> list[BadStep]:
    """Return the bad steps that `record_norms(keep=n)` has kept, oldest first.

    Use it after a run broke, or later on a checkpoint of the run, to find which step
    broke, and in which layer.

    Args:
      opt_state: an optimizer state, or a tree that contains one, such as a checkpoint,
        as in :func:`metrics`.

    Returns:
      A list of `BadStep(step, norm, threshold, loss, groups, forward, backward, usual,
      recorder)`, empty if there was none. `step` is the number of updates before the
      bad step, so the first step of a run is step 0. `loss` is None if `update` got
      none. `groups` maps the names of groups to their norms, and `forward` and
      `backward` map the names of probes to the norms that they saw. `usual` has the
      norms that probes saw in the forward pass of the last step of the run, if that
      step was not bad. `recorder` is what the metrics of the `record_norms` that kept
      the step begin with.

    Raises:
      TypeError: `opt_state` is traced, or has shapes in place of arrays.
      ValueError: no `record_norms` in `opt_state` keeps steps; the state is stacked, as
        `vmap` makes it.

    If the norm of a bad step is an outlier, the text that `print` shows names the group
    with the largest part of the squared norm. If the norm is not finite, the text names
    the groups that are not finite, and the layer from which on all groups are finite:
    the backward pass broke at the layer before it. If no group is finite, the text says
    that the step broke in the loss or in the forward pass, since gradients do not tell
    the layer then. A group whose norm is 0, such as a group of weights that the step
    does not use, is left out of this search. With probes, the text says in which pass
    and at which layer the first NaN or infinity arose. Pass `loss=` to `update`, too,
    so that the text can tell the loss from the last layer.

    See Also:
      :func:`record_norms` keeps the steps; :func:`probe` finds the layer in both
      passes; :func:`skip_spikes` skips such steps.

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
        (label, name, bad, state)
        for label, state in labeled_states_in(opt_state).items()
        if isinstance(state.memory, Mapping)
        for name, node in state.memory.items()
        if (bad := restored(BadSteps, BadSteps._fields, node))
    ]
    if not kept:
        raise ValueError(
            "opt_state: no recorder in it keeps bad steps. Put one in front of the "
            "optimizer, outside of a skip: optax.chain(clipjax.record_norms('leaf', "
            "keep=16), clipjax.bounded(...))"
        )
    found = [step for each in kept for step in _steps_in(*each)]
    return sorted(found, key=lambda step: step.step)


def _steps_in(
    label: str, name: str, kept: BadSteps, state: MetricsState
) -> list[BadStep]:
    """Return the steps in a memory, whose updates are called `name` in the metrics."""
    needed = kept.held, kept.steps, kept.rows, kept.order, state.step
    arrays = [*map(as_array, needed)], logged_in(state)
    for x in jax.tree.leaves(arrays):
        is_traced = isinstance(x, jax.core.Tracer)
        if is_traced or not isinstance(x, jax.Array | np.ndarray | np.generic):
            raise TypeError(
                "opt_state: it must have known arrays: call bad_steps outside jit, got "
                f"{short_repr(x)}"
            )
    (count, steps, rows, order, total), last = jax.device_get(arrays)
    if np.ndim(count):
        raise ValueError(
            f"opt_state: it is stacked, of shape {np.shape(count)}; take one, as in "
            "jax.tree.map(lambda x: x[0], opt_state)"
        )
    in_text_order = sorted(name for name, x in last.items() if x.dtype.kind == "f")
    names = [in_text_order[i] for i in order[: len(in_text_order)]]
    last_is_bad = count > 0 and steps[-1] == total - 1
    of_last = {name: float(last[name]) for name in names}
    usual = {} if last_is_bad else _groups_of("forward", of_last)
    usual = usual if any(usual.values()) else {}
    found = []
    for place in range(len(steps) - count, len(steps)):
        norm, threshold, loss, *norms = map(float, rows[place])
        pairs = zip(names, norms, strict=True)
        named = {name: norm for name, norm in pairs if norm != UNKNOWN}
        forward, backward = (_groups_of(of, named) for of in ("forward", "backward"))
        given = any((*forward.values(), *backward.values()))
        step = BadStep(
            step=int(steps[place]),
            norm=norm,
            threshold=threshold,
            loss=None if loss == UNKNOWN else loss,
            groups=_groups_of(name, named),
            recorder=label,
        )
        if given:
            step = step._replace(forward=forward, backward=backward, usual=usual)
        found.append(step)
    return found


def _groups_of(name: str, norms: dict[str, float]) -> dict[str, float]:
    """Return the norms of the groups of what is called `name` in the metrics."""
    own = {
        key[len(name) + 1 :]: norm
        for key, norm in norms.items()
        if f"{key}/".startswith(f"{name}/")
    }
    # Leaves beside stacks form a group without a name, which gets the name of the
    # updates. If it is the only group, it is none.
    return {} if list(own) == [""] else {key or name: x for key, x in own.items()}
