"""Bounds on attention logits, by scaling the query and key weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import leaves_with_paths, path_name
from clipjax._core.bounds import Bound, bound_at, check_fits
from clipjax._core.dtypes import as_arrays, in_float64, wide
from clipjax._core.maxima import min_of
from clipjax._core.mesh import placed_as
from clipjax._core.rescale import factor_of, to_bound
from clipjax._core.stats import Stats
from clipjax._core.trees import Report, summary
from clipjax.weights.link import larger_than
from clipjax.weights.projections import How, Projection
from clipjax.weights.qk_layout import Layer, Part, check_layout, clipped, layers_of


class QkClipState(NamedTuple):
    """State of :func:`qk_clip` as a link; `norm` is the largest logit, `factor` the smallest factor."""

    qk_clip: Stats
    violation: jax.Array  # float: always 0, as weights alone do not determine logits


@explained
def qk_clip(
    threshold: Bound = 100.0,
    *,
    query: str = "query",
    key: str = "key",
    axis: int | Sequence[int] | None = None,
    head_dim: int | None = None,
    parts: Mapping[str, Sequence[Part]] | None = None,
) -> Projection:
    """Scale down the query and key weights of each attention head whose largest logit is above `threshold`.

    For a head with largest logit S, the query and key weights and biases are multiplied by
    sqrt(min(1, threshold / S)). A logit is linear in each of the two, so S becomes `threshold`. If query
    heads share a key head (each key head serves the same number of consecutive query heads), the key is
    scaled for the largest of their logits, and each query head by the rest of its own factor. If a part of
    each query is multiplied with a key that all heads share, such as the rotary part in multi-head latent
    attention (MLA), that part is multiplied by the whole factor, and the shared key is unchanged.

    Args:
      threshold: the largest logit allowed: a number, an array that broadcasts to the logits, or a schedule
        `step -> threshold`.
      query: the path component that identifies queries, as in `"encoder/attention/query/kernel"`.
      key: the path component that identifies keys. The path before it names the layer.
      axis: the axis of the heads, in kernels and in biases. By default -2, as in Flax: kernels are
        `(in, heads, head_dim)` and biases `(heads, head_dim)`. A key kernel with one axis less than the
        query kernel has one head.
      head_dim: the size of a head, for kernels in which the entries of all heads lie along one axis. These
        are `(in, heads * head_dim)` by default, with `axis` -1; those of Equinox, `(heads * head_dim, in)`,
        need `axis=0`. Several axes, as in `axis=(-2, -1)`, are treated as one.
      parts: the layout of kernels that do not hold only queries or only keys: a mapping from the path
        component that identifies the kernel to pairs (role, size). The pairs are in their order along `axis`,
        and repeat as often as they fit. It needs `head_dim`. The roles are "query" and "key", for one head or
        several, of size `head_dim` each; "query_rope", the part of the same queries that is multiplied with a
        key that all heads share; and "value", everything that stays unchanged: values, gates, the shared
        key. For example, MLA with DeepSeek's names, and queries, keys and values in one kernel:

            qk_clip(head_dim=128, parts={"q_b_proj": [("query", 128), ("query_rope", 64)],
                                         "kv_b_proj": [("key", 128), ("value", 128)]})
            qk_clip(head_dim=64, parts={"c_attn": [("query", 768), ("key", 768), ("value", 768)]})

        docs/constraints.md has more examples. Parameters under none of these components, such as MLA's
        `kv_a_proj_with_mqa`, are unchanged.

    Returns:
      A :class:`Projection`, to be called or put last in a chain. Both uses need one more argument: the
      largest logits of the step's forward pass, after the scale `1 / sqrt(head_dim)` and before the
      softmax, over all tokens, examples and devices (`lax.pmax`):

          params = qk_clip()(params, max_logits=max_logits)
          updates, state = tx.update(grads, state, params, max_logits=max_logits)

      `max_logits` is an array `(heads,)`, for the heads of the queries, or `(layers, heads)` for layers
      stacked along their first axis. For several attention layers, it is a mapping from their paths, or the
      last components of these, to such arrays, as in `{"encoder/attention": …}`; it may be nested, like what
      a Flax model sows. Layers that it does not name are left alone. The metric `norm` is the largest
      logit, and `scale` the smallest factor of a logit. The weights alone do not determine the logits, so
      `clipjax.verify` reports nothing for them, and `violation` is 0.

    Raises:
      TypeError, ValueError: `threshold` is not a number, is negative or is NaN; `query`, `key`, `axis`,
        `head_dim` or `parts` is invalid. In `init`: there is no attention layer. When called: `max_logits` is
        missing, names no attention layer, or does not fit the heads and parts of one; query heads share a
        key head in a layer with a "query_rope" part. As a link: `update` gets no `params`.

    Guarantees: with the weights that produced `max_logits`, every head's logits end at or below
    `threshold`, up to the rounding of the weights. No weight grows. The query weights of a head at or below
    `threshold` are unchanged, bit for bit, and so are its key weights unless another head shares them. A
    logit that is 0 or negative clips nothing; one that is not finite clips nothing and counts in
    `nonfinite_count`.

    If queries and keys are normalized before their product, the logits do not depend on the size of these
    weights, and there is nothing to clip.

    References:
      Kimi Team, 2025, Kimi K2: Open agentic intelligence (arXiv 2507.20534), algorithm 1.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> params = {"query": {"kernel": jnp.ones((4, 2, 3))}, "key": {"kernel": jnp.ones((4, 2, 3))}}
      >>> clipped = clipjax.qk_clip(100.0)(params, max_logits=jnp.array([50.0, 400.0]))
      >>> print(clipped["query"]["kernel"][0].round(3))  # the first head is inside
      [[1.  1.  1. ]
       [0.5 0.5 0.5]]
    """
    bound = bound_at("threshold", threshold)
    layout = check_layout(query, key, axis, head_dim, parts)

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
        for layer, logits in _assigned(max_logits, layers_of(params, layout)):
            limit = check_fits("threshold", bound(step), logits.shape, "the logits")
            limit = jnp.broadcast_to(limit, logits.shape)
            usable = jnp.isfinite(logits)
            factor = factor_of(to_bound(jnp.where(usable, logits, 0.0), limit))  # of each logit
            for position, leaf in clipped(layer, factor, layout):
                leaves[position] = leaf
            norm, after = (jnp.where(jnp.all(usable), jnp.max(x), jnp.nan) for x in (logits, logits * factor))
            reports.append(Report(norm, min_of(factor), jnp.any(factor < 1), after))
        return treedef.unflatten(leaves), summary(reports)

    def measure(params: Any, step: Any) -> list[Any]:
        del step
        layers_of(params, layout)
        return []

    how = How(outside=larger_than, extra=("max_logits",), check=lambda params: layers_of(params, layout))
    return Projection(f"clipjax.qk_clip({shown(threshold)})", QkClipState, constrain, measure, how)


def _assigned(max_logits: Any, layers: list[Layer]) -> list[tuple[Layer, jax.Array]]:
    """Find the layer of each array of logits; several arrays for one layer are reduced to their maximum."""
    found: dict[str, jax.Array] = {}
    for path, value in leaves_with_paths(max_logits):
        layer = _layer_of(path_name(path), layers)
        logits = wide(lax.stop_gradient(jnp.asarray(value)))
        logits = placed_as(np.zeros(logits.shape), logits)  # replicated on all devices
        if jnp.iscomplexobj(logits):
            raise TypeError(f"max_logits must be real, got dtype {value.dtype} for layer {layer.path!r}")
        if layer.path in found:
            logits = jnp.maximum(logits, found[layer.path])
        found[layer.path] = logits
    return [(layer, found[layer.path]) for layer in layers if layer.path in found]


def _layer_of(name: str, layers: list[Layer]) -> Layer:
    """Return the layer whose path, or the end of whose path, is `name` or the start of `name`."""
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
    what = f"the path {name!r}" if name else "an array without a path"
    raise ValueError(f"max_logits: {what} does not name exactly one attention layer. They are:\n  {listed}")
