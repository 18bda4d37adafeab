"""`adagc` gives each leaf or unit a bound that follows its own past norms."""

import math
from typing import Any

import jax
import numpy as np

import clipjax
from tests.gradients.norm_runs import (
    BAD,
    PARAMS,
    SEEDS,
    clipped_steps,
    metric,
    norms_of,
    runs,
    with_bad_steps,
)


def adagc(
    norms,
    relative_bound=1.04,
    decay=0.99,
    warmup_steps=100,
    warmup_max_norm=1.0,
    warmup_norms="before",
):
    """The norms after the clip, and the smallest bounds, of norms (steps, leaves)."""
    gamma = np.full(norms.shape[1], np.inf)
    after, least = [], []
    for t, n in enumerate(norms):
        if t < warmup_steps:
            clipped, bound = (
                n * min(1, warmup_max_norm / np.linalg.norm(n)),
                warmup_max_norm,
            )
            gamma = np.minimum(gamma, n if warmup_norms == "before" else clipped)
        else:
            bound = relative_bound * gamma
            clipped = np.minimum(n, bound)
            gamma = np.where(
                gamma == np.inf, clipped, decay * gamma + (1 - decay) * clipped
            )
        after.append(clipped)
        least.append(np.min(bound))
    return np.array(after), np.array(least)


def leaf_norms(stacked: Any) -> np.ndarray:
    """The norm of each leaf of each tree of a stack, in float64."""
    return np.stack([norms_of([leaf]) for leaf in jax.tree.leaves(stacked)], axis=1)


# A small bound clips every step of the warm-up, so that norms before and after differ.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"warmup_norms": "after", "warmup_steps": 20, "warmup_max_norm": 0.1},
    {"warmup_steps": 0},
    {"warmup_steps": 1, "warmup_max_norm": math.inf},
    {"relative_bound": 0.9, "decay": 0.8, "warmup_max_norm": 0.05, "warmup_steps": 7},
]


def test_it_follows_the_authors_code() -> None:
    stacks = with_bad_steps()
    done = runs({str(options): clipjax.adagc(**options) for options in OPTIONS}, stacks)
    for options in OPTIONS:
        updates, thresholds, state = done[str(options)]
        for seed in range(SEEDS):
            before, after = (
                leaf_norms(jax.tree.map(lambda x, i=seed: x[i], t))
                for t in (stacks, updates)
            )
            good = np.isfinite(before).all(axis=1)
            expected, least = adagc(before[good], **options)
            # Float32 statistics err by an ulp a step.
            np.testing.assert_allclose(after[good], expected, rtol=1e-4)
            np.testing.assert_allclose(thresholds[seed][good], least, rtol=1e-4)
            assert np.isnan(after[~good][:, 1]).all(), (
                "the kernel has the entry that is not finite"
            )
            warming = np.cumsum(good)[~good] < options.get("warmup_steps", 100)
            np.testing.assert_array_equal(np.isnan(after[~good][:, 0]), warming)
        np.testing.assert_array_equal(metric(state, "nonfinite_count"), len(BAD))
        assert (clipped_steps(state) >= 5).all()


def test_a_leaf_without_a_gradient_is_not_kept_at_zero() -> None:
    """Gamma is never 0, so that a leaf can start later; its first norm is unclipped."""
    tx = clipjax.adagc(warmup_steps=5)
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for bias in [0] * 9 + [3, 0, 300]:
        updates, state = update({**PARAMS, "bias": np.full(3, bias, np.float32)}, state)
        np.testing.assert_allclose(updates["bias"], min(bias, 1.04 * 3), rtol=1e-5)


def test_units_of_a_leaf_follow_their_own_past() -> None:
    """A leaf of several layers is clipped as those in leaves of their own."""
    rng, short = np.random.default_rng(3), {"warmup_steps": 5, "warmup_max_norm": 3.0}
    sizes = np.exp(0.5 * rng.standard_normal((30, 4))) * 10.0 ** np.arange(-2, 2)
    layers = (rng.standard_normal((1, 30, 4, 5, 3)) * sizes[:, :, None, None]).astype(
        np.float32
    )
    head = rng.standard_normal((1, 30, 6)).astype(np.float32)
    apart = {f"{i}": layers[:, :, i] for i in range(4)}
    rules = {
        "units": clipjax.adagc(axes={"layers": (1, 2), "head": None}, **short),
        "skip": clipjax.adagc(axes={"layers": (1, 2)}, **short),
    }
    params = {
        "head": np.zeros(6, np.float32),
        "layers": np.zeros((4, 5, 3), np.float32),
    }
    done = runs(rules, {"head": head, "layers": layers}, params)
    leaves = runs(
        {"apart": clipjax.adagc(**short)},
        apart,
        dict.fromkeys(apart, params["layers"][0]),
    )["apart"]

    updates, _, state = done["units"]
    # The first axis: seeds.
    assert [x.shape for x in jax.tree.leaves(state.memory.gammas)] == [
        (1,),
        (1, 4, 1, 1),
    ]
    after = leaf_norms([updates["head"][0], *np.moveaxis(updates["layers"][0], 1, 0)])
    expected, _ = adagc(leaf_norms([head[0], *np.moveaxis(layers[0], 1, 0)]), **short)
    np.testing.assert_allclose(after, expected, rtol=1e-4)

    updates, thresholds, state = done["skip"]
    np.testing.assert_array_equal(updates["head"], head)
    np.testing.assert_allclose(
        updates["layers"], np.stack([*leaves.updates.values()], axis=2), rtol=1e-5
    )
    np.testing.assert_allclose(thresholds, leaves.thresholds, rtol=1e-5)
    found = clipjax.metrics(state)
    for key, value in clipjax.metrics(leaves.state).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, err_msg=key)
    assert clipped_steps(state) > 5


def test_parameters_may_have_other_dtypes_than_their_gradients() -> None:
    """The metrics are of stacks of norms and of gammas, which are in one order."""
    with jax.enable_x64(True):
        kinds = {"a": np.float32, "b": np.float64, "c": np.float32}
        tx = clipjax.adagc(1.04, warmup_steps=1, warmup_max_norm=math.inf)
        state = tx.init({key: np.ones(2, kind) for key, kind in kinds.items()})
        update = jax.jit(tx.update)
        for norm in (100.0, 1000.0):
            grads = {"a": np.float32(1), "b": np.float32(norm), "c": np.float32(1)}
            _, state = update(grads, state)
        last = {key: float(x) for key, x in clipjax.metrics(state).items()}
    np.testing.assert_allclose(last["adagc/scale"], 0.104, rtol=1e-5)
    np.testing.assert_allclose(
        last["adagc/norm_after"], math.sqrt(104**2 + 2), rtol=1e-5
    )
