"""Norms in the state of a chain, without clipping: for a logger, and of bad steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.aliases import Bound, Memory, Metrics, Ord, Step, Tree
from clipjax._core.bounds import (
    as_list,
    check_bound,
    check_count,
    check_label,
    check_ord,
    traced_error,
)
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, beside, short_repr
from clipjax._core.norms import tree_norm
from clipjax._core.states import UNKNOWN, BadSteps, check_same
from clipjax.gradients import spikes
from clipjax.gradients.past_norms import norm_dtype
from clipjax.gradients.skipping import loss_of
from clipjax.gradients.window import check_size
from clipjax.monitoring.groups import (
    LARGEST,
    by_group,
    joined,
    names_of_norms,
    norms_of,
)
from clipjax.monitoring.taps import tapped

_PASSES = ("forward", "backward")  # what probes see


class Recorder(optax.GradientTransformationExtraArgs):
    """The transformation that :func:`record_norms` returns.

    It belongs outside a skip, which would freeze it at the steps that it should see.
    """


def record_norms(
    groups: str | int | Sequence[str] | None = None,
    *,
    of: str | Sequence[str] = ("updates",),
    name: str = "updates",
    ord: Ord = None,
    stacked: str | Sequence[str] = (),
    keep: SupportsIndex = 0,
    z_threshold: Bound = 6.0,
    window: SupportsIndex = 64,
    probes: Mapping[str, SupportsIndex] | None = None,
) -> Recorder:
    """Record norms for a logger, and change nothing.

    Use it to log the norms of gradients, weights or updates, of the whole tree or layer
    by layer, and with `keep` to find the layer in which a step broke.

    Args:
      groups: which leaves share a norm: all of them (None, the default), none
        (`"leaf"`), those whose paths begin with the same n components (an int n, so
        that 1 is for top-level modules), or those that a path pattern matches. Of
        several patterns the first match counts, and other leaves are left out.
      of: one or several of `"updates"`, the default, `"params"`, as they are before the
        update, and `"ratio"`, the norm of the updates divided by that of the
        parameters. Where the updates are 0, so is the ratio; where only the parameters
        are, it is infinite. It is of use at the end of a chain, where the updates are
        what the weights get.
      name: what the updates are called in the metrics, `"updates"` by default;
        `"gradients"` fits in front of a clip.
      ord: the order of the norms: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.
      stacked: path patterns of leaves that stack layers along their first axis, as
        `nn.scan` and `nnx.vmap` make them; none by default. Each layer becomes a group
        `<group>/<index>`, so all stacks of a group need the same number of layers.
      keep: how many bad steps to keep in the state for :func:`bad_steps`, 0 by default.
        A step is bad if its norm is not finite, if the loss that `update(...,
        loss=loss)` gets is not finite, or if :func:`skip_spikes` would skip it. The
        last ones are kept, but where bad steps come in a row, the first of the row
        stays and the oldest of the others makes room. A skip must not wrap
        `record_norms`, which would then be frozen at exactly these steps.
      z_threshold: how many standard deviations above the trend a norm or a loss has to
        be to count as an outlier for `keep`, as in :func:`skip_spikes`; a scalar
        `Bound`, 6.0 by default.
      window: the number of past norms and losses for that trend, 64 by default.
      probes: the name of each :func:`probe` of the model, in the order of the forward
        pass, mapped to the number of layers of its tap, or to 0 for a single one:
        `{"embed": 0, "blocks": 12}`. None, the default, is for a model without probes.
        With them, every update needs the gradients with respect to the taps,
        `update(..., taps={"embed": …, "blocks": …})`, and the metrics get
        `forward/<probe>/<layer>` and `backward/<probe>/<layer>`, which are infinite
        where an element is not finite.

    Returns:
      A gradient transformation that passes the updates on, with the metrics
      `record_norms/<name>`, or `record_norms/<name>/<group>` for groups. For `"params"`
      and `"ratio"`, `update` needs the parameters.

    Raises:
      TypeError: `name` is not a string without `/`, or `groups` has none of the four
        forms.
      ValueError: two norms would have one name; `keep` is given and `of` leaves the
        updates out, or `ord` is not 2. In `init` or `update`: a pattern matches no
        leaf; the parameters are missing; the stacks of a group differ in length; a skip
        wraps `record_norms` with `keep`; `taps` are missing, or do not fit `probes`.

    See Also:
      :func:`bad_steps` reads what `keep` has kept; :func:`metrics` reads the norms;
      :func:`functional.leaf_norms` measures them directly.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> w, b = jnp.array([3.0, 4.0]), jnp.array([2.0])
      >>> grads = {"encoder": {"w": w}, "head": {"b": b}}
      >>> record = clipjax.record_norms(1, name="gradients")
      >>> tx = optax.chain(record, optax.sgd(0.1))
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(clipjax.metrics(state)["record_norms/gradients/encoder"])
      5.0
    """
    measured = _check_of(of)
    check_label(name)
    if name != "updates" and "updates" not in measured:
        raise ValueError(
            f"name is the name of the updates in the metrics, got {name!r}, but "
            f"of={short_repr(of)} does not measure updates"
        )
    lengths = _check_probes(probes)
    if name in ("steps", "params", "ratio", *_PASSES):
        raise ValueError(
            f"name must not be {name!r}, which begins like the names of other metrics"
        )
    order = check_ord(ord)
    groups_in = by_group(groups, stacked)
    size = check_count("keep", keep, 0)
    z_limit = check_bound("z_threshold", z_threshold, scalar=True)
    length = check_count("window", window, 1)
    # `optax.inject_hyperparams` traces it.
    is_known = not isinstance(size, jax.core.Tracer)
    if is_known and size and "updates" not in measured:
        raise ValueError(
            "keep: bad steps are told by the norm of the updates, but "
            f"of={short_repr(of)} does not measure updates"
        )

    if is_known and size and order != 2:
        raise ValueError(
            f"ord: bad steps have norms of order 2, got {ord} with keep={size}; use a "
            f"second record_norms for order {ord}"
        )

    labels = [name if x == "updates" else x for x in measured]

    def names_in(leaves: Leaves) -> list[str]:
        """Return the names of all norms, in the order of the model."""
        own = [x for group in groups_in(leaves) for x in group.names]
        of_probes = dict.fromkeys(_PASSES, _names_of(lengths)) if lengths else {}
        return names_of_norms(dict.fromkeys(labels, own) | of_probes)

    def norms_in(updates: Leaves, params: Tree, taps: Any) -> jax.Array:
        found = {}
        if {*measured} != {"params"}:
            found["updates"] = norms_of(groups_in(updates), order)
        if {*measured} != {"updates"}:
            weights = beside(updates, params, "params", "record_norms")
            groups = groups_in(updates._replace(values=weights))
            found["params"] = norms_of(groups, order)
        if "ratio" in measured:
            found["ratio"] = _ratio(found["updates"], found["params"])
        each = [found[x] for x in measured]
        return lax.stop_gradient(joined(each + _norms_of_probes(lengths, taps)))

    def measure(updates: Leaves, params: Tree, step: Step, memory: Memory) -> Metrics:
        shapes = _shapes_of_taps(lengths).items()
        taps = {name: jnp.zeros(shape, np.float32) for name, shape in shapes}
        return _by_name(names_in(updates), norms_in(updates, params, taps))

    def remember(params: Leaves) -> Any:
        if not is_known:
            raise traced_error("keep", keep)
        past = spikes.no_past(length, norm_dtype(params))
        return {name: _no_steps(size, names_in(params), past)}

    def act(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **extra: Any
    ) -> Any:
        names, norms = names_in(updates), norms_in(updates, params, extra.get("taps"))
        (kept,) = memory.values() if memory else (None,)
        if is_known and step is not None:
            check_same("keep", 0 if kept is None else kept.steps.size, size)
        if kept is not None:
            sizes = kept.rows.shape[-1] - 4, norms.size
            check_same("state", *(f"{size} norms" for size in sizes))
            norm = lax.stop_gradient(tree_norm(updates.inexact))
            check_size(kept.past.window, length)
            places = _order_of(names)
            sorted_norms = norms[np.argsort(places)] if names else norms
            after = _with_step(
                kept._replace(order=jnp.asarray(places)),
                step,
                norm,
                loss_of(extra),
                z_limit.at(step),
                sorted_norms,
            )
            memory = dict.fromkeys(memory, after)
        return updates.rebuild(updates.values), _by_name(names, norms), memory

    first = remember if not is_known or size else None
    made = transformation("record_norms", act, first, measure, fixed_names=False)
    return Recorder(*made)


def _check_probes(probes: Any) -> dict[str, int]:
    """Return how many layers each probe has, 0 for a single one."""
    if not isinstance(probes, Mapping | None):
        raise TypeError(
            "probes must be a mapping from names to numbers of layers, got "
            f"{short_repr(probes)}"
        )
    return {
        str(name): check_count(f"probes[{name!r}]", layers, 0, static=True)
        for name, layers in (probes or {}).items()
    }


def _shapes_of_taps(lengths: dict[str, int]) -> dict[str, tuple[int, ...]]:
    return {name: (n, 6) if n else (6,) for name, n in lengths.items()}


def _names_of(lengths: dict[str, int]) -> list[str]:
    """Return the names of the layers of all probes."""
    return [
        name
        for probe, n in lengths.items()
        for name in ([f"{probe}/{i}" for i in range(n)] if n else [probe])
    ]


def _norms_of_probes(lengths: dict[str, int], taps: Any) -> list[jax.Array]:
    """Return the norms that probes saw, by pass: infinite if not all is finite."""
    if not lengths:
        return []
    wanted = _shapes_of_taps(lengths)
    is_mapping = isinstance(taps, Mapping)
    given = {name: np.shape(x) for name, x in taps.items()} if is_mapping else taps
    if not is_mapping or given != wanted:
        raise ValueError(
            "taps: record_norms has probes, so write update(..., taps=...) with the "
            "gradients with respect to clipjax.tap(..., probe=True), of the shapes "
            f"{wanted} that probes= says; got {short_repr(given)}"
        )
    seen = tapped(jnp.concatenate([jnp.atleast_2d(taps[x]) for x in lengths]))
    # The sum of squares of a mask, which is finite, may overflow.
    return [
        jnp.where(
            seen[f"{of}_nonfinite_count"] > 0,
            jnp.inf,
            jnp.minimum(seen[f"{of}_norm"], LARGEST),
        )
        for of in _PASSES
    ]


def _by_name(names: Sequence[str], norms: jax.Array) -> Metrics:
    return dict(zip(names, jnp.unstack(norms), strict=True))


def _check_of(of: Any) -> tuple[str, ...]:
    """Return what is measured, as a tuple of words."""
    measured = tuple(dict.fromkeys(map(str, as_list(of))))
    if not measured or not {*measured} <= {"updates", "params", "ratio"}:
        raise ValueError(
            "of must be 'updates', 'params', 'ratio' or several of them, got "
            f"{short_repr(of)}"
        )
    return measured


def _ratio(norm: jax.Array, of: jax.Array) -> jax.Array:
    """Return one norm divided by another, or 0 if the first is 0."""
    some = norm != 0
    return jnp.where(some, norm, 0) / jnp.where(some, of, 1)


def _no_steps(size: int, names: Sequence[str], past: spikes.Past) -> BadSteps:
    """Return the memory before the first step."""
    order, dtype = _order_of(names), past.window.values.dtype
    return BadSteps(
        past,
        held=jnp.zeros((), np.int32),
        steps=jnp.zeros(size, np.int32),
        followed_by=jnp.full(size, -1, np.int32),
        rows=jnp.zeros((size, 4 + len(names)), dtype),
        order=jnp.asarray(order),
        usual=jnp.zeros(len(order), dtype),
    )


def _order_of(names: Sequence[str]) -> np.ndarray:
    """Return the place of each name, in the order of the model, among sorted names.

    It is one 0 if there are none: Orbax saves no array without elements.
    """
    place = {name: i for i, name in enumerate(sorted(names))}
    return np.array([place[name] for name in names] or [0], np.int32)


def _with_step(
    kept: BadSteps,
    step: Step,
    norm: Any,
    loss: Any,
    z_threshold: Any,
    norms: jax.Array,
) -> BadSteps:
    """Return the memory after a step, which takes in the step if it is bad.

    The oldest one makes room, but the first of a row only after its followers.
    """
    spike, past, seen = spikes.compare(norm, loss, kept.past, z_threshold=z_threshold)
    is_bad = spike | ~jnp.isfinite(norm) | ~jnp.isfinite(seen["loss"])
    known_loss = UNKNOWN if loss is None else loss
    numbers = [norm, seen["threshold"], known_loss, seen["loss_threshold"]]
    row = jnp.stack([jnp.asarray(x, kept.rows.dtype) for x in numbers])
    norms = norms.astype(row.dtype)

    was_bad = kept.steps + kept.followed_by == step - 1
    leads = is_bad & was_bad & (kept.followed_by >= 0)
    follows = leads.any()
    followed_by = kept.followed_by + leads.astype(np.int32)
    enters = is_bad & ~follows if kept.steps.size == 1 else is_bad
    # The second one follows the oldest, or there is no step in its place.
    oldest_stays = (kept.followed_by[1:2] < 0).any()
    moves = enters & ((np.arange(kept.steps.size) > 0) | ~oldest_stays)

    def after(old: jax.Array, new: Any) -> jax.Array:
        newest = jnp.asarray(new, old.dtype)[None]
        moved = jnp.concatenate([old[1:], newest])
        return jnp.where(moves.reshape(-1, *[1] * (old.ndim - 1)), moved, old)

    return kept._replace(
        past=past,
        held=jnp.minimum(kept.held + enters.astype(np.int32), kept.steps.size),
        steps=after(kept.steps, step),
        followed_by=after(followed_by, jnp.where(follows, -1, 0)),
        rows=after(kept.rows, jnp.concatenate([row, norms])),
        usual=jnp.where(is_bad, kept.usual, norms) if norms.size else kept.usual,
    )
