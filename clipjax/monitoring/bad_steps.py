"""The bad steps that `record_norms` keeps, read from its state."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from clipjax._core.aliases import Tree
from clipjax._core.leaves import a_few, short_repr
from clipjax._core.states import UNKNOWN, BadSteps, MetricsState
from clipjax.monitoring.groups import LARGEST, natural_order
from clipjax.monitoring.metrics import labeled_states_in, logged_in, restored


class BadStep(NamedTuple):
    """A step that was not finite, or an outlier; `print` says what went wrong."""

    step: int  # the number of updates before it
    norm: float  # the norm of all leaves
    # The norm above which a step is an outlier; infinite in the first steps.
    threshold: float
    loss: float | None  # None if `update` got none
    loss_threshold: float | None  # likewise for the loss
    groups: dict[str, float]  # the norm of each group, by name
    # How many bad steps came directly after it; 0 for those steps themselves.
    followed_by: int = 0
    # The norms that probes saw, in the order of the model; infinite if an element is
    # not finite. They are empty if there are no probes.
    forward: dict[str, float] = {}  # noqa: RUF012
    backward: dict[str, float] = {}  # noqa: RUF012
    # The norms that probes saw in the forward pass of the last step that was not bad.
    usual: dict[str, float] = {}  # noqa: RUF012
    recorder: str = "record_norms"  # what the metrics of its `record_norms` begin with

    @property
    def is_of_loss(self) -> bool:
        """Whether the norm is within the threshold, so that only the loss is bad."""
        return self.norm <= self.threshold and self.norm < math.inf

    def __str__(self) -> str:
        parts = [_compared("norm", self.norm, self.threshold)]
        if self.loss is not None and self.loss_threshold is not None:
            is_usual = math.isfinite(self.loss) and self.loss <= self.loss_threshold
            if not is_usual:
                parts.insert(0, _compared("loss", self.loss, self.loss_threshold))
        parts += [place.text for place in places_of(self) if place.text]
        if self.followed_by:
            parts.append(f"followed by {self.followed_by} more")
        return f"step {self.step}: {'; '.join(parts)}"


def _compared(name: str, value: float, threshold: float) -> str:
    usual = f", usual up to {threshold:.2g}" if threshold < math.inf else ""
    return f"{name} {value:.2g}{usual}"


class Place(NamedTuple):
    """What is known of the place where a step broke; nothing by default."""

    text: str = ""
    layer: str = ""  # the layer or the group that the text names, if it is one


def places_of(step: BadStep) -> tuple[Place, Place]:
    """Return what probes tell of the place where a step broke, and what groups tell."""
    by_probes = _place_by_probes(step)
    # The gradient of unused weights is 0, and so finite wherever the step broke.
    used = {name: norm for name, norm in step.groups.items() if norm != 0}
    bad = [name for name, norm in used.items() if not math.isfinite(norm)]
    none_is_finite = len(bad) == len(used) > 1
    is_told = bool(by_probes.text) and none_is_finite
    if is_told or step.is_of_loss or not step.groups:
        return by_probes, Place()
    if none_is_finite:
        text = "no group is finite: it broke in the loss or in the forward pass"
        if step.loss is not None and math.isfinite(step.loss):
            # It may be that of another micro-batch, or be scaled before the gradient.
            text = "no group is finite, but the loss is"
        return by_probes, Place(text)
    if bad:
        text, only = _not_finite(step.groups), bad[0] if len(bad) == 1 else ""
        if step.loss is not None and not math.isfinite(step.loss):
            # As the slope of a ReLU at NaN is 0, biases may have a finite gradient.
            text, only = f"{text}: it broke in the loss or in the forward pass", ""
        return by_probes, Place(text, only)
    return by_probes, _place_of_most(step)


def _place_by_probes(step: BadStep) -> Place:
    """Return the first layer in time that is not finite, and is so at usual steps.

    The forward pass goes from the first layer to the last, and the backward pass from
    the last to the first.
    """
    forward, backward = (
        [
            name
            for name, norm in norms.items()
            if not math.isfinite(norm) and math.isfinite(usual.get(name, 0))
        ]
        for norms, usual in ((step.forward, step.usual), (step.backward, {}))
    )
    if forward:
        return Place(f"first in the forward pass, at {forward[0]}", forward[0])
    if not backward:
        return _place_of_growth(step)
    name = backward[-1]
    if step.loss is not None and not math.isfinite(step.loss):
        return Place(f"in the loss, or after {name}")
    *_, last = (key for key, norm in step.backward.items() if norm != 0)
    some_is_finite = any(math.isfinite(x) for x in step.groups.values() if x != 0)
    if name != last or some_is_finite:
        return Place(f"in the backward pass, at {name}", name)
    # No weights after the last probe show whether their gradients are finite.
    if step.loss is None:
        return Place(
            f"in the loss, or in the backward pass from it to {name}; with loss=, "
            "update would tell which"
        )
    return Place(f"in the backward pass, from the loss to {name}")


# The text names a layer at which activations grow this many times more than usual.
_TOLD = 10


def _place_of_growth(step: BadStep) -> Place:
    """Return the layer at which activations grew most, compared with a usual step."""
    times, names = [1.0], []
    for name, norm in step.forward.items():
        usual = step.usual.get(name, 0)
        if min(norm, usual) >= LARGEST:  # as of a mask, at all steps
            continue
        is_known = usual > 0 and max(norm, usual) < LARGEST
        times.append(norm / usual if is_known else 0.0)
        names.append(name)
    pairs = zip(itertools.pairwise(times), names, strict=True)
    growths = [(now / was, name) for (was, now), name in pairs if was > 0]
    most, name = max(growths, default=(0.0, ""))
    if most <= _TOLD:
        return Place()
    text = f"{most:.0f} times its usual growth at {name}, in the forward pass"
    return Place(text, name)


def _place_of_most(step: BadStep) -> Place:
    """Return the group with most of the norm, where all groups are finite."""
    name, largest = max(step.groups.items(), key=lambda item: item[1])
    if math.isfinite(step.norm):
        # The squares of the norms of all groups add up to the square of the norm.
        return Place(f"{(largest / step.norm) ** 2:.0%} of it in {name}", name)
    if math.hypot(*step.groups.values()) < LARGEST:
        return Place("all groups are finite: it broke in weights outside of the groups")
    return Place(f"largest in {name}", name)


# How many runs of names a text has at most.
_RUNS = 3


def _not_finite(norms: Mapping[str, float]) -> str:
    """Say which groups are not finite, or, if these are many, which others are.

    If they are many, paths end where all groups that begin like them are of their kind.
    """
    is_bad = {name: not math.isfinite(norm) for name, norm in norms.items()}
    bad, _ = _runs({name: is_bad[name] for name in norms if norms[name]})
    if len(bad) <= _RUNS:
        return f"not finite in {', '.join(bad)}"
    kinds: dict[str, set[bool]] = {}
    for name in norms:
        for part in _parts(name):
            kinds.setdefault(part, set()).add(is_bad[name])
    bad, fine = _runs(
        {
            next((x for x in _parts(name) if len(kinds[x]) == 1), name): is_bad[name]
            for name in norms
            if norms[name]
        }
    )
    if len(fine) < len(bad) > _RUNS:
        return f"finite only in {a_few(fine, _RUNS)}"
    return f"not finite in {a_few(bad, _RUNS)}"


def _parts(path: str) -> list[str]:
    """Return a path and those around it, outermost first; a pattern is no path."""
    names = path.split("/")
    is_pattern = path.startswith("/") or not {*"*?["}.isdisjoint(path)
    depths = () if is_pattern else range(1, len(names))
    return [*("/".join(names[:depth]) for depth in depths), path]


def _runs(is_bad: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the bad names and the others; layers in a row are `first to last`."""

    def run(name: str) -> tuple[bool, str]:
        return is_bad[name], re.sub(r"\d+", "", name)

    found: tuple[list[str], list[str]] = [], []
    for (bad, _), each in itertools.groupby(sorted(is_bad, key=natural_order), run):
        first, *rest = each
        found[not bad].append(f"{first} to {rest[-1]}" if rest else first)
    return found


