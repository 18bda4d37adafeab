"""Leaves with their paths, and the patterns that match these."""

from __future__ import annotations

import fnmatch
import glob
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import GetAttrKey


class Leaf(NamedTuple):
    """A leaf of a tree: an array, or what is no array and passes through."""

    path: tuple[Any, ...]
    value: Any

    @property
    def name(self) -> str:
        """The path as text, such as `"encoder/Dense_0/kernel"`."""
        return path_name(self.path)

    def __str__(self) -> str:
        return f"leaf {self.name!r} of shape {tuple(np.shape(self.value))}"


def is_float(x: Any) -> bool:
    """Return whether a leaf has a norm: float and complex ones do; ints, bools, keys and float0 do not."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def path_name(path: tuple[Any, ...]) -> str:
    """Format a key path, such as `"encoder/Dense_0/kernel"`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda _: False
) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the leaves of a tree with their key paths.

    Flax keeps an array in a box (`nnx.Variable`, `nn.Partitioned`) at `value`, which is
    left out.
    """
    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: is_box(x) or is_leaf(x)
    ):
        for inner, leaf in (
            jax.tree_util.tree_leaves_with_path(node, is_leaf)
            if is_box(node)
            else [((), node)]
        ):
            found.append(
                ((*path, *itertools.dropwhile(GetAttrKey("value").__eq__, inner)), leaf)
            )
    return found


def is_box(node: Any) -> bool:
    """Return whether a node is one of Flax's boxes around arrays."""
    if isinstance(node, jax.Array):  # nearly all are
        return False
    each = type(node).__mro__
    return any(
        x.__name__ in ("Variable", "AxisMetadata") and x.__module__.startswith("flax.")
        for x in each
    )


def leaves_of(tree: Any) -> tuple[list[Leaf], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a tree, and the function that puts other values in their places.

    Python numbers and NumPy arrays of floats become JAX arrays; what is no array, such
    as a function, is an error.
    """
    treedef: Any = jax.tree.structure(tree)
    return [
        Leaf(path, _as_array(path, leaf)) for path, leaf in with_paths(tree)
    ], treedef.unflatten


def floats_of(tree: Any) -> list[jax.Array]:
    """Return the leaves that have a norm."""
    return [leaf.value for leaf in leaves_of(tree)[0] if is_float(leaf.value)]


def _as_array(path: tuple[Any, ...], leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, bool | int | float | complex) or hasattr(leaf, "__jax_array__"):
        return jnp.asarray(leaf)
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm":
        return leaf if leaf.dtype == jax.dtypes.float0 else jnp.asarray(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(
            f"leaf {path_name(path)!r} must be an array: for shapes use "
            "jax.eval_shape(tx.init, params)"
        )
    raise TypeError(
        f"leaf {path_name(path)!r} must be an array of numbers, got "
        f"{type(leaf).__name__}: pass only the arrays, of an Equinox module "
        "eqx.filter(model, eqx.is_inexact_array)"
    )


def matches(pattern: str, name: str) -> bool:
    """Return whether a glob matches a whole path, or its last components; with a leading slash, only the former."""
    whole = pattern.startswith("/")
    return (
        fnmatch.fnmatchcase(f"/{name}", pattern if whole else f"*/{pattern}")
        or pattern == name
    )


def first_matches(
    argument: str, patterns: Sequence[str], tree: Any, *, in_order: bool = True
) -> list[str | None]:
    """Return the first of `patterns` that matches each leaf of a tree, or None.

    One that matches no leaf and no None is an error, and `in_order` one that is never
    the first; not so where `optax.masked` or `optax.partition` has removed leaves,
    which it may be for.
    """
    found = with_paths(tree, _is_absent)
    names = [
        path_name(path) for path, _ in found
    ]  # two may be the same: those of {"a/b": x, "a": {"b": y}}
    each = _all_matches(patterns, names)
    first = [which[0] if which else None for which in each]
    if names and not any(isinstance(node, optax.MaskedNode) for _, node in found):
        used = set(itertools.chain(*each))
        for pattern in (p for p in patterns if p not in used):
            inside = any(matches(f"{pattern}/*", name) for name in names)
            hint = f"; {pattern + '/*'!r} matches some" if inside else ""
            raise ValueError(
                f"{argument}: the pattern {pattern!r} matches no leaf{hint}. The "
                f"paths are: {a_few(names)}"
            )
        if in_order and (late := set(patterns) - set(first)):
            raise ValueError(
                f"{argument}: {a_few(sorted(late))} comes after patterns that match "
                "all of its leaves"
            )
    return [
        which
        for which, (_, node) in zip(first, found, strict=True)
        if not _is_absent(node)
    ]


def _all_matches(patterns: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Return the patterns that match each name, in their order.

    Those without wildcards are looked up: `unit_axes` has one for each leaf, and would
    take quadratic time.
    """
    place, globs = (
        {pattern: i for i, pattern in enumerate(patterns)},
        [p for p in patterns if glob.has_magic(p)],
    )
    each = []
    for name in names:
        ends = {
            f"/{name}",
            *(name.split("/", i)[-1] for i in range(name.count("/") + 1)),
        }
        found = {
            *(end for end in ends if end in place),
            *(p for p in globs if matches(p, name)),
        }
        each.append(sorted(found, key=place.__getitem__))
    return each


def _is_absent(node: Any) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def per_leaf(argument: str, given: Any, tree: Any, other: Any) -> list[Any]:
    """Return what is given for each leaf: the same for all, or by path patterns, with `other` where none matches."""
    if not isinstance(given, Mapping):
        return [given] * len(leaves_of(tree)[0])
    return [
        other if pattern is None else given[pattern]
        for pattern in first_matches(argument, tuple(given), tree)
    ]


def a_few(names: Sequence[Any], most: int = 20) -> str:
    """List the first names, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
