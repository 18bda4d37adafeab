"""A bound on attention logits, by scaling the weights of queries and keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.aliases import Bound, Step
from clipjax._core.bounds import check_bound, check_count, is_real
from clipjax._core.clip import factor_to, rescaled
from clipjax._core.leaves import Leaf, Leaves, is_inexact, path_name
from clipjax._core.messages import a_few, short_repr
from clipjax._core.norms import mesh_axes, over_devices, replicated
from clipjax.weights.projection import Projection, projection, written


def qk_clip(
    threshold: Bound = 100.0,
    *,
    query: str = "query",
    key: str = "key",
    rope: SupportsIndex = 0,
) -> Projection:
    """Scale queries and keys to bound the logits of each attention head.

        w * sqrt(min(1, threshold / S)),  S the largest logit of the head

    Here w is a weight of the queries or keys. A logit is linear in the queries and in
    the keys, so a largest logit above `threshold` becomes `threshold`. Use it when the
    attention logits of a transformer grow during training until the softmax saturates,
    as they do above all with Muon.

    Kernels are (in, heads, head_dim) and biases (heads, head_dim), as in Flax. Keys may
    have fewer heads than queries, or no axis for heads. Each key head then serves the
    same number of consecutive query heads, and its scale follows from the largest logit
    of all of these query heads. If this scale is not small enough for a query head, the
    query head is scaled by the rest of its own factor; no query head is scaled up. The
    logits of a head within the bound may therefore shrink, because another head shares
    its key. Megatron scales all query heads of such a group by the factor of the
    largest logit of the group, and so reduces some of them more.

    Args:
      threshold: the bound on logits, a `Bound`, 100 by default. An array broadcasts to
        the logits, (heads,) or (layers, heads).
      query: the component that stands for queries in a path, "query" by default, as in
        `"encoder/attention/query/kernel"`. The components before it name the layer.
      key: the component that stands for keys in a path, "key" by default.
      rope: for multi-head latent attention, as in `qk_clip(query="wq_b", key="wkv_b",
        rope=64)`: how many elements at the end of a query head are multiplied with the
        rotary key that all heads share; 0 by default. These elements are scaled by the
        whole factor, since the shared key must not change. If a key head is longer than
        the query head without its rotary elements, the elements at its end belong to
        the values of the attention, and are not changed.

    Returns:
      A :class:`Projection`. Its `apply`, and `update` in a chain, need the argument
      `max_logits`: the largest logits of the forward pass over all tokens and examples,
      after the scale 1 / sqrt(head_dim) and the mask, and before the softmax. It is an
      array (heads,) of query heads, (layers, heads) for a stack, or a mapping, possibly
      nested, from the paths of layers, or their last components, to such arrays. Layers
      that `max_logits` does not name are not changed. A logit that is not finite
      changes nothing.

    Raises:
      TypeError: `rope` is not an int; when applied, `max_logits` contains something
        other than real arrays.
      ValueError: in `init`, or when applied, no layer has both queries and keys, or the
        heads of queries and keys differ in size or rank, as in a fused kernel, so that
        the shapes do not tell which elements are multiplied with each other; when
        applied, `max_logits` is missing, does not fit the heads, or names no layer.

    In a checked `shard_map`, the largest logits over all devices count. The exception
    is a mesh axis that splits the weights: it is assumed to split the heads, and the
    logits are not combined along it. If such an axis splits `in`, as in FSDP, pass
    `lax.pmax(max_logits, axis_name)`. With `accumulate=k`, only the logits that come
    with the last micro-batch count, so pass the largest logits of all k micro-batches
    with it.

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
    parts = query, key
    if query == key or not all(map(_is_part, parts)):
        raise ValueError(
            f"query and key must be two components of paths, got {query!r} and {key!r}"
        )

    def layers_of(weights: Leaves) -> dict[str, list[_Side]]:
        layers = _layers_of(weights, query, key)
        for path, sides in layers.items():
            _check_heads(path, sides, rotary)
        return layers

    def clip(weights: Leaves, step: Step, max_logits: Any = None) -> list[Any]:
        if max_logits is None:
            raise ValueError(
                "max_logits: qk_clip needs the largest logit of each head, as in "
                "tx.update(grads, state, params, max_logits=max_logits), or in "
                "qk_clip().apply(params, max_logits)"
            )
        most = bound.at(step)
        factors: list[Any] = [None] * len(weights.values)
        for path, logits, sides in _by_layer(max_logits, layers_of(weights)):
            finite = jnp.where(jnp.isfinite(logits), logits, 0)
            # Mesh axes that do not split the weights split batches.
            split = {x for side in sides for x in mesh_axes(side.leaf.value)}
            finite = over_devices(lax.pmax, finite, but=split)
            fitted = bound.fit(most, finite, f"the logits of {path!r}")
            scales = _scales(sides, factor_to(fitted, finite), rotary)
            for side, scale in zip(sides, scales, strict=True):
                factors[side.place] = scale
        return rescaled(weights.values, factors)

    name = written(qk_clip, threshold, query=query, key=key, rope=rotary)
    return projection(
        name,
        clip,
        scheduled=bound.scheduled,
        needs=("max_logits",),
        check=layers_of,
    )


