"""The norms of groups of leaves, and of the layers of stacks."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._core.bounds import check_count, traced_error
from clipjax._core.leaves import (
    Leaf,
    Leaves,
    a_few,
    check_patterns,
    first_matches,
    is_inexact,
    path_name,
)
from clipjax._core.norms import (
    check_whole,
    replicated,
    root,
    sum_of,
    total,
    tree_total,
)

# A larger norm of finite elements would be infinite in float32.
LARGEST = 2.0**64


class Group(NamedTuple):
    """Leaves that share a norm, or stacks that share one for each of their layers."""

    names: list[str]
    leaves: list[Leaf]
    is_stacked: bool


def by_group(groups: Any, stacked: Any) -> Callable[[Leaves], list[Group]]:
    """Return the function that puts leaves into groups, in the order of the model."""
    # The number of components of a path: 0 for the whole tree, None for all of them.
    depth: int | None = 0 if groups is None else None
    patterns: tuple[str, ...] = ()
    if isinstance(groups, jax.Array):
        raise traced_error("groups", groups)
    if isinstance(groups, int | np.integer):
        depth = check_count("groups", groups, 1)
    elif not (groups is None or (isinstance(groups, str) and groups == "leaf")):
        patterns = check_patterns("groups", groups)
    stacks = check_patterns("stacked", stacked) if stacked else ()

    def keys_of(leaves: Leaves) -> list[Any]:
        """Return the pattern of each leaf, or the start of its path."""
        if patterns:
            return first_matches("groups", patterns, leaves)
        return [path[:depth] for path in leaves.paths]

    def groups_in(leaves: Leaves) -> list[Group]:
        stacked_by = first_matches("stacked", stacks, leaves)
        members: dict[Any, list[Leaf]] = {}
        if groups is None and not stacks:
            members[(), False] = []  # the norm of a tree without leaves is 0
        rows = zip(keys_of(leaves), stacked_by, leaves.each, strict=True)
        for key, stack, leaf in rows:
            if key is not None and is_inexact(leaf.value):
                members.setdefault((key, stack is not None), []).append(leaf)
        found = []
        for (key, is_stacked), of_group in members.items():
            name = key if patterns else path_name(key)
            names = [name]
            if is_stacked:
                start = f"{name}/" if name else ""
                names = [f"{start}{i}" for i in range(_layers_in(of_group))]
            found.append(Group(names, of_group, is_stacked))
        return found

    return groups_in


def _layers_in(stacks: list[Leaf]) -> int:
    """Return how many layers the stacks of a group have along their first axis."""
    lengths = {leaf.value.shape[:1] for leaf in stacks}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            "stacked: these must have equally many layers along their first axis: "
            f"{a_few(stacks)}"
        )
    for leaf in stacks:
        check_whole("stacked", leaf)
    ((length,),) = lengths
    return int(length)


def norms_of(groups: Sequence[Group], ord: float) -> jax.Array:
    """Return the norms of all groups, in one array."""
    powers = [jnp.zeros(0, np.float32)]
    for group in groups:
        if group.is_stacked:
            powers.append(_powers_of_layers(group.leaves, ord))
        else:
            power = tree_total([leaf.value for leaf in group.leaves], ord)
            powers.append(jnp.atleast_1d(power))
    return root(joined(powers), ord)


def _powers_of_layers(stacks: list[Leaf], ord: float) -> jax.Array:
    """Return the norm of each layer, along the first axis, to the power `ord`."""
    powers = [
        total(leaf.value, tuple(range(1, leaf.value.ndim)), ord).ravel()
        for leaf in stacks
    ]
    each = list(map(replicated, powers))
    return functools.reduce(jnp.maximum, each) if ord == jnp.inf else sum_of(each)


def joined(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return arrays as one, in the widest of their dtypes."""
    dtype = np.result_type(*(x.dtype for x in arrays))
    return jnp.concatenate([x.astype(dtype) for x in arrays])


def natural_order(name: str) -> list[Any]:
    """Return a key that sorts names: `layer_2` comes before `layer_10`."""
    return [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", name)]


def names_of_norms(measured: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of norms in the metrics, from those of groups by label."""
    names = [
        f"{label}/{name}" if name else label
        for label, of_groups in measured.items()
        for name in of_groups
    ]
    # Two paths may have one name, as in {"a/b": x, "a": {"b": y}}.
    if twice := sorted(name for name, n in Counter(names).items() if n > 1):
        raise ValueError(f"groups: two norms would be called {a_few(twice)}")
    return names
