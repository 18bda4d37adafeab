"""A skipped step leaves weights and states bit for bit as they were: many optimizers,
kinds of leaves, meshes.
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
from optax import contrib

import clipjax

PARAMS = {
    "w": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
    "b": np.ones(3, np.float32),
}
SGD = optax.sgd(0.1, momentum=0.9)
ADAM = optax.adam(0.1)
RATE = optax.linear_schedule(1.0, 0.0, 9)
OPTIMIZERS: dict[str, Any] = {
    "adafactor": optax.adafactor(0.1),
    "sm3": optax.sm3(0.1),
    "muon": contrib.muon(0.1),
    "lbfgs": optax.lbfgs(memory_size=2),
    "noisy_sgd": optax.noisy_sgd(0.1, key=1),
    "prodigy": contrib.prodigy(),
    "schedule_free": contrib.schedule_free(ADAM, 0.1, b1=0.5),
    "mechanize": contrib.mechanize(SGD),
    "sam": optax.GradientTransformation(
        *contrib.sam(SGD, optax.chain(contrib.normalize(), SGD))
    ),
    # Of infinities, no decomposition may end.
    "galore": optax.chain(clipjax.zero_nonfinite(), contrib.galore(0.1)),
    "plateau": optax.chain(ADAM, contrib.reduce_on_plateau()),
    "if_finite": optax.apply_if_finite(ADAM, 3),
    "inject": optax.inject_hyperparams(optax.adam)(RATE),
    "lookahead": optax.lookahead(SGD, 2, 0.5),
    "masked": optax.masked(ADAM, {"w": True, "b": False}),
    "MultiSteps": optax.MultiSteps(ADAM, 2).gradient_transformation(),
    "partition": optax.partition({"a": ADAM, "b": SGD}, {"w": "a", "b": "b"}),
}
SKIPS = {name: clipjax.skip_nonfinite(tx) for name, tx in OPTIMIZERS.items()}
SKIPS |= {
    f"spikes, {n}": clipjax.skip_spikes(OPTIMIZERS[n], max_norm=1e6)
    for n in ("muon", "MultiSteps")
}
# At the steps of two runs. A loss of NaN skips, too.
SIZES = np.array([[1, np.nan, 2, 1, 1], [2, 1, -np.inf, 1e9, 1]], np.float32)
LOSSES = np.array([[1, 1, 1, np.nan, 1], [1, 1, 1, 1, 1]], np.float32)


def bits(tree: Any) -> list[Any]:
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return [
        (x.dtype, getattr(x, "weak_type", None), np.asarray(x).tobytes())
        for x in leaves
    ]


def loss_of(params: Any, loss: Any = None, obj_fn: Any = None) -> Any:
    """Return a loss; a line search passes on what else `update` was given."""
    return sum(jnp.sum((x - 1) ** 2) for x in jax.tree.leaves(params))


def test_optimizers_in_a_scan_of_a_vmap_with_donated_states() -> None:
    def step(carry: Any, given: Any) -> Any:
        (size, loss), after = given, {}
        for name, (params, state) in carry.items():
            fast = params.fast if name == "lookahead" else params
            grads = jax.tree.map(
                lambda x: x.at[0].multiply(size), jax.grad(loss_of)(fast)
            )
            extra = {
                "value": loss_of(fast),
                "grad": grads,
                "value_fn": loss_of,
                "obj_fn": loss_of,
                "loss": loss,
            }
            updates, state = SKIPS[name].update(grads, state, params, **extra)
            after[name] = optax.apply_updates(params, updates), state
        return after, after

    first = {
        n: optax.LookaheadParams.init_synced(PARAMS) if n == "lookahead" else PARAMS
        for n in SKIPS
    }

    @jax.jit
    def two_of_each(first: Any) -> Any:
        each = {n: (params, SKIPS[n].init(params)) for n, params in first.items()}
        return jax.tree.map(lambda x: jnp.stack([x, x]), each)

    program = jax.jit(
        jax.vmap(lambda carry, *given: lax.scan(step, carry, given)), donate_argnums=0
    )
    _, steps = jax.device_get(program(two_of_each(first), SIZES, LOSSES))
    for name, (params, state) in steps.items():
        skipped = ~np.isfinite(SIZES * LOSSES) | (("spikes" in name) & (SIZES > 1e6))
        for i, j in np.ndindex(2, 4):
            each = [
                jax.tree.map(lambda x, t=t: x[t], (params, state.memory.inner))
                for t in ((i, j), (i, j + 1))
            ]
            assert (bits(each[0]) == bits(each[1])) == skipped[i, j + 1], (name, i, j)


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
        clipjax.adagc(), OPTIMIZERS["partition"], OPTIMIZERS["MultiSteps"]
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


def test_a_waiting_micro_batch_that_is_infinite_moves_nothing() -> None:
    """`optax.MultiSteps` multiplies what its optimizer makes of it by 0."""
    grads = np.float32([[1, 2], [np.inf, 1], [3, 4]])
    weights = np.ones(2, np.float32)

    def run(tx: Any) -> Any:
        def step(carry: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, carry[1], carry[0])
            weights = optax.apply_updates(carry[0], updates)
            return (weights, state), weights

        return lax.scan(step, (weights, tx.init(weights)), grads)[1]

    def after(tx: Any) -> Any:
        return np.asarray(jax.jit(lambda: run(tx))())

    skips = clipjax.bounded(optax.sgd(0.5), nonfinite="skip", accumulate=2)
    np.testing.assert_array_equal(after(skips), [[1, 1], [1, 1], [0, -0.5]])
    of_optax = optax.MultiSteps(optax.sgd(0.5), 3).gradient_transformation()
    np.testing.assert_array_equal(after(of_optax)[:2], [[1, 1], [np.nan, 1]])
