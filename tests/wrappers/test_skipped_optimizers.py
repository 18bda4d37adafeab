"""A skipped step leaves weights and states bit for bit as they were: kinds of leaves,
and a mesh. `test_optax_wrappers` has the optimizers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax

PARAMS = {
    "w": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
    "b": np.ones(3, np.float32),
}
ADAM = optax.adam(0.1)


def bits(tree: Any) -> list[Any]:
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return [
        (x.dtype, getattr(x, "weak_type", None), np.asarray(x).tobytes())
        for x in leaves
    ]


def states_of_all_kinds(_: Any) -> Any:
    dtypes = (
        np.int32,
        np.uint8,
        bool,
        jnp.bfloat16,
        np.float16,
        np.complex64,
    )
    others = {
        "key": jax.random.key(0),
        "float0": np.zeros(2, jax.dtypes.float0),
        "weak": jnp.asarray(1.0),
        "no": None,
    }
    return [
        {str(np.dtype(x)): jnp.ones(2, x) for x in dtypes},
        (others, {}, [()]),
        {"empty": jnp.ones((0, 2))},
    ]


def next_state(updates: Any, state: Any, params: Any = None) -> Any:
    def next_of(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(x)[0]
        if x.dtype == jax.dtypes.float0:
            return x
        return ~x if x.dtype == bool else x + x

    return updates, jax.tree.map(next_of, state)


def test_leaves_of_all_kinds() -> None:
    tx = clipjax.skip_spikes(
        optax.GradientTransformation(states_of_all_kinds, next_state)
    )
    float0 = jax.dtypes.float0
    params = {
        "w": jnp.array([1, -0.0]),
        "half": jnp.full(2, -0.0, jnp.bfloat16),
        "weak": jnp.asarray(0.0),
        "no": None,
    }
    grads = params | {"n": np.zeros(2, float0)}
    first, update = tx.init(params | {"n": jnp.arange(2)}), jax.jit(tx.update)
    _, state = update(grads, first)
    updates, after = update(grads | {"w": jnp.array([1, jnp.nan])}, state)
    changed = [
        x != y
        for x, y in zip(bits(first.memory.inner), bits(state.memory.inner), strict=True)
    ]
    assert sum(changed) >= 8  # all but the empty one and float0
    assert bits(after.memory.inner) == bits(state.memory.inner)
    assert bits(
        {name: x if x is None else x + updates[name] for name, x in params.items()}
    ) == bits(params)
    assert updates["n"].dtype == float0


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_on_a_mesh_where_one_device_has_the_nan() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"w": P("data"), "b": P()}
    bad = PARAMS | {
        "w": PARAMS["w"]
        * np.where(np.arange(8) == 7, np.nan, 1).astype(np.float32)[:, None]
    }
    inner = optax.chain(
        clipjax.adagc(), optax.MultiSteps(ADAM, 2).gradient_transformation()
    )

    def changes(tx: Any, params: Any, bad: Any) -> Any:
        """Count what differs after a fine step, and after a skipped one."""
        weights, state, counts = params, tx.init(params), []
        for grads in (params, bad):
            before = weights, state.memory.inner
            updates, state = tx.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
            pairs = zip(
                jax.tree.leaves(before),
                jax.tree.leaves((weights, state.memory.inner)),
                strict=True,
            )
            counts.append(sum(jnp.sum(x != y) for x, y in pairs))
        return jnp.stack(counts)

    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    on_each = jax.shard_map(
        lambda *x: lax.psum(changes(clipjax.skip_spikes(inner), *x), "data"),
        mesh=mesh,
        in_specs=(specs, specs),
        out_specs=P(),
    )
    by_xla = functools.partial(changes, clipjax.skip_nonfinite(inner))
    for program in (by_xla, on_each):
        counts = jax.jit(program)(
            *jax.device_put((PARAMS, bad), (shardings, shardings))
        )
        assert [bool(x) for x in counts] == [True, False]


def test_finite_gradients_raise_nothing_under_debug_nans() -> None:
    tx = clipjax.skip_nonfinite(clipjax.skip_spikes(ADAM, warmup_steps=2))
    with jax.debug_nans(True):
        update, state = jax.jit(tx.update), tx.init(PARAMS)
        for size in np.float32([1, 2, 3, 0, 1e6, 1e30]):
            grads = {name: size * x for name, x in PARAMS.items()}
            _, state = update(grads, state, PARAMS, loss=size)
    # The square of the last norm is infinite.
    assert clipjax.metrics(state)["skip_nonfinite/skipped"] == 1
