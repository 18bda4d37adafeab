"""The parameters of a Linen model and their layers, found by tracing its initialization."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import flax.linen as nn
import jax
from flax import struct
from flax.core import DenyList, meta

from clipjax._core.paths import Path, leaves_with_paths, path_name
from clipjax._flax_layers import own_axes
from clipjax._unit_axes import Param

Names: TypeAlias = tuple[str, ...]
Layers: TypeAlias = dict[Names, list[nn.Module]]  # by path; several if they share a scope
Ranks: TypeAlias = dict[Names, int]  # of each parameter, before it is stacked

_calls = itertools.count()
_REPARAMETRISED = (nn.WeightNorm, nn.SpectralNorm)


class _Stacked(struct.PyTreeNode, meta.AxisMetadata[Any]):
    """A box around a parameter, in which `nn.scan` and `nn.vmap` record the axes they add."""

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


def linen_params(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Param]:
    """Return the parameters that `model.init(*args, **kwargs)` makes, with their axes by layer."""
    layers: Layers = {}
    ranks: Ranks = {}
    params = _initialized(model, args, kwargs, layers, ranks)
    boxes = jax.tree.leaves(params, is_leaf=_is_box)
    leaves = leaves_with_paths(meta.unbox(params))
    return [
        _param(_names(path), leaf.shape, box.added if isinstance(box, _Stacked) else (), layers, ranks)
        for box, (path, leaf) in zip(boxes, leaves, strict=True)
    ]


def _is_box(node: Any) -> bool:
    return isinstance(node, meta.AxisMetadata)


def _names(path: Path) -> Names:
    return tuple(path_name((key,)) for key in path)


def _param(names: Names, shape: Any, added: tuple[int, ...], layers: Layers, ranks: Ranks) -> Param:
    depth = next((i for i in reversed(range(len(names))) if names[:i] in layers), 0)
    owners, own_name = layers.get(names[:depth], [None]), "/".join(names[depth:])
    told = [own_axes(owner, own_name, len(shape) - len(added)) for owner in owners]
    axes = ([axes for axes in told if not isinstance(axes, str)] or told)[-1]
    if isinstance(axes, tuple):
        own = list(range(len(shape)))
        for index in reversed(added):
            del own[index]
        axes = tuple(own[axis] for axis in axes)
        if len(own) != ranks.get(names):
            axes = f"{own_name!r} of {type(owners[-1]).__name__}: which axes are a stack?"
    return Param("/".join(names), tuple(shape), axes)


def _initialized(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layers: Layers, ranks: Ranks
) -> Any:
    """Return the shapes of the parameters, in boxes if they are stacked; fill in `layers` and `ranks`."""
    roots: list[Any] = []
    reparametrised: list[nn.Module] = []  # currently running; boxes would change the paths that they read

    def watch(call: Any, call_args: Any, call_kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if module.scope is None or context.method_name == "<lambda>":  # Flax tries out a setup
            return call(*call_args, **call_kwargs)
        layers.setdefault(module.scope.path, []).append(module)
        if isinstance(module, _REPARAMETRISED):
            reparametrised.append(module)
        result = call(*call_args, **call_kwargs)
        if isinstance(module, _REPARAMETRISED):
            reparametrised.pop()
        for path, leaf in leaves_with_paths(module.scope.variables().get("params", {})):
            ranks.setdefault((*module.scope.path, *_names(path)), len(leaf.shape))
        in_transformation = module.scope.root is not roots[0]
        if in_transformation and not reparametrised:
            _box(module.scope)
        return result

    def start(bound: Any, *a: Any, method: Any = None, **k: Any) -> Any:
        roots.append(bound.scope.root)
        call = type(bound).__call__ if method is None else method
        return getattr(bound, call)(*a, **k) if isinstance(call, str) else call(bound, *a, **k)

    # A new name each time makes modules under nn.jit run again; otherwise JAX would return cached results.
    mutable = DenyList(("intermediates", f"unit_axes_{next(_calls)}"))
    treedef: Any
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}

    def init(arrays: dict[int, Any]) -> Any:
        init_args, init_kwargs = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        return nn.init(start, model, mutable)(*init_args, **init_kwargs).get("params", {})

    with nn.intercept_methods(watch):
        return jax.eval_shape(init, arrays)


def _box(scope: Any) -> None:
    """Put boxes around the parameters of a module and its submodules."""
    if scope.is_mutable_collection("params"):
        for name, value in scope.variables().get("params", {}).items():
            boxed = jax.tree.map(
                lambda x: x if isinstance(x, _Stacked) else _Stacked(x), value, is_leaf=_is_box
            )
            scope.put_variable("params", name, boxed)
