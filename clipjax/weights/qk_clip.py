"""Bounding attention logits by the weights that make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import Skip, check_some, is_measured, leaves_with_paths, path_name
from clipjax._core.bounds import Bound, bound_at, check_fits
from clipjax._core.maxima import min_of
from clipjax._core.mesh import placed_as
from clipjax._core.norms import as_arrays, in_float64, wide
from clipjax._core.rescale import factor_of, rescaled, scale_by, to_bound
from clipjax._core.stats import Stats
from clipjax._core.trees import Report, summary
from clipjax.weights.link import larger_than
from clipjax.weights.projections import How, Projection


class QkClipState(NamedTuple):
    """State of :func:`qk_clip` as a link; `norm` is the largest logit, `factor` its factor."""

    qk_clip: Stats
    violation: jax.Array  # float: 0, as the weights alone do not tell


class _Leaf(NamedTuple):
    position: int  # in the tree
    name: str  # as "query/kernel"
    leaf: Any


class _Layer(NamedTuple):
    """The parameters that make the queries and the keys of one attention layer, or of a stack of them."""

    path: str
    query: dict[str, _Leaf]  # "kernel", "bias"
    key: dict[str, _Leaf]


@explained
def qk_clip(
    threshold: Bound = 100.0,
    *,
    query: str = "query",
    key: str = "key",
    axis: int | None = None,
    head_dim: int | None = None,
) -> Projection:
    """Scale down the query and key weights of each attention head whose largest logit is above `threshold`.

    A head with largest logit S gets its query and its key weights times sqrt(min(1, threshold / S)), the
    biases too: a logit is linear in each, so that S becomes `threshold`. Where query heads share a key
    head (each key head serves as many query heads in a row), the largest of their logits scales the key,
    and each query takes what is still missing of its own factor.

    Args:
      threshold: the largest logit: a number, an array that broadcasts to the logits, or a schedule
        `step -> threshold`.
      query: the component of a path that says "query", as in `"encoder/attention/query/kernel"`.
      key: the one that says "key". The path before it names the layer.
      axis: the axis of the heads, in kernels and biases alike. By default that of Flax, -2: kernels are
        `(in, heads, head_dim)` and biases `(heads, head_dim)`. A key kernel with one axis less than the
        query's has one head.
      head_dim: the size of a head, for fused kernels. These are `(in, heads * head_dim)` by default, with
        `axis` -1; those of Equinox, `(heads * head_dim, in)`, have `axis=0`.

    Returns:
      A :class:`Projection`, to be called or put last in a chain. Both need one more argument: the
      largest logits of the step's forward pass, after the scale `1 / sqrt(head_dim)` and before the
      softmax, over all tokens, examples and devices (`lax.pmax`):

          params = qk_clip()(params, max_logits=max_logits)
          updates, state = tx.update(grads, state, params, max_logits=max_logits)

      `max_logits` is an array `(heads,)`, the heads being those of the queries, or `(layers, heads)`
      for layers stacked along their first axis; for several attention layers a mapping from their paths,
      or the last components of these, to such arrays, as `{"encoder/attention": …}`, or nested, as what a
      Flax model sows. Layers that it does not name are left alone. The metric `norm` is the largest
      logit, and `scale` the smallest factor for one. The weights alone do not tell a logit:
      `clipjax.verify` has nothing to say of it, and `violation` is 0.

    Raises:
      TypeError, ValueError: `threshold` is no number, negative or NaN; `query`, `key`, `axis` or
        `head_dim` is of no use. In `init`: there is no attention layer. When called: `max_logits` is missing,
        names no attention layer, or does not fit one. As a link: no `params` in `update`.

    Guarantees: with the weights that `max_logits` came from, every head's logits end at or below
    `threshold`, to the rounding of the weights. No weight grows. A head inside stays bit for bit, and so does
    its key unless another head shares it. A logit that is 0 or negative clips nothing; one that is not
    finite clips nothing and counts in `nonfinite_count`.

    Logits that pass a normalisation of queries and keys do not depend on these weights' size: there is
    nothing to clip then.

    References:
      Kimi Team, 2025, Kimi K2: Open agentic intelligence (arXiv 2507.20534).

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> params = {"query": {"kernel": jnp.ones((4, 2, 3))}, "key": {"kernel": jnp.ones((4, 2, 3))}}
      >>> clipped = clipjax.qk_clip(100.0)(params, max_logits=jnp.array([50.0, 400.0]))
      >>> print(clipped["query"]["kernel"][0].round(3))  # the first head is inside
      [[1.  1.  1. ]
       [0.5 0.5 0.5]]
    """
    bound = bound_at("threshold", threshold)
    for name, value in (("query", query), ("key", key)):
        if not isinstance(value, str) or not value or "/" in value:
            raise ValueError(f"{name} must be one component of a path, got {shown(value)}")
    if query == key:
        raise ValueError(f"query and key must differ, got {shown(query)} for both")
    for name, number in (("axis", axis), ("head_dim", head_dim)):
        if isinstance(number, bool) or not isinstance(number, int | None):
            raise TypeError(f"{name} must be an int, got {shown(number)}")
    if head_dim is not None and head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {shown(head_dim)}")
    heads_at = axis if axis is not None else -2 if head_dim is None else -1

    @in_float64
    def constrain(params: Any, step: Any, max_logits: Any = None) -> tuple[Any, Report]:
        if max_logits is None:
            raise ValueError(
                "qk_clip needs the largest logit of each head: pass max_logits, as in "
                "tx.update(grads, state, params, max_logits=max_logits)"
            )
        params = as_arrays(params)
        treedef: Any
        leaves, treedef = jax.tree.flatten(params)
        reports = []
        for layer, logits in _assigned(max_logits, _layers(params, query, key)):
            limit = check_fits("threshold", bound(step), logits.shape, "the logits")
            limit = jnp.broadcast_to(limit, logits.shape)
            usable = jnp.isfinite(logits)
            factor = factor_of(to_bound(jnp.where(usable, logits, 0.0), limit))  # of each logit
            for position, clipped in _clipped(layer, factor, heads_at, head_dim):
                leaves[position] = clipped
            norm, after = (jnp.where(jnp.all(usable), jnp.max(x), jnp.nan) for x in (logits, logits * factor))
            reports.append(Report(norm, min_of(factor), jnp.any(factor < 1), after))
        return treedef.unflatten(leaves), summary(reports)

    def measure(params: Any, step: Any) -> list[Any]:
        del step
        _layers(params, query, key)
        return []

    how = How(outside=larger_than, extra=("max_logits",), check=lambda params: _layers(params, query, key))
    return Projection(f"clipjax.qk_clip({shown(threshold)})", QkClipState, constrain, measure, how)


def _layers(params: Any, query: str, key: str) -> list[_Layer]:
    """Find the attention layers: what has parameters of queries and of keys."""
    found: dict[str, dict[str, dict[str, _Leaf]]] = {}
    for i, (path, leaf) in enumerate(leaves_with_paths(params)):
        parts = [path_name((entry,)) for entry in path]
        at = max((j for j, part in enumerate(parts) if part in (query, key)), default=None)
        if at is not None and is_measured(leaf):
            side = found.setdefault("/".join(parts[:at]), {}).setdefault(parts[at], {})
            side["/".join(parts[at + 1 :])] = _Leaf(i, "/".join(parts), leaf)
    layers = [_Layer(path, both[query], both[key]) for path, both in found.items() if len(both) == 2]
    if not layers:
        leaves, why = leaves_with_paths(params), Skip(f"no layer has both {query!r} and {key!r}")
        check_some("query, key", leaves, [why] * len(leaves), "Name the components of the paths of both.")
    return layers


def _assigned(max_logits: Any, layers: list[_Layer]) -> list[tuple[_Layer, jax.Array]]:
    """Find the layer of each array of logits; of several for one layer the largest count."""
    found: dict[str, jax.Array] = {}
    for path, value in leaves_with_paths(max_logits):
        layer = _layer_of(path_name(path), layers)
        logits = wide(lax.stop_gradient(jnp.asarray(value)))
        logits = placed_as(np.zeros(logits.shape), logits)  # all of them on each device
        if jnp.iscomplexobj(logits):
            raise TypeError(f"max_logits must be real, got dtype {value.dtype} for layer {layer.path!r}")
        if layer.path in found:
            logits = jnp.maximum(logits, found[layer.path])
        found[layer.path] = logits
    return [(layer, found[layer.path]) for layer in layers if layer.path in found]


def _layer_of(name: str, layers: list[_Layer]) -> _Layer:
    """The layer whose path, or the end of it, is `name` or the start of it."""
    if not name and len(layers) == 1:
        return layers[0]
    parts = name.split("/") if name else []
    for i in range(len(parts), -1, -1):
        start = "/".join(parts[:i])
        exact = [layer for layer in layers if layer.path == start]
        ending = [layer for layer in layers if start and layer.path.endswith(f"/{start}")]
        if len(exact or ending) == 1:
            return (exact or ending)[0]
    listed = "\n  ".join(layer.path or "(the tree itself)" for layer in layers) or "(none)"
    what = f"the path {name!r} names" if name else "an array names"
    raise ValueError(f"max_logits: {what} no one attention layer. They are:\n  {listed}")


def _clipped(
    layer: _Layer, factor: jax.Array, axis: int, head_dim: int | None
) -> Iterator[tuple[int, jax.Array]]:
    """The new parameters of a layer, each head's logits times `factor`, by their positions in the tree."""
    stack, heads = factor.shape[:-1], factor.shape[-1] if factor.ndim else 0
    counts = {_count(x, layer.query.get(name), stack, axis, head_dim) for name, x in layer.key.items()}
    key_heads = counts.pop()
    shared_by = heads // max(key_heads, 1)
    fits = [_count(x, None, stack, axis, head_dim) == heads > 0 for x in layer.query.values()]
    if counts or not all(fits) or key_heads * shared_by != heads:
        both = (*layer.query.values(), *layer.key.values())
        listed = ", ".join(f"{x.name!r} of shape {x.leaf.shape}" for x in both)
        blocks = "" if head_dim is None else f" in blocks of {head_dim}"
        raise ValueError(
            f"max_logits: shape {factor.shape} does not fit {listed}, with heads at axis {axis}{blocks}. It "
            f"must be (heads,), or (layers, heads) for a stack, and key heads must divide the query's"
        )
    of_key = jnp.sqrt(jnp.min(factor.reshape(*stack, key_heads, shared_by), axis=-1))
    given = jnp.repeat(of_key, shared_by, axis=-1)
    # At most what is missing: a query never grows to make up for the key that it shares.
    of_query = jnp.where(factor < given, factor / jnp.where(given > 0, given, 1.0), 1.0)
    for side, scale in ((layer.query, of_query), (layer.key, of_key)):
        for each in side.values():
            yield each.position, _scaled(each.leaf, scale, axis, head_dim)


def _count(each: _Leaf, like: _Leaf | None, stack: tuple[int, ...], axis: int, head_dim: int | None) -> int:
    """How many heads a parameter has; 0 if it does not fit. `like` is its counterpart of the queries."""
    shape = each.leaf.shape
    if shape[: len(stack)] != stack:
        return 0
    if like is not None and head_dim is None and len(shape) == len(like.leaf.shape) - 1:
        return 1
    own = shape[len(stack) :]
    size = own[axis] if -len(own) <= axis < len(own) else 0
    return size if head_dim is None else size // head_dim if size % head_dim == 0 else 0


def _scaled(leaf: Any, scale: jax.Array, axis: int, head_dim: int | None) -> jax.Array:
    """A parameter with each head times its scale; a scale of 1 changes no bit."""
    stack, own = scale.ndim - 1, leaf.ndim - scale.ndim + 1
    if head_dim is not None:
        scale = jnp.repeat(scale, head_dim, axis=-1)
    shape = [1] * own
    if scale.shape[-1] > 1:  # one head needs no axis
        shape[axis] = scale.shape[-1]
    scale = scale.reshape(*scale.shape[:stack], *shape)
    return rescaled(leaf, scale_by(scale))
