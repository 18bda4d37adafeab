"""Leaves that are no floats pass through and do not count; empty ones and complex ones work."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.contract.cases import (
    DEFAULTS,
    VARIANTS,
    covering,
    every_case,
    labelled,
    metric,
    run,
    sampled,
    step,
    with_identity,
)
from tests.support.trees import avals, flat, same_bits
from tests.support.walk import Case, build, is_projection, parameters

KERNEL = np.arange(6, dtype=np.float32).reshape(2, 3)

ODD = {
    "none": None,
    "masked": optax.MaskedNode(),
    "int32": np.arange(3, dtype=np.int32),
    "uint8": np.arange(3, dtype=np.uint8),
    "bool": np.array([True, False]),
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(1), 2),
}


@every_case
def test_odd_leaves_pass_through_and_do_not_count(case: Case) -> None:
    tx = with_identity(case)

    @jax.jit
    def alone_and_among(grad: Any, weight: Any, odd: Any) -> Any:
        alone = step(tx, {"kernel": grad}, {"kernel": weight})
        among = step(tx, {"kernel": grad, "odd": odd}, {"kernel": weight, "odd": odd})
        # jit neither takes nor returns a float0, but what it traces does.
        float0 = np.zeros(3, jax.dtypes.float0)
        beside, state = step(
            tx, {"kernel": grad, "float0": float0}, {"kernel": weight, "float0": np.arange(3)}
        )
        assert beside["float0"].dtype == jax.dtypes.float0
        assert beside["float0"].shape == (3,)
        called = tx({"kernel": weight, "odd": odd})["odd"] if is_projection(tx) else None
        return alone, among, (beside["kernel"], state), called

    alone, among, beside, called = alone_and_among(4 * KERNEL, -KERNEL, ODD)
    for kind, leaf in ODD.items():
        assert jax.tree.structure(among[0]["odd"][kind]) == jax.tree.structure(leaf), kind
        assert same_bits(among[0]["odd"][kind], leaf), kind
        if called is not None:
            assert same_bits(called[kind], leaf), kind
    assert same_bits(among[0]["kernel"], alone[0]["kernel"])
    assert same_bits(beside[0], alone[0]["kernel"])
    seen = clipjax.metrics(alone[1])
    assert same_bits(clipjax.metrics(among[1]), seen)
    assert same_bits(clipjax.metrics(beside[1]), seen)


EMPTY = {
    "empty": {},
    "empty-tuple": (),
    "none": None,
    "masked": optax.MaskedNode(),
    "size0": {"a": np.zeros((0,), np.float32)},
    "size0-2d": {"a": np.zeros((3, 0), np.float32), "b": np.zeros((0, 3), np.float32)},
    "only-ints": {"a": np.zeros((), np.int32)},
}


@functools.cache
def results_of_empty_trees(label: str) -> dict[str, Any]:
    """For each tree the update, the state and, of a projection, the call: all in one program."""
    tx = with_identity(labelled(label))

    @jax.jit
    def all_of_them(trees: Any) -> Any:
        found = {}
        for name, tree in trees.items():
            if is_projection(tx):
                found[name] = (*step(tx, tree, tree), tx(tree)) if name != "none" else ()
            else:
                found[name] = step(tx, tree, tree)
        return found

    return all_of_them(EMPTY)


@pytest.mark.parametrize("name", EMPTY)
@every_case
def test_empty_trees_and_leaves(case: Case, name: str) -> None:
    tree = EMPTY[name]
    if tree is None and is_projection(with_identity(case)):
        pytest.skip("no parameters at all is an error of its own")
    updates, state, *called = results_of_empty_trees(str(case))[name]
    assert same_bits(updates, tree)
    assert avals(updates) == avals(tree)
    assert not any(np.isnan(float(v)) for v in clipjax.metrics(state).values())
    assert len(called) == is_projection(with_identity(case))
    for after in called:
        assert same_bits(after, tree)


WITH_AXES = [case for case in DEFAULTS if "axes" in parameters(case.name)]


@covering("case, axes", WITH_AXES, ["0", "1", "(0, 1)", "fan_in"])
def test_zero_size_units(case: Case, axes: str) -> None:
    tx = build(case, axes={"0": 0, "1": 1, "(0, 1)": (0, 1), "fan_in": clipjax.fan_in}[axes])
    tree = {
        "a": np.zeros((3, 0), np.float32),
        "b": np.zeros((0, 3), np.float32),
        "c": np.full((2, 3), 4, np.float32),
    }
    updates, state = run(tx, tree, tree)
    assert avals(updates) == avals(tree)
    assert not any(np.isnan(float(v)) for v in clipjax.metrics(state).values())


@sampled(VARIANTS, one_in=4, first=3)
def test_complex_leaves(case: Case) -> None:
    """Complex entries count by |z|; what needs an order raises a TypeError that says so."""
    tx = with_identity(case)
    rng = np.random.default_rng(3)
    z = (4 * (rng.standard_normal((4, 3)) + 1j * rng.standard_normal((4, 3)))).astype(np.complex64)
    grads = {"kernel": z, "x": np.ones(2, np.float32)}
    params = {"kernel": z[::-1], "x": np.ones(2, np.float32)}

    @jax.jit
    def step_and_gradient(grads: Any, params: Any) -> Any:
        def loss(kernel: Any) -> Any:
            out = step(tx, {**grads, "kernel": kernel}, params)[0]["kernel"]
            return jnp.sum(jnp.real(out) ** 2 + jnp.sin(jnp.imag(out)))

        return *step(tx, grads, params), jax.grad(loss)(grads["kernel"])

    try:
        updates, state, gradient = step_and_gradient(grads, params)
    except TypeError as error:
        assert "complex" in str(error)  # noqa: PT017
        return
    assert avals(updates) == avals(grads)
    assert np.isfinite(flat(gradient)).all()
    # Turning every entry by the same angle turns the result, and changes no norm. (A quarter turn is exact.)
    quarter = np.complex64(1j)
    turned, turned_state, _ = step_and_gradient(
        {**grads, "kernel": grads["kernel"] * quarter}, {**params, "kernel": params["kernel"] * quarter}
    )
    np.testing.assert_allclose(turned["kernel"], updates["kernel"] * quarter, rtol=1e-6, atol=1e-6)
    for key, value in clipjax.metrics(state).items():
        np.testing.assert_allclose(clipjax.metrics(turned_state)[key], value, rtol=1e-6, err_msg=key)
    bad = z.copy()
    bad[0, 0] = complex(0, math.nan)
    _, bad_state, _ = step_and_gradient({**grads, "kernel": bad}, params)
    if case.options.get("nonfinite") not in ("zero", "skip"):
        assert metric(bad_state, "nonfinite_count", "skipped") > 0 or not clipjax.metrics(bad_state)
    at_zero = step_and_gradient({**grads, "kernel": np.zeros_like(z)}, params)[2]
    assert np.isfinite(flat(at_zero)).all()
