"""A tree taken apart: its arrays, their paths, and the patterns that match paths."""

import collections
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

from clipjax._core.aliases import Path, Tree


class Leaf(NamedTuple):
    """A leaf with its path, as errors describe it."""

    path: Path
    value: Any

    @property
    def name(self) -> str:
        """The path as text, such as `"encoder/Dense_0/kernel"`."""
        return path_name(self.path)

    def __str__(self) -> str:
        return f"leaf {self.name!r} of shape {tuple(np.shape(self.value))}"


class Leaves(NamedTuple):
    """A tree, taken apart; `values` and `paths` have one entry for each leaf."""

    values: list[Any]
    paths: list[Path]
    rebuild: Callable[[Sequence[Any]], Tree]
    # The paths at which the tree has None, or from which `optax.masked` has removed a
    # leaf.
    absent: list[Path]
    is_masked: bool

    @property
    def inexact(self) -> list[jax.Array]:
        """The leaves that have a norm."""
        return [x for x in self.values if is_inexact(x)]

    @property
    def each(self) -> list[Leaf]:
        """The leaves with their paths."""
        return list(map(Leaf, self.paths, self.values))


def flatten(tree: Tree) -> Leaves:
    """Take a tree apart.

    Python numbers and NumPy arrays become JAX arrays. A leaf that is no array, such as
    a function, raises an error.
    """
    found = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: _is_absent(node) or _is_sparse(node)
    )
    paths = without_boxes([path for path, _ in found])
    nodes = [node for _, node in found]
    is_absent = list(map(_is_absent, nodes))
    present = [path for path, gone in zip(paths, is_absent, strict=True) if not gone]
    kept = [node for node, gone in zip(nodes, is_absent, strict=True) if not gone]
    treedef: Any = jax.tree.structure(tree)
    return Leaves(
        list(map(_array_at, present, kept)),
        present,
        treedef.unflatten,
        list(itertools.compress(paths, is_absent)),
        any(isinstance(node, optax.MaskedNode) for node in nodes),
    )


def is_inexact(x: Any) -> bool:
    """Return whether a leaf is of float or complex numbers, and so has a norm."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def path_name(path: Path) -> str:
    """Format a path, such as `"encoder/Dense_0/kernel"`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


_VALUE = GetAttrKey("value")


def without_boxes(paths: Sequence[Path]) -> list[Path]:
    """Drop the key `.value` from paths where the node has no other child.

    Such a node is a box around an array, as `nnx.Variable` and `nn.Partitioned` are,
    and users write paths without that key.
    """
    if not any(_VALUE in path for path in paths):
        return list(paths)
    edges = {path[: i + 1] for path in paths for i in range(len(path))}
    children = collections.Counter(edge[:-1] for edge in edges)
    return [
        tuple(
            key for i, key in enumerate(path) if key != _VALUE or children[path[:i]] > 1
        )
        for path in paths
    ]


def unboxed(tree: Tree) -> Tree:
    """Return a tree with the contents of boxes in their place."""

    def contents(node: Any) -> list[Any]:
        level = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
        children = list(level[0]) if level else []
        return [child for key, child in children if [key] == [_VALUE] * len(children)]

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not any(path[-1:] == (_VALUE,) for path, _ in leaves):
        return tree  # which saves the walk through all nodes
    return jax.tree.map(
        lambda node: (contents(node) or [node])[0],
        tree,
        is_leaf=lambda node: bool(contents(node)),
    )


def _is_absent(node: Any) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _is_sparse(node: Any) -> bool:
    return not isinstance(node, jax.Array) and hasattr(node, "todense")


def _array_at(path: Path, leaf: Any) -> Any:
    array: Any
    # `init` takes shapes, as Optax's does; elsewhere JAX raises an error for them.
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        array = leaf
    elif isinstance(leaf, bool | int | float | complex):
        array = jnp.asarray(leaf)
    elif isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm":
        array = leaf if leaf.dtype == jax.dtypes.float0 else jnp.asarray(leaf)
    elif _is_sparse(leaf):
        raise _unsupported(path, "is sparse")
    else:
        raise TypeError(
            f"leaf {path_name(path)!r} must be an array of numbers, got "
            f"{type(leaf).__name__}: pass only the arrays, of an Equinox module "
            "eqx.filter(model, eqx.is_inexact_array)"
        )
    if array.dtype.itemsize == 1 and jnp.issubdtype(array.dtype, jnp.floating):
        raise _unsupported(path, f"is {array.dtype}")
    return array


def _unsupported(path: Path, what: str) -> TypeError:
    return TypeError(
        f"leaf {path_name(path)!r} {what}: clipjax takes dense arrays, whose floats "
        "have 16 bits or more; leave others out with optax.masked"
    )


