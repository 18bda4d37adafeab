"""Derivatives, devices and chains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import clipjax
from benchmarks.edge_cases_inputs import Case, Library, both, norm64, shown
from clipjax import functional

_DEVICES = 8


def _gradient_at(x: list[float]) -> Callable[[Library], str]:
    def ask(of: Library) -> str:
        tx = of.clip_by_global_norm(1.0)
        return shown(jax.grad(lambda g: tx.update(g, tx.init(g))[0].sum())(jnp.array(x)))

    return ask


def _conv1d_ours() -> str:
    norms = functional.unitwise_norms(jnp.ones((5, 4, 8)), clipjax.fan_in)
    return f"{norms.size} norms of {float(norms.reshape(-1)[0]):.4g}"


def _conv1d_optax() -> str:
    norms = optax.transforms.unitwise_norm(jnp.ones((5, 4, 8)))
    # It repeats each norm along the axes it reduced: the first entry tells how many entries share one.
    shared = round(float(norms.reshape(-1)[0]) ** 2)
    return f"{norms.size // shared} norms of {float(norms.reshape(-1)[0]):.4g}"


def _scan(make: Callable[[], optax.GradientTransformation]) -> str:
    tx = make()
    grads = jnp.array([3.0, 4.0])

    def step(state: Any, _: None) -> tuple[Any, None]:
        return tx.update(grads, state)[1], None

    state, _ = jax.lax.scan(step, tx.init(grads), None, length=3)
    return f"works; norm {float(optax.tree.get(state, 'norm')):.3g}"


def _last_norm(tx: optax.GradientTransformation, steps: int = 3) -> str:
    """The norm of weights after some steps, for a bound of 1 on them."""
    params = jnp.ones((4, 1))
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(-jnp.ones((4, 1)), state, params)
        params = optax.apply_updates(params, updates)
    return f"silent: norm {norm64(params):.4g} for radius 1"


def _project_optax() -> optax.GradientTransformation:
    def to_ball(updates: Any, params: Any) -> Any:
        return optax.projections.projection_l2_ball(params + updates, 1.0) - params

    return optax.stateless(to_ball)


def _bad_step(tx: optax.GradientTransformation) -> str:
    """A good step, then one with an inf: what it does to the weights and to the momentum."""
    params = jnp.array([1.0, 1.0])
    state = tx.init(params)
    _, state = tx.update(jnp.array([0.3, 0.4]), state, params)
    updates, state = tx.update(jnp.array([jnp.inf, 0.4]), state, params)
    momentum = optax.tree.get(state, "trace")
    return f"update {shown(updates)}, momentum {shown(momentum)}"


def _momentum(clip: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(clip, optax.sgd(1.0, momentum=0.5))


def sharded_norm(of: Library) -> str:
    """The true norm of a tree clipped to 1 inside `shard_map`; needs 8 devices."""
    mesh = jax.make_mesh((_DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = PartitionSpec("data")
    tx = of.clip_by_global_norm(1.0)

    @jax.jit
    def clip(grads: Any) -> Any:
        return jax.shard_map(
            lambda g: tx.update(g, tx.init(g))[0], mesh=mesh, in_specs=(split,), out_specs=split
        )(grads)

    return f"norm {norm64(clip(jnp.arange(1.0, 65.0))):.6g} for bound 1"


def _on_devices(name: str) -> str:
    """Run :func:`sharded_norm` in a process of its own, which makes 8 devices of this CPU."""
    script = (
        "from benchmarks import edge_cases_inputs, edge_cases_systems\n"
        f"print(edge_cases_systems.sharded_norm(edge_cases_inputs.{name}))"
    )
    flags = f"--xla_force_host_platform_device_count={_DEVICES}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip()


def _known_gradient(of: Library) -> str:
    """The derivative of the clipped sum beside the one that central differences give."""
    x = jnp.array([3.0, 4.0])
    tx = of.clip_by_global_norm(1.0)
    wanted = [4 / 125 * (4 - 3), 3 / 125 * (3 - 4)]  # d(x+y)/|v| = (y(y-x), x(x-y)) / |v|^3
    found = np.asarray(jax.grad(lambda g: tx.update(g, tx.init(g))[0].sum())(x))
    return f"off by {np.abs(found - wanted).max():.0e}"


SYSTEMS: list[Case] = [
    both("gradient through the clip at [0 0]", _gradient_at([0.0, 0.0])),
    both("gradient through the clip at [3 4], bound 1", _known_gradient),
    (
        "units of a Conv1D kernel (5, 4, 8) of ones: 8 of norm 4.472",
        _conv1d_ours,
        _conv1d_optax,
    ),
    (
        "inside shard_map, split over 8 devices",
        lambda: _on_devices("OURS"),
        lambda: _on_devices("OPTAX"),
    ),
    (
        "a state that holds the norm, as carry of scan",
        lambda: _scan(lambda: clipjax.clip_by_global_norm(1.0)),
        lambda: _scan(
            lambda: optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.clip_by_global_norm(1.0))
        ),
    ),
    (
        "the last link in the right place: projection after Adam",
        lambda: _last_norm(optax.chain(optax.adam(1.0), clipjax.max_norm(1.0))),
        lambda: _last_norm(optax.chain(optax.adam(1.0), _project_optax())),
    ),
    (
        "the wrong order: projection before Adam",
        lambda: _last_norm(optax.chain(clipjax.max_norm(1.0), optax.adam(1.0))),
        lambda: _last_norm(optax.chain(_project_optax(), optax.adam(1.0))),
    ),
    (
        "the wrong place: a projection as the clip of bounded",
        lambda: _last_norm(clipjax.bounded(optax.adam(1.0), clip=clipjax.max_norm(1.0))),
        None,
    ),
    (
        "an inf in a gradient, bound 1, momentum after it",
        lambda: _bad_step(_momentum(clipjax.clip_by_global_norm(1.0))),
        lambda: _bad_step(_momentum(optax.clip_by_global_norm(1.0))),
    ),
    (
        "the same, steps with non-finite gradients skipped",
        lambda: _bad_step(clipjax.skip_nonfinite(_momentum(clipjax.clip_by_global_norm(1.0)))),
        lambda: _bad_step(optax.apply_if_finite(_momentum(optax.clip_by_global_norm(1.0)), 5)),
    ),
    (
        "the clip outside the skipping wrapper: clip, then skip(momentum)",
        lambda: _bad_step(
            optax.chain(
                clipjax.clip_by_global_norm(1.0), clipjax.skip_nonfinite(optax.sgd(1.0, momentum=0.5))
            )
        ),
        lambda: _bad_step(
            optax.chain(
                optax.clip_by_global_norm(1.0), optax.apply_if_finite(optax.sgd(1.0, momentum=0.5), 5)
            )
        ),
    ),
]
