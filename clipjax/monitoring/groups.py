"""The norms of groups of leaves, and of the layers of stacks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.bounds import check_count
from clipjax._core.leaves import (
    Leaf,
    Leaves,
    check_patterns,
    first_matches,
    is_inexact,
    path_name,
)
from clipjax._core.messages import a_few, traced_error
from clipjax._core.norms import (
    concatenate,
    replicated,
    root,
    sum_of,
    total,
    tree_total,
)
from clipjax._core.states import Table, table
from clipjax._core.units import check_whole

# The names of groups of leaves, and their norms in one array.
Groups: TypeAlias = tuple[list[str], jax.Array]


def by_group(groups: Any, stacked: Any, ord: float) -> Callable[[Leaves], Groups]:
    """Return the function that measures the norms of groups, and of layers."""
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

    def groups_of(leaves: Leaves) -> list[Any]:
        """Return the pattern of each leaf, or the start of its path."""
        if patterns:
            return first_matches("groups", patterns, leaves)
        return [path[:depth] for path in leaves.paths]

    def groups_in(leaves: Leaves) -> Groups:
        stacked_by = first_matches("stacked", stacks, leaves)
        members: dict[Any, list[Leaf]] = {}
        if groups is None and not stacks:
            members[(), False] = []  # the norm of a tree without leaves is 0
        for group, stack, leaf in zip(
            groups_of(leaves), stacked_by, leaves.each, strict=True
        ):
            if group is not None and is_inexact(leaf.value):
                members.setdefault((group, stack is not None), []).append(leaf)
        names: list[str] = []
        powers = [jnp.zeros(0, np.float32)]
        for (group, is_stacked), of_group in members.items():
            name = group if patterns else path_name(group)
            if is_stacked:
                power = _powers_of_layers(of_group, ord)
                start = f"{name}/" if name else ""
                names += [f"{start}{i}" for i in range(power.size)]
            else:
                power = tree_total([leaf.value for leaf in of_group], ord)
                names.append(name)
            powers.append(jnp.atleast_1d(power))
        dtype = np.result_type(*(x.dtype for x in powers))
        joined = concatenate(x.astype(dtype) for x in powers)
        return names, root(joined, ord)

    return groups_in


def _powers_of_layers(stacks: list[Leaf], ord: float) -> jax.Array:
    """Return the norm of each layer, along the first axis, to the power `ord`."""
    lengths = {leaf.value.shape[:1] for leaf in stacks}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            "stacked: these must have equally many layers along their first axis: "
            f"{a_few(stacks)}"
        )
    for leaf in stacks:
        check_whole("stacked", leaf)
    powers = [
        total(leaf.value, tuple(range(1, leaf.value.ndim)), ord).ravel()
        for leaf in stacks
    ]
    each = list(map(replicated, powers))
    return functools.reduce(jnp.maximum, each) if ord == jnp.inf else sum_of(each)


def table_of_norms(measured: dict[str, Groups]) -> Table:
    """Return all norms in one array."""
    names = [
        f"{label}/{name}" if name else label
        for label, (names, _) in measured.items()
        for name in names
    ]
    # Two paths may have one name, as in {"a/b": x, "a": {"b": y}}.
    if twice := sorted(name for name, n in Counter(names).items() if n > 1):
        raise ValueError(f"groups: two norms would be called {a_few(twice)}")
    arrays = [norms for _, norms in measured.values()]
    dtype = np.result_type(*(x.dtype for x in arrays))
    joined = concatenate(x.astype(dtype) for x in arrays)
    if not names:  # Orbax saves no array without elements
        joined = jnp.zeros((), dtype)
    return table((tuple(names),), lax.stop_gradient(joined))