def _is_part(name: Any) -> bool:
    return isinstance(name, str) and name != "" and "/" not in name


class _Side(NamedTuple):
    """A parameter that makes the queries or the keys of a layer, or of a stack."""

    place: int  # among the leaves of the tree
    leaf: Leaf
    is_query: bool
    rest: str  # of the path, such as "kernel"


def _layers_of(weights: Leaves, query: str, key: str) -> dict[str, list[_Side]]:
    """Return the layers that have both queries and keys, by path."""
    found: dict[str, list[_Side]] = {}
    leaves = weights.each
    for i, leaf in enumerate(leaves):
        parts = leaf.name.split("/")
        places = [j for j, part in enumerate(parts) if part in (query, key)]
        if places and is_inexact(leaf.value):
            at = places[-1]
            side = _Side(i, leaf, parts[at] == query, "/".join(parts[at + 1 :]))
            found.setdefault("/".join(parts[:at]), []).append(side)
    layers = {}
    for path, sides in found.items():
        if len({side.is_query for side in sides}) == 2 and _kernels(sides):
            layers[path] = sides
    if leaves and not layers:
        raise ValueError(
            f"query, key: no layer has both {query!r} and {key!r} with kernels (in, "
            "heads, head_dim); reshape other kernels first. The leaves are: "
            f"{a_few(leaves)}"
        )
    return layers


def _check_heads(path: str, sides: list[_Side], rope: int) -> None:
    """Raise if shapes do not tell which components of queries and keys meet."""
    queries = [side for side in sides if side.is_query]
    keys = [side for side in sides if not side.is_query]
    split = [
        sorted({name for side in sides for name in mesh_axes(side.leaf.value)})
        for sides in (queries, keys)
    ]
    if split[0] != split[1]:
        raise ValueError(
            f"query, key: inside shard_map, the queries of the layer {path!r} differ "
            f"over {split[0]} and its keys over {split[1]}, so that it is not known "
            "which of them meet: split both, or clip outside shard_map, under jit"
        )
    ranks = {side.rest: side.leaf.value.ndim for side in queries}
    fewer = [ranks.get(k.rest, k.leaf.value.ndim) - k.leaf.value.ndim for k in keys]
    of_queries = {side.leaf.value.shape[-1:] for side in queries}
    of_keys = {side.leaf.value.shape[-1:] for side in keys}
    one_size = len(of_queries) == len(of_keys) == 1 and () not in of_keys
    if one_size and set(fewer) <= {0, 1}:
        ((wide,),) = of_queries
        ((narrow,),) = of_keys
        meet = wide == narrow if rope == 0 else 0 < wide - rope <= narrow
        if meet:
            return
    raise ValueError(
        f"query, key: in the layer {path!r}, the heads of queries and keys do not "
        f"fit together: {', '.join(str(side.leaf) for side in sides)}. Kernels must be "
        "(in, heads, head_dim): split fused kernels and reshape flat ones. Only in "
        "multi-head latent attention the sizes of heads differ; there, rope= is the "
        f"number of last components of a query that are rotary, got {rope}"
    )


def _kernels(sides: list[_Side], stacked: int = 0) -> list[_Side]:
    """Return the kernels (in, heads, head_dim) of queries, or stacks of these."""
    return [
        side for side in sides if side.is_query and side.leaf.value.ndim >= stacked + 3
    ]


