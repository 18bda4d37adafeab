"""Every transformation works within Optax's and Flax's wrappers, trained for some steps with donated state.

By default every transformation is tried in one wrapper, and every wrapper
around three transformations or more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import clipjax
from clipjax import SKIP
from tests.contract.cases import (
    DEFAULTS,
    VARIANTS,
    default,
    every_case,
    labelled,
    metric,
    own_metrics,
    problem,
    run,
    sampled,
    update,
    with_identity,
)
from tests.support.trees import avals, flat, same_bits
from tests.support.walk import ARGUMENTS, Case, bound_parameters, build, is_projection, parameters, required

STEPS = 4


def chain_of(tx: Any) -> Any:
    return optax.chain(optax.sgd(0.5), tx) if is_projection(tx) else optax.chain(tx, optax.sgd(0.5))


def injected(case: Case, *, schedule: bool) -> Any:
    bounds = [key for key in bound_parameters(case.name) if key in required(case.name)]
    static = [
        key
        for key, parameter in parameters(case.name).items()
        if key not in bounds and (callable(parameter.default) or key in ("function", "optimizer"))
    ]
    factory = optax.inject_hyperparams(getattr(clipjax, case.name), static_args=static)
    options = {key: ARGUMENTS[key] for key in required(case.name)}
    if schedule:
        options |= {key: (lambda _, key=key: ARGUMENTS[key]) for key in bounds}
    return factory(**options)


def partition_of(case: Case) -> Any:
    other = build(case)
    try:
        other.init({"scale": problem()[1]["scale"]})
    except ValueError:  # a scalar is nothing to bound, which has to be asked for
        other = build(case, **{key: SKIP for key in ("axes", "flatten") if key in parameters(case.name)})
    parts = {"a": chain_of(default(case)), "b": chain_of(other)}
    return optax.partition(parts, {"dense": "a", "scale": "b"})


WRAPPERS: dict[str, Callable[[Case], Any]] = {
    "chain": lambda case: chain_of(default(case)),
    "masked": lambda case: optax.masked(with_identity(case), {"dense": True, "scale": False}),
    "partition": partition_of,
    "inject_hyperparams": lambda case: injected(case, schedule=False),
    "inject_hyperparams, schedule": lambda case: injected(case, schedule=True),
    "MultiSteps": lambda case: optax.MultiSteps(chain_of(default(case)), 2).gradient_transformation(),
    "apply_if_finite": lambda case: optax.apply_if_finite(chain_of(default(case)), 10),
}


def every_case_in(name: str) -> Any:
    """Of the wrappers, which take turns, each case has one by default."""
    return sampled(DEFAULTS, one_in=len(WRAPPERS), first=list(WRAPPERS).index(name))


def own_states(tx: Any, params: Any) -> set[str]:
    return {key.split("/")[0] for key in own_metrics(tx, params)}


class Trained:
    """Some steps of several transformations, each with parameters and state of its own, all donated."""

    def __init__(self, txs: dict[str, Any], dtype: Any = np.float32) -> None:
        self.start = problem(dtype)[1]
        self.dtype = dtype
        self.before = {name: tx.init(self.start) for name, tx in txs.items()}
        self.after: dict[str, Any] = {}
        self.first: dict[str, Any] = {}  # the updates of the first step

        def one(grads: Any, carried: Any) -> Any:
            updates, after = {}, {}
            for name, tx in txs.items():
                params, state = carried[name]
                updates[name], state = tx.update(grads, state, params)
                after[name] = optax.apply_updates(params, updates[name]), state
            return updates, after

        self.step = jax.jit(one, donate_argnums=1)
        carried = {
            name: jax.tree.map(jnp.copy, (self.start, tx.init(self.start))) for name, tx in txs.items()
        }
        for seed in range(STEPS):
            updates, carried = self.step(problem(dtype, seed=seed)[0], carried)
            self.first = self.first or updates
        self.after = carried

    def step_from(self, name: str, grads: Any, params: Any, state: Any) -> Any:
        """One step more of one of them, by the same program."""
        copied = jax.tree.map(jnp.copy, {**self.after, name: (params, state)})
        updates, after = self.step(grads, copied)
        return updates[name], *after[name]


@functools.cache
def trained(label: str, name: str) -> Trained:
    return Trained({name: WRAPPERS[name](labelled(label))})


def check(case: Case, name: str) -> Trained:
    """Train; state, parameters and the names of the metrics are as they should be."""
    found = trained(str(case), name)
    params, state = found.after[name]
    assert avals(state) == avals(found.before[name])
    assert avals(params) == avals(found.start)
    assert np.isfinite(flat(params)).all()
    if name != "partition":  # which has two of them
        assert set(clipjax.metrics(state)) == set(own_metrics(default(case), found.start))
    return found


donating = jax.jit(
    lambda tx, grads, state, params: tx.update(grads, state, params), static_argnums=0, donate_argnums=2
)


@every_case
def test_donated_state_works_again_and_again(case: Case) -> None:
    tx = default(case)
    grads, params = problem()
    state = tx.init(params)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers), "two leaves of the state share one buffer"
    expected = state
    for _ in range(3):
        expected = update(tx, grads, expected, params)[1]
    for _ in range(3):
        state = donating(tx, grads, state, params)[1]
    assert same_bits(state, expected)


@every_case_in("chain")
def test_in_a_chain(case: Case) -> None:
    check(case, "chain")


@sampled([case for case in VARIANTS if case.options], one_in=6)
def test_variants_in_a_chain(case: Case) -> None:
    tx = default(case)
    found = Trained({"chain": chain_of(tx)})
    params, state = found.after["chain"]
    assert avals(state) == avals(found.before["chain"])
    assert np.isfinite(flat(params)).all()
    assert set(clipjax.metrics(state)) == set(own_metrics(tx, params))


@every_case_in("masked")
def test_in_masked(case: Case) -> None:
    found = check(case, "masked")
    grads, params = problem()
    assert same_bits(found.first["masked"]["scale"], grads["scale"])
    alone = run(with_identity(case), {"dense": grads["dense"]}, {"dense": params["dense"]})[0]
    assert same_bits({"dense": found.first["masked"]["dense"]}, alone)


@every_case_in("partition")
def test_in_partition(case: Case) -> None:
    found = check(case, "partition")
    own = set(own_metrics(default(case), found.start))
    expected = own | {key.replace("/", "_1/", 1) for key in own}
    if len({key.split("/")[0] for key in own}) == len(own_states(default(case), found.start)):
        assert set(clipjax.metrics(found.after["partition"][1])) == expected


@every_case_in("inject_hyperparams")
def test_in_inject_hyperparams(case: Case) -> None:
    name = "inject_hyperparams"
    found = check(case, name)
    grads, params = problem()
    np.testing.assert_allclose(flat(found.first[name]), flat(run(default(case), grads, params)[0]), rtol=1e-6)
    bounds = [key for key in bound_parameters(case.name) if key in required(case.name)]
    if bounds:
        state = found.before[name]
        for key in bounds:
            state.hyperparams[key] = jnp.zeros_like(state.hyperparams[key])
        changed = found.step_from(name, grads, params, state)[0]
        assert not same_bits(changed, found.first[name])
        assert np.isfinite(flat(changed)).all()


@every_case_in("inject_hyperparams, schedule")
def test_in_inject_hyperparams_with_a_schedule(case: Case) -> None:
    name = "inject_hyperparams, schedule"
    found = check(case, name)
    grads, params = problem()
    np.testing.assert_allclose(flat(found.first[name]), flat(run(default(case), grads, params)[0]), rtol=1e-6)


@every_case_in("MultiSteps")
def test_in_multi_steps(case: Case) -> None:
    found = check(case, "MultiSteps")
    assert_two_steps(case, found.after["MultiSteps"])


@every_case_in("apply_if_finite")
def test_in_apply_if_finite(case: Case) -> None:
    found = check(case, "apply_if_finite")
    assert_bad_steps_change_nothing(case, found)


def assert_two_steps(case: Case, carried: Any) -> None:
    params, state = carried
    assert metric(state, "/steps") in (0, 2 * len(own_states(default(case), params)))
    if case.name == "max_norm":
        assert_inside_the_ball(params)


def assert_bad_steps_change_nothing(case: Case, found: Trained) -> None:
    params, state = jax.tree.map(jnp.copy, found.after["apply_if_finite"])
    if case.name == "max_norm":
        assert_inside_the_ball(params)
    bad = jax.tree.map(lambda g: np.full_like(g, np.nan), problem(found.dtype)[0])
    after = found.step_from("apply_if_finite", bad, params, state)[1]
    assert same_bits(after, params)


def assert_inside_the_ball(params: Any) -> None:
    norms = np.sqrt((np.asarray(params["dense"]["kernel"]).astype(np.float64) ** 2).sum(axis=0))
    assert norms.max() <= 1.0
    assert norms.max() > 0.9


@sampled(DEFAULTS, one_in=8, first=3)
def test_16_bits_in_branches(case: Case) -> None:
    """A link may widen its updates: wrappers that choose between branches must still take them."""
    names = ("MultiSteps", "apply_if_finite")
    found = Trained({name: WRAPPERS[name](case) for name in names}, ml_dtypes.bfloat16)
    for name in names:
        params, state = found.after[name]
        assert avals(state) == avals(found.before[name])
        assert avals(params) == avals(found.start)
        assert np.isfinite(flat(params)).all()
        assert set(clipjax.metrics(state)) == set(own_metrics(default(case), found.start))
    assert_two_steps(case, found.after["MultiSteps"])
    assert_bad_steps_change_nothing(case, found)


@sampled(DEFAULTS, one_in=7, first=1)
def test_in_a_flax_train_state(case: Case) -> None:
    train_state = pytest.importorskip("flax.training.train_state")
    tx = chain_of(default(case))
    params = problem()[1]
    state = train_state.TrainState.create(apply_fn=lambda *_: None, params=params, tx=tx)
    for seed in range(2):
        state = apply_gradients(state, problem(seed=seed)[0])
    assert int(state.step) == 2
    assert set(clipjax.metrics(state)) == set(own_metrics(tx, params))
    assert np.isfinite(flat(state.params)).all()


apply_gradients = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))


@sampled(DEFAULTS, one_in=7, first=2)
def test_in_an_nnx_optimizer(case: Case) -> None:
    nnx = pytest.importorskip("flax.nnx")
    tx = chain_of(build(case))
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = 10 * jnp.ones((2, 3))

    @nnx.jit
    def one(model: Any, optimizer: Any) -> None:
        grads = nnx.grad(lambda model: jnp.sum((model(x) - 1) ** 2))(model)
        optimizer.update(model, grads)

    before = np.asarray(model.kernel[...])
    one(model, optimizer)
    one(model, optimizer)
    after = np.asarray(model.kernel[...])
    assert np.isfinite(after).all()
    assert not np.array_equal(before, after)
    seen = clipjax.metrics(optimizer.opt_state)
    assert set(seen) == set(own_metrics(tx, {"kernel": jnp.ones((3, 4))}))
    assert all(np.ndim(value) == 0 and float(value) >= 0 for value in seen.values())
    assert metric(optimizer.opt_state, "/steps") in (0, 2 * len(own_states(tx, {"kernel": jnp.ones((3, 4))})))
