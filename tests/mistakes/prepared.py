"""What the mistakes are made with: the names that the code of a row can use."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import clipjax


@functools.cache
def names() -> dict[str, Any]:
    """The modules, the public names of clipjax, and small trees; Flax' and Equinox' where installed."""
    params = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    tx = optax.chain(clipjax.clip_by_global_norm(1.0), optax.sgd(1e-3))
    found: dict[str, Any] = {name: getattr(clipjax, name) for name in clipjax.__all__}
    found |= {"clipjax": clipjax, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "P": PartitionSpec}
    found |= {
        "x": jnp.ones(3),
        "params": params,
        "grads": {"kernel": jnp.full((4, 3), 2.0), "bias": jnp.ones(3)},
        "layers": {f"layer_{i}": params for i in range(48)},
        "conv": {"kernel": jnp.ones((3, 4, 5)), "bias": jnp.ones(5)},
        "images": {"kernel": jnp.ones((3, 3, 4, 5))},
        "heads": {name: {"kernel": jnp.ones((4, 2, 3))} for name in ("query", "key")},
        "variables": {"params": params, "batch_stats": {"mean": -jnp.ones(3), "var": jnp.ones(3)}},
        "adam": optax.adam(1e-3),
        "sgd": optax.sgd(1e-3),
        "clip": clipjax.clip_by_global_norm(1.0),
        "schedule": optax.constant_schedule(1.0),
        "tx": tx,
        "state": tx.init(params),
        "mesh": jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,)),
        "log": _log(),
    }
    if importlib.util.find_spec("flax"):
        found |= _flax()
    if importlib.util.find_spec("equinox"):
        found |= _equinox()
    return found


def _log() -> clipjax.NormLog:
    log = clipjax.NormLog()
    log.extend(np.ones(4))
    return log


def _flax() -> dict[str, Any]:
    import flax.linen as nn
    from flax import nnx

    from clipjax.flax import unit_axes

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x @ self.param("table", nn.initializers.ones, (3, 2))

    dense = nn.Dense(3)
    return {
        "nn": nn,
        "nnx": nnx,
        "unit_axes": unit_axes,
        "dense": dense,
        "own": Own(),
        "key": jax.random.key(0),
        "linear": nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
    }


def _equinox() -> dict[str, Any]:
    import equinox as eqx

    key = jax.random.key(0)
    return {"eqx": eqx, "mlp": eqx.nn.MLP(4, 3, 5, 1, key=key), "lin": eqx.nn.Linear(4, 3, key=key)}


FLAX = ("nn", "nnx", "unit_axes", "dense", "own", "key", "linear")
EQUINOX = ("eqx", "mlp", "lin")
