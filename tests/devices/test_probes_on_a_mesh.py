"""Probes of a scanned, rematerialized stack whose weights and batch are split."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import clipjax

LAYERS, WIDTH, BROKEN, STEPS = 4, 16, 2, 20
SPECS = {
    "w": PartitionSpec(None, "data", "model"),
    "scale": PartitionSpec(),
}
tx = optax.chain(
    clipjax.record_norms("leaf", stacked="*", keep=4, probes={"blocks": LAYERS}),
    clipjax.skip_spikes(
        clipjax.bounded(optax.adam(1e-2), clip=clipjax.clip_by_global_norm(1.0))
    ),
)


@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
def layer(x: Any, inputs: Any) -> Any:
    weights, tap, breaks = inputs
    x = clipjax.probe(x, tap)
    x += jnp.tanh((x * weights["scale"]) @ weights["w"])
    x = x.at[0, 0].set(jnp.where(breaks, jnp.nan, x[0, 0]))
    return clipjax.probe(x, tap), None


def train(count: int) -> Any:
    """Train on a mesh of so many devices; return the bad step and the losses."""
    devices = np.array(jax.devices()[:count]).reshape(-1, 2 if count > 1 else 1)
    auto = (AxisType.Auto,) * 2
    place = partial(NamedSharding, Mesh(devices, ("data", "model"), axis_types=auto))
    whole = place(PartitionSpec())

    w = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    weights = {"w": w, "scale": jnp.ones((LAYERS, WIDTH))}
    params = {k: jax.device_put(x, place(SPECS[k])) for k, x in weights.items()}
    # The moments are split as the parameters, everything else is whole.
    state = jax.tree.map(
        lambda x: (
            x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, whole)
        ),
        tx.init(params),
    )
    kept = jax.tree.map(lambda x: x.sharding, (params, state))

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*kept, whole))
    def step(params: Any, state: Any, x: Any, breaks: Any) -> Any:
        def loss_fn(params: Any, taps: Any) -> Any:
            out, _ = jax.lax.scan(layer, x, (params, taps["blocks"], breaks))
            return jnp.mean((out - 1) ** 2)

        taps = {"blocks": clipjax.tap(LAYERS, probe=True)}
        loss, (grads, taps) = jax.value_and_grad(loss_fn, (0, 1))(params, taps)
        updates, state = tx.update(grads, state, params, loss=loss, taps=taps)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for i in range(STEPS):
        x = np.random.default_rng(i).normal(size=(8, WIDTH)).astype(np.float32)
        x = jax.device_put(x, place(PartitionSpec("data")))
        breaks = jax.device_put(jnp.arange(LAYERS) == (BROKEN if i == 5 else -1), whole)
        params, state, loss = step(params, state, x, breaks)
        losses.append(float(loss))
    compiled: Any = step
    assert compiled._cache_size() == 1
    (bad,) = clipjax.bad_steps(state)
    return bad, losses


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_eight_devices_find_the_layer_that_one_finds() -> None:
    (expected, losses), (bad, found) = train(1), train(8)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert f"first in the forward pass, at blocks/{BROKEN}" in str(bad)
    assert str(bad) == str(expected)
    np.testing.assert_allclose(
        list(bad.forward.values()), list(expected.forward.values()), rtol=1e-5
    )


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_each_stage_of_a_pipeline_has_the_statistics_of_its_layer() -> None:
    mesh = jax.make_mesh((LAYERS,), ("stage",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("stage"), PartitionSpec()
    w = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    weights = {"w": w, "scale": jnp.ones((LAYERS, WIDTH))}
    x, breaks = jnp.ones((2, WIDTH)), jnp.arange(LAYERS) == BROKEN

    def scanned(taps: Any) -> Any:
        return jnp.sum(jax.lax.scan(layer, x, (weights, taps, breaks))[0] ** 2)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(split, split, split), out_specs=whole)
    def piped(taps: Any, weights: Any, breaks: Any) -> Any:
        stage = jax.lax.axis_index("stage")
        own = jax.tree.map(lambda x: x[0], (weights, taps, breaks))
        out = jax.lax.pcast(x, "stage", to="varying")
        for i in range(LAYERS):
            here = stage == i
            given = own[0], own[1], own[2] & here
            out, _ = layer(jnp.where(here, out, 0), given)
            onward = [(i, (i + 1) % LAYERS) for i in range(LAYERS)]
            out = jax.lax.ppermute(out, "stage", onward)
        last = jnp.where(stage == 0, out, 0)
        return jax.lax.psum(jnp.sum(last**2), "stage")

    taps = clipjax.tap(LAYERS, probe=True)
    expected = jax.jit(jax.grad(scanned))(taps)
    found = jax.jit(jax.grad(piped))(taps, weights, breaks)
    ours, theirs = clipjax.tapped(found), clipjax.tapped(expected)
    for of in ("forward", "backward"):
        np.testing.assert_allclose(ours[f"{of}_norm"], theirs[f"{of}_norm"], rtol=1e-5)
        count = f"{of}_nonfinite_count"
        np.testing.assert_array_equal(ours[count], theirs[count])
