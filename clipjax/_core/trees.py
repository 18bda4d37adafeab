"""Leaves with their paths, and the patterns that match these."""

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

from clipjax._core.aliases import Tree
from clipjax._core.messages import a_few

Path = tuple[Any, ...]  # JAX's keys


class Leaf(NamedTuple):
    """A leaf of a tree: an array, or what is no array and passes through."""

    path: Path
    value: Any

    @property
    def name(self) -> str:
        """The path as text, such as `"encoder/Dense_0/kernel"`."""
        return path_name(self.path)

    def __str__(self) -> str:
        return f"leaf {self.name!r} of shape {tuple(np.shape(self.value))}"


def is_float(x: Any) -> bool:
    """Return whether a leaf has a norm: float and complex ones do."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def path_name(path: Path) -> str:
    """Format a key path, such as `"encoder/Dense_0/kernel"`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def with_paths(
    tree: Tree, is_leaf: Callable[[Any], bool] = lambda _: False
) -> list[tuple[Path, Any]]:
    """Return the leaves of a tree with their key paths.

    Flax keeps an array in a box (`nnx.Variable`, `nn.Partitioned`) at `value`, which
    is left out.
    """
    flatten = jax.tree_util.tree_leaves_with_path
    found = []
    for path, node in flatten(tree, is_leaf=lambda x: is_box(x) or is_leaf(x)):
        for inner, leaf in flatten(node, is_leaf) if is_box(node) else [((), node)]:
            kept = itertools.dropwhile(GetAttrKey("value").__eq__, inner)
            found.append(((*path, *kept), leaf))
    return found


def is_box(node: Any) -> bool:
    """Return whether a node is one of Flax's boxes around arrays."""
    if isinstance(node, jax.Array):  # nearly all are
        return False
    return any(
        kind.__name__ in ("Variable", "AxisMetadata")
        and kind.__module__.startswith("flax.")
        for kind in type(node).__mro__
    )


def leaves_of(tree: Tree) -> tuple[list[Leaf], Callable[[Sequence[Any]], Tree]]:
    """Return the leaves of a tree, and the function that puts others in their places.

    Python numbers and NumPy arrays of floats become JAX arrays; what is no array, such
    as a function, is an error.
    """
    leaves = [Leaf(path, _as_array(path, leaf)) for path, leaf in with_paths(tree)]
    treedef: Any = jax.tree.structure(tree)
    return leaves, treedef.unflatten


def floats_of(tree: Tree) -> list[jax.Array]:
    """Return the leaves that have a norm."""
    return [leaf.value for leaf in leaves_of(tree)[0] if is_float(leaf.value)]


def map_floats(function: Callable[[Leaf], Any], tree: Tree) -> Tree:
    """Return a tree with `function(leaf)` in place of each leaf that has a norm."""
    leaves, rebuild = leaves_of(tree)
    return rebuild([function(x) if is_float(x.value) else x.value for x in leaves])


def _as_array(path: Path, leaf: Any) -> Any:
    # `init` takes shapes, as Optax's does; JAX refuses them elsewhere.
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, bool | int | float | complex) or hasattr(leaf, "__jax_array__"):
        return jnp.asarray(leaf)
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm":
        return leaf if leaf.dtype == jax.dtypes.float0 else jnp.asarray(leaf)
    raise TypeError(
        f"leaf {path_name(path)!r} must be an array of numbers, got "
        f"{type(leaf).__name__}: pass only the arrays, of an Equinox module "
        "eqx.filter(model, eqx.is_inexact_array)"
    )