def bad_steps(opt_state: Tree) -> list[BadStep]:
    """Return the bad steps that `record_norms(keep=n)` has kept, oldest first.

    Use it when a run broke, or later on one of its checkpoints, to see which step broke
    first, and in which layer.

    Args:
      opt_state: an optimizer state, or a tree that contains one, such as a checkpoint,
        as in :func:`metrics`.

    Returns:
      A list of `BadStep`, empty if no step was bad. `step` counts from 0, `norm` is the
      norm of all gradients and `threshold` the norm above which a step is an outlier;
      `loss` and `loss_threshold` are the same for the loss, or None where `update` got
      none. `groups` has the norm of each group by name, `forward` and `backward` what
      each probe saw, and `usual` what they saw in the forward pass of the last step
      that was not bad. `followed_by` is the number of bad steps directly after the
      first of a row, and `recorder` is what the metrics of its `record_norms` begin
      with.

    Raises:
      TypeError: `opt_state` is traced, or has shapes in place of arrays.
      ValueError: no `record_norms` in `opt_state` keeps steps; the state is stacked, as
        `vmap` makes it.

    `print` of a step is one line. For an outlier it names the group with the largest
    part of the squared norm. Otherwise it lists the groups that are not finite, or, if
    these are many, the only ones that are finite: the backward pass, which goes from
    the last layer to the first, broke where one kind ends and the other begins.
    If no group is finite, or the loss is not, the step broke in the loss or in the
    forward pass; if no group is and the loss is all the same, where the backward pass
    begins, or in elements of the forward pass that the loss masks. There only probes
    can tell the layer; and because the loss comes after the last probe, pass `loss=`,
    too. Groups whose norm is 0 say nothing, so they are left out.

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
        (label, name, bad, found.state)
        for label, found in labeled_states_in(opt_state).items()
        if isinstance(found.state.memory, Mapping)
        for name, node in found.state.memory.items()
        if (bad := restored(BadSteps, BadSteps._fields, node))
    ]
    if not kept:
        raise ValueError(
            f"opt_state: no recorder in {short_repr(opt_state)} keeps bad steps; pass "
            "the state that tx.init and tx.update return, of a chain with one in front "
            "of the optimizer, outside of a skip: optax.chain(clipjax.record_norms("
            "'leaf', keep=16), clipjax.bounded(...))"
        )
    found = [step for each in kept for step in _steps_in(*each)]
    return sorted(found, key=lambda step: step.step)


def _steps_in(
    label: str, name: str, kept: BadSteps, state: MetricsState
) -> list[BadStep]:
    """Return the steps in a memory, whose updates are called `name` in the metrics."""
    logged = logged_in(state)
    for x in jax.tree.leaves((kept, logged)):
        is_traced = isinstance(x, jax.core.Tracer)
        if is_traced or not isinstance(x, jax.Array | np.ndarray | np.generic):
            raise TypeError(
                "opt_state: it must have known arrays: call bad_steps outside jit, got "
                f"{short_repr(x)}"
            )
    known: Any = jax.device_get(kept)
    if np.ndim(known.held):
        raise ValueError(
            f"opt_state: it is stacked, of shape {np.shape(known.held)}; take one, as "
            "in jax.tree.map(lambda x: x[0], opt_state)"
        )
    names = sorted(key for key, x in logged.items() if x.dtype.kind == "f")

    def in_order(norms: Sequence[float]) -> dict[str, float]:
        return {names[i]: float(norms[i]) for i in known.order[: len(names)]}

    usual_of_probes = _norms_of("forward", in_order(known.usual))
    found = []
    for i in range(len(known.steps) - known.held, len(known.steps)):
        norm, threshold, loss, loss_threshold, *rest = map(float, known.rows[i])
        norms = in_order(rest)
        has_loss = loss != UNKNOWN
        step = BadStep(
            step=int(known.steps[i]),
            norm=norm,
            threshold=threshold,
            loss=loss if has_loss else None,
            loss_threshold=loss_threshold if has_loss else None,
            groups=_norms_of(name, norms),
            followed_by=max(0, int(known.followed_by[i])),
            forward=_norms_of("forward", norms),
            backward=_norms_of("backward", norms),
            usual=usual_of_probes if any(usual_of_probes.values()) else {},
            recorder=label,
        )
        found.append(step)
    return found


def _norms_of(name: str, norms: dict[str, float]) -> dict[str, float]:
    """Return the norms of the groups of what is called `name` in the metrics."""
    own = {
        key[len(name) + 1 :]: norm
        for key, norm in norms.items()
        if f"{key}/".startswith(f"{name}/")
    }
    # Leaves beside stacks form a group without a name, which gets the name of the
    # updates. If it is the only group, it is none.
    return {} if list(own) == [""] else {key or name: x for key, x in own.items()}
