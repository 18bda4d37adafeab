"""Bounds among accumulated gradients, frozen parameters, groups, schedules and Flax: against NumPy.

Each oracle is the whole update rule, written out in float64: what is clipped together, when, and how
often.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.oracles import exact_norm, exact_tree_norm
from tests.support.trees import flat, random_tree, same_bits

CLIP, RADIUS, RATE = 1.0, 1.5, 0.5
BALL = clipjax.max_norm(RADIUS)

Tree = dict[str, Any]


def bounded(optimizer: Any = None, **options: Any) -> Any:
    return clipjax.bounded(
        optax.sgd(RATE) if optimizer is None else optimizer,
        clip=clipjax.clip_by_global_norm(CLIP),
        project=BALL,
        **options,
    )


def tree(seed: int, scale: float = 1.0) -> Tree:
    rng = np.random.default_rng(seed)
    shapes = {"head": (4, 2), "body": (3, 4), "bias": (4,)}
    return {k: jnp.asarray((scale * rng.standard_normal(s)).astype(np.float32)) for k, s in shapes.items()}


def in_float64(params: Tree) -> Tree:
    return {k: np.asarray(v, np.float64) for k, v in params.items()}


def clipped(grads: Tree, bound: float = CLIP) -> Tree:
    norm = float(exact_tree_norm(grads))
    return {k: np.asarray(g, np.float64) * min(1.0, bound / norm) for k, g in grads.items()}


def projected(params: Tree, radius: float = RADIUS) -> Tree:
    def one(w: np.ndarray) -> np.ndarray:
        return w * np.minimum(1.0, radius / np.linalg.norm(w, axis=0)) if w.ndim == 2 else w

    return {k: one(np.asarray(w, np.float64)) for k, w in params.items()}


def descend(params: Tree, grads: Tree, rate: float = RATE) -> Tree:
    return {k: np.asarray(params[k], np.float64) - rate * np.asarray(grads[k], np.float64) for k in params}


def assert_close(params: Tree, expected: Tree) -> None:
    assert set(params) == set(expected)
    for k, value in expected.items():
        np.testing.assert_allclose(np.asarray(params[k]), value, rtol=2e-6, atol=2e-6, err_msg=k)


def train(tx: Any, params: Any, gradients: Any) -> Any:
    """Yield the parameters and the state after each step."""

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for grads in gradients:
        params, state = step(params, state, grads)
        yield params, state


def last(steps: Any) -> Any:
    *_, final = steps
    return final


# --------------------------------------------------------------------------------------------------
# Accumulated gradients.

EVERY = 3


def poisoned(grads: Tree) -> Tree:
    return {**grads, "body": grads["body"].at[0, 0].set(jnp.nan)}


@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "skip"])
def test_accumulated_gradients_are_clipped_once(nonfinite: Any) -> None:
    micro = [tree(i, 3.0) for i in range(3 * EVERY)]
    params = expected = BALL(tree(100, 2.0))
    tx = optax.MultiSteps(bounded(nonfinite=nonfinite), every_k_schedule=EVERY).gradient_transformation()
    for i, (after, state) in enumerate(train(tx, params, micro)):
        if i % EVERY == EVERY - 1:
            part = [in_float64(g) for g in micro[i + 1 - EVERY : i + 1]]
            mean = {k: sum(g[k] for g in part) / EVERY for k in part[0]}
            assert float(exact_tree_norm(mean)) > CLIP
            expected = projected(descend(expected, clipped(mean)))
            seen = clipjax.metrics(state)
            assert seen["clip_by_global_norm/steps"] == (i + 1) // EVERY
            np.testing.assert_allclose(seen["clip_by_global_norm/norm"], exact_tree_norm(mean), rtol=1e-6)
        assert_close(after, expected)
        assert not clipjax.verify(after, BALL)


def test_that_is_not_what_clipping_each_micro_batch_does() -> None:
    """Guards the test above, and says why `bounded` refuses to stand around `MultiSteps`."""
    micro = [tree(i, 3.0) for i in range(EVERY)]
    params = BALL(tree(100, 2.0))
    right = last(train(optax.MultiSteps(bounded(), EVERY).gradient_transformation(), params, micro))[0]
    inner = optax.MultiSteps(optax.sgd(RATE), EVERY).gradient_transformation()
    wrong = last(train(optax.chain(clipjax.clip_by_global_norm(CLIP), inner, BALL), params, micro))[0]
    assert np.abs(flat(right) - flat(wrong)).max() > 0.01


@pytest.mark.parametrize("name", ["optimizer", "clip"])
@pytest.mark.parametrize("which", ["object", "transformation"])
def test_accumulating_inside_bounded_is_an_error(name: str, which: str) -> None:
    inside = optax.MultiSteps(optax.sgd(RATE), EVERY)
    given = inside if which == "object" else inside.gradient_transformation()
    arguments = {"optimizer": optax.sgd(RATE), name: given}
    with pytest.raises(
        ValueError, match=rf"^{name}: .*put it around, as in optax.MultiSteps\(clipjax.bounded"
    ):
        clipjax.bounded(**arguments)


KEEP_OUT: dict[str, Callable[[Any], Any]] = {
    "should_skip_update_fn": lambda tx: optax.MultiSteps(
        tx, EVERY, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "skip_nonfinite": lambda tx: clipjax.skip_nonfinite(
        optax.MultiSteps(tx, EVERY).gradient_transformation()
    ),
}


@pytest.mark.parametrize("how", KEEP_OUT)
def test_a_bad_micro_batch_can_be_kept_out(how: str) -> None:
    """As if it had never been there."""
    tx = KEEP_OUT[how](bounded())
    params = BALL(tree(100, 2.0))
    good = [tree(i, 3.0) for i in range(2 * EVERY)]
    with_bad = [good[0], poisoned(good[1]), *good[1:]]
    after, state = last(train(tx, params, with_bad))
    expected, _ = last(train(tx, params, good))
    assert same_bits(after, expected)
    assert clipjax.metrics(state)["clip_by_global_norm/steps"] == 2


def test_a_bad_micro_batch_stays_in_the_accumulator() -> None:
    """Why it must be kept out: what has become NaN is multiplied by 0, and is NaN still."""
    tx = optax.MultiSteps(bounded(nonfinite="skip"), EVERY).gradient_transformation()
    params = BALL(tree(100, 2.0))
    micro = [poisoned(tree(0)), *(tree(i) for i in range(1, 4 * EVERY))]
    after, state = last(train(tx, params, micro))
    assert same_bits(after, params)
    assert clipjax.metrics(state)["skip_nonfinite/skipped"] == 4


# --------------------------------------------------------------------------------------------------
# Frozen parameters do not count.

FROZEN: dict[str, Callable[[Any], Any]] = {
    "zeros": jnp.zeros_like,
    "huge": lambda w: jnp.full_like(w, 1e30),
    "nan": lambda w: jnp.full_like(w, jnp.nan),
}
TRAINED = {"head": True, "body": False, "bias": True}


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("kind", FROZEN)
@pytest.mark.parametrize("how", ["partition", "masked"])
def test_frozen_parameters_do_not_count(how: str, kind: str, nonfinite: Any) -> None:
    params = BALL(tree(100, 2.0))
    if how == "partition":
        labels = {k: "train" if trained else "freeze" for k, trained in TRAINED.items()}
        tx = optax.partition({"train": bounded(nonfinite=nonfinite), "freeze": optax.set_to_zero()}, labels)
    else:
        frozen = {k: not trained for k, trained in TRAINED.items()}
        tx = optax.chain(
            optax.masked(bounded(nonfinite=nonfinite), TRAINED), optax.masked(optax.set_to_zero(), frozen)
        )
    micro = [{**tree(i, 3.0), "body": FROZEN[kind](params["body"])} for i in range(2)]
    expected = {k: v for k, v in params.items() if TRAINED[k]}
    for (after, state), grads in zip(train(tx, params, micro), micro, strict=True):
        trained = {k: v for k, v in grads.items() if TRAINED[k]}
        expected = projected(descend(expected, clipped(trained)))
        assert same_bits(after["body"], params["body"])
        assert_close({k: after[k] for k in expected}, expected)
        norm = clipjax.metrics(state)["clip_by_global_norm/norm"]
        np.testing.assert_allclose(norm, exact_tree_norm(trained), rtol=1e-6)
        assert not clipjax.verify({k: after[k] for k in expected}, BALL)


def test_parameters_that_are_none_do_not_count() -> None:
    """As Equinox' `partition` and NNX' filters leave them."""
    params, grads = {**BALL(tree(100, 2.0)), "body": None}, {**tree(0, 3.0), "body": None}
    after, state = last(train(bounded(), params, [grads]))
    expected = projected(descend(without_body(params), clipped(without_body(grads))))
    assert_close(without_body(after), expected)
    assert after["body"] is None
    np.testing.assert_allclose(
        clipjax.metrics(state)["clip_by_global_norm/norm"], exact_tree_norm(grads), rtol=1e-6
    )


def without_body(params: Tree) -> Tree:
    return {k: v for k, v in params.items() if k != "body"}


# --------------------------------------------------------------------------------------------------
# Groups: where the clip stands says what shares a norm.

LABELS = {"head": "a", "body": "b", "bias": "b"}
RATES = {"a": 0.5, "b": 0.25}


def group(params: Tree, label: str) -> Tree:
    return {k: v for k, v in params.items() if LABELS[k] == label}


def test_around_the_partition_all_groups_share_one_norm() -> None:
    params, grads = BALL(tree(100, 2.0)), tree(0, 3.0)
    tx = bounded(optax.partition({label: optax.sgd(rate) for label, rate in RATES.items()}, LABELS))
    after, state = last(train(tx, params, [grads]))
    shared = clipped(grads)
    expected: Tree = {}
    for label, rate in RATES.items():
        expected |= projected(descend(group(params, label), group(shared, label), rate))
    assert_close(after, expected)
    assert not clipjax.verify(after, BALL)
    norms = [v for k, v in clipjax.metrics(state).items() if k.startswith("clip") and k.endswith("/norm")]
    np.testing.assert_allclose(norms, [exact_tree_norm(grads)], rtol=1e-6)


def test_inside_the_partition_each_group_has_its_own_norm() -> None:
    params, grads = BALL(tree(100, 2.0)), tree(0, 3.0)
    groups = {label: bounded(optax.sgd(rate)) for label, rate in RATES.items()}
    after, state = last(train(optax.partition(groups, LABELS), params, [grads]))
    expected: Tree = {}
    for label, rate in RATES.items():
        expected |= projected(descend(group(params, label), clipped(group(grads, label)), rate))
    assert_close(after, expected)
    assert not clipjax.verify(after, BALL)
    norms = [v for k, v in clipjax.metrics(state).items() if k.startswith("clip") and k.endswith("/norm")]
    np.testing.assert_allclose(norms, [exact_tree_norm(group(grads, label)) for label in RATES], rtol=1e-6)


# --------------------------------------------------------------------------------------------------
# Bounds that change.


def test_schedules_as_bounds() -> None:
    def bound(step: Any) -> Any:
        return 2.0 / (1 + step)

    def radius(step: Any) -> Any:
        return 1.5 - 0.25 * step

    tx = clipjax.bounded(
        optax.sgd(RATE), clip=clipjax.clip_by_global_norm(bound), project=clipjax.max_norm(radius)
    )
    expected = params = tree(100, 2.0)
    micro = [tree(i, 3.0) for i in range(4)]
    for i, (after, _) in enumerate(train(tx, params, micro)):
        expected = projected(descend(expected, clipped(micro[i], bound(i))), radius(i))
        assert_close(after, expected)
        assert not clipjax.verify(after, tx, step=i)


@pytest.mark.parametrize("scheduled", [False, True], ids=["changed", "scheduled"])
def test_hyperparameters_that_are_injected(scheduled: bool) -> None:
    """A bound in the state: set by hand, or by a schedule, without compiling again."""

    @optax.inject_hyperparams
    def make(rate: Any, bound: Any, radius: Any) -> Any:
        return clipjax.bounded(
            optax.sgd(rate),
            clip=clipjax.clip_by_global_norm(bound),
            project=clipjax.max_norm(radius),
            nonfinite="skip",
        )

    def radius(step: Any) -> Any:
        return 1.5 - 0.25 * step

    tx = make(rate=RATE, bound=CLIP, radius=radius if scheduled else radius(0))
    expected = params = tree(100, 2.0)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for i in range(4):
        if not scheduled:
            state.hyperparams["radius"] = jnp.asarray(radius(i))
        updates, state = update(tree(i, 3.0), state, params)
        params = optax.apply_updates(params, updates)
        expected = projected(descend(expected, clipped(tree(i, 3.0))), radius(i))
        assert_close(params, expected)
        assert not clipjax.verify(params, clipjax.max_norm(radius(i)))
    assert update._cache_size() == 1


# --------------------------------------------------------------------------------------------------
# Several projections.


def test_projections_are_applied_in_order() -> None:
    """Onto the ball and then onto the orthant is not onto the orthant and then onto the ball."""

    def orthant(params: Any) -> Any:
        return jax.tree.map(lambda w: jnp.maximum(w, 0), params)

    params, grads = tree(100, 2.0), tree(0)
    moved = descend(params, grads)
    ball_first = {k: np.maximum(w, 0) for k, w in projected(moved).items()}
    ball_last = projected({k: np.maximum(w, 0) for k, w in moved.items()})
    assert np.abs(flat(ball_first) - flat(ball_last)).max() > 0.01
    for project, expected in (([BALL, orthant], ball_first), ((orthant, BALL), ball_last)):
        tx = clipjax.bounded(optax.sgd(RATE), project=project)
        after, state = last(train(tx, params, [grads]))
        assert_close(after, expected)
        assert not clipjax.verify(after, tx)
        assert {"max_norm/steps", "project/steps"} <= set(clipjax.metrics(state))
        direct = functools.reduce(
            lambda w, p: clipjax.project(p)(w),
            project,
            optax.apply_updates(params, jax.tree.map(lambda g: -RATE * g, grads)),
        )
        assert_close(direct, expected)


def test_what_bounded_is_given_in_the_wrong_place() -> None:
    ends = clipjax.chain(optax.sgd(RATE), BALL)
    for name in ("optimizer", "clip"):
        for given in (ends, clipjax.skip_nonfinite(ends), clipjax.bounded(optax.sgd(RATE), project=BALL)):
            with pytest.raises(ValueError, match=rf"{name}: a chain that ends in clipjax.max_norm.*project="):
                clipjax.bounded(**{"optimizer": optax.sgd(RATE), name: given})
    with pytest.raises(TypeError, match=r"project must be a projection.*got 3"):
        clipjax.bounded(optax.sgd(RATE), project=[BALL, 3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"project must be a projection.*gradient transformation"):
        clipjax.bounded(optax.sgd(RATE), project=[clipjax.clip_by_norm(1.0)])


# --------------------------------------------------------------------------------------------------
# A link that widens 16-bit updates, in a branch whose other side does not.

BRANCHES: dict[str, Callable[[Any], Any]] = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.transforms.conditionally_transform(tx, lambda step: step < 2),
    "conditionally_mask": lambda tx: optax.transforms.conditionally_mask(tx, lambda step: step < 2),
    "both": lambda tx: optax.apply_if_finite(
        optax.MultiSteps(tx, 1, should_skip_update_fn=optax.skip_not_finite).gradient_transformation(), 3
    ),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", BRANCHES)
def test_16_bit_links_in_branches(name: str, dtype: Any) -> None:
    params = jax.tree.map(lambda x: x.astype(dtype), random_tree(1, scale=2.0))
    grads = jax.tree.map(lambda x: x.astype(dtype), random_tree(2))
    tx = BRANCHES[name](clipjax.chain(optax.sgd(RATE), BALL))
    after, _ = last(train(tx, params, [grads, grads]))
    assert not clipjax.verify(after, BALL)
    assert exact_norm(after["dense"]["kernel"], 0).max() > 0.95 * RADIUS


# --------------------------------------------------------------------------------------------------
# Flax, with the projection called on the new parameters.


def test_a_flax_train_state() -> None:
    train_state = pytest.importorskip("flax.training.train_state")
    tx = optax.chain(clipjax.clip_by_global_norm(CLIP), optax.sgd(RATE))
    params = BALL(tree(100, 2.0))
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)

    @jax.jit
    def step(state: Any, grads: Any) -> Any:
        state = state.apply_gradients(grads=grads)
        return state.replace(params=BALL(state.params))

    expected = params
    for i in range(3):
        state = step(state, tree(i, 3.0))
        expected = projected(descend(expected, clipped(tree(i, 3.0))))
        assert_close(state.params, expected)
        assert not clipjax.verify(state.params, BALL)
    assert clipjax.metrics(state)["clip_by_global_norm/steps"] == 3


def test_an_nnx_optimizer() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model, ball = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), clipjax.max_norm(0.5)
    tx = optax.chain(clipjax.clip_by_global_norm(CLIP), optax.sgd(RATE))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 3)), np.float32)

    def loss(model: Any) -> jax.Array:
        return jnp.sum((model(x) - 5) ** 2)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        grads = nnx.grad(loss)(model)
        optimizer.update(model, grads)
        nnx.update(model, ball(nnx.state(model, nnx.Param)))
        return grads

    for _ in range(4):
        before = {"bias": model.bias[...], "kernel": model.kernel[...]}
        grads = step(model, optimizer)
        grads = {"bias": grads["bias"][...], "kernel": grads["kernel"][...]}
        after = {"bias": model.bias[...], "kernel": model.kernel[...]}
        assert_close(after, projected(descend(before, clipped(grads)), 0.5))
        assert not clipjax.verify(nnx.state(model, nnx.Param), ball)
    assert exact_norm(model.kernel[...], 0).max() > 0.99 * 0.5
    assert clipjax.metrics(optimizer.opt_state)["clip_by_global_norm/clipped_fraction"] > 0
