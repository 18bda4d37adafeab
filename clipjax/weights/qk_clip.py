"""A bound on attention logits, by scaling the weights of queries and keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from clipjax import _checks
from clipjax._core import bounds, clipping, trees
from clipjax.weights.projection import Projection, written


def qk_clip(
    threshold: bounds.Bound = 100.0,
    *,
    query: str = "query",
    key: str = "key",
    rope: SupportsIndex = 0,
) -> Projection:
    """Scale each head's queries and keys by sqrt(min(1, threshold / S)), where S is its largest logit.

    S then becomes `threshold`, as a logit is linear in each of the two. Kernels are
    (in, heads, head_dim) and biases (heads, head_dim), as in Flax. A key may have fewer
    heads than the query, or no axis for them: each of its heads serves equally many
    consecutive query heads, is scaled for the largest of their logits, and each query
    head is scaled by the rest, but never up: a head inside the threshold may lose by
    its neighbors. Megatron scales all queries of a group by its largest logit instead,
    and so more.

    Args:
      threshold: the largest logit: a number, an array that broadcasts to the logits, or
        a schedule.
      query: the component of a path that names queries, as in
        `"encoder/attention/query/kernel"`.
      key: the component of a path that names keys. The components before it name the
        layer.
      rope: for multi-head latent attention, as in `qk_clip(query="wq_b", key="wkv_b",
        rope=64)`: how many of the last components of a query head meet a rotary key
        that all heads share. They are scaled by the whole factor, since that key must
        not change; nor do the components of `key` that meet none of the query, which
        are values.

    Returns:
      A :class:`Projection`. Its call, and `update` where it is a link, need the
      argument `max_logits`: the largest logits of the forward pass, after the scale 1 /
      sqrt(head_dim) and the mask, and before the softmax, over all tokens, examples and
      devices. It is an array (heads,) of query heads, (layers, heads) for a stack, or a
      mapping, possibly nested, from the paths of layers, or their last components, to
      such arrays. Layers that it does not name are not changed, and logits that are not
      finite clip nothing. With `accumulate=k`, those of the last micro-batch count:
      pass the largest of all k with it.

    Raises:
      TypeError, ValueError: in `init`, or when called: no layer has both; heads of the
        two differ in size, or in rank, as those of a fused kernel, so that it is not
        known what meets what. When called: `max_logits` is missing, does not fit the
        heads, or names no layer.

    References:
      Kimi Team, 2025, Kimi K2: open agentic intelligence, arXiv:2507.20534, algorithm
      1.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.ones((4, 2, 3))  # (in, heads, head_dim)
      >>> params = {"query": {"kernel": kernel}, "key": {"kernel": kernel}}
      >>> logits = jnp.array([50.0, 400.0])  # the first head is inside
      >>> clipped = clipjax.qk_clip(100.0)(params, max_logits=logits)
      >>> print(clipped["query"]["kernel"][0].round(3))
      [[1.  1.  1. ]
       [0.5 0.5 0.5]]
    """
    bound, rotary = (
        bounds.as_schedule("threshold", threshold),
        _checks.check_count("rope", rope, 0),
    )
    if (
        not all(
            isinstance(each, str) and each and "/" not in each for each in (query, key)
        )
        or query == key
    ):
        raise ValueError(
            f"query and key must be two components of paths, got {query!r} and {key!r}"
        )

    def find(params: Any) -> dict[str, list[_Side]]:
        layers = _layers_of(params, query, key)
        for path, sides in layers.items():
            _check_heads(path, sides, rotary)
        return layers

    def clip(params: Any, step: Any, max_logits: Any = None, **other: Any) -> Any:
        if max_logits is None:
            raise ValueError(
                "max_logits: qk_clip needs the largest logit of each head, as in "
                "tx.update(grads, state, params, max_logits=max_logits)"
            )
        limit, each, scales = bound(step), [], []
        for path, logits, sides in _by_layer(max_logits, find(params)):
            finite = jnp.where(jnp.isfinite(logits), logits, 0)
            factor = clipping.factor_to(
                bounds.fit_bound("threshold", limit, finite, f"the logits of {path!r}"),
                finite,
            )
            each += sides
            scales += _scales(sides, factor, rotary)
        return clipping.rescaled(params, each, scales)

    name = written(
        "qk_clip", threshold, query=(query, "query"), key=(key, "key"), rope=(rope, 0)
    )
    return Projection(name, clip, scheduled=callable(threshold), check=find)


class _Side(NamedTuple):
    """A parameter that makes the queries or the keys of a layer, or of a stack of layers."""

    place: int  # among the leaves of the tree
    leaf: trees.Leaf
    is_query: bool
    rest: str  # of the path, such as "kernel"


def _layers_of(params: Any, query: str, key: str) -> dict[str, list[_Side]]:
    """Return the layers that have both queries and keys, by path."""
    found: dict[str, list[_Side]] = {}
    leaves, _ = trees.leaves_of(params)
    for i, leaf in enumerate(leaves):
        parts = leaf.name.split("/")
        at = max(
            (j for j, part in enumerate(parts) if part in (query, key)), default=None
        )
        if at is not None and trees.is_float(leaf.value):
            side = _Side(i, leaf, parts[at] == query, "/".join(parts[at + 1 :]))
            found.setdefault("/".join(parts[:at]), []).append(side)
    layers = {
        path: sides
        for path, sides in found.items()
        if len({s.is_query for s in sides}) == 2 and _kernels(sides)
    }
    if leaves and not layers:
        raise ValueError(
            f"query, key: no layer has both {query!r} and {key!r}, with kernels (in, "
            "heads, head_dim): reshape others first. The leaves are: "
            f"{trees.a_few(leaves)}"
        )
    return layers


def _check_heads(path: str, sides: list[_Side], rope: int) -> None:
    """Raise an error if the shapes of a layer do not say which components of queries and keys meet."""
    ranks = {side.rest: side.leaf.value.ndim for side in sides if side.is_query}
    of_query, of_key = (
        {s.leaf.value.shape[-1:] for s in sides if s.is_query is kind}
        for kind in (True, False)
    )
    ranks_fit = all(
        ranks.get(s.rest, s.leaf.value.ndim) - s.leaf.value.ndim in (0, 1)
        for s in sides
        if not s.is_query
    )
    if ranks_fit and len(of_query) == len(of_key) == 1 and () not in of_key:
        ((wide,),), ((narrow,),) = of_query, of_key
        if wide == narrow if rope == 0 else 0 < wide - rope <= narrow:
            return
    found = ", ".join(str(side.leaf) for side in sides)
    raise ValueError(
        f"query, key: in the layer {path!r}, the heads of queries and keys do not "
        f"meet: {found}. Both are (in, heads, head_dim). Heads of two sizes are those "
        "of multi-head latent attention, where rope= says how many of the last "
        f"components of a query are rotary, got {rope}. Split or reshape fused and "
        "flat kernels first"
    )


def _kernels(sides: list[_Side], stacked: int = 0) -> list[_Side]:
    """Return the kernels (in, heads, head_dim) of queries, behind the axes of a stack."""
    return [
        side for side in sides if side.is_query and side.leaf.value.ndim >= stacked + 3
    ]


def _by_layer(
    max_logits: Any, layers: dict[str, list[_Side]]
) -> list[tuple[str, jax.Array, list[_Side]]]:
    """Return the layers that are named, with their logits: the largest, where there are several arrays."""
    found: dict[str, jax.Array] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(max_logits):
        if not bounds.is_real(value):
            raise TypeError(
                "max_logits must be a real array or a mapping to such arrays, got "
                f"{bounds.short_repr(value)}"
            )
        layer = _layer_at(trees.path_name(path), list(layers))
        logits = jnp.asarray(lax.stop_gradient(value)).astype(np.float32)
        sharding = jax.typeof(logits).sharding
        if any(sharding.spec):  # over explicit mesh axes
            logits = jax.sharding.reshard(
                logits, NamedSharding(sharding.mesh, PartitionSpec())
            )
        found[layer] = jnp.maximum(found[layer], logits) if layer in found else logits
    if layers and not found:
        raise ValueError(
            f"max_logits: {bounds.short_repr(max_logits)} names none of the layers: "
            f"{_shown(layers)}"
        )
    return [(path, logits, layers[path]) for path, logits in found.items()]


def _layer_at(name: str, layers: list[str]) -> str:
    """Return the layer whose path, or the end of whose path, is `name` or the start of `name`."""
    for i in range(name.count("/") + 1):
        start = name.rsplit("/", i)[0]
        named = [layer for layer in layers if layer == start]
        named = named or [
            layer for layer in layers if start and layer.endswith(f"/{start}")
        ]
        if len(named) == 1:
            return named[0]
    if len(layers) == 1 and "" in (
        name,
        layers[0],
    ):  # a model that is one layer may call its logits anything
        return layers[0]
    what = f"the path {name!r}" if name else "an array without a path"
    raise ValueError(
        f"max_logits: {what} does not name one of the attention layers: "
        f"{_shown(layers)}"
    )


def _shown(layers: Iterable[str]) -> str:
    return trees.a_few(
        [repr(layer) for layer in layers]
    )  # the tree itself may be one, ''


def _scales(sides: list[_Side], factor: jax.Array, rope: int) -> list[jax.Array]:
    """Return what multiplies the parameters of a layer, for a factor of each query head's logits."""
    *stack, heads = factor.shape or (0,)
    ranks = {side.rest: side.leaf.value.ndim for side in sides if side.is_query}
    shapes, counts = [], {True: set[int](), False: set[int]()}
    for side in sides:
        shape = side.leaf.value.shape
        own = shape[len(stack) :]
        alone = (
            not side.is_query and ranks.get(side.rest) == len(shape) + 1
        )  # one head without an axis
        fits = list(shape[: len(stack)]) == stack and len(own) >= (1 if alone else 2)
        count = 0 if not fits else 1 if alone else own[-2]
        counts[side.is_query].add(count)
        last = (count,) if alone else (count, 1)
        shapes.append((*stack, *(1,) * (len(own) - len(last)), *last))
    shared_by = heads // max(max(counts[False]), 1)
    heads_fit = (
        counts[True] == {heads}
        and heads
        and all(count * shared_by == heads for count in counts[False])
    )
    if not (heads_fit and _kernels(sides, len(stack))):
        found = ", ".join(str(side.leaf) for side in sides)
        raise ValueError(
            f"max_logits: shape {factor.shape} does not fit {found}. It must be "
            "(heads,), or (layers, heads) for a stack; kernels are (in, heads, "
            "head_dim), biases (heads, head_dim), and the number of key heads "
            "divides that of query heads"
        )
    of_key = jnp.sqrt(
        jnp.min(factor.reshape(*stack, heads // shared_by, shared_by), axis=-1)
    )
    given = jnp.repeat(of_key, shared_by, axis=-1)
    # At most 1: a query does not grow to make up for the key that it shares.
    of_query = jnp.where(factor < given, factor, 1) / jnp.where(
        factor < given, given, 1
    )
    if rope == 0:
        return [
            (of_query if s.is_query else of_key).reshape(shape)
            for s, shape in zip(sides, shapes, strict=True)
        ]
    of_rotary, of_values = factor, jnp.ones_like(of_key)
    both = {True: (of_query, of_rotary), False: (of_key, of_values)}
    width = (
        next(side.leaf.value.shape[-1] for side in sides if side.is_query) - rope
    )  # of what both have
    scales = []
    for side, shape in zip(sides, shapes, strict=True):
        own, rest = (scale.reshape(shape) for scale in both[side.is_query])
        scales.append(
            jnp.where(jnp.arange(side.leaf.value.shape[-1]) < width, own, rest)
        )
    return scales
