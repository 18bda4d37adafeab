"""Norms in the state of a chain, for a logger, without clipping."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import optax

from clipjax import _checks
from clipjax._core import norms, transformation, trees, units
from clipjax._core.messages import a_few, short_repr, traced_error


class Recorder(optax.GradientTransformationExtraArgs):
    """What :func:`record_norms` returns: it may come after a projection, since it changes nothing."""


def record_norms(
    groups: str | int | Sequence[str] | None = None,
    *,
    of: str | Sequence[str] = ("updates",),
    name: str = "updates",
    stacked: str | Sequence[str] = (),
) -> Recorder:
    """Record norms for a logger, and change nothing.

    Args:
      groups: which leaves share a norm. None: the whole tree. `"leaf"`: each leaf has
        its own. An int n: leaves whose paths have the same first n components; 1 gives
        a norm for each top-level module. Path patterns: leaves belong to the first
        pattern that matches them, and others are left out.
      of: what is measured: `"updates"`, `"params"`, or both.
      name: what the updates are called in the metrics: `"gradients"` in front of a
        clip.
      stacked: path patterns of leaves that stack layers along their first axis, as
        `nn.scan` and `nnx.vmap` make them: each layer is a group of its own,
        `<group>/<index>`, and `<group>` has the other leaves alone. All stacks of a
        group have equally many layers.

    Returns:
      A transformation with the metrics `record_norms/<name>`, and
      `record_norms/<name>/<group>` for groups. With `"params"`, `update` needs the
      parameters.

    Raises:
      ValueError: the parameters are missing; the stacks of a group differ in length, or
        one is a scalar.

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
    measured = (
        (of,) if isinstance(of, str) else tuple(of) if isinstance(of, Iterable) else ()
    )
    if not measured or any(each not in ("updates", "params") for each in measured):
        raise ValueError(
            f"of must be 'updates', 'params' or both, got {short_repr(of)}"
        )
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a str, got {short_repr(name)}")
    if name != "updates" and "updates" not in measured:
        raise ValueError(
            f"name is what the updates are called, got {name!r}, but "
            f"of={short_repr(of)} leaves them out"
        )
    if name == "params" and len(set(measured)) == 2:
        raise ValueError(
            "name must not be 'params' if both are measured: that is what the "
            "weights are called"
        )
    if isinstance(groups, jax.Array):
        raise traced_error("groups", groups)
    depth = (
        _checks.check_count("groups", groups, 1) if isinstance(groups, int) else None
    )
    patterns = (
        _checks.check_patterns("groups", groups)
        if depth is None and groups not in (None, "leaf")
        else None
    )
    stacks = _checks.check_patterns("stacked", stacked) if stacked else ()

    def groups_of(tree: Any) -> list[str | None]:
        if patterns is not None:
            return trees.first_matches("groups", patterns, tree)
        return [
            "" if groups is None else trees.path_name(leaf.path[:depth])
            for leaf in trees.leaves_of(tree)[0]
        ]

    def measured_in(label: str, tree: Any) -> dict[str, jax.Array]:
        members: dict[Any, list[trees.Leaf]] = (
            {("", False): []} if groups is None and not stacks else {}
        )
        each: dict[str, jax.Array] = {}
        leaves = trees.leaves_of(tree)[0]
        found = (
            trees.first_matches("stacked", stacks, tree)
            if stacks
            else [None] * len(leaves)
        )
        for group, stack, leaf in zip(groups_of(tree), found, leaves, strict=True):
            if group is not None and trees.is_float(leaf.value):
                members.setdefault((group, stack is not None), []).append(leaf)
        for (group, is_stacked), of_group in members.items():
            prefix = f"{label}/{group}".rstrip("/")
            if is_stacked:
                each |= {
                    f"{prefix}/{i}": norm
                    for i, norm in enumerate(_norms_of_layers(of_group))
                }
            else:
                each[prefix] = norms.tree_norm([leaf.value for leaf in of_group])
        return each

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        metrics = measured_in(name, updates) if "updates" in measured else {}
        if "params" in measured:
            metrics |= measured_in(
                "params", trees.params_for("record_norms", updates, params)
            )
        return updates, metrics, memory

    return Recorder(*transformation.with_metrics("record_norms", act))


def _norms_of_layers(stacks: list[trees.Leaf]) -> list[jax.Array]:
    """Return the norm of each layer of stacks along the first axis."""
    lengths = {leaf.value.shape[:1] for leaf in stacks}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            "stacked: these must have equally many layers along their first axis: "
            f"{a_few(stacks)}"
        )
    for leaf in stacks:
        units.check_whole("stacked", leaf)
    of_leaves = [
        norms.norm(leaf.value, tuple(range(1, leaf.value.ndim))).reshape(-1)
        for leaf in stacks
    ]
    (count,) = lengths.pop()
    return [norms.tree_norm([each[i] for each in of_leaves]) for i in range(count)]
