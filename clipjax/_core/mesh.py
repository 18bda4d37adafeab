"""The mesh axes over which the entries of one norm are spread, inside `shard_map` and `pmap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from clipjax._core.arguments import check_names
from clipjax._core.axes import Path, Reduced, path_name
from clipjax._core.paths import described, for_each_leaf, leaves_of_prefix

Names: TypeAlias = tuple[str, ...]
OfALeaf: TypeAlias = str | Sequence[str] | None
AxisName: TypeAlias = OfALeaf | Mapping[str, OfALeaf]


def varying(leaf: Any) -> Names:
    """Return the mesh axes that `leaf` varies over, from its type; none outside `shard_map`."""
    if not isinstance(leaf, jax.core.Tracer):
        return ()
    type_ = jax.typeof(leaf)
    vma = getattr(type_, "vma", None)  # its place depends on the version of JAX
    if vma is None:
        vma = getattr(getattr(type_, "mat", None), "varying", None)
    return tuple(sorted(vma or ()))


def split_by_type(leaf: Any) -> tuple[Any, ...]:
    """Return the explicit mesh axes that split each dimension of `leaf`, from its type; () if none do."""
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    spec = () if sharding is None else tuple(sharding.spec)
    return spec if any(spec) else ()


def is_divided(leaf: Any) -> bool:
    """Whether explicit mesh axes split `leaf` over devices; an axis with one device does not."""
    return bool(split_by_type(leaf)) and jax.typeof(leaf).sharding.shard_shape(leaf.shape) != leaf.shape


def is_spread(leaf: Any) -> bool:
    """Whether the type of `leaf` says that devices have different parts of it."""
    return bool(varying(leaf) or split_by_type(leaf))


def placed_as(like: Any, x: jax.Array) -> jax.Array:
    """Split x by the explicit mesh axes of `like`, which has the same shape, so `jnp.where` accepts both."""
    if split_by_type(like) == split_by_type(x):
        return x
    mesh = jax.typeof(like if split_by_type(like) else x).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*split_by_type(like))))


def on_auto_axes(function: Callable[..., Any], like: Any, *args: Any) -> Any:
    """Return `function(*args)`, with explicit mesh axes treated as automatic ones inside.

    This is for operations for which JAX has no rules for explicit axes. The results are split like `like`.
    """
    if not any(split_by_type(x) for x in args):
        return function(*args)
    return jax.sharding.auto_axes(
        function, out_sharding=jax.tree.map(lambda x: jax.typeof(x).sharding, like)
    )(*args)


def of_each_leaf(axis_name: AxisName, tree: Any) -> list[OfALeaf]:
    """Return the `axis_name` of each leaf; in a mapping the first match wins, and other leaves get ()."""
    found = for_each_leaf("axis_name", axis_name, tree, ())
    return [names or () for names in found] if isinstance(axis_name, Mapping) else found


def as_names(axis_name: OfALeaf, argument: str = "axis_name") -> Names:
    """Return an `axis_name` argument, or an entry of a spec, as a tuple; raise an error for unknown names."""
    names = check_names(argument, axis_name)
    for name in names:
        if not _is_here(name):
            raise ValueError(
                f"{argument}: there is no axis {name!r} here. The names are those of the mesh that shard_map "
                "got, or the axis_name of pmap or vmap; outside of these, in sharded jit too, none is needed"
            )
    return names


def _is_here(name: str) -> bool:
    """Whether a mesh axis of this name exists in the current trace."""
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def is_inside(specs: Any, axis_name: AxisName) -> bool:
    """Whether one of these mesh axes exists in the current trace, as inside `shard_map` and `pmap`."""
    of_leaves = axis_name.values() if isinstance(axis_name, Mapping) else [axis_name]
    named = [name for names in of_leaves for name in check_names("axis_name", names)]
    for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)):
        if isinstance(spec, PartitionSpec | NamedSharding):
            entries = spec.spec if isinstance(spec, NamedSharding) else spec
            named += [name for entry in entries for name in check_names("specs", entry)]
    return any(map(_is_here, named))


def names_of_leaves(tree: Any, axis_name: AxisName) -> list[Names]:
    """Return the mesh axes that each whole leaf is spread over: those named, else those of its type."""
    each = zip(of_each_leaf(axis_name, tree), jax.tree.leaves(tree), strict=True)
    return [as_names(names) or varying(leaf) for names, leaf in each]


def names_of_units(
    path: Path, leaf: Any, axes: Reduced, spec: PartitionSpec | None, axis_name: OfALeaf
) -> tuple[Names, Names]:
    """Return the mesh axes that one unit of `leaf` is spread over, and those over which units differ.

    Raises:
      ValueError: the leaf varies over mesh axes, and neither `specs` nor `axis_name` says which
        of its dimensions they split.
    """
    of_spec = [] if spec is None else _manual(path, leaf, spec)
    everywhere = varying(leaf) or tuple(
        sorted({name for names in of_spec for name in names if _is_here(name)})
    )
    if axis_name is not None:
        names = as_names(axis_name) or varying(leaf)
    elif axes is None:
        names = everywhere
    elif spec is not None:
        split = {name for axis in axes if axis < len(of_spec) for name in of_spec[axis]}
        names = as_names(tuple(sorted(split)), "specs")
    elif not varying(leaf):
        names = ()
    else:
        raise ValueError(
            f"specs: leaf {path_name(path)!r} of shape {leaf.shape} varies over the mesh axes "
            f"{varying(leaf)}, and its type does not say which dimension they split. Pass specs=, the "
            f"PartitionSpec tree that shard_map got."
        )
    return names, tuple(name for name in everywhere if name not in names)


def _manual(path: Path, leaf: Any, spec: PartitionSpec) -> list[Names]:
    """Return the mesh axes of each entry of a spec, without automatic axes."""
    if len(spec) > len(leaf.shape):
        raise ValueError(f"specs: {spec} has more entries than leaf {described(path, leaf)} has axes")
    mesh = jax.sharding.get_abstract_mesh()
    compilers = set(mesh.axis_names) - set(mesh.manual_axes)
    names = (check_names("specs", entry) for entry in spec)
    return [tuple(name for name in entry if name not in compilers) for entry in names]


def spec_leaves(specs: Any, tree: Any) -> list[PartitionSpec | None]:
    """Return one spec for each leaf of `tree`, from a tree of specs or a prefix of one.

    Raises:
      TypeError, ValueError: `specs` contains something else, or has another structure.
    """
    if specs is None:
        return [None] * len(jax.tree.leaves(tree))

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec | NamedSharding)

    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        if not is_spec(spec):
            raise TypeError(f"specs must be PartitionSpecs, NamedShardings or None, got {spec!r}")
    found = leaves_of_prefix("specs", "PartitionSpec", specs, tree, is_spec)
    specs = [spec.spec if isinstance(spec, NamedSharding) else spec for spec in found]
    return [PartitionSpec() if spec is None else spec for spec in specs]


def largest_of_devices(x: jax.Array, names: Names) -> jax.Array:
    """Return the largest value on all devices; infinity if one is NaN, which `lax.pmax` may lose."""

    def in_float32(x: jax.Array) -> jax.Array:  # TPUs do not support this reduction in float64
        return lax.convert_element_type(lax.pmax(lax.convert_element_type(x, np.float32), names), x.dtype)

    known = jnp.where(jnp.isnan(x), jnp.inf, x)
    return lax.platform_dependent(known, tpu=in_float32, default=lambda x: lax.pmax(x, names))


def sum_of_devices(x: jax.Array, names: Names) -> jax.Array:
    """Return the sum of float64 values in [0, 1] over all devices.

    TPUs add in float32. So each value is split into three parts: two of 12 bits, whose sums over 4,096
    devices a float32 represents exactly, and the rest.
    """

    def in_parts(x: jax.Array) -> jax.Array:
        high = jnp.round(x * 2.0**12) * 2.0**-12
        middle = jnp.round((x - high) * 2.0**24) * 2.0**-24
        parts = jnp.stack([high, middle, x - high - middle])
        sums = lax.convert_element_type(lax.psum(lax.convert_element_type(parts, np.float32), names), x.dtype)
        return sums[0] + (sums[1] + sums[2])

    return lax.platform_dependent(x, tpu=in_parts, default=lambda x: lax.psum(x, names))
