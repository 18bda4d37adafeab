"""Modes of JAX that a program may run in: every public member works in each, with the same numbers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import clipjax
from clipjax import functional
from tests.contract.cases import DEFAULTS, VARIANTS, default, like, problem, project, step, update, with_entry
from tests.support.trees import avals, same_bits
from tests.support.walk import Case, is_projection

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "global_norm": functional.global_norm,
    "leaf_norms": functional.leaf_norms,
    "unitwise_norms": lambda tree: functional.unitwise_norms(tree, clipjax.fan_in),
    "clip_by_value": lambda tree: functional.clip_by_value(tree, -0.5, 0.25),
    "clip_by_norm": lambda tree: functional.clip_by_norm(tree, 0.5),
    "clip_by_global_norm": lambda tree: functional.clip_by_global_norm(tree, 0.5),
    "clip_gradient_by_norm": lambda tree: jax.grad(
        lambda tree: sum(jnp.sum(3 * x) for x in jax.tree.leaves(clipjax.clip_gradient_by_norm(tree, 0.5)))
    )(tree),
}

every_case = pytest.mark.parametrize("case", DEFAULTS, ids=str)
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def as_float64(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def total(tree: Any) -> Any:
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --------------------------------------------------------------------------------------------------
# 64 bits.


@every_case
def test_float64_of_numpy_is_float32(case: Case) -> None:
    """As everywhere in JAX; and so it is for the state and for weights that are projected."""
    tx, (grads, params) = default(case), problem()
    expected = update(tx, grads, tx.init(params), params)
    with no_warnings():
        got = tx.update(as_float64(grads), tx.init(as_float64(params)), as_float64(params))
        assert avals(got) == avals(expected)
        if is_projection(tx):
            assert avals(tx(as_float64(params))) == avals(project(tx, params))


@every_function
def test_float64_of_numpy_is_float32_in_functions(name: str) -> None:
    tree = problem()[0]
    with no_warnings():
        assert same_bits(FUNCTIONS[name](as_float64(tree)), FUNCTIONS[name](tree))


def changing() -> optax.GradientTransformation:
    """An optimizer whose update changes the dtypes of its state."""

    def change(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), grads)
        return grads, {"momentum": halves, "count": state["count"] + np.float32(1)}

    return optax.GradientTransformation(
        lambda params: {"momentum": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros((), jnp.int32)},
        change,
    )


SKIPPING = {
    "skip_nonfinite": clipjax.skip_nonfinite,
    "skip_spikes": clipjax.skip_spikes,
    "bounded": lambda optimizer: clipjax.bounded(
        optimizer, clip=clipjax.zclip(), project=clipjax.max_norm(1.0), nonfinite="skip"
    ),
}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # of Optax
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", SKIPPING)
def test_a_state_of_the_other_width_goes_on(name: str, before: bool, jit: bool) -> None:
    """Made with `jax_enable_x64` on and used with it off, or the other way round."""
    tx = SKIPPING[name](optax.sgd(0.1, momentum=0.5))
    step = jax.jit(tx.update) if jit else tx.update
    grads, params = map(as_float64, problem())
    with jax.enable_x64(before):
        state = tx.init(params)
    with jax.enable_x64(not before):
        updates, good = step(grads, state, params)
        skipped, bad = step(with_entry(grads, np.nan), good, params)
    assert all((x != 0).any() for x in jax.tree.leaves(updates))
    assert not any(x.any() for x in jax.tree.leaves(skipped))
    assert same_bits(bad.inner, good.inner)
    assert avals(bad) == avals(good)


@pytest.mark.parametrize("name", SKIPPING)
def test_an_optimizer_may_change_the_dtypes_of_its_state(name: str) -> None:
    tx, (grads, params) = SKIPPING[name](changing()), problem()
    states = [update(tx, each, tx.init(params), params)[1] for each in (grads, with_entry(grads, np.nan))]
    assert avals(states[0]) == avals(states[1])
    assert [int(state.skipped) for state in states] == [0, 1]


# --------------------------------------------------------------------------------------------------
# Shapes that `jax.export` leaves open.

OPEN = jax.export.symbolic_shape("b, c")
PLATFORMS = ("cpu", "tpu", "cuda")


def open_tree(case: Any = None) -> dict[str, Any]:
    """Leaves of unknown sizes; for a spectral cap, whose matrices are known, vectors alone."""
    shapes: dict[str, tuple[Any, ...]] = {"bias": (OPEN[0],), "kernel": (4, 3)}
    if "spectral" not in str(case):
        shapes |= {"kernel": (OPEN[0], 16), "columns": (16, OPEN[1])}
    return {key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in shapes.items()}


def exported(function: Callable[..., Any], *args: Any) -> Any:
    return jax.export.export(jax.jit(function), platforms=PLATFORMS)(*args)


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_open_shapes_are_exported(case: Case) -> None:
    tx, tree = default(case), open_tree(case)
    exported(lambda grads, params: step(tx, grads, params), tree, tree)
    if is_projection(tx):
        exported(tx.__call__, tree)


@every_function
def test_open_shapes_are_exported_in_functions(name: str) -> None:
    exported(FUNCTIONS[name], open_tree())


def test_open_shapes_have_the_same_bits() -> None:
    names = ("clip_by_rms", "clip_by_value", "unit_norm", "tangent_cone", "adaptive_grad_clip")
    txs = [default(case) for case in DEFAULTS if case.name in names]

    def steps(grads: Any, params: Any) -> Any:
        return [step(tx, grads, params) for tx in txs]

    rng = np.random.default_rng(0)
    sizes = {"bias": (24,), "kernel": (24, 16), "columns": (16, 5)}
    grads, params = ({k: rng.standard_normal(n).astype(np.float32) for k, n in sizes.items()} for _ in "ab")
    called = jax.jit(exported(steps, open_tree(), open_tree()).call)(grads, params)
    assert same_bits(called, jax.jit(steps)(grads, params))


def test_open_stacks_of_matrices_but_no_open_matrices() -> None:
    cap = clipjax.spectral_cap(1.0, flatten=(1, 2))
    stack = np.random.default_rng(0).standard_normal((3, 4, 6)).astype(np.float32)
    capped = exported(cap.__call__, jax.ShapeDtypeStruct((OPEN[0], 4, 6), np.float32))
    assert same_bits(capped.call(stack), jax.jit(cap.__call__)(stack))
    with pytest.raises(ValueError, match=r"'columns' of shape .* unknown size"):
        exported(clipjax.spectral_cap(1.0).__call__, open_tree())


# --------------------------------------------------------------------------------------------------
# Checks for NaN, and what else JAX can be told to watch.


@every_case
def test_no_nan_of_ours(case: Case) -> None:
    """Operation by operation, where each constant and each branch that is not taken shows."""
    tx, (grads, params) = default(case), problem()
    with jax.debug_nans(True):
        for tree in (grads, like(grads, 0.0)):
            tx.update(tree, tx.init(params), params)
        if is_projection(tx):
            tx(params)
            jax.grad(lambda params: total(tx(params)))(params)


@every_function
def test_no_nan_of_ours_in_functions(name: str) -> None:
    with jax.debug_nans(True):
        FUNCTIONS[name](problem()[0])


@every_case
def test_derivatives_of_a_jitted_step(case: Case) -> None:
    """JAX asks for derivatives when the program has been traced, in the user's mode, and constants show."""
    tx, (grads, params) = default(case), problem()
    with jax.debug_nans(True):
        jax.eval_shape(jax.grad(jax.jit(lambda grads: total(step(tx, grads, params)[0]))), grads)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # which JAX computes in its own mode
