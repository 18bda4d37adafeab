"""Healthy runs keep their steps: what `skip_spikes` calls an outlier, measured."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax


def network(key: Any, inputs: int, hidden: int, outputs: int) -> Any:
    shapes = (inputs, hidden), (hidden, hidden), (hidden, outputs)
    return [
        jax.random.normal(jax.random.fold_in(key, i), shape) / shape[0] ** 0.5
        for i, shape in enumerate(shapes)
    ]


def output(params: Any, x: Any) -> Any:
    first, second, last = params
    return jax.nn.relu(jnp.tanh(x @ first) @ second) @ last


def skipped_in(
    optimizer: Any, params: Any, loss: Any, batch: Any, steps: int, key: Any
) -> Any:
    """Return which steps of a run were skipped: with its loss, and without."""

    def run(with_loss: Any) -> Any:
        tx = clipjax.skip_spikes(optimizer)

        def step(carry: Any, i: Any) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, batch(key, i))
            given = jnp.where(with_loss, value, 1.0)
            updates, state = tx.update(grads, state, params, loss=given)
            last = clipjax.metrics(state)["skip_spikes/skipped_last"]
            return (optax.apply_updates(params, updates), state), last

        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))[1]

    return jax.vmap(run)(jnp.array([False, True]))


def squared(params: Any, data: Any) -> Any:
    x, y = data
    return jnp.mean((output(params, x) - y) ** 2)


def of_classes(params: Any, data: Any) -> Any:
    x, y = data
    each = optax.softmax_cross_entropy_with_integer_labels(output(params, x), y)
    return jnp.mean(each)


@pytest.mark.slow
def test_full_batches_lose_at_most_one_step_in_a_hundred() -> None:
    """Without noise the smallest swing is many standard deviations."""
    steps = 3000

    def runs(noise: Any, rate: Any, falls: Any) -> Any:
        key = jax.random.key(0)
        x = jax.random.normal(key, (64, 4))
        y = jnp.sin(x.sum(1, keepdims=True)) + noise * x[:, :1] ** 3

        def rate_at(step: Any) -> Any:
            cosine = optax.cosine_decay_schedule(1.0, steps)(step)
            return rate * jnp.where(falls, cosine, 1.0)

        return skipped_in(
            optax.adam(rate_at),
            network(key, 4, 16, 1),
            squared,
            lambda key, step: (x, y),
            steps,
            key,
        )

    given = [
        (0.0, 1e-2, False),
        (0.0, 3e-3, False),
        (0.1, 1e-3, False),
        (0.1, 1e-2, True),
    ]
    skipped = jax.jit(jax.vmap(runs))(*map(np.array, zip(*given, strict=True)))
    assert np.sum(skipped, axis=-1).max() <= 0.01 * steps


@pytest.mark.slow
def test_young_runs_lose_at_most_one_step_in_two_thousand() -> None:
    """From the first step on, on small batches of a regression and of images."""
    steps, seeds = 100, 20

    def points(key: Any, i: Any) -> Any:
        x = jax.random.normal(jax.random.fold_in(key, i), (32, 8))
        return x, jnp.sin(x[:, :2])

    def images(key: Any, i: Any) -> Any:
        """Ten classes around their means, all pixels at least 0."""
        of_class, noise = jax.random.split(jax.random.fold_in(key, i))
        y = jax.random.randint(of_class, (32,), 0, 10)
        means = jax.random.normal(jax.random.key(1), (10, 32))
        return jax.nn.relu(means[y] + jax.random.normal(noise, (32, 32))), y

    tasks = [
        (optax.adam(1e-2), squared, (8, 16, 2), points),
        (optax.sgd(0.1, momentum=0.9), of_classes, (32, 32, 10), images),
    ]

    def runs(key: Any) -> Any:
        return [
            skipped_in(tx, network(key, *sizes), loss, batch, steps, key)
            for tx, loss, sizes, batch in tasks
        ]

    keys = jax.vmap(jax.random.key)(np.arange(seeds))
    skipped = np.array(jax.jit(jax.vmap(runs))(keys))
    assert skipped.sum() <= skipped.size / 2000


def drawn() -> dict[str, np.ndarray]:
    """Norms of 500 steps that fall, rise, vary, swing, and change their level."""
    rng, t = np.random.default_rng(11), np.arange(500)
    noise = rng.normal(size=(8, 500))
    slow = np.zeros(500)
    for i in range(1, 500):
        slow[i] = 0.95 * slow[i - 1] + 0.1 * noise[7, i]
    logarithms = {
        "falls fifty times": 0.15 * noise[0] - 0.05 * np.minimum(t, 80),
        "falls ten thousand times": 0.1 * noise[1] - 0.092 * np.minimum(t, 100),
        "rises thirty times": 0.15 * noise[2] + 0.017 * np.minimum(t, 200),
        "varies": 0.5 * noise[3],
        "drifts": slow + 0.05 * noise[4],
        "swings": 0.7 * np.sin(t / 20 * 2 * np.pi) + 0.1 * noise[5],
        "heavy tails": 0.25 * rng.standard_t(3, size=500),
        "plateaus": 0.1 * noise[6] - 0.8 * (t // 60),
        "levels": 0.1 * noise[0] + t // 100,
    }
    return {name: np.exp(x) for name, x in logarithms.items()}


def test_spikes_are_seen_and_usual_norms_are_not() -> None:
    """Thirty times the norm, in single steps from step 20 on, and in rows of five."""
    norms = np.stack([*drawn().values()])
    spikes = np.zeros((3, 500), bool)
    spikes[1, 20::25] = True
    for start in (60, 200, 350):
        spikes[2, start : start + 5] = True
    given = norms * np.where(spikes, 30, 1)[:, None]
    tx = clipjax.skip_spikes(optax.identity())

    def run(norms: Any) -> Any:
        def step(state: Any, norm: Any) -> Any:
            _, state = tx.update(norm, state)
            return state, clipjax.metrics(state)["skip_spikes/skipped_last"]

        return jax.lax.scan(step, tx.init(jnp.zeros(())), norms)[1]

    every = jax.jit(jax.vmap(jax.vmap(run)))(given.astype(np.float32))
    alone, single, rows = np.array(every)
    assert alone.sum() <= 15e-4 * alone.size
    early = np.arange(500) < 100
    assert single[:, spikes[1] & early].mean() >= 0.9
    assert single[:, spikes[1] & ~early].mean() >= 0.85
    assert rows[:, spikes[2]].mean() >= 0.82