def nodes_where(is_one: Callable[[Any], bool], tree: Tree) -> list[Any]:
    """Return the outermost nodes of a tree for which a predicate holds."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_one) if is_one(node)]


def shapes_of(function: Callable[[Leaves], Any], leaves: Leaves) -> Any:
    """Return the shapes of what a function returns for leaves, without computing it."""
    return jax.eval_shape(
        lambda values: function(leaves._replace(values=values)), leaves.values
    )


def check_within(updates: Tree, params: Tree) -> None:
    """Raise if updates have leaves where the parameters have none.

    Parameters of another type are those of a wrapper, such as `optax.lookahead`, whose
    updates are for a part of them.
    """
    structures: Any = [jax.tree.structure(tree) for tree in (updates, params)]
    if type(params) is not type(updates) or structures[0] == structures[1]:
        return
    of_updates, of_params = (
        without_boxes([path for path, _ in jax.tree_util.tree_leaves_with_path(tree)])
        for tree in (updates, params)
    )
    known = {*of_params}
    other = [path_name(path) for path in of_updates if path not in known]
    if other:
        raise ValueError(
            "params: they must have the tree of the updates, but have no leaf at "
            f"{a_few(other) or 'the root'}: write update(grads, state, params, "
            "loss=loss), with the parameters that init got"
        )


def beside(
    leaves: Leaves, given: Tree | Leaves, argument: str, name: str, of: str = "updates"
) -> list[Any]:
    """Return the leaves of another tree, such as parameters, at the paths of a tree.

    The other tree is an argument of `name`, and may have more leaves. `of` says for
    errors what the first tree is: updates, or weights.
    """
    if given is None and leaves.values:
        raise ValueError(
            f"{argument}: {name} needs them, as in "
            f"tx.update(updates, state, {argument})"
        )
    others = given if isinstance(given, Leaves) else flatten(given)
    by_path = dict(zip(others.paths, others.values, strict=True))
    missing = [path_name(path) for path in leaves.paths if path not in by_path]
    if missing:
        raise ValueError(
            f"{argument}: {name} needs them in the structure of the {of}, but has none "
            f"for {a_few(missing)}"
        )
    found = [by_path[path] for path in leaves.paths]
    for leaf, other in zip(leaves.each, found, strict=True):
        if np.shape(leaf.value) != np.shape(other):
            raise ValueError(
                f"{argument}: {name} got {leaf._replace(value=other)}, beside {of} of "
                f"shape {np.shape(leaf.value)}"
            )
    return found


def matches(pattern: str, name: str) -> bool:
    """Return whether a glob matches a whole path, or its last components.

    A glob with a leading slash only matches the whole path.
    """
    path = f"/{name}"
    if pattern.startswith("/"):
        return path == pattern or fnmatch.fnmatchcase(path, pattern)
    is_end = path.endswith(f"/{pattern}")
    return is_end or fnmatch.fnmatchcase(path, f"*/{pattern}")


def first_matches(
    argument: str, patterns: Sequence[str], leaves: Leaves, *, in_order: bool = True
) -> list[str | None]:
    """Return for each leaf the first pattern that matches it, or None.

    A pattern that matches nothing in the tree raises an error, and so does, if
    `in_order`, a pattern that is never the first. Where `optax.masked` or
    `optax.partition` has removed leaves, a pattern may be for the removed ones.
    """
    # Two leaves may have one name, as in {"a/b": x, "a": {"b": y}}.
    names = [path_name(path) for path in (*leaves.paths, *leaves.absent)]
    matched = _all_matches(patterns, names)
    first = [found[0] if found else None for found in matched]
    if names and not leaves.is_masked:
        used = set(itertools.chain(*matched))
        for pattern in (p for p in patterns if p not in used):
            below = f"{pattern}/*"
            is_folder = any(matches(below, name) for name in names)
            hint = f"; {below!r} matches some" if is_folder else ""
            raise ValueError(
                f"{argument}: the pattern {pattern!r} matches no leaf{hint}. The paths "
                f"are: {a_few(names)}"
            )
        late = set(patterns) - set(first)
        if in_order and late:
            raise ValueError(
                f"{argument}: {a_few(sorted(late))} comes after patterns that match "
                "all of its leaves"
            )
    return first[: len(leaves.values)]


def _all_matches(patterns: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Return for each name the patterns that match it, in their order.

    Patterns without wildcards are looked up, since `unit_axes` has one for each leaf,
    and comparing each with each would take quadratic time.
    """
    place = {pattern: i for i, pattern in enumerate(patterns)}
    globs = [pattern for pattern in patterns if glob.has_magic(pattern)]
    matched = []
    for name in names:
        parts = name.split("/")
        # With a leading slash, a pattern is for a whole path, and no component.
        ends = {"/".join(parts[i:]) for i, part in enumerate(parts) if part}
        exact = [end for end in (f"/{name}", *ends) if end in place]
        found = {*exact, *(p for p in globs if matches(p, name))}
        matched.append(sorted(found, key=place.__getitem__))
    return matched


def check_patterns(argument: str, patterns: Any) -> tuple[str, ...]:
    """Return one pattern or several as a tuple."""
    each = (patterns,) if isinstance(patterns, str) else patterns
    is_sequence = isinstance(each, Sequence) and len(each) > 0
    if not is_sequence or not all(isinstance(pattern, str) for pattern in each):
        raise TypeError(
            f"{argument}: path patterns must be one or more strings, got {patterns!r}"
        )
    return tuple(each)


def of_each_leaf(argument: str, given: Any, leaves: Leaves, other: Any) -> list[Any]:
    """Return for each leaf what is given: the same for all, or by path patterns.

    A leaf that no pattern matches gets `other`.
    """
    if not isinstance(given, Mapping):
        return [given] * len(leaves.values)
    found = first_matches(argument, tuple(given), leaves)
    return [other if pattern is None else given[pattern] for pattern in found]


_LONGEST = 80


def short_repr(value: Any) -> str:
    """Return the repr of a value on one line, cut to what an error message can hold."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def a_few(names: Sequence[Any], count: int = 20) -> str:
    """List the first names, and say how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(map(str, names[:count])) + more
