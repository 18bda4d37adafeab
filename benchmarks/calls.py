"""What a call of a small step costs, which grows with the arrays of its state."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import clipjax
from benchmarks.steps import GLOBAL
from benchmarks.tables import Figure, Row

_ADAM = optax.adam(1e-3)
_CLIP = clipjax.clip_by_global_norm(GLOBAL)
_THEIRS = optax.chain(optax.clip_by_global_norm(GLOBAL), _ADAM)
_OURS = optax.chain(_CLIP, _ADAM)
# The peer of all, and goals: the largest ratios to its time.
_PEER = "apply_if_finite"
CASES: dict[str, tuple[optax.GradientTransformation, float | None]] = {
    _PEER: (optax.apply_if_finite(_THEIRS, max_consecutive_errors=5), None),
    "optax.clip_by_global_norm": (_THEIRS, None),
    "clip_by_global_norm": (_OURS, None),
    "skip_nonfinite": (clipjax.skip_nonfinite(_OURS), 1.2),
    "skip_spikes": (clipjax.skip_spikes(_OURS), None),
    "bounded with clip and skip": (
        clipjax.bounded(_ADAM, clip=_CLIP, nonfinite="skip"),
        1.2,
    ),
}


def _net() -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs))


def _with_jax(tx: optax.GradientTransformation) -> Callable[[], Any]:
    params = nnx.to_pure_dict(nnx.state(_net()))
    grads = jax.tree.map(jnp.ones_like, params)
    carry = [params, tx.init(params)]

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def run() -> Any:
        carry[:] = step(*carry)
        return carry

    return run


def _with_nnx(tx: optax.GradientTransformation) -> Callable[[], Any]:
    net = _net()
    grads = jax.tree.map(jnp.ones_like, nnx.state(net, nnx.Param))
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)

    @nnx.jit
    def step(net: Any, optimizer: Any) -> None:
        optimizer.update(net, grads)

    def run() -> Any:
        step(net, optimizer)
        return nnx.state(net)

    return run


def _seconds(run: Callable[[], Any], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        last = run()
    jax.block_until_ready(jax.tree.leaves(last))
    return (time.perf_counter() - begin) / calls


def compare(way: str, rounds: int) -> list[Row]:
    """Time calls of all steps in turns, by `jax.jit` or `nnx.jit`."""
    make, calls = {"jax.jit": (_with_jax, 500), "nnx.jit": (_with_nnx, 50)}[way]
    runs = {name: make(tx) for name, (tx, _) in CASES.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        _seconds(run, 5)
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_seconds(run, calls))
    params = nnx.to_pure_dict(nnx.state(_net()))
    alone = len(jax.tree.leaves(_ADAM.init(params)))
    rows = []
    for name, (tx, goal) in CASES.items():
        pairs = zip(times[name], times[_PEER], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells: dict[str, Figure | str] = {
            "time": Figure(middle, goal, low, high),
            "µs": f"{statistics.median(times[name]) * 1e6:.0f}",
            "arrays of its own": str(len(jax.tree.leaves(tx.init(params))) - alone),
        }
        rows.append(Row((name, _PEER, way), cells))
    return rows