def _by_layer(
    max_logits: Any, layers: dict[str, list[_Side]]
) -> list[tuple[str, jax.Array, list[_Side]]]:
    """Return the layers that `max_logits` names, each with its largest logits."""
    found: dict[str, jax.Array] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(max_logits):
        if not is_real(value):
            raise TypeError(
                "max_logits must be a real array or a mapping to such arrays, got "
                f"{short_repr(value)}"
            )
        layer = _layer_at(path_name(path), list(layers))
        logits = jnp.asarray(lax.stop_gradient(value)).astype(np.float32)
        logits = replicated(logits)
        found[layer] = jnp.maximum(found[layer], logits) if layer in found else logits
    if layers and not found:
        raise ValueError(
            f"max_logits: {short_repr(max_logits)} names none of the layers: "
            f"{_shown(layers)}"
        )
    return [(path, logits, layers[path]) for path, logits in found.items()]


def _layer_at(name: str, layers: list[str]) -> str:
    """Return the layer that a path in `max_logits` names.

    The path, or its start, is that of the layer, or the last components of it.
    """
    for i in range(name.count("/") + 1):
        start = name.rsplit("/", i)[0]
        exact = [layer for layer in layers if layer == start]
        ends = [layer for layer in layers if start and layer.endswith(f"/{start}")]
        if len(exact or ends) == 1:
            return (exact or ends)[0]
    # If the model is one layer, its logits may have any name.
    if len(layers) == 1 and "" in (name, layers[0]):
        return layers[0]
    what = f"the path {name!r}" if name else "an array without a path"
    raise ValueError(
        f"max_logits: {what} does not name one of the attention layers: "
        f"{_shown(layers)}"
    )


def _shown(layers: Iterable[str]) -> str:
    return a_few([repr(layer) for layer in layers])  # the tree may be one, ''


def _scales(sides: list[_Side], factor: jax.Array, rope: int) -> list[jax.Array]:
    """Return the factor of each parameter of a layer, in a shape that broadcasts to it.

    Args:
      sides: the parameters.
      factor: the factor of the logits of each query head, `(*stack, heads)`.
      rope: the number of last components of a query that are rotary.
    """
    shapes, shared_by = _fitted(sides, factor.shape)
    *stack, heads = factor.shape
    # Not -1, which could not be inferred for an empty stack.
    of_group = factor.reshape(*stack, heads // shared_by, shared_by)
    of_key = jnp.sqrt(jnp.min(of_group, axis=-1))
    given = jnp.repeat(of_key, shared_by, axis=-1)
    # The factor is at most 1: a query does not grow to make up for its shared key.
    less = factor < given
    of_query = jnp.where(less, factor, 1) / jnp.where(less, given, 1)
    of_rotary = factor
    of_values = jnp.ones_like(of_key)
    wide = next(side.leaf.value.shape[-1] for side in sides if side.is_query)
    scales = []
    for side, shape in zip(sides, shapes, strict=True):
        own, rest = (of_query, of_rotary) if side.is_query else (of_key, of_values)
        scale = own.reshape(shape)
        if rope:
            both = jnp.arange(side.leaf.value.shape[-1]) < wide - rope
            scale = jnp.where(both, scale, rest.reshape(shape))
        scales.append(scale)
    return scales


def _fitted(
    sides: list[_Side], given: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], int]:
    """Return the shapes of heads in each parameter, and how many heads share a key."""
    *stack, heads = given or (0,)
    ranks = {side.rest: side.leaf.value.ndim for side in sides if side.is_query}
    depth = len(stack)
    shapes = []
    of_queries: set[int] = set()
    of_keys: set[int] = set()
    for side in sides:
        shape = side.leaf.value.shape
        own = shape[depth:]
        # One key head may have no axis.
        alone = not side.is_query and ranks.get(side.rest) == len(shape) + 1
        last = (1,) if alone else (*own[-2:-1], 1)
        fits = list(shape[:depth]) == stack and len(own) >= 2 - alone
        (of_queries if side.is_query else of_keys).add(last[0] if fits else 0)
        shapes.append((*stack, *(1,) * (len(own) - len(last)), *last))
    shared_by = heads // max(*of_keys, 1)
    keys_fit = {count * shared_by for count in of_keys} == {heads}
    queries_fit = heads > 0 and of_queries == {heads}
    if not (keys_fit and queries_fit and _kernels(sides, depth)):
        raise ValueError(
            f"max_logits: shape {given} does not fit "
            f"{', '.join(str(side.leaf) for side in sides)}. It must be (heads,), or "
            "(layers, heads) for a stack; kernels are (in, heads, head_dim), biases "
            "(heads, head_dim), and the number of key heads divides that of query heads"
        )
    return shapes, shared_by
