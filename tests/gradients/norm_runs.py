"""Gradients whose norms are given, and one program that runs clips over them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

import clipjax

SHAPES = {"bias": (3,), "kernel": (4, 3)}
PARAMS = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
SEEDS, STEPS = 3, 160
# One entry of the kernel at these steps.
BAD = {
    0: np.nan,
    9: np.inf,
    10: np.nan,
    70: -np.inf,
}


def norms_with_spikes(seed: int) -> np.ndarray:
    """Norms that drift and vary by a factor, at some scale, with spikes."""
    rng = np.random.default_rng(seed)
    drift = np.linspace(0, rng.uniform(-1, 1), STEPS)
    norms = np.exp(rng.uniform(-6, 6) + 0.3 * rng.standard_normal(STEPS) + drift)
    return norms * np.where(rng.random(STEPS) < 0.08, rng.uniform(2, 50, STEPS), 1)


def gradients_of(norms: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Trees of the given norms, stacked along the first axis."""
    norms, rng = np.asarray(norms), np.random.default_rng(seed)
    flat = rng.standard_normal((len(norms), 15))
    flat *= (norms / np.linalg.norm(flat, axis=1))[:, None]
    parts = {"bias": flat[:, :3], "kernel": flat[:, 3:].reshape(-1, 4, 3)}
    return {name: x.astype(np.float32) for name, x in parts.items()}


def norms_of(stacked: Any) -> np.ndarray:
    """The norm of each tree of a stack, in float64."""
    parts = [
        np.asarray(x).astype(np.float64).reshape(len(x), -1)
        for x in jax.tree.leaves(stacked)
    ]
    return np.linalg.norm(np.concatenate(parts, axis=1), axis=1)


class Run(NamedTuple):
    """What a clip did over a sequence of steps."""

    updates: Any  # of each step, stacked
    thresholds: np.ndarray
    state: Any  # the last


def metric(state: Any, name: str) -> jax.Array:
    """Return a metric of a clip, in one state or in many that are stacked."""
    found = clipjax.metrics(state)
    return next(x for key, x in found.items() if key.endswith(f"/{name}"))


def clipped_steps(state: Any) -> jax.Array:
    return metric(state, "clipped_fraction") * metric(state, "steps")


def runs(rules: Mapping[str, Any], stacks: Any, params: Any = PARAMS) -> dict[str, Run]:
    """Run these clips over gradients whose leaves have the shape (seeds, steps,
    *shape), as one program.
    """

    def one_step(states: Any, grads: Any) -> Any:
        done = {name: tx.update(grads, states[name]) for name, tx in rules.items()}
        seen = {
            name: (
                updates,
                metric(state, "threshold"),
            )
            for name, (updates, state) in done.items()
        }
        return {name: state for name, (_, state) in done.items()}, seen

    def over_steps(stacked: Any) -> Any:
        return jax.lax.scan(
            one_step, {name: tx.init(params) for name, tx in rules.items()}, stacked
        )

    states, seen = jax.tree.map(np.asarray, jax.jit(jax.vmap(over_steps))(stacks))
    return {name: Run(*seen[name], states[name]) for name in rules}


def with_bad_steps() -> dict[str, np.ndarray]:
    """Gradients with spikes for each seed, of which the steps in BAD are not finite."""
    each = [gradients_of(norms_with_spikes(seed), seed) for seed in range(SEEDS)]
    stacks = {name: np.stack([stacked[name] for stacked in each]) for name in SHAPES}
    for step, value in BAD.items():
        stacks["kernel"][:, step, 1, 2] = value
    return stacks


def check_against(
    oracle: Callable[..., Any], done: Run, stacks: Any, options: dict[str, Any]
) -> None:
    """Compare the norms after a clip of the whole tree with an oracle that never sees
    the bad steps.

    Statistics in float32 err by an ulp (6e-8) a step, and by less than 1e-5 over all of
    them.
    """
    for seed in range(SEEDS):
        before, after = (
            norms_of(jax.tree.map(lambda x, i=seed: x[i], t))
            for t in (stacks, done.updates)
        )
        good = np.isfinite(before)
        assert np.isnan(after[~good]).all()
        np.testing.assert_allclose(
            after[good], oracle(before[good], **options), rtol=1e-4
        )
        clipped = good & (after < before)
        assert (after[clipped] <= done.thresholds[seed][clipped]).all(), (
            "above the threshold that it shows"
        )
    np.testing.assert_array_equal(done.state.step, STEPS)
    np.testing.assert_array_equal(
        metric(done.state, "nonfinite_count"), [len(BAD)] * SEEDS
    )
