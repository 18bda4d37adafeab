"""Bounding attention logits by the weights that make them."""

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
from clipjax._core.maxima import min_of
from clipjax._core.mesh import placed_as
from clipjax._core.norms import as_arrays, in_float64, wide
from clipjax._core.rescale import factor_of, to_bound
from clipjax._core.stats import Stats
from clipjax._core.trees import Report, summary
from clipjax.weights.link import larger_than
from clipjax.weights.projections import How, Projection
from clipjax.weights.qk_layout import Layer, Part, check_layout, clipped, layers_of


class QkClipState(NamedTuple):
    """State of :func:`qk_clip` as a link; `norm` is the largest logit, `factor` its factor."""

    qk_clip: Stats
    violation: jax.Array  # float: 0, as the weights alone do not tell


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

    A head with largest logit S gets its query and its key weights times sqrt(min(1, threshold / S)), the
    biases too: a logit is linear in each, so that S becomes `threshold`. Where query heads share a key
    head (each key head serves as many query heads in a row), the largest of their logits scales the key,
    and each query takes what is still missing of its own factor. Where a part of each query meets a key that
    all heads share, as the rotary one of multi-head latent attention (MLA), that part takes the whole factor,
    and the shared key stays.

    Args:
      threshold: the largest logit: a number, an array that broadcasts to the logits, or a schedule
        `step -> threshold`.
      query: the component of a path that says "query", as in `"encoder/attention/query/kernel"`.
      key: the one that says "key". The path before it names the layer.
      axis: the axis of the heads, in kernels and biases alike. By default that of Flax, -2: kernels are
        `(in, heads, head_dim)` and biases `(heads, head_dim)`. A key kernel with one axis less than the
        query's has one head.
      head_dim: the size of a head, for kernels in which the entries of all heads follow each other. These are
        `(in, heads * head_dim)` by default, with `axis` -1; those of Equinox, `(heads * head_dim, in)`, have
        `axis=0`. Several axes, as `axis=(-2, -1)`, are read as one.
      parts: what kernels hold that are not of queries alone or of keys alone: a mapping from the component of
        a path that says which to pairs (role, size), in the order in which these follow each other along
        `axis`, from its start to its end and as often as they fit. It needs `head_dim`. The roles are
        "query" and "key", of one head or several, with a size of `head_dim` each; "query_rope", the part of
        the same queries that meets a key that all heads share; and "value", whatever stays: values, gates,
        that key. MLA in DeepSeek's names, and queries, keys and values in one kernel:

            qk_clip(head_dim=128, parts={"q_b_proj": [("query", 128), ("query_rope", 64)],
                                         "kv_b_proj": [("key", 128), ("value", 128)]})
            qk_clip(head_dim=64, parts={"c_attn": [("query", 768), ("key", 768), ("value", 768)]})

        docs/constraints.md has more. What lies under no such component, as MLA's `kv_a_proj_with_mqa`, stays.

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
      TypeError, ValueError: `threshold` is no number, negative or NaN; `query`, `key`, `axis`, `head_dim` or
        `parts` is of no use. In `init`: there is no attention layer. When called: `max_logits` is missing,
        names no attention layer, or does not fit one with its heads and parts; query heads share a key head
        where there is a "query_rope". As a link: no `params` in `update`.

    Guarantees: with the weights that `max_logits` came from, every head's logits end at or below
    `threshold`, to the rounding of the weights. No weight grows. A head inside stays bit for bit, and so does
    its key unless another head shares it. A logit that is 0 or negative clips nothing; one that is not
    finite clips nothing and counts in `nonfinite_count`.

    Logits that pass a normalisation of queries and keys do not depend on these weights' size: there is
    nothing to clip then.

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


def _layer_of(name: str, layers: list[Layer]) -> Layer:
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
