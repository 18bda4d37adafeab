"""A bound on attention logits, by scaling the weights of queries and keys."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.aliases import Bound, Step
from clipjax._core.bounds import check_bound, check_count, is_real
from clipjax._core.clip import factor_to, rescaled
from clipjax._core.leaves import Leaf, Leaves, a_few, is_inexact, path_name, short_repr
from clipjax._core.norms import mesh_axes, over_devices, replicated
from clipjax.weights.projection import Projection, projection


def qk_clip(
    threshold: Bound = 100.0,
    *,
    query: str = "query",
    key: str = "key",
    rope: SupportsIndex = 0,
) -> Projection:
    """Scale queries and keys of heads whose attention logits are above a threshold.

        w * sqrt(min(1, threshold / S)),  S the largest logit of the head

    Here w is a weight of the queries or of the keys. A logit is linear in both, so if
    the largest logit of a head is above `threshold`, it becomes `threshold`. In a chain
    the logits are measured before the update, so those after it may exceed `threshold`
    by what one step adds. Use it when attention logits grow during training until the
    softmax saturates, as they do above all with Muon.

    Where several query heads share a key head, the largest of their logits decides how
    the key is scaled, and a query head that needs more is scaled by the rest. No weight
    grows to make up for a shared key, so the other logits of such a group shrink, too.
    If the threshold is 0, only keys become 0, and what is rotary in queries.

    Args:
      threshold: the largest logit allowed, a `Bound`, 100 by default. An array
        broadcasts to the shape of `max_logits`, `(heads,)` or `(layers, heads)`.
      query: the name of the layer that makes queries, "query" by default. In the path
        `"encoder/attention/query/kernel"`, the part before it, "encoder/attention", is
        the path of the attention layer. Kernels are `(in, heads, head_dim)` and biases
        `(heads, head_dim)`, as in Flax, and a stack has one more axis in front.
      key: the name of the layer that makes keys, "key" by default. Its parameters have
        the same shapes, and the number of its heads divides that of the queries.
      rope: for multi-head latent attention, as in `qk_clip(query="wq_b", key="wkv_b",
        rope=64)`: how many elements at the end of a query head are multiplied with the
        rotary key that all heads share; 0 by default. They take the whole factor,
        because the shared key must not change. The other elements of the query meet as
        many at the start of a key head; what follows these belongs to the values, which
        are not scaled.

    Returns:
      A :class:`Projection`. Its `apply`, and `update` in a chain, need `max_logits`:
      the largest logit of each query head over all tokens and examples, after the scale
      and the mask and before the softmax. For a model with one attention layer it is an
      array `(heads,)`, or `(layers, heads)` for a stack. For several, it is a mapping,
      nested or not, from the whole paths of layers to such arrays. Layers that it does
      not name stay as they are, and a logit that is not finite changes nothing.

    Raises:
      TypeError: `rope` is not an int, or `max_logits` contains something other than
        real arrays.
      ValueError: no layer has queries and keys with kernels of three axes, or their
        sizes do not tell which elements meet, as in a fused kernel; `max_logits` is
        missing, does not fit the heads, or names no layer.

    In a checked `shard_map`, the largest logits over all devices count. They are not
    combined along a mesh axis that splits the weights, because such an axis is taken to
    split the heads: with FSDP, pass `lax.pmax(max_logits, axis_name)`. With
    `accumulate=k`, pass the largest logits of all k micro-batches with the last one.

    References:
      Kimi Team, 2025, Kimi K2: open agentic intelligence, arXiv:2507.20534, algorithm
      1.

    See Also:
      :func:`spectral_cap` bounds the singular values of any matrix; :func:`max_norm`
      bounds norms.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.ones((4, 2, 3))  # (in, heads, head_dim)
      >>> params = {"query": {"kernel": kernel}, "key": {"kernel": kernel}}
      >>> logits = jnp.array([50.0, 400.0])  # the first head is within the bound
      >>> clipped = clipjax.qk_clip(100.0).apply(params, max_logits=logits)
      >>> print(clipped["query"]["kernel"][0].round(3))
      [[1.  1.  1. ]
       [0.5 0.5 0.5]]
    """
    bound = check_bound("threshold", threshold)
    rotary = check_count("rope", rope, 0, static=True)
    layers_of = functools.partial(_layers_of, query=query, key=key, rope=rotary)

    def clip(weights: Leaves, step: Step, max_logits: Any = None) -> list[Any]:
        if max_logits is None:
            raise ValueError(
                "max_logits: qk_clip needs the largest logit of each head, as in "
                "tx.update(grads, state, params, max_logits=max_logits), or in "
                "qk_clip().apply(params, max_logits=max_logits)"
            )
        most = bound.at(step)
        layers = layers_of(weights)
        factors: list[Any] = [None] * len(weights.values)
        for path, logits in _logits_of_layers(max_logits, layers).items():
            finite = jnp.where(jnp.isfinite(logits), logits, 0)
            # Mesh axes that do not split the weights split batches.
            split = _mesh_axes(layers[path].queries)
            finite = over_devices(lax.pmax, finite, but=split)
            fitted = bound.fit(most, finite, f"the logits of {path!r}")
            scales = _scales(layers[path], factor_to(fitted, finite), rotary)
            for place, scale in scales.items():
                factors[place] = scale
        return rescaled(weights.values, factors)

    return projection(
        "clipjax.qk_clip",
        clip,
        scheduled=bound.scheduled,
        needs=("max_logits",),
        check=layers_of,
    )


class _Layer(NamedTuple):
    """The parameters of an attention layer, or of a stack, by place in the tree."""

    queries: dict[int, Leaf]
    keys: dict[int, Leaf]

    def __str__(self) -> str:
        return ", ".join(map(str, [*self.queries.values(), *self.keys.values()]))


def _layers_of(weights: Leaves, query: str, key: str, rope: int) -> dict[str, _Layer]:
    """Return the layers that have both queries and keys, by path."""
    found: dict[str, _Layer] = {}
    leaves = weights.each
    for place, leaf in enumerate(leaves):
        parts = leaf.name.split("/")
        named = [i for i, part in enumerate(parts) if part in (query, key)]
        if named and is_inexact(leaf.value):
            at = named[-1]
            layer = found.setdefault("/".join(parts[:at]), _Layer({}, {}))
            side = layer.queries if parts[at] == query else layer.keys
            side[place] = leaf
    layers = {
        path: layer
        for path, layer in found.items()
        if layer.keys and _kernel(layer.queries).ndim >= 3
    }
    if leaves and not layers:
        raise ValueError(
            f"query, key: no layer has both {query!r} and {key!r} with kernels (in, "
            "heads, head_dim); reshape other kernels first. The leaves are: "
            f"{a_few(leaves)}"
        )
    for path, layer in layers.items():
        _check_heads(path, layer, rope)
    return layers


def _kernel(side: dict[int, Leaf]) -> Any:
    """Return the parameter with most axes; the others are biases."""
    return max(
        (leaf.value for leaf in side.values()), key=jnp.ndim, default=np.zeros(())
    )


def _mesh_axes(side: dict[int, Leaf]) -> set[str]:
    """Return the mesh axes that split a parameter."""
    return {name for leaf in side.values() for name in mesh_axes(leaf.value)}


def _check_heads(path: str, layer: _Layer, rope: int) -> None:
    """Raise if shapes do not tell which elements of queries and keys meet."""
    split = [sorted(_mesh_axes(side)) for side in layer]
    if split[0] != split[1]:
        raise ValueError(
            f"query, key: inside shard_map, the queries of the layer {path!r} differ "
            f"over {split[0]} and its keys over {split[1]}, so that it is not known "
            "which of them meet: split both, or clip outside shard_map, under jit"
        )
    queries, keys = map(_kernel, layer)
    sizes = [{leaf.value.shape[-1:] for leaf in side.values()} for side in layer]
    if queries.ndim == keys.ndim and sizes == [{queries.shape[-1:]}, {keys.shape[-1:]}]:
        wide, narrow = queries.shape[-1], keys.shape[-1]
        meet = wide == narrow if rope == 0 else 0 < wide - rope <= narrow
        if meet:
            return
    raise ValueError(
        f"query, key: in the layer {path!r}, the heads of queries and keys do not "
        f"fit together: {layer}. Kernels must be (in, heads, head_dim): split fused "
        "kernels and reshape flat ones. Only in multi-head latent attention the sizes "
        "of heads differ; there, rope= is the number of last components of a query "
        f"that are rotary, got {rope}"
    )


def _logits_of_layers(
    max_logits: Any, layers: dict[str, _Layer]
) -> dict[str, jax.Array]:
    """Return the largest logits of each layer that `max_logits` names, by path.

    A path may go on below the layer, as that of what Flax sows there.
    """
    found: dict[str, jax.Array] = {}
    shown = a_few([repr(path) for path in layers])  # the tree may be one, ''
    for path, value in jax.tree_util.tree_leaves_with_path(max_logits):
        if not is_real(value):
            raise TypeError(
                "max_logits must be a real array or a mapping to such arrays, got "
                f"{short_repr(value)}"
            )
        name = path_name(path)
        if not name and len(layers) == 1:
            (name,) = layers
        starts = [layer for layer in layers if f"{name}/".startswith(f"{layer}/")]
        if not starts:
            raise ValueError(
                f"max_logits: {name!r} is not the whole path of an attention layer, "
                f"which are: {shown}"
            )
        layer = max(starts, key=len)
        logits = jnp.asarray(lax.stop_gradient(value)).astype(np.float32)
        logits = replicated(logits)
        found[layer] = jnp.maximum(found.get(layer, logits), logits)
    if layers and not found:
        raise ValueError(
            f"max_logits: {short_repr(max_logits)} names none of the layers: {shown}"
        )
    return found


def _scales(layer: _Layer, factor: jax.Array, rope: int) -> dict[int, jax.Array]:
    """Return the factor of each parameter of a layer, by place in the tree.

    Args:
      layer: the parameters.
      factor: the factor of the logits of each query head, `(*stack, heads)`.
      rope: the number of last components of a query that are rotary.
    """
    *stack, heads = factor.shape or (0,)
    depth = len(stack)
    kernel = _kernel(layer.keys)
    groups = kernel.shape[-2]
    fits = kernel.ndim >= depth + 3 and heads > 0 and heads % max(groups, 1) == 0
    for side, count in zip(layer, (heads, groups), strict=True):
        for leaf in side.values():
            *axes, _ = leaf.value.shape
            fits &= len(axes) > depth and [*axes[:depth], axes[-1]] == [*stack, count]
    if not fits:
        raise ValueError(
            f"max_logits: shape {factor.shape} does not fit {layer}. It must be "
            "(heads,), or (layers, heads) for a stack; kernels are (in, heads, "
            "head_dim), biases (heads, head_dim), and the number of key heads divides "
            "that of query heads"
        )
    of_group = factor.reshape(*stack, groups, heads // groups)
    of_key = jnp.sqrt(jnp.min(of_group, axis=-1))
    given = jnp.repeat(of_key, heads // groups, axis=-1)
    # The factor is at most 1: a query does not grow to make up for its shared key.
    less = factor < given
    of_query = jnp.where(less, factor, 1) / jnp.where(less, given, 1)
    both = _kernel(layer.queries).shape[-1] - rope  # the rest is rotary, or a value
    sides = (
        (layer.queries, of_query, factor),
        (layer.keys, of_key, jnp.ones_like(of_key)),
    )
    scales = {}
    for side, of_both, of_rest in sides:
        for place, leaf in side.items():
            *axes, size = leaf.value.shape
            shape = *stack, *(1,) * (len(axes) - depth - 1), axes[-1], 1
            own, rest = of_both.reshape(shape), of_rest.reshape(shape)
            scales[place] = jnp.where(jnp.arange(size) < both, own, rest)
    return scales