@pytest.mark.parametrize(
    "name", ["clip_by_value", "box", "clip_by_norm", "max_norm", "tangent_cone", "zclip", "spectral_cap"]
)
def test_checkify_finds_nothing(name: str) -> None:
    tx, (grads, params) = default(Case(name)), problem()
    checked = jax.jit(checkify.checkify(lambda *trees: step(tx, *trees), errors=checkify.float_checks))
    for tree in (grads, like(grads, 0.0)):
        checked(tree, params)[0].throw()


@every_case
def test_infinite_values_are_thresholds_that_are_unknown(case: Case) -> None:
    """Under `jax.debug_infs` all others pass; `non_negative` has an upper bound of infinity."""
    if case.name == "non_negative" or hasattr(default(case).init(problem()[1]), "threshold"):
        return
    tx, (grads, params) = default(case), problem()
    with jax.debug_infs(True):
        tx.update(grads, tx.init(params), params)


WATCHED: dict[str, Callable[[], Any]] = {
    "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "equal ranks": lambda: jax.numpy_rank_promotion("raise"),
}


@every_case
@pytest.mark.parametrize("mode", WATCHED)
def test_traced_under_watch(mode: str, case: Case) -> None:
    tx = default(case)
    with WATCHED[mode]():
        for dtype in (np.float32, jnp.bfloat16):
            grads, params = problem(dtype)
            jax.eval_shape(jax.jit(lambda grads, params: step(tx, grads, params)), grads, params)
            if is_projection(tx):
                jax.eval_shape(jax.jit(tx.__call__), params)


@pytest.mark.parametrize("name", ["clip_by_global_norm", "max_norm", "skip_spikes"])
def test_no_tracer_leaks(name: str) -> None:
    tx, trees = default(Case(name)), problem()
    with jax.checking_leaks():
        jax.eval_shape(jax.jit(lambda *trees: step(tx, *trees)), *trees)


@every_case
def test_without_jit(case: Case) -> None:
    tx, (grads, params) = default(case), problem()
    expected, _ = update(tx, grads, tx.init(params), params)
    with jax.disable_jit():
        got, _ = step(tx, grads, params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_nothing_is_transferred() -> None:
    """What is on the device stays there; bounds of Python and of NumPy are constants of the program."""
    grads, params = jax.tree.map(jnp.asarray, problem())
    tx = clipjax.bounded(
        optax.sgd(0.1),
        clip=clipjax.clip_by_norm(np.float32(0.5)),
        project=[clipjax.max_norm(np.full((1, 3), 0.5, np.float32)), clipjax.spectral_cap(1.0)],
        nonfinite="skip",
    )
    state, bound = tx.init(params), jnp.float32(0.5)
    with jax.transfer_guard("disallow"):
        jax.jit(tx.update)(grads, state, params)
        jax.jit(clipjax.max_norm(bound).__call__)(params)
