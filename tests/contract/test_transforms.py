"""The same under jit, scan, vmap, grad and remat as step by step; forward derivatives agree with reverse."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.contract.cases import (
    DEFAULTS,
    FLOATS,
    VARIANTS,
    covering,
    default,
    every_case,
    labelled,
    like,
    problem,
    run,
    sampled,
    stacked,
    step,
    update,
    with_identity,
)
from tests.support.trees import avals, flat, same_bits, within_one_ulp
from tests.support.walk import Case, is_projection


@sampled(VARIANTS, one_in=5)
def test_jit_equals_eager_bit_for_bit(case: Case) -> None:
    tx = default(case)
    # Leaves of one shape: without jit, each operation is compiled for each shape.
    grads, params = ({"a": tree["dense"], "b": {"kernel": -tree["dense"]["kernel"]}} for tree in problem())
    del grads["a"]["bias"], params["a"]["bias"]
    grads, params = jax.tree.map(jnp.asarray, (grads, params))
    assert same_bits(run(tx, grads, params), step(tx, grads, params))


# Every transformation is either in a scan or mapped by default. What a scan needs, a carry of constant types,
# is asked of each in test_types.py.
@covering("case, dtype", DEFAULTS, FLOATS[:2], keeps=lambda case: case in DEFAULTS[::2])
def test_scan_equals_a_loop_bit_for_bit(case: Case, dtype: Any) -> None:
    tx = default(case)
    _, params = problem(dtype)
    every_grads = [problem(dtype, seed=s)[0] for s in range(3)]

    # The parameters stay as they are: adding the updates to them would be a fused multiply-add in
    # one program and not in the other, which is not ours to promise.
    @jax.jit
    def scan(state: Any, stack: Any, params: Any) -> Any:
        def one(state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return state, updates

        return jax.lax.scan(one, state, stack)

    state = tx.init(params)
    scanned, all_updates = scan(state, stacked(every_grads), params)
    looped = []
    for grads in every_grads:
        updates, state = update(tx, grads, state, params)
        looped.append(updates)
    assert same_bits(scanned, state)
    if is_projection(tx):
        # A link ends in `projected - params`, which XLA may fuse with the multiplication before it in
        # one program and not in the other: one rounding of the update is not ours to promise either.
        for a, b in zip(jax.tree.leaves(all_updates), jax.tree.leaves(stacked(looped)), strict=True):
            assert within_one_ulp(a, b)
    else:
        assert same_bits(all_updates, stacked(looped))
    assert avals(scanned) == avals(tx.init(params))


@sampled(DEFAULTS, one_in=2, first=1)
def test_vmap_equals_single_calls(case: Case) -> None:
    tx = default(case)
    problems = [problem(seed=s) for s in range(3)]
    mapped = jax.jit(jax.vmap(lambda g, p: step(tx, g, p)))(*stacked(problems))
    single = stacked([run(tx, g, p) for g, p in problems])
    assert avals(mapped) == avals(single)
    for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(single), strict=True):
        # Sums in another order differ in the last bits of float64, and so in one bit of float32.
        np.testing.assert_allclose(a, b, rtol=3e-7, atol=3e-7)


def after(case: Case, grads: Any, params: Any) -> Any:
    return optax.apply_updates(params, step(with_identity(case), grads, params)[0])


def loss(case: Case, grads: Any, params: Any) -> jax.Array:
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(after(case, grads, params)))


@functools.cache
def gradient(label: str) -> Any:
    return jax.jit(jax.grad(functools.partial(loss, labelled(label)), argnums=(0, 1)))


def scaled(scale: float) -> tuple[Any, Any]:
    grads, params = problem()
    return jax.tree.map(lambda g: np.float32(scale) * g, grads), params


@every_case
def test_gradients_are_finite(case: Case) -> None:
    for scale in (0.0, 1e-3, 1.0):
        grads, params = scaled(scale)
        found = flat(gradient(str(case))(grads, params))
        assert np.isfinite(found).all()
        assert np.abs(found).max() > 0
        at_zero = gradient(str(case))(grads, like(params, 0.0))
        assert np.isfinite(flat(at_zero)).all()


@sampled(DEFAULTS, one_in=6, first=1)
def test_gradients_are_the_same_with_remat(case: Case) -> None:
    remat = jax.jit(jax.grad(jax.checkpoint(functools.partial(loss, case)), argnums=(0, 1)))
    for scale in (0.0, 1e-3, 1.0):
        plain = gradient(str(case))(*scaled(scale))
        np.testing.assert_allclose(flat(remat(*scaled(scale))), flat(plain), rtol=1e-6, atol=1e-7)


@sampled(DEFAULTS, one_in=3)
def test_forward_derivatives_agree_with_reverse(case: Case) -> None:
    grads, params = problem()

    def kernel(k: jax.Array) -> jax.Array:
        changed = {**grads, "dense": {**grads["dense"], "kernel": k}}
        return after(case, changed, params)["dense"]["kernel"]

    k = grads["dense"]["kernel"]
    forward, reverse = jax.jit(lambda k: (jax.jacfwd(kernel)(k), jax.jacrev(kernel)(k)))(k)
    np.testing.assert_allclose(forward, reverse, rtol=1e-5, atol=1e-6)
