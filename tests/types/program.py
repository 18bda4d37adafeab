"""What users write, for `mypy`: each wrong line has to be an error.

An error that is ignored and does not occur is one, too. Optax has no types that others
see, so that an annotation with a name of Optax would accept anything.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax


def falling(step: jax.Array) -> jax.Array:
    return 1 / (1 + step)


def right(model: Any) -> None:
    params = {"w": jnp.ones((2, 3))}
    for bound in (1, 1.0, np.float32(1), np.ones(3), jnp.ones(()), falling):
        clipjax.clip_by_norm(bound)
    clipjax.clip_by_global_norm(optax.constant_schedule(1.0))
    clipjax.clip_by_global_norm(lambda step: 1.0 / (1 + step))
    clipjax.max_norm({"w": 1.0, "b": falling}, axes={"w": 0, "*": clipjax.SKIP})
    clipjax.qk_clip(100.0, query="q", key="k", rope=np.int32(2))
    clipjax.spectral_cap(1.0, flatten=((0, 1, 2), 3)).apply(params)
    clipjax.keep_norm(axes="auto")
    tx = clipjax.bounded(optax.adam(1e-3), clip=clipjax.clip_by_global_norm(1.0))
    tx.update(params, tx.init(params), params)
    clipjax.max_norm(1.0, axes=clipjax.flax.unit_axes(model))
    clipjax.max_norm(1.0, axes=clipjax.equinox.unit_axes(model))


def wrong() -> None:
    clipjax.clip_by_global_norm("1")  # type: ignore[arg-type]
    clipjax.clip_by_global_norm(None)  # type: ignore[arg-type]
    clipjax.clip_by_norm(lambda: 1.0)  # type: ignore[arg-type, misc]
    clipjax.max_norm({0: 1.0})  # type: ignore[dict-item]
    clipjax.spectral_cap("1")  # type: ignore[arg-type]
    clipjax.qk_clip(rope="2")  # type: ignore[arg-type]
    clipjax.qk_clip(100.0, "query")  # type: ignore[call-arg]
    clipjax.flax.axes_of(None)  # type: ignore[attr-defined]
    clipjax.clip(1.0)  # type: ignore[attr-defined]
