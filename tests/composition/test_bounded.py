"""`bounded` against the loop by hand in NumPy, for each policy and accumulation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipjax

RATE, MOMENTUM, CLIP, RADIUS = 0.3, 0.9, 1.0, 1.5
COMBINATIONS = [
    (policy, k) for policy in ("propagate", "zero", "skip") for k in (1, 2, 3)
]
SGD = optax.sgd(RATE, momentum=MOMENTUM)
CLIPPED = {
    "clip": clipjax.clip_by_global_norm(CLIP),
    "project": clipjax.max_norm(RADIUS),
}
TRANSFORMATIONS = {
    (p, k): clipjax.bounded(SGD, **CLIPPED, nonfinite=p, accumulate=k)
    for p, k in COMBINATIONS
}
RNG = np.random.default_rng(0)
START = {
    "kernel": RNG.normal(size=(4, 3)).astype(np.float32) * 0.3,
    "bias": np.zeros(3, np.float32),
}
TARGETS = [
    {
        "kernel": RNG.normal(size=(4, 3)).astype(np.float32) * 2,
        "bias": RNG.normal(size=3).astype(np.float32),
    }
    for _ in range(12)
]
BAD = {
    "propagate": {11: np.nan},
    "zero": {2: np.nan, 5: np.inf},
    "skip": {2: np.nan, 5: np.inf},
}


def micro_batches(policy: str) -> list[Any]:
    """Targets; one entry of a bad one makes one of the gradient NaN or infinite."""
    found = [jax.tree.map(np.copy, target) for target in TARGETS]
    for i, value in BAD[policy].items():
        found[i]["kernel"][1, 2] = value
    return found


def gradient(params: Any, target: Any) -> Any:
    """Return that of |params - target|² / 2."""
    return jax.tree.map(lambda p, t: p - t, params, target)


def by_hand(policy: str, k: int) -> list[Any]:
    """The parameters after each micro-batch, in float64."""
    params = {name: x.astype(np.float64) for name, x in START.items()}
    trace = {name: np.zeros_like(x) for name, x in params.items()}
    waiting: list[Any] = []
    history = []
    for target in micro_batches(policy):
        grads = gradient(params, target)
        if policy == "zero":
            grads = {name: np.where(np.isfinite(g), g, 0) for name, g in grads.items()}
        if policy != "skip" or all(np.isfinite(g).all() for g in grads.values()):
            waiting.append(grads)
        if len(waiting) == k:
            mean = {name: sum(g[name] for g in waiting) / k for name in params}
            norm = np.sqrt(sum((g**2).sum() for g in mean.values()))
            waiting = []
            for name, g in mean.items():
                trace[name] = MOMENTUM * trace[name] + g * np.minimum(1, CLIP / norm)
                params[name] = params[name] - RATE * trace[name]
            params["kernel"] = params["kernel"] * np.minimum(
                1, RADIUS / np.linalg.norm(params["kernel"], axis=0)
            )
        history.append({name: x.copy() for name, x in params.items()})
    return history


@pytest.fixture(scope="module")
def step() -> Any:
    """One micro-batch of every combination, as one program."""

    def step(params: Any, states: Any, targets: Any) -> Any:
        moved, new = {}, {}
        for key, tx in TRANSFORMATIONS.items():
            updates, new[key] = tx.update(
                gradient(params[key], targets[key]), states[key], params[key]
            )
            moved[key] = optax.apply_updates(params[key], updates)
        return moved, new

    return jax.jit(step)


def start() -> Any:
    return dict.fromkeys(COMBINATIONS, START), {
        key: tx.init(START) for key, tx in TRANSFORMATIONS.items()
    }


def test_every_combination_is_the_loop_by_hand(step: Any) -> None:
    params, states = start()
    batches = {key: micro_batches(key[0]) for key in COMBINATIONS}
    expected = {key: by_hand(*key) for key in COMBINATIONS}
    for i in range(12):
        before = params
        params, states = step(
            params, states, {key: batches[key][i] for key in COMBINATIONS}
        )
        for key in COMBINATIONS:
            kernel = np.asarray(params[key]["kernel"], np.float64)
            # One such entry reaches all that share the norm.
            if key[0] == "propagate" and i == 11:
                assert all(np.isnan(x).all() for x in params[key].values()), key
                continue
            for name in START:  # a dozen steps in float32
                np.testing.assert_allclose(
                    params[key][name], expected[key][i][name], rtol=1e-5, atol=2e-6
                )
            assert np.linalg.norm(kernel, axis=0).max() <= RADIUS * (1 + 1e-6), (key, i)
            emitted = (
                i - len([b for b in BAD["skip"] if b <= i]) if key[0] == "skip" else i
            )
            waits = (emitted + 1) % key[1] or (key[0] == "skip" and i in BAD["skip"])
            assert bool(waits) == all(
                np.array_equal(params[key][n], before[key][n]) for n in START
            ), (key, i)
    for policy, k in COMBINATIONS:
        read = clipjax.metrics(states[policy, k])
        micro = {"propagate": 12, "zero": 12, "skip": 10}[policy]
        assert read["clip_by_global_norm/steps"] == micro // k
        if policy == "zero":
            assert (
                read["zero_nonfinite/zeroed_entries"],
                read["zero_nonfinite/steps"],
            ) == (2, 12)
        if policy == "skip":
            assert (read["skip_nonfinite/skipped"], read["skip_nonfinite/steps"]) == (
                2,
                12,
            )
            assert read["skip_nonfinite/nonfinite_count"] == 2
            assert read["clip_by_global_norm/nonfinite_count"] == 0


def test_a_skipped_micro_batch_is_as_if_it_had_not_been(step: Any) -> None:
    """Bit for bit, in parameters and inner state, and the next one is taken."""
    with_bad, without = start(), start()
    for i, target in enumerate(micro_batches("skip")):
        same = dict.fromkeys(COMBINATIONS, target)
        with_bad = step(*with_bad, same)
        if i not in BAD["skip"]:
            without = step(*without, same)
        for k in (1, 2, 3):
            ours, others = [
                (p["skip", k], s["skip", k].memory.inner)
                for p, s in (with_bad, without)
            ]
            jax.tree.map(np.testing.assert_array_equal, ours, others)


def test_sequences_are_chained_in_their_order() -> None:
    clips = [clipjax.clip_by_value(0.5), clipjax.clip_by_global_norm(1.0)]
    projections = (
        clipjax.non_negative(),
        optax.projections.projection_l2_ball,
        clipjax.max_norm(0.7),
    )
    several = clipjax.bounded(optax.adam(0.1), clip=clips, project=projections)
    links = [clipjax.project(each) for each in projections]
    by_hand = optax.chain(*clips, optax.adam(0.1), *links)
    alone = clipjax.bounded(
        SGD, clip=clips[0], project=lambda tree: jax.tree.map(jnp.tanh, tree)
    )
    nothing = clipjax.bounded(SGD)

    @jax.jit
    def updates(params: Any, grads: Any) -> Any:
        each = (several, by_hand, nothing, SGD, alone)
        return [tx.update(grads, tx.init(params), params)[0] for tx in each]

    grads = jax.tree.map(lambda x: 3 * x, TARGETS[0])
    ours, chained, plain, sgd, bent = updates(START, grads)
    jax.tree.map(np.testing.assert_array_equal, ours, chained)
    jax.tree.map(np.testing.assert_array_equal, plain, sgd)
    moved = jax.tree.map(
        lambda p, g: np.tanh(p - RATE * np.clip(g, -0.5, 0.5)) - p, START, grads
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), bent, moved
    )


def test_zero_also_zeroes_what_a_norm_that_overflows_made_nan() -> None:
    tx = TRANSFORMATIONS["zero", 1]
    grads = {
        "kernel": np.full((4, 3), 2e19, np.float32),
        "bias": np.ones(3, np.float32),
    }
    updates, state = jax.jit(tx.update)(grads, tx.init(START), START)
    assert not any(np.any(x) for x in updates.values())
    read = clipjax.metrics(state)
    assert (
        read["zero_nonfinite/zeroed_entries"],
        read["zero_nonfinite_1/zeroed_entries"],
    ) == (0, 15)
    assert read["clip_by_global_norm/nonfinite_count"] == 1


def test_a_schedule_counts_optimizer_steps() -> None:
    tx = clipjax.bounded(
        optax.identity(),
        clip=clipjax.clip_by_global_norm(lambda step: 1.0 + step),
        nonfinite="skip",
        accumulate=2,
    )
    update, grads, norms = jax.jit(tx.update), np.full(4, 50.0, np.float32), []
    state = tx.init(grads)
    for value in (1, 1, np.nan, 1, 1, 1, 1):
        updates, state = update(grads * value, state)
        norms.append(float(jnp.linalg.norm(updates)))
    np.testing.assert_allclose(norms, [0, 1, 0, 0, 2, 0, 3], rtol=2e-6)


OTHERS = {
    "key": jax.random.key(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "int": np.array([7, 8], np.int32),
    "bool": np.array([True, False]),
    "none": None,
}


@pytest.mark.parametrize("policy", ["propagate", "skip"])
def test_leaves_of_other_kinds_pass_through_an_accumulation(policy: str) -> None:
    """They have no mean: the optimizer gets those of the last micro-batch."""
    tx = clipjax.bounded(
        optax.stateless_with_tree_map(
            lambda g, p: -g if jnp.issubdtype(g.dtype, np.floating) else g
        ),
        clip=clipjax.clip_by_global_norm(1.0),
        nonfinite=policy,
        accumulate=2,
    )
    params = {"w": jnp.zeros((2, 2)), "half": jnp.zeros(2, jnp.bfloat16), **OTHERS}

    @jax.jit
    def step(state: Any, size: Any) -> Any:
        grads = params | {
            "w": jnp.full((2, 2), size),
            "half": jnp.full(2, size, jnp.bfloat16),
            "int": OTHERS["int"] + size.astype(np.int32),
        }
        updates, state = tx.update(grads, state, params)
        key = jax.random.key_data(updates.pop("key"))
        assert updates.pop("float0").dtype == jax.dtypes.float0
        return state, (updates, key)

    # Means of 2, and of 0.1, which is not clipped.
    sizes = np.float32([1, 3, 0.15, 0.05])
    state, (updates, keys) = lax.scan(step, tx.init(params), sizes)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    for name in ("w", "half"):
        found = np.asarray(updates[name], np.float64).reshape(4, -1)[:, 0]
        exact = [0, -(1 / 6**0.5), 0, -0.1]
        np.testing.assert_allclose(found, exact, rtol=1e-5 if name == "w" else 1e-2)
    np.testing.assert_array_equal(updates["int"], [[0, 0], [10, 11], [0, 0], [7, 8]])
    assert updates["bool"].tolist() == [[False, False], [True, False]] * 2
    np.testing.assert_array_equal(keys[1], jax.random.key_data(OTHERS["key"]))
    assert updates["none"] is None


def test_a_micro_batch_that_waits_changes_nothing_even_if_it_is_infinite() -> None:
    """`optax.MultiSteps` multiplies its updates by 0, which makes NaN."""
    tx = clipjax.bounded(SGD, accumulate=2)
    grads = {"kernel": np.float32([np.inf, 1.0])}
    updates, state = tx.update(grads, tx.init(grads))
    assert not updates["kernel"].any()
    assert np.isnan(tx.update(grads, state)[0]["kernel"][0])


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_accumulation_where_only_a_part_of_the_mesh_is_manual() -> None:
    """The stages of a pipeline, beside an axis that is left to XLA."""
    mesh = jax.make_mesh((2, 4), ("pp", "data"), axis_types=(AxisType.Auto,) * 2)
    tx = clipjax.bounded(SGD, clip=CLIPPED["clip"], nonfinite="skip", accumulate=2)

    def steps(params: Any, batches: Any) -> Any:
        def one(carry: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return lax.scan(one, (params, tx.init(params)), batches)[0][0]

    params = {"kernel": np.ones((4, 8), np.float32)}
    batches = {"kernel": RNG.normal(size=(4, 4, 8)).astype(np.float32)}
    staged = jax.shard_map(
        steps,
        mesh=mesh,
        in_specs=(P(None, "pp"), P(None, None, "pp")),
        out_specs=P(None, "pp"),
        axis_names={"pp"},
    )
    found, expected = jax.jit(staged)(params, batches), jax.jit(steps)(params, batches)
    np.testing.assert_allclose(found["kernel"], expected["kernel"], rtol=1e-5)
    assert np.abs(found["kernel"] - params["kernel"]).max() > 0.1