def nodes_where(is_one: Callable[[Any], bool], tree: Any) -> list[Any]:
    """Return the nodes of a tree that a predicate holds for, the outer ones."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_one) if is_one(node)]


def eval_shape(function: Callable[..., Any], params: Tree, *args: Any) -> Any:
    """Return the shapes of `function(params, *args)`, also for host memory.

    A trace does not read arrays there, but refuses to mix them with others. What is no
    array is the error of :func:`leaves_of`.
    """
    leaves_of(params)
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_in_host(x) else x,
        params,
    )
    return jax.eval_shape(function, params, *args)


def is_in_host(x: Any) -> bool:
    """Return whether an array is in the memory of the host, on purpose."""
    space = jax.memory.Space.Host
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == space


def params_for(name: str, updates: Tree, params: Tree) -> Tree:
    """Return the parameters, as :func:`like` does."""
    if params is None:
        if not jax.tree.leaves(updates):
            return updates
        raise ValueError(
            f"params: {name} needs them: tx.update(updates, state, params)"
        )
    return like("params", name, updates, params, "updates")


def like(argument: str, name: str, tree: Tree, given: Tree, of: str) -> Tree:
    """Return what is given for each leaf of a tree, with None where that has None.

    Other structures and shapes than those of the tree, which is `of` updates or
    weights, are an error.
    """
    try:
        given = jax.tree.map(
            lambda x, y: None if x is None else y,
            tree,
            given,
            is_leaf=lambda x: x is None,
        )
    except ValueError as error:
        raise ValueError(
            f"{argument}: {name} needs them in the structure of the {of}: {error}"
        ) from error
    shapes = [list(map(np.shape, jax.tree.leaves(x))) for x in (tree, given)]
    if shapes[0] != shapes[1]:
        _raise_if_unlike(argument, name, leaves_of(tree)[0], leaves_of(given)[0], of)
    return given


def _raise_if_unlike(
    argument: str, name: str, leaves: list[Leaf], given: list[Leaf], of: str
) -> None:
    missing = {leaf.name for leaf in leaves} - {leaf.name for leaf in given}
    if missing:
        raise ValueError(
            f"{argument}: {name} needs one for each of the {of}, but has none for "
            f"{a_few(sorted(missing))}"
        )
    for leaf, other in zip(leaves, given, strict=True):
        shape = np.shape(leaf.value)
        if shape != np.shape(other.value):
            raise ValueError(
                f"{argument}: {name} got {other}, beside {of} of shape {shape}"
            )


def matches(pattern: str, name: str) -> bool:
    """Return whether a glob matches a whole path, or its last components.

    With a leading slash it only matches the whole path.
    """
    glob_of_all = pattern if pattern.startswith("/") else f"*/{pattern}"
    return pattern == name or fnmatch.fnmatchcase(f"/{name}", glob_of_all)


def first_matches(
    argument: str, patterns: Sequence[str], tree: Tree, *, in_order: bool = True
) -> list[str | None]:
    """Return the first of `patterns` that matches each leaf of a tree, or None.

    One that matches no leaf and no None is an error, and `in_order` one that is never
    the first; not so where `optax.masked` or `optax.partition` has removed leaves,
    which it may be for.
    """
    found = with_paths(tree, _is_absent)
    # Two may be the same: those of {"a/b": x, "a": {"b": y}}.
    names = [path_name(path) for path, _ in found]
    each = _all_matches(patterns, names)
    first = [which[0] if which else None for which in each]
    if names and not any(isinstance(node, optax.MaskedNode) for _, node in found):
        used = set(itertools.chain(*each))
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
    kept = zip(first, found, strict=True)
    return [which for which, (_, node) in kept if not _is_absent(node)]


def _all_matches(patterns: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Return the patterns that match each name, in their order.

    Those without wildcards are looked up: `unit_axes` has one for each leaf, and would
    take quadratic time.
    """
    place = {pattern: i for i, pattern in enumerate(patterns)}
    globs = [pattern for pattern in patterns if glob.has_magic(pattern)]
    each = []
    for name in names:
        parts = name.split("/")
        ends = {"/".join(parts[i:]) for i in range(len(parts))}
        exact = [end for end in (f"/{name}", *ends) if end in place]
        found = {*exact, *(p for p in globs if matches(p, name))}
        each.append(sorted(found, key=place.__getitem__))
    return each


def _is_absent(node: Any) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def per_leaf(argument: str, given: Any, tree: Tree, other: Any) -> list[Any]:
    """Return what is given for each leaf: the same for all, or by path patterns.

    It is `other` where no pattern matches.
    """
    if not isinstance(given, Mapping):
        return [given] * len(jax.tree.leaves(tree))
    found = first_matches(argument, tuple(given), tree)
    return [other if pattern is None else given[pattern] for pattern in found]
