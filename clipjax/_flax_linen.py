"""Whose parameters are whose in a Linen model: seen while they are initialised, as shapes."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
from flax import struct
from flax.core import DenyList, meta

from clipjax._core.axes import Path, leaves_with_paths, path_name
from clipjax._flax_layers import Param, no_rule, rule_of

Names: TypeAlias = tuple[str, ...]

_calls = itertools.count()
_REPARAMETRISED = (nn.WeightNorm, nn.SpectralNorm)


class _Stacked(struct.PyTreeNode, meta.AxisMetadata[Any]):
    """A box around a parameter, on which `nn.scan` and `nn.vmap` note the axes they add."""

    value: Any
    added: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> Any:
        return self.replace(value=val)

    def add_axis(self, index: int, params: Any) -> Any:
        return _Stacked(meta.add_axis(self.value, index, params), (*self.added, index))

    def remove_axis(self, index: int, params: Any) -> Any:
        return _Stacked(meta.remove_axis(self.value, index, params), self.added[:-1])


class _Seen(NamedTuple):
    """What was seen of a model while its parameters were initialised."""

    layers: dict[Names, list[nn.Module]]  # by path; several if they share a scope
    ranks: dict[Names, int]  # of the parameters, inside what may stack them
    params: Any  # shapes, boxed by what may stack them


def linen_params(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Param]:
    """Find the parameters that `model.init(*args, **kwargs)` makes, and what their layers say of them."""
    seen = _initialised(model, args, kwargs)
    boxes = jax.tree.leaves(seen.params, is_leaf=_is_box)
    leaves = leaves_with_paths(meta.unbox(seen.params))
    return [
        _param(_names(path), leaf, box.added if isinstance(box, _Stacked) else (), seen)
        for box, (path, leaf) in zip(boxes, leaves, strict=True)
    ]


def _is_box(node: Any) -> bool:
    return isinstance(node, meta.AxisMetadata)


def _names(path: Path) -> Names:
    return tuple(path_name((key,)) for key in path)


def _param(names: Names, leaf: Any, added: tuple[int, ...], seen: _Seen) -> Param:
    depth = next((i for i in reversed(range(len(names))) if names[:i] in seen.layers), 0)
    owners, own_name = seen.layers.get(names[:depth], [None]), "/".join(names[depth:])
    axes, why, rank = None, no_rule(owners[-1], own_name), len(leaf.shape)
    for owner in owners:
        if rule := rule_of(owner, own_name):
            axes = rule(owner, rank - len(added))
    if isinstance(axes, tuple):
        own = _own_axes(rank, added)
        axes = tuple(own[axis] for axis in axes)
        if len(own) != seen.ranks.get(names):
            axes, why = None, f"{own_name!r} of {type(owners[-1]).__name__}: which axes are a stack?"
    return Param("/".join(names), tuple(leaf.shape), axes, why)


def _own_axes(rank: int, added: tuple[int, ...]) -> list[int]:
    """The axes that remain when those that were added one after the other are taken away."""
    axes = list(range(rank))
    for index in reversed(added):
        del axes[index]
    return axes


def _initialised(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Seen:
    layers: dict[Names, list[nn.Module]] = {}
    ranks: dict[Names, int] = {}
    roots: list[Any] = []
    reparametrised: list[nn.Module] = []  # the modules that we are in and that look at the paths of leaves

    def watch(call: Any, call_args: Any, call_kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if module.scope is None or context.method_name == "<lambda>":  # as where Flax tries out a setup
            return call(*call_args, **call_kwargs)
        layers.setdefault(module.scope.path, []).append(module)
        if isinstance(module, _REPARAMETRISED):
            reparametrised.append(module)
        result = call(*call_args, **call_kwargs)
        if isinstance(module, _REPARAMETRISED):
            reparametrised.pop()
        _note_ranks(module.scope, ranks)
        if module.scope.root is not roots[0] and not reparametrised:  # inside a transformation
            _box(module.scope)
        return result

    def start(bound: Any, *a: Any, method: Any = None, **k: Any) -> Any:
        roots.append(bound.scope.root)
        call = type(bound).__call__ if method is None else method
        return getattr(bound, call)(*a, **k) if isinstance(call, str) else call(bound, *a, **k)

    # Of modules under nn.jit that ran before, JAX keeps the result: a name never used makes them run again.
    mutable = DenyList(("intermediates", f"unit_axes_{next(_calls)}"))
    treedef: Any
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def init(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        merged = [next(rest) if yes else leaf for leaf, yes in zip(leaves, is_array, strict=True)]
        init_args, init_kwargs = treedef.unflatten(merged)
        return nn.init(start, model, mutable)(*init_args, **init_kwargs).get("params", {})

    with nn.intercept_methods(watch):
        params = jax.eval_shape(init, list(itertools.compress(leaves, is_array)))
    return _Seen(layers, ranks, params)


def _note_ranks(scope: Any, ranks: dict[Names, int]) -> None:
    """Note the ranks of parameters that are seen for the first time."""
    for path, leaf in leaves_with_paths(scope.variables().get("params", {})):
        ranks.setdefault((*scope.path, *_names(path)), len(leaf.shape))


def _box(scope: Any) -> None:
    """Put boxes around the parameters of a module and of those in it."""
    if scope.is_mutable_collection("params"):
        for name, value in scope.variables().get("params", {}).items():
            boxed = jax.tree.map(
                lambda x: x if isinstance(x, _Stacked) else _Stacked(x), value, is_leaf=_is_box
            )
            scope.put_variable("params", name, boxed)
