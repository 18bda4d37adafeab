"""The layout of query and key heads in the parameters of attention layers, and their scaling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

from clipjax._core.arguments import shown
from clipjax._core.axes import Skip, check_some, is_measured, leaves_with_paths, path_name
from clipjax._core.rescale import rescaled, scale_by

Role = Literal["query", "query_rope", "key", "value"]
Part: TypeAlias = tuple[Role, int]  # the role, and the number of entries along the axis


class Layout(NamedTuple):
    """Where heads lie in a parameter, apart from the axis of a stack of layers."""

    axes: tuple[int, ...]  # treated as one axis
    head_dim: int | None  # None: there is one entry for each head
    parts: dict[str, tuple[Part, ...]]  # by path component; they repeat along that axis

    @property
    def width(self) -> int:
        """The number of entries of a head along the axis."""
        return self.head_dim or 1


class Leaf(NamedTuple):
    """A parameter that produces queries or keys."""

    position: int  # in the tree
    name: str  # such as "attention/query/kernel"
    rest: str  # such as "kernel"
    leaf: Any
    parts: tuple[Part, ...]

    def has(self, role: Role) -> bool:
        """Whether any part has this role."""
        return any(of == role for of, _ in self.parts)


class Layer(NamedTuple):
    """The query and key parameters of one attention layer, or of a stack of layers."""

    path: str
    leaves: list[Leaf]


def check_layout(query: str, key: str, axis: Any, head_dim: Any, parts: Any) -> Layout:
    """Make a layout from the arguments of :func:`clipjax.qk_clip`, or raise an error if they are invalid."""
    for name, value in (("query", query), ("key", key)):
        _check_component(name, value)
    if query == key:
        raise ValueError(
            f"query and key must differ, got {shown(query)} for both; parts= is for kernels that hold both"
        )
    if isinstance(head_dim, bool) or not isinstance(head_dim, int | None):
        raise TypeError(f"head_dim must be an int, got {shown(head_dim)}")
    if head_dim is not None and head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {shown(head_dim)}")
    axes = _check_axis(axis, head_dim)
    width = head_dim or 1
    found: dict[str, tuple[Part, ...]] = {query: (("query", width),), key: (("key", width),)}
    if parts is not None:
        if not isinstance(parts, Mapping) or not parts:
            raise TypeError(f"parts must map components of paths to pairs (role, size), got {shown(parts)}")
        if head_dim is None:
            raise ValueError(f"parts needs head_dim, the size of a head's query and key, got {shown(parts)}")
        found |= {name: _check_parts(name, value, head_dim) for name, value in parts.items()}
    return Layout(axes, head_dim, found)


def _check_component(argument: str, value: Any) -> None:
    if not isinstance(value, str) or not value or "/" in value:
        raise ValueError(f"{argument} must be one component of a path, got {shown(value)}")


def _check_axis(axis: Any, head_dim: int | None) -> tuple[int, ...]:
    if axis is None:
        return (-2,) if head_dim is None else (-1,)
    several = isinstance(axis, Sequence) and not isinstance(axis, str)
    axes = tuple(axis) if several else (axis,)
    if not axes or any(isinstance(each, bool) or not isinstance(each, int) for each in axes):
        raise TypeError(f"axis must be an int or several, got {shown(axis)}")
    if several and head_dim is None:
        raise ValueError(
            f"axis: several axes need head_dim, the size of a head along them, got {shown(axis)}"
        )
    if list(axes) != sorted(set(axes)) or (axes[0] < 0) != (axes[-1] < 0):
        raise ValueError(f"axis: several axes must ascend, and count from one end, got {shown(axis)}")
    return axes


def _check_parts(name: Any, value: Any, head_dim: int) -> tuple[Part, ...]:
    _check_component("parts: a key", name)
    pairs = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"parts[{name!r}] must be pairs (role, size), got {shown(value)}")
    for role, size in pairs:
        if role not in get_args(Role):
            raise ValueError(f"parts[{name!r}]: a role must be one of {get_args(Role)}, got {shown(role)}")
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"parts[{name!r}]: the size of {role!r} must be an int, got {shown(size)}")
        if size < 1 or (role in ("query", "key") and size % head_dim):
            least = f"a multiple of head_dim={head_dim}" if role in ("query", "key") else "at least 1"
            raise ValueError(f"parts[{name!r}]: the size of {role!r} must be {least}, got {size}")
    roles = [role for role, _ in pairs if role != "value"]
    if len(set(roles)) != len(roles):
        raise ValueError(f"parts[{name!r}] must name each of a head's parts once, got {shown(value)}")
    return tuple((role, size) for role, size in pairs)


def layers_of(params: Any, layout: Layout) -> list[Layer]:
    """Find the attention layers: those with both query and key parameters."""
    found: dict[str, list[Leaf]] = {}
    for i, (path, leaf) in enumerate(leaves_with_paths(params)):
        names = [path_name((entry,)) for entry in path]
        at = max((j for j, name in enumerate(names) if name in layout.parts), default=None)
        if at is not None and is_measured(leaf):
            rest = "/".join(names[at + 1 :])
            each = Leaf(i, "/".join(names), rest, leaf, layout.parts[names[at]])
            found.setdefault("/".join(names[:at]), []).append(each)
    layers = [
        Layer(path, leaves)
        for path, leaves in found.items()
        if any(each.has("query") for each in leaves) and any(each.has("key") for each in leaves)
    ]
    if not layers:
        query, key, *others = map(repr, layout.parts)
        of_parts = f", nor has one of parts {', '.join(others)} queries and keys" if others else ""
        why = Skip(f"no layer has both {query} and {key}{of_parts}")
        leaves, argument = leaves_with_paths(params), "query, key, parts" if others else "query, key"
        check_some(argument, leaves, [why] * len(leaves), "Name the components of the paths of both.")
    return layers


def clipped(layer: Layer, factor: jax.Array, layout: Layout) -> Iterator[tuple[int, jax.Array]]:
    """Yield a layer's new parameters, which multiply each head's logits by `factor`, with their positions."""
    stack, heads = factor.shape[:-1], factor.shape[-1] if factor.ndim else 0
    repeats = [_repeats(each, layer, stack, layout) for each in layer.leaves]
    key_heads = _heads("key", layer, repeats, layout)
    shared_by = heads // max(key_heads, 1)
    fits = _heads("query", layer, repeats, layout) == heads > 0 and key_heads * shared_by == heads
    if not fits or not all(_rope_fits(*pair, heads) for pair in zip(layer.leaves, repeats, strict=True)):
        in_turn = sorted(layer.leaves, key=lambda each: not each.has("query"))
        listed = ", ".join(
            f"{each.name!r} of shape {each.leaf.shape}{_shown_parts(each, layout)}" for each in in_turn
        )
        where = layout.axes[0] if len(layout.axes) == 1 else layout.axes
        blocks = "" if layout.head_dim is None else f" in blocks of {layout.head_dim}"
        raise ValueError(
            f"max_logits: shape {factor.shape} does not fit {listed}, with heads at axis {where}{blocks}. It "
            f"must be (heads,), or (layers, heads) for a stack, and key heads must divide the query's"
        )
    if key_heads != heads and any(each.has("query_rope") for each in layer.leaves):
        raise ValueError(
            f"parts: 'query_rope' needs a key head for each query head, but layer {layer.path!r} has {heads} "
            f"query heads and {key_heads} key heads"
        )
    of_key = jnp.sqrt(jnp.min(factor.reshape(*stack, key_heads, shared_by), axis=-1))
    given = jnp.repeat(of_key, shared_by, axis=-1)
    # A factor of at most 1: a query never grows to compensate for the key that it shares.
    of_query = jnp.where(factor < given, factor / jnp.where(given > 0, given, 1.0), 1.0)
    # The rotary part of a query is multiplied with a key that all heads share and that is not scaled.
    of_role = {"query": of_query, "query_rope": factor, "key": of_key}
    for each, times in zip(layer.leaves, repeats, strict=True):
        yield each.position, _scaled(each, of_role, times, layout, len(stack))


def _repeats(each: Leaf, layer: Layer, stack: tuple[int, ...], layout: Layout) -> int:
    """Return how often the parts of a parameter repeat; 0 if they do not fit."""
    shape = each.leaf.shape
    if shape[: len(stack)] != stack:
        return 0
    if _has_no_axis(each, layer, layout):
        return 1
    own = shape[len(stack) :]
    if not all(-len(own) <= axis < len(own) for axis in layout.axes):
        return 0
    entries, size = math.prod(own[axis] for axis in layout.axes), sum(size for _, size in each.parts)
    return entries // size if entries % size == 0 else 0


def _has_no_axis(each: Leaf, layer: Layer, layout: Layout) -> bool:
    """Whether a key has a single head and no axis for heads."""
    queries = [leaf for leaf in layer.leaves if leaf.has("query") and leaf.rest == each.rest]
    ranks = [len(leaf.leaf.shape) for leaf in queries]
    return each.has("key") and layout.head_dim is None and ranks == [len(each.leaf.shape) + 1]


def _heads(role: Role, layer: Layer, repeats: Sequence[int], layout: Layout) -> int:
    """Return the number of heads in parameters with parts of this role; 0 if these disagree."""
    counts = {
        times * size // layout.width
        for each, times in zip(layer.leaves, repeats, strict=True)
        for of, size in each.parts
        if of == role
    }
    return counts.pop() if len(counts) == 1 else 0


def _rope_fits(each: Leaf, times: int, heads: int) -> bool:
    """Whether the rotary parts can be divided among the heads."""
    return all(
        times > 0 and heads % times == 0 and size % (heads // times) == 0
        for role, size in each.parts
        if role == "query_rope"
    )


def _shown_parts(each: Leaf, layout: Layout) -> str:
    alone = each.parts in ((("query", layout.width),), (("key", layout.width),))
    return "" if alone else f" with parts {each.parts}"


def _scaled(each: Leaf, of_role: dict[str, jax.Array], times: int, layout: Layout, stacked: int) -> jax.Array:
    """Multiply each head of a parameter by its scale; a scale of 1 changes no bit."""
    stack, own = each.leaf.shape[:stacked], each.leaf.shape[stacked:]

    def entries(role: Role, size: int) -> jax.Array:
        if role == "value":
            return jnp.ones((*stack, times, size))
        scale = of_role[role]
        return jnp.repeat(scale, times * size // scale.shape[-1], axis=-1).reshape(*stack, times, size)

    scale = jnp.concatenate([entries(*part) for part in each.parts], axis=-1)
    shape = [1] * len(own)
    if scale.size > math.prod(stack):  # one head needs no axis
        for axis in layout.axes:
            shape[axis] = own[axis]
    return rescaled(each.leaf, scale_by(scale.reshape(*stack, *shape)))
