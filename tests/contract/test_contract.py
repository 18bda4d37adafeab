"""What every public transformation guarantees: one test for each guarantee, over all of them.

The transformations are found by walking `clipjax.__all__`, so that one added later is tested without
being named here. `walk.ARGUMENTS` gives the constructor arguments, by parameter name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import clipjax
from tests.support.trees import avals, bits, flat, floats, random_tree, same_bits, within_one_ulp
from tests.support.walk import (
    ARGUMENTS,
    SIGNED,
    TURNING,
    Case,
    bound_parameters,
    build,
    cases,
    is_projection,
    is_transformation,
    make,
    names,
    parameters,
    public_callables,
    required,
    returns_transformation,
    variants,
)

CASES = [pytest.param(case, id=str(case)) for case in cases()]
VARIANTS = [pytest.param(case, id=str(case)) for case in variants()]
BOUNDED = [
    pytest.param(case, parameter, id=f"{case}-{parameter}")
    for case in cases()
    for parameter in bound_parameters(case.name)
]
# The bounds that a transformation cannot do without, for tests that set them one at a time.
MAIN_BOUNDS = [p for p in BOUNDED if p.values[1] in required(p.values[0].name)]
FLOATS = [np.float32, ml_dtypes.bfloat16, np.float16]

every_case = pytest.mark.parametrize("case", CASES)
every_variant = pytest.mark.parametrize("case", VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", FLOATS[:2], ids=lambda d: np.dtype(d).name)

EXACT = {"optimizer": optax.identity()}


@functools.cache
def _built(label: str, identity: bool) -> Any:
    case = next(c for c in variants() if str(c) == label)
    extra = {key: value for key, value in EXACT.items() if identity and key in parameters(case.name)}
    return build(case, **extra)


def default(case: Case) -> Any:
    """The transformation of a case: one object for all tests, so that `run` compiles once."""
    return _built(str(case), identity=False)


def with_identity(case: Case, **options: Any) -> Any:
    """Build a transformation; a wrapper is put around an optimizer that returns its gradients."""
    if not options:
        return _built(str(case), identity=True)
    extra = {key: value for key, value in EXACT.items() if key in parameters(case.name)}
    return build(case, **extra, **options)


def problem(dtype: Any = np.float32, *, seed: int = 0) -> tuple[Any, Any]:
    """Gradients and parameters, of which each norm is beyond the bounds in ARGUMENTS."""
    return random_tree(seed, dtype, 4.0), random_tree(seed + 100, dtype, 2.0)


def step(tx: Any, grads: Any, params: Any) -> tuple[Any, Any]:
    return tx.update(grads, tx.init(params), params)


run = jax.jit(step, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def after_a_while(tx: Any, params: Any) -> Any:
    """The state after small gradients, beyond any warm-up: what adapts to them clips larger ones."""

    def one(state: Any, i: jax.Array) -> tuple[Any, None]:
        size = 1e-3 * (1 + 0.1 * jnp.sin(i))
        small = jax.tree.map(lambda p: jnp.full(p.shape, size.astype(p.dtype), p.dtype), params)
        return tx.update(small, state, params)[1], None

    return jax.lax.scan(one, tx.init(params), jnp.arange(128.0))[0]


def new_params(tx: Any, grads: Any, params: Any) -> Any:
    return optax.apply_updates(params, run(tx, grads, params)[0])


def metric(state: Any, *endings: str) -> float:
    return sum(float(v) for k, v in clipjax.metrics(state).items() if k.endswith(endings))


# --------------------------------------------------------------------------------------------------
# The walk itself.


@pytest.mark.parametrize("name", sorted(public_callables()))
def test_the_walk_can_build_every_transformation(name: str) -> None:
    function = public_callables()[name]
    if not returns_transformation(function):
        assert not is_transformation(name), f"{name} returns a transformation: its annotation must say so"
        return
    missing = [key for key in required(name) if key not in ARGUMENTS]
    assert not missing, (
        f"clipjax.{name} has required parameters {missing} without a value: add them to "
        f"ARGUMENTS in tests/support/walk.py, so that the contract is tested for it"
    )
    assert isinstance(make(name), optax.GradientTransformation)


def test_the_walk_finds_the_transformations() -> None:
    assert {
        "clip_by_value",
        "clip_by_global_norm",
        "max_norm",
        "project",
        "bounded",
        "skip_nonfinite",
    } <= set(names())
    assert set(clipjax.__all__) <= set(dir(clipjax))


# --------------------------------------------------------------------------------------------------
# Structure, shapes, dtypes, weak types.


@every_dtype
@every_variant
def test_shapes_dtypes_and_state_are_kept(case: Case, dtype: Any) -> None:
    tx = default(case)
    grads, params = problem(dtype)
    state = tx.init(params)
    before = avals(state)
    updates, after = run(tx, grads, params)
    assert avals(after) == before
    assert avals(optax.apply_updates(params, updates)) == avals(params)
    if avals(updates) != avals(grads):  # only a projection, which may widen 16 bits
        assert is_projection(tx) or "project" in case.options
        wider = jax.tree.map(lambda g: jnp.zeros(g.shape, np.float32), grads)
        assert np.dtype(dtype).itemsize == 2
        assert avals(updates) == avals(wider)
    if is_projection(tx):
        assert avals(tx(params)) == avals(params)


@every_variant
def test_the_update_works(case: Case) -> None:
    """Guards the others: with these gradients and weights there is something to do."""
    tx = with_identity(case)
    grads, params = problem()
    grads["dense"]["kernel"] = grads["dense"]["kernel"].at[0, 0].set(jnp.nan)
    updates = run(tx, grads, params)[0]
    does_nothing = case.name == "bounded" and not case.options
    assert same_bits(updates, grads) == does_nothing


@every_case
def test_weak_types_and_python_floats_are_kept(case: Case) -> None:
    tx = default(case)
    grads = {"weak": jnp.asarray(3.0), "python": 4.0, "strong": jnp.ones(3)}
    params = {"weak": jnp.asarray(-2.0), "python": 1.0, "strong": jnp.ones(3)}
    assert grads["weak"].weak_type
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    assert avals(updates) == avals(grads)
    assert avals(after) == avals(state)
    jitted = jax.jit(tx.update)(grads, state, params)[0]
    assert avals(jitted) == avals(grads)
    if is_projection(tx):
        assert avals(tx(params)) == avals(params)


class Layer(NamedTuple):
    kernel: Any
    bias: Any = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kernel", "bias"], meta_fields=["name"])
@dataclasses.dataclass
class Dense:
    kernel: Any
    bias: Any
    name: str = "dense"


KERNEL = np.arange(6, dtype=np.float32).reshape(2, 3)


@every_case
def test_containers(case: Case) -> None:
    tx = default(case)

    def trees(kernel: Any, bias: Any) -> list[Any]:
        kernel, bias = jnp.asarray(kernel, np.float32), jnp.asarray(bias, np.float32)
        return [
            (kernel, [bias]),
            Layer(kernel, bias),
            Dense(kernel, bias),
            {"kernel": kernel, "zbias": bias},
            Layer(kernel),
            kernel,
        ]

    results = []
    for grads, params in zip(trees(4 * KERNEL, np.ones(3)), trees(-KERNEL, np.zeros(3)), strict=True):
        updates, state = run(tx, grads, params)
        assert avals(updates) == avals(grads)
        assert avals(state) == avals(tx.init(params))
        results.append(bits(jax.tree.leaves(updates)))
    assert results[0] == results[1] == results[2] == results[3]
    assert results[4] == results[5]


# --------------------------------------------------------------------------------------------------
# Under JAX' transformations.


@every_variant
def test_jit_equals_eager_bit_for_bit(case: Case) -> None:
    tx = default(case)
    grads, params = problem()
    assert same_bits(run(tx, grads, params), step(tx, grads, params))


@every_dtype
@every_case
def test_scan_equals_a_loop_bit_for_bit(case: Case, dtype: Any) -> None:
    tx = default(case)
    _, params = problem(dtype)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(problem(dtype, seed=s)[0] for s in range(3)))

    # The parameters stay as they are: adding the updates to them would be a fused multiply-add in
    # one program and not in the other, which is not ours to promise.
    def one(state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return state, updates

    state = tx.init(params)
    scanned, all_updates = jax.lax.scan(one, state, stacked)
    single = jax.jit(one)
    looped = []
    for i in range(3):
        state, updates = single(state, jax.tree.map(lambda x, i=i: x[i], stacked))
        looped.append(updates)
    assert same_bits(scanned, state)
    stacked_updates = jax.tree.map(lambda *x: jnp.stack(x), *looped)
    if is_projection(tx):
        # A link ends in `projected - params`, which XLA may fuse with the multiplication before it in
        # one program and not in the other: one rounding of the update is not ours to promise either.
        for a, b in zip(jax.tree.leaves(all_updates), jax.tree.leaves(stacked_updates), strict=True):
            assert within_one_ulp(a, b)
    else:
        assert same_bits(all_updates, stacked_updates)
    assert avals(scanned) == avals(tx.init(params))


@every_case
def test_vmap_equals_single_calls(case: Case) -> None:
    tx = default(case)
    problems = [problem(seed=s) for s in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *problems)
    mapped = jax.jit(jax.vmap(lambda g, p: step(tx, g, p)))(*stacked)
    single = jax.tree.map(lambda *x: jnp.stack(x), *(run(tx, g, p) for g, p in problems))
    assert avals(mapped) == avals(single)
    for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(single), strict=True):
        # Sums in another order differ in the last bits of float64, and so in one bit of float32.
        np.testing.assert_allclose(a, b, rtol=3e-7, atol=3e-7)


@every_case
def test_donated_state_works_again_and_again(case: Case) -> None:
    tx = default(case)
    grads, params = problem()
    state = tx.init(params)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers), "two leaves of the state share one buffer"
    expected = state
    keeping = jax.jit(lambda g, s, p: tx.update(g, s, p)[1])
    for _ in range(3):
        expected = keeping(grads, expected, params)
    donating = jax.jit(lambda g, s, p: tx.update(g, s, p)[1], donate_argnums=1)
    for _ in range(3):
        state = donating(grads, state, params)
    assert same_bits(state, expected)


@every_case
def test_gradients_and_remat_are_finite(case: Case) -> None:
    tx = with_identity(case)

    def loss(grads: Any, params: Any) -> jax.Array:
        after = optax.apply_updates(params, step(tx, grads, params)[0])
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(after))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    remat = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))
    for scale in (0.0, 1e-3, 1.0):
        grads, params = problem()
        grads = jax.tree.map(lambda g, scale=scale: scale * g, grads)
        plain = gradient(grads, params)
        assert np.isfinite(flat(plain)).all()
        assert np.abs(flat(plain)).max() > 0
        np.testing.assert_allclose(flat(remat(grads, params)), flat(plain), rtol=1e-6, atol=1e-7)
        at_zero = gradient(grads, jax.tree.map(jnp.zeros_like, params))
        assert np.isfinite(flat(at_zero)).all()


@every_case
def test_forward_derivatives_agree_with_reverse(case: Case) -> None:
    tx = with_identity(case)
    grads, params = problem()

    def kernel(k: jax.Array) -> jax.Array:
        changed = {**grads, "dense": {**grads["dense"], "kernel": k}}
        return optax.apply_updates(params, step(tx, changed, params)[0])["dense"]["kernel"]

    k = grads["dense"]["kernel"]
    forward, reverse = jax.jit(lambda k: (jax.jacfwd(kernel)(k), jax.jacrev(kernel)(k)))(k)
    np.testing.assert_allclose(forward, reverse, rtol=1e-5, atol=1e-6)


@every_variant
def test_strict_promotion(case: Case) -> None:
    tx = default(case)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for dtype in FLOATS:
            grads, params = problem(dtype)
            # Promotion is a matter of tracing: nothing needs to be compiled.
            updates, state = jax.eval_shape(lambda g, p: step(tx, g, p), grads, params)
            jax.eval_shape(clipjax.metrics, state)
            assert len(jax.tree.leaves(updates)) == len(jax.tree.leaves(grads))
            if is_projection(tx):
                jax.eval_shape(tx.__call__, params)


# --------------------------------------------------------------------------------------------------
# Odd leaves.


def odd_leaves() -> dict[str, Any]:
    return {
        "none": None,
        "masked": optax.MaskedNode(),
        "int32": jnp.arange(3),
        "uint8": jnp.arange(3, dtype=np.uint8),
        "bool": jnp.array([True, False]),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(1), 2),
    }


@every_case
def test_odd_leaves_pass_through_and_do_not_count(case: Case) -> None:
    tx = with_identity(case)
    kernel, weight, odd = 4 * jnp.asarray(KERNEL), -jnp.asarray(KERNEL), odd_leaves()
    alone, alone_state = run(tx, {"kernel": kernel}, {"kernel": weight})
    float0 = {"float0": np.zeros(3, jax.dtypes.float0)}
    # jit does not take a float0.
    for go, of_grads, of_params in ((run, odd, odd), (step, float0, {"float0": jnp.arange(3)})):
        params = {"kernel": weight, "odd": of_params}
        updates, state = go(tx, {"kernel": kernel, "odd": of_grads}, params)
        for kind, leaf in of_grads.items():
            assert jax.tree.structure(updates["odd"][kind]) == jax.tree.structure(leaf), kind
            assert same_bits(updates["odd"][kind], leaf), kind
        assert same_bits(updates["kernel"], alone["kernel"])
        assert same_bits(clipjax.metrics(state), clipjax.metrics(alone_state))
        if is_projection(tx):
            for kind, leaf in of_params.items():
                assert same_bits(tx(params)["odd"][kind], leaf), kind


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param({}, id="empty"),
        pytest.param((), id="empty-tuple"),
        pytest.param(None, id="none"),
        pytest.param(optax.MaskedNode(), id="masked"),
        pytest.param({"a": np.zeros((0,), np.float32)}, id="size0"),
        pytest.param({"a": np.zeros((3, 0), np.float32), "b": np.zeros((0, 3), np.float32)}, id="size0-2d"),
        pytest.param({"a": np.zeros((), np.int32)}, id="only-ints"),
    ],
)
@every_case
def test_empty_trees_and_leaves(case: Case, tree: Any) -> None:
    tx = with_identity(case)
    tree = jax.tree.map(jnp.asarray, tree)
    if tree is None and is_projection(tx):
        pytest.skip("no parameters at all is an error of its own")
    updates, state = run(tx, tree, tree)
    assert same_bits(updates, tree)
    assert avals(updates) == avals(tree)
    assert not any(np.isnan(float(v)) for v in clipjax.metrics(state).values())
    if is_projection(tx):
        assert same_bits(tx(tree), tree)


@pytest.mark.parametrize("axes", [0, 1, (0, 1), clipjax.fan_in])
@every_case
def test_zero_size_units(case: Case, axes: Any) -> None:
    if "axes" not in parameters(case.name):
        pytest.skip("has no axes")
    tree = {"a": jnp.zeros((3, 0)), "b": jnp.zeros((0, 3)), "c": 4 * jnp.ones((2, 3))}
    updates, state = run(build(case, axes=axes), tree, tree)
    assert avals(updates) == avals(tree)
    assert not any(np.isnan(float(v)) for v in clipjax.metrics(state).values())


@every_variant
def test_complex_leaves(case: Case) -> None:
    """Complex entries count by |z|; what needs an order raises a TypeError that says so."""
    tx = with_identity(case)
    rng = np.random.default_rng(3)
    z = jnp.asarray(4 * (rng.standard_normal((4, 3)) + 1j * rng.standard_normal((4, 3))), np.complex64)
    grads, params = {"kernel": z, "x": jnp.ones(2)}, {"kernel": z[::-1], "x": jnp.ones(2)}
    try:
        updates, state = run(tx, grads, params)
    except TypeError as error:
        assert "complex" in str(error)  # noqa: PT017
        return
    assert avals(updates) == avals(grads)
    # Turning every entry by the same angle turns the result, and changes no norm. (A quarter turn is exact.)
    turned, turned_state = run(
        tx, {**grads, "kernel": grads["kernel"] * 1j}, {**params, "kernel": params["kernel"] * 1j}
    )
    np.testing.assert_allclose(turned["kernel"], updates["kernel"] * np.complex64(1j), rtol=1e-6, atol=1e-6)
    for key, value in clipjax.metrics(state).items():
        np.testing.assert_allclose(clipjax.metrics(turned_state)[key], value, rtol=1e-6, err_msg=key)
    bad = {**grads, "kernel": z.at[0, 0].set(complex(0, math.nan))}
    _, bad_state = run(tx, bad, params)
    if case.options.get("nonfinite") not in ("zero", "skip"):
        assert metric(bad_state, "nonfinite_count", "skipped") > 0 or not clipjax.metrics(bad_state)

    @jax.jit
    @jax.grad
    def gradient(kernel: Any) -> jax.Array:
        out = step(tx, {**grads, "kernel": kernel}, params)[0]["kernel"]
        return jnp.sum(jnp.real(out) ** 2 + jnp.sin(jnp.imag(out)))

    assert np.isfinite(flat(gradient(z))).all()
    assert np.isfinite(flat(gradient(jnp.zeros_like(z)))).all()


@every_variant
def test_float64(case: Case) -> None:
    with jax.enable_x64(True):
        tx = default(case)
        grads, params = problem(np.float64)
        state = tx.init(params)
        updates, after = run(tx, grads, params)
        assert avals(after) == avals(state)
        assert avals(updates) == avals(grads)
        norms = {k: v.dtype for k, v in clipjax.metrics(after).items() if k.endswith("/norm")}
        assert set(norms.values()) <= {np.dtype(np.float64)}


@every_case
def test_scalars_of_every_dtype_together(case: Case) -> None:
    tx = default(case)
    tree = {np.dtype(d).name: jnp.asarray(3, d) for d in FLOATS}
    updates = run(tx, tree, tree)[0]
    after = optax.apply_updates(tree, updates)
    assert avals(after) == avals(tree)
    if not is_projection(tx):
        assert avals(updates) == avals(tree)


# --------------------------------------------------------------------------------------------------
# Inside the bound nothing moves.


def delicate(dtype: Any) -> dict[str, Any]:
    """Small entries that a multiplication by 1 keeps, but not one by a reciprocal, or an addition."""
    info = ml_dtypes.finfo(dtype)
    # XLA on CPU flushes the subnormals of float32 and bfloat16 in any arithmetic; float16's are
    # computed in float32, where they are normal.
    smallest = info.smallest_subnormal if dtype == np.float16 else info.smallest_normal
    values = np.array([-0.0, 0.0, smallest, -smallest, 3 * smallest, 1e-4], dtype)
    return {"bias": jnp.asarray(values), "kernel": jnp.asarray(values.reshape(2, 3))}


@every_dtype
@every_variant
def test_inside_the_bound_nothing_moves(case: Case, dtype: Any) -> None:
    wide_open = {
        key: math.inf
        for key in bound_parameters(case.name)
        if key in required(case.name) and key not in ("low", "high")
    }
    for bounds in ({}, wide_open):
        if {"low", "high"} <= {*required(case.name), *case.options} and not is_projection(build(case)):
            bounds = {"low": -1.0, "high": 1.0}
        tx = with_identity(case, **bounds)
        tree = delicate(dtype)
        if is_projection(tx):
            start = tx(tree)
            for _ in range(200 if "rate" in case.options else 0):  # goes a part of the way at a time
                start = tx(start)
            assert same_bits(tx(start), start), "the projection is not idempotent"
            still = jax.tree.map(jnp.zeros_like, start)
            after = optax.apply_updates(start, run(tx, still, start)[0])
            for a, b in zip(floats(after), floats(start), strict=True):
                np.testing.assert_array_equal(a, b)
        else:
            weights = jax.tree.map(jnp.ones_like, tree)
            if "project" in case.options or case.name in TURNING:  # weights far inside: nothing to say
                weights = jax.tree.map(jnp.zeros_like, tree)
            updates, state = run(tx, tree, weights)
            back = jax.tree.map(lambda u, g: u.astype(g.dtype), updates, tree)
            assert same_bits(back, tree)
            assert metric(state, "clipped_fraction", "nonfinite_count") == 0


@every_case
def test_a_projection_leaves_the_updates_of_weights_inside_alone(case: Case) -> None:
    tx = default(case)
    if not is_projection(tx):
        pytest.skip("not a projection")
    params = tx(jax.tree.map(lambda x: 0.01 * x, problem()[1]))
    grads = jax.tree.map(lambda x: 1e-4 * x, params)
    after = optax.apply_updates(params, grads)
    if same_bits(tx(after), after):
        assert same_bits(run(tx, grads, params)[0], grads)


# --------------------------------------------------------------------------------------------------
# Non-finite values.


@every_dtype
@every_variant
def test_nonfinite_entries_follow_a_policy(case: Case, dtype: Any) -> None:
    """Each entry that shares a norm with a bad one is NaN, or the step says what it did instead."""
    tx = with_identity(case)
    grads, params = problem(dtype)

    def with_entry(value: float) -> Any:
        kernel = grads["dense"]["kernel"].at[1, 2].set(jnp.asarray(value, dtype))
        return {**grads, "dense": {**grads["dense"], "kernel": kernel}}

    marks = jax.tree.map(jnp.zeros_like, grads)
    marks["dense"]["kernel"] = marks["dense"]["kernel"].at[1, 2].set(1)
    entry = int(np.argmax(flat(marks)))
    used = after_a_while(tx, params)
    update = jax.jit(tx.update)

    def effect(value: float) -> np.ndarray:
        return seen_in(update(with_entry(value), used, params)[0])

    def seen_in(updates: Any) -> np.ndarray:
        projects = is_projection(tx) or "project" in case.options
        return flat(optax.apply_updates(params, updates) if projects else updates)

    # Who shares a norm with the entry: those that change when it does.
    small, large, opposite = effect(8.0), effect(64.0), effect(-64.0)
    shares = (small != large) | (small != opposite)
    shares[entry] = True

    for bad in (math.nan, math.inf, -math.inf):
        updates, state = update(with_entry(bad), used, params)
        after = seen_in(updates)
        seen = clipjax.metrics(state)
        assert not seen or metric(state, "nonfinite_count", "skipped") > 0, "the metrics must show it"
        if metric(state, "/skipped"):
            assert same_bits(updates, jax.tree.map(jnp.zeros_like, updates))
        elif metric(state, "zero_nonfinite/nonfinite_count"):
            assert same_bits(updates, update(with_entry(0.0), used, params)[0])
        elif not seen:  # a wrapper that was given nothing to bound
            assert not np.isfinite(after[entry])
        elif shares.sum() == 1 and math.isinf(bad) and not np.isnan(after[entry]):
            # What bounds single entries treats an infinite one as a large one; one without a bound shows.
            as_large = effect(math.copysign(64.0, bad))
            if np.isinf(after[entry]):
                assert math.copysign(as_large[entry], bad) > 32
                as_large[entry] = bad
            np.testing.assert_array_equal(after, as_large)
        else:
            assert np.isnan(after[shares]).all(), "an entry that shares the norm is not NaN"
            np.testing.assert_array_equal(after[~shares], small[~shares])


@every_case
def test_statistics_do_not_take_in_nonfinite_norms(case: Case) -> None:
    tx = with_identity(case)
    grads, params = problem()
    bad = jax.tree.map(lambda g: g.at[...].set(jnp.nan), grads)
    clean = run(tx, grads, params)
    _, state = run(tx, bad, params)
    updates, state = jax.jit(tx.update)(grads, state, params)
    assert np.isfinite(flat(updates)).all()
    assert not any(jnp.isnan(x).any() for x in jax.tree.leaves(state))
    assert same_bits(updates, clean[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_skip_nonfinite_freezes_the_inner_state(bad: float) -> None:
    tx = clipjax.skip_nonfinite(optax.chain(clipjax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    grads, params = problem()
    update = jax.jit(tx.update)
    _, state = update(grads, tx.init(params), params)
    poisoned = {**grads, "scale": jnp.asarray(bad)}
    for n in (1, 2):
        updates, state_after = update(poisoned, state, params)
        assert same_bits(updates, jax.tree.map(jnp.zeros_like, grads))
        assert same_bits(state_after.inner, state.inner)
        assert (int(state_after.skipped), int(state_after.skipped_in_a_row)) == (n, n)
        state = state_after
    _, state = update(grads, state, params)
    assert (int(state.steps), int(state.skipped), int(state.skipped_in_a_row)) == (4, 2, 0)
    once = update(grads, update(grads, tx.init(params), params)[1], params)
    assert same_bits(state.inner, once[1].inner)


@pytest.mark.parametrize("mode", ["propagate", "zero", "skip"])
def test_bounded_has_three_modes(mode: Any) -> None:
    tx = clipjax.bounded(
        optax.sgd(0.5),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.max_norm(1.0),
        nonfinite=mode,
    )
    params = clipjax.max_norm(1.0)(problem()[1])
    grads = problem()[0]
    kernel = grads["dense"]["kernel"].at[0, 0].set(jnp.nan)
    bad = {**grads, "dense": {**grads["dense"], "kernel": kernel}}
    updates, state = jax.jit(lambda g, p: step(tx, g, p))(bad, params)
    after = optax.apply_updates(params, updates)
    seen = clipjax.metrics(state)
    if mode == "propagate":
        assert np.isnan(flat(after)).all()
        assert seen["clip_by_global_norm/nonfinite_count"] == 1
    if mode == "zero":
        assert np.isfinite(flat(after)).all()
        assert seen["zero_nonfinite/nonfinite_count"] == 1
        assert not same_bits(after, params)
    if mode == "skip":
        assert same_bits(after, params)
        assert seen["skip_nonfinite/skipped"] == 1
        assert seen["clip_by_global_norm/steps"] == 0
    after = new_params(tx, grads, params)
    assert np.isfinite(flat(after)).all()
    assert np.linalg.norm(np.asarray(after["dense"]["kernel"], np.float64), axis=0).max() <= 1.0


def test_bounded_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match=re.escape("nonfinite must be one of")):
        clipjax.bounded(optax.sgd(1.0), nonfinite="no")
    with pytest.raises(TypeError, match="optimizer"):
        clipjax.bounded(1.0)
    with pytest.raises(ValueError, match=r"optimizer.*project="):
        clipjax.bounded(clipjax.max_norm(1.0))
    with pytest.raises(ValueError, match=r"clip.*project="):
        clipjax.bounded(optax.sgd(1.0), clip=clipjax.max_norm(1.0))
    with pytest.raises(TypeError, match="project"):
        clipjax.bounded(optax.sgd(1.0), project=clipjax.clip_by_norm(1.0))
    with pytest.raises(TypeError, match="optimizer"):
        clipjax.skip_nonfinite(None)


# --------------------------------------------------------------------------------------------------
# Bounds.


@pytest.mark.parametrize("value", [-1, -0.5, math.nan, True, "1", None, 1j, np.array([1.0, -1.0])], ids=repr)
@pytest.mark.parametrize(("case", "parameter"), BOUNDED)
def test_bad_bounds_raise_when_built(case: Case, parameter: str, value: Any) -> None:
    negative = not isinstance(value, str | bool | complex | None) and np.min(value) < 0
    if negative and (case.name, parameter) in SIGNED:
        pytest.skip("a limit of entries may be negative")
    if value is None and parameters(case.name)[parameter].default is None:
        pytest.skip("None is the default")
    with pytest.raises((ValueError, TypeError)) as caught:
        build(case, **{parameter: value})
    message = str(caught.value)
    # clip_by_value calls its only argument `bound`.
    assert parameter in message or (parameter == "low" and "bound" in message)
    assert repr(value) in message


@pytest.mark.parametrize(("case", "parameter"), MAIN_BOUNDS)
def test_zero_and_infinite_bounds_work(case: Case, parameter: str) -> None:
    grads, params = problem()

    @jax.jit
    def with_traced(bound: Any) -> Any:
        return new_params(with_identity(case, **{parameter: bound}), grads, params)

    for value in (0.0, 1.0, math.inf):
        both = {"low", "high"} <= set(required(case.name))
        limits = {**ARGUMENTS, parameter: value}
        if both and (limits["low"] > limits["high"] or math.isinf(limits["low"])):
            continue
        expected = with_traced(value)
        assert np.isfinite(flat(expected)).all()
        kinds = [value, jnp.float32(value), np.float64(value), lambda _, value=value: value]
        for bound in kinds if value == 0 else kinds[:1]:
            after = new_params(with_identity(case, **{parameter: bound}), grads, params)
            # Known and traced bounds are different programs: XLA folds a constant into the factor.
            np.testing.assert_allclose(flat(after), flat(expected), rtol=2.5e-7, atol=1e-7)
            # Of one bound, 0 leaves nothing to round.
            assert value == 1 or both or same_bits(after, expected), f"{bound!r} and a traced {value} differ"


@pytest.mark.parametrize(("case", "parameter"), MAIN_BOUNDS)
def test_schedules_that_reach_zero_and_go_below(case: Case, parameter: str) -> None:
    def schedule(count: Any) -> Any:
        return 1.0 - count  # 1, 0, -1

    if {"low", "high"} <= set(required(case.name)):
        pytest.skip("limits of entries: their order and their signs are their own")
    tx = with_identity(case, **{parameter: schedule})
    grads, params = problem()
    if is_projection(tx):
        grads = jax.tree.map(jnp.zeros_like, grads)
    state = tx.init(params)
    update = jax.jit(tx.update)
    results = []
    for _ in range(4):
        updates, state = update(grads, state, params)
        result = optax.apply_updates(params, updates) if is_projection(tx) else updates
        results.append(result)
        start = params if is_projection(tx) else grads
        assert np.isfinite(flat(result)).all()
        assert case.name in TURNING or (flat(result) * flat(start) >= 0).all(), "a sign flipped"
    below = step(with_identity(case, **{parameter: lambda _: -1.0}), grads, params)[0]
    below = optax.apply_updates(params, below) if is_projection(tx) else below
    assert same_bits(below, results[2])  # without jit, too
    assert same_bits(results[1], results[2])  # a bound below zero is zero
    assert not same_bits(results[0], results[1])
    assert same_bits(results[2], results[3])
    if is_projection(tx):
        for count in range(3):
            direct = tx(params, jnp.asarray(count))
            np.testing.assert_allclose(flat(direct), flat(results[count]), rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match=rf"{parameter} is a schedule"):
            tx(params)


@pytest.mark.parametrize(("case", "parameter"), MAIN_BOUNDS)
def test_traced_bounds_below_zero_never_flip_a_sign(case: Case, parameter: str) -> None:
    if {"low", "high"} <= set(required(case.name)):
        pytest.skip("limits of entries: their order and their signs are their own")
    grads, params = problem()
    still = jax.tree.map(jnp.zeros_like, grads)

    @jax.jit
    def with_traced(bound: Any) -> Any:
        tx = with_identity(case, **{parameter: bound})
        if is_projection(tx):
            return optax.apply_updates(params, step(tx, still, params)[0])
        return step(tx, grads, params)[0]

    result = flat(with_traced(-1.0))
    assert np.isfinite(result).all()
    assert (result * flat(params if is_projection(build(case)) else grads) >= 0).all()
    assert np.isnan(flat(with_traced(math.nan))).any(), "a traced NaN bound must show"


@every_case
def test_projections_need_params_as_a_link(case: Case) -> None:
    tx = default(case)
    grads, params = problem()
    if not is_projection(tx):
        pytest.skip("not a projection")
    with pytest.raises(ValueError, match="params"):
        tx.update(grads, tx.init(params))


# --------------------------------------------------------------------------------------------------
# Composition.


def train(tx: Any, params: Any, steps: int = 3, *, seed: int = 0) -> tuple[Any, Any]:
    """Some jitted steps with a donated state; returns the parameters and the state."""
    params = jax.tree.map(jnp.copy, params)
    state = tx.init(params)
    before = avals(state)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def one(grads: Any, params: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        grads = jax.tree.map(lambda x, p: x.astype(p.dtype), problem(seed=seed + i)[0], params)
        params, state = one(grads, params, state)
    assert avals(state) == before
    assert np.isfinite(flat(params)).all()
    return params, state


def own_metrics(tx: Any, params: Any) -> dict[str, Any]:
    return clipjax.metrics(tx.init(params))


def chain_of(tx: Any) -> Any:
    return optax.chain(optax.sgd(0.5), tx) if is_projection(tx) else optax.chain(tx, optax.sgd(0.5))


@every_variant
def test_in_a_chain(case: Case) -> None:
    tx = default(case)
    params = problem()[1]
    _, state = train(chain_of(tx), params)
    assert set(clipjax.metrics(state)) == set(own_metrics(tx, params))


@every_case
def test_in_masked(case: Case) -> None:
    tx = with_identity(case)
    grads, params = problem()
    masked = optax.masked(tx, {"dense": True, "scale": False})
    state = masked.init(params)
    assert set(clipjax.metrics(state)) == set(own_metrics(tx, params))
    updates, state = jax.jit(masked.update)(grads, state, params)
    assert same_bits(updates["scale"], grads["scale"])
    alone = run(tx, {"dense": grads["dense"]}, {"dense": params["dense"]})[0]
    assert same_bits({"dense": updates["dense"]}, alone)


@every_case
def test_in_partition(case: Case) -> None:
    tx = default(case)
    _, params = problem()
    labels = {"dense": "a", "scale": "b"}
    parts = optax.partition({"a": chain_of(tx), "b": chain_of(build(case))}, labels)
    _, state = train(parts, params)
    own = set(own_metrics(tx, params))
    expected = own | {key.replace("/", "_1/", 1) for key in own}
    if len({key.split("/")[0] for key in own}) == len(own_states(tx, params)):
        assert set(clipjax.metrics(state)) == expected


def own_states(tx: Any, params: Any) -> set[str]:
    return {key.split("/")[0] for key in own_metrics(tx, params)}


@pytest.mark.parametrize("schedule", [False, True], ids=["number", "schedule"])
@every_case
def test_in_inject_hyperparams(case: Case, schedule: bool) -> None:
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
    grads, params = problem()
    tx = factory(**options)
    plain = build(case)
    state = tx.init(params)
    before = avals(state)
    updates, state = jax.jit(tx.update)(grads, state, params)
    assert avals(state) == before
    assert set(clipjax.metrics(state)) == set(own_metrics(plain, params))
    np.testing.assert_allclose(flat(updates), flat(run(plain, grads, params)[0]), rtol=1e-6)
    if bounds and not schedule:
        for key in bounds:
            state.hyperparams[key] = jnp.zeros_like(state.hyperparams[key])
        changed = tx.update(grads, state, params)[0]
        assert not same_bits(changed, updates)
        assert np.isfinite(flat(changed)).all()


@every_dtype
@every_case
def test_in_multi_steps(case: Case, dtype: Any) -> None:
    tx = default(case)
    _, params = problem(dtype)
    steps = optax.MultiSteps(chain_of(tx), 2)
    after, state = train(steps.gradient_transformation(), params, 4)
    assert set(clipjax.metrics(state)) == set(own_metrics(tx, params))
    assert metric(state, "/steps") in (0, 2 * len(own_states(tx, params)))
    if case.name == "max_norm":
        assert_inside_the_ball(after)


@every_dtype
@every_case
def test_in_apply_if_finite(case: Case, dtype: Any) -> None:
    tx = default(case)
    grads, params = problem(dtype)
    wrapped = optax.apply_if_finite(chain_of(tx), 10)
    after, state = train(wrapped, params)
    assert set(clipjax.metrics(state)) == set(own_metrics(tx, params))
    if case.name == "max_norm":
        assert_inside_the_ball(after)
    bad = jax.tree.map(lambda g: g * jnp.asarray(jnp.nan, g.dtype), grads)
    updates, _ = jax.jit(wrapped.update)(bad, state, after)
    assert same_bits(optax.apply_updates(after, updates), after)


def assert_inside_the_ball(params: Any) -> None:
    norms = np.sqrt((np.asarray(params["dense"]["kernel"]).astype(np.float64) ** 2).sum(axis=0))
    assert norms.max() <= 1.0
    assert norms.max() > 0.9


@every_case
def test_in_a_flax_train_state(case: Case) -> None:
    train_state = pytest.importorskip("flax.training.train_state")
    tx = chain_of(build(case))
    params = problem()[1]
    state = train_state.TrainState.create(apply_fn=lambda *_: None, params=params, tx=tx)
    run = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for seed in range(2):
        state = run(state, problem(seed=seed)[0])
    assert int(state.step) == 2
    assert set(clipjax.metrics(state)) == set(own_metrics(tx, params))
    assert np.isfinite(flat(state.params)).all()


@every_case
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


# --------------------------------------------------------------------------------------------------
# Metrics.


@every_variant
def test_metrics_are_flat_scalars_with_constant_keys(case: Case) -> None:
    tx = default(case)
    grads, params = problem()
    state = tx.init(params)
    before = clipjax.metrics(state)
    state = run(tx, grads, params)[1]
    after, jitted = clipjax.metrics(state), jax.jit(clipjax.metrics)(state)
    assert list(before) == list(after) == sorted(jitted, key=list(after).index)
    assert same_bits(after, jitted)
    assert avals(before) == avals(after)
    for key, value in after.items():
        assert re.fullmatch(r"[a-z_0-9]+/[a-z_0-9]+", key), key
        assert np.shape(value) == ()
    if case.name != "bounded":
        assert any(key.startswith(f"{case.name}/") for key in after), "its own name is missing"
    if f"{case.name}/steps" in after:
        assert after[f"{case.name}/steps"] == 1


@every_case
def test_repeated_names_are_numbered(case: Case) -> None:
    own = own_metrics(build(case), problem()[1])
    state = optax.chain(*(with_identity(case) for _ in range(3))).init(problem()[1])
    seen = set(clipjax.metrics(state))
    for label in {key.split("/")[0] for key in own} if case.name != "bounded" else set():
        assert {key.split("/")[0] for key in seen} >= {label, f"{label}_1", f"{label}_2"}
    assert len(seen) == 3 * len(own)


def test_metrics_say_what_happened() -> None:
    tx = clipjax.clip_by_global_norm(2.0)
    tree = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    state = tx.init(tree)
    for factor in (1.0, 0.1, math.nan, 2.0):
        _, state = tx.update(jax.tree.map(lambda x, f=factor: x * f, tree), state)
    assert {k: float(v) for k, v in clipjax.metrics(state).items()} == {
        "clip_by_global_norm/norm": 10.0,
        "clip_by_global_norm/scale": pytest.approx(0.2, rel=1e-6),
        "clip_by_global_norm/steps": 4,
        "clip_by_global_norm/clipped_fraction": 0.5,
        "clip_by_global_norm/nonfinite_count": 1,
    }
