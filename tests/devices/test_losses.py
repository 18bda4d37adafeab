"""A loss that differs from device to device: its mean decides, and all devices leave out the step or none."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support.eight_devices import DEVICES, mesh, pmap

NAN = math.nan
TWO = lambda: mesh(2, 4, names=("x", "y"))  # noqa: E731
KINDS = {
    "skip_nonfinite": lambda **of: clipjax.skip_nonfinite(optax.sgd(1.0), **of),
    "bounded": lambda **of: clipjax.bounded(optax.sgd(1.0), nonfinite="skip", **of),
    "skip_spikes": lambda **of: clipjax.skip_spikes(optax.sgd(1.0), warmup_steps=2, **of),
}

# Of each step the losses of all devices: that of one is NaN, and that of one is a spike even in the mean.
LOSSES = np.random.default_rng(0).uniform(1.5, 1.52, (9, DEVICES)).astype(np.float32)
LOSSES[4, 5], LOSSES[6, 2], LOSSES[7, 3] = NAN, 1e4, math.inf
GRADS = np.random.default_rng(1).uniform(1, 2, (DEVICES, 3)).astype(np.float32)


def in_shard_map(on: Any, spec: P, tx: Any, state: Any, **options: Any) -> Any:
    def step(grads: Any, loss: Any, state: Any) -> Any:
        return tx.update(grads, state, loss=loss[0])

    mapped = jax.shard_map(step, mesh=on, in_specs=(spec, spec, P()), out_specs=(spec, P()), **options)
    return jax.jit(mapped), state


def in_pmap(tx: Any, state: Any) -> Any:
    each = pmap(lambda grads, loss, state: tx.update(grads, state, loss=loss[0]))
    states = jax.tree.map(lambda x: np.broadcast_to(x, (DEVICES, *np.shape(x))), state)

    def step(grads: Any, loss: Any, states: Any) -> Any:
        updates, states = each(grads[:, None], loss[:, None], states)
        for leaf in jax.tree.leaves(states):
            np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
        return updates[:, 0], states

    return step, states


# A way gives a step, and the state that it starts with.
WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "shard_map": ({}, lambda *of: in_shard_map(mesh(), P("d"), *of)),
    "two mesh axes": ({}, lambda *of: in_shard_map(TWO(), P(("x", "y")), *of)),
    "named": ({"axis_name": "d"}, lambda *of: in_shard_map(mesh(), P("d"), *of)),
    "unchecked": ({"axis_name": "d"}, lambda *of: in_shard_map(mesh(), P("d"), *of, check_vma=False)),
    "unchecked, by path": (
        {"axis_name": {"*": ("x", "y")}},
        lambda *of: in_shard_map(TWO(), P(("x", "y")), *of, check_vma=False),
    ),
    "pmap": ({"axis_name": "d"}, in_pmap),
}


@functools.cache
def on_one_device(kind: str) -> Any:
    tx = KINDS[kind]()
    return run(
        jax.jit(lambda grads, loss, state: tx.update(grads, state, loss=jnp.mean(loss))), tx.init(GRADS)
    )


def run(step: Any, state: Any) -> Any:
    updates, states = [], []
    for losses in LOSSES:
        new, state = step(GRADS, losses, state)
        state = jax.tree.map(np.asarray, state)
        updates.append(np.asarray(new))
        states.append(state)
    return updates, states


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_same_as_on_one_device(way: str, kind: str) -> None:
    options, started = WAYS[way]
    tx = KINDS[kind](**options)
    updates, states = run(*started(tx, tx.init(GRADS)))
    expected, one_device = on_one_device(kind)
    skipped = [4, 6, 7] if kind == "skip_spikes" else [4, 7]
    assert [i for i, each in enumerate(updates) if not each.any()] == skipped
    np.testing.assert_array_equal(updates, expected)
    for state, other in zip(states, one_device, strict=True):
        for field in set(state._fields) - {"inner"}:
            theirs = np.asarray(getattr(other, field))
            ours = np.asarray(getattr(state, field))
            ours = ours[0] if way == "pmap" else ours
            # A sum in another order; a z-score is a difference of logarithms.
            np.testing.assert_allclose(
                ours, theirs, rtol=1e-6, atol=1e-4 * ("z_score" in field), err_msg=field
            )


def test_a_loss_that_all_devices_share_stays_as_it_is() -> None:
    for options in ({}, {"axis_name": "d"}):
        tx = KINDS["skip_spikes"](**options)

        def step(grads: Any, loss: Any, state: Any, tx: Any = tx) -> Any:
            return tx.update(grads, state, loss=loss)

        mapped = jax.jit(
            jax.shard_map(step, mesh=mesh(), in_specs=(P("d"), P(), P()), out_specs=(P("d"), P()))
        )
        _, state = mapped(GRADS, np.float32(1.25), tx.init(GRADS))
        assert float(state.loss) == 1.25


def test_an_axis_that_is_not_there_is_an_error() -> None:
    tx = clipjax.skip_nonfinite(optax.sgd(1.0), axis_name="d")
    with pytest.raises(ValueError, match="axis_name: there is no axis 'd' here"):
        tx.update({}, tx.init({}), loss=1.0)
