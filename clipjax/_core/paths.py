"""Paths of leaves, and the patterns that match them."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import optax

Path: TypeAlias = tuple[Any, ...]


def path_name(path: Path) -> str:
    """Format a key path, for example as `"encoder/Dense_0/kernel"`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def the_leaf(path: Path) -> str:
    """Name a leaf in an error message."""
    return f"leaf {path_name(path)!r}" if path else "the array"


def described(path: Path, leaf: Any) -> str:
    """Name a leaf and its shape in an error message."""
    name = repr(path_name(path)) if path else "(the array itself)"
    return f"{name} of shape {tuple(leaf.shape)}"


def a_few(lines: Sequence[str], most: int = 5) -> str:
    """Return the first of `lines`, each shortened if it is long, and the number of further lines."""
    shown = [line if len(line) <= 120 else f"{line[:117]}..." for line in lines[:most]]
    return "\n  ".join([*shown, f"and {len(lines) - most} more"] if len(lines) > most else shown)


def check_rule(argument: str, rule: Callable[..., Any]) -> None:
    """Raise an error if a function cannot be called with a path and a leaf."""
    try:
        signature = inspect.signature(rule)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind((), None)
    except TypeError as error:
        raise TypeError(
            f"{argument}: a rule takes (path, leaf), but the arguments of this are {signature}"
        ) from error


def leaves_with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[Path, Any]]:
    """Return the leaves of `tree` with their paths, which are the same with and without Flax's boxes.

    For JAX an `nnx.Variable` or an `nn.Partitioned` is a node with its leaf at `value`: that key is left out.
    """
    boxes = _boxes()

    def is_end(node: Any) -> bool:
        return isinstance(node, boxes) or (is_leaf is not None and is_leaf(node))

    found: list[tuple[Path, Any]] = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_end):
        if isinstance(node, boxes):
            inside = jax.tree_util.tree_leaves_with_path(node, is_leaf=is_leaf)
            found += [((*path, *keys[1:]), leaf) for keys, leaf in inside]
        else:
            found.append((path, node))
    return found


def _boxes() -> tuple[type, ...]:
    """Return the types of Flax's boxes; none if Flax is not loaded."""
    names = (("flax.nnx", "Variable"), ("flax.nnx", "VariableState"), ("flax.core.meta", "AxisMetadata"))
    loaded = ((vars(sys.modules[module]), name) for module, name in names if module in sys.modules)
    return tuple(members[name] for members, name in loaded if name in members)


def first_matches(argument: str, patterns: Sequence[str], tree: Any) -> list[str | None]:
    """Return the first of `patterns` that matches the path of each leaf of `tree`, or None.

    Raises:
      ValueError: a pattern matches no leaf, nor anything that `optax.masked`, `optax.partition` or a None
        removes from the tree.
    """
    names = [path_name(path) for path, _ in leaves_with_paths(tree)]
    if not names:  # nothing to do: Optax's wrappers may leave a group without leaves
        return []
    found = [[p for p in patterns if _matches(p, name)] for name in names]
    unmatched = [p for p in patterns if not any(p in matching for matching in found)]
    absent = leaves_with_paths(tree, _is_absent) if unmatched else []
    left_out = [path_name(path) for path, node in absent if _is_absent(node)]
    for pattern in unmatched:
        if not any(_may_reach(pattern, name) for name in left_out):
            listed = a_few(names, most=20)
            raise ValueError(
                f"{argument}: the pattern {pattern!r} matches no leaf. The paths are:\n  {listed}"
            )
    return [matching[0] if matching else None for matching in found]


def for_each_leaf(argument: str, value: Any, tree: Any, otherwise: Any) -> list[Any]:
    """Return a value for each leaf of `tree`: the same, or from a mapping that of the first match."""
    if not isinstance(value, Mapping):
        return [value] * len(leaves_with_paths(tree))
    found = first_matches(argument, list(value), tree)
    return [otherwise if pattern is None else value[pattern] for pattern in found]


def check_none_is_hidden(argument: str, patterns: Sequence[str], tree: Any) -> None:
    """Raise an error if a pattern comes after a wider one that matches all of its leaves."""
    names = [path_name(path) for path, _ in leaves_with_paths(tree)]
    of = {p: {name for name in names if _matches(p, name)} for p in patterns}
    for i, narrow in enumerate(patterns):
        for wide in patterns[:i]:
            if of[narrow] and of[narrow] < of[wide]:
                raise ValueError(
                    f"{argument}: the first match wins, and {wide!r} takes all leaves of {narrow!r}, which "
                    f"comes after it: put the narrower pattern first"
                )


def leaves_of_prefix(
    argument: str, what: str, prefix: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Return the value for each leaf of `tree`, from a tree of values or a prefix of one.

    Raises:
      ValueError: `prefix` has another structure.
    """
    found: list[Any] = []
    try:
        jax.tree.map(
            lambda x, part: found.extend([x] * len(jax.tree.leaves(part))), prefix, tree, is_leaf=is_leaf
        )
    except ValueError as error:
        given, wanted = (
            a_few([path_name(path) for path, _ in leaves_with_paths(x, is_leaf)]) for x in (prefix, tree)
        )
        raise ValueError(
            f"{argument} must be one {what}, or have the structure of the tree:\n  {wanted}\nbut it has:\n"
            f"  {given}"
        ) from error
    return found


def _is_absent(node: Any) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _may_reach(pattern: str, name: str) -> bool:
    """Whether a pattern matches a path, or may match a path below it."""
    parts = pattern.split("/")
    return not name or any(_matches("/".join(parts[: i + 1]), name) for i in range(len(parts)))


def _matches(pattern: str, name: str) -> bool:
    """Whether a glob matches a whole path, or its last components."""
    return _compiled(pattern).match(name) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(f"(?s:.*/)?{fnmatch.translate(pattern)}")
