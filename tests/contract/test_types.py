"""Every leaf keeps its shape, dtype and weak type, the state keeps its own, and no container matters."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax
from tests.contract.cases import (
    DEFAULTS,
    FLOATS,
    bounds_the_weights,
    default,
    every_case,
    every_variant,
    every_variant_and_dtype,
    problem,
    project,
    run,
    sampled,
    step,
)
from tests.support.trees import avals, bits
from tests.support.walk import Case, is_projection


@every_variant_and_dtype
def test_shapes_dtypes_and_state_are_kept(case: Case, dtype: Any) -> None:
    tx = default(case)
    grads, params = problem(dtype)
    state = tx.init(params)
    updates, after = run(tx, grads, params)
    assert avals(after) == avals(state)
    assert avals(optax.apply_updates(params, updates)) == avals(params)
    if avals(updates) != avals(grads):  # only a projection, which may widen 16 bits
        assert bounds_the_weights(case)
        wider = jax.tree.map(lambda g: np.zeros(g.shape, np.float32), grads)
        assert np.dtype(dtype).itemsize == 2
        for leaf, own, wide in zip(*map(jax.tree.leaves, (updates, grads, wider)), strict=True):
            assert avals(leaf) in (avals(own), avals(wide))
    if is_projection(tx):
        assert avals(project(tx, params)) == avals(params)


@every_variant
def test_float64(case: Case) -> None:
    with jax.enable_x64(True):
        tx = default(case)
        grads, params = problem(np.float64)
        # The types are known without compiling anything.
        updates, after = jax.eval_shape(functools.partial(step, tx), grads, params)
        assert avals_of(after) == avals_of(jax.eval_shape(tx.init, params))
        assert avals_of(updates) == avals_of(jax.eval_shape(lambda x: x, grads))
        norms = {k: v.dtype for k, v in jax.eval_shape(clipjax.metrics, after).items() if k.endswith("/norm")}
        assert set(norms.values()) <= {np.dtype(np.float64)}


@sampled(DEFAULTS, one_in=7)
def test_float64_runs(case: Case) -> None:
    with jax.enable_x64(True):
        tx = default(case)
        grads, params = problem(np.float64)
        updates, after = run(tx, grads, params)
        assert avals(after) == avals(tx.init(params))
        assert avals(updates) == avals(grads)


def avals_of(tree: Any) -> Any:
    """Structure, shapes, dtypes and weak types of what is not computed."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in leaves]


@every_case
def test_weak_types_are_kept(case: Case) -> None:
    tx = default(case)
    grads = {"weak": jnp.asarray(3.0), "python": 4.0, "strong": jnp.ones((3, 2))}
    params = {"weak": jnp.asarray(-2.0), "python": 1.0, "strong": jnp.ones((3, 2))}
    assert grads["weak"].weak_type
    state = tx.init(params)
    updates, after = jax.eval_shape(tx.update, grads, state, params)
    assert avals_of(updates) == avals_of(jax.eval_shape(lambda x: x, grads))
    assert avals_of(after) == avals_of(jax.eval_shape(lambda x: x, state))
    if is_projection(tx):
        assert avals_of(jax.eval_shape(tx.__call__, params)) == avals_of(jax.eval_shape(lambda x: x, params))


@sampled(DEFAULTS, one_in=6, first=1)
def test_python_floats_are_taken_without_jit(case: Case) -> None:
    """Operation by operation a Python number is one until it meets an array."""
    tx = default(case)
    kernel = jnp.ones((2, 1))  # or some would bound nothing
    grads = {"weak": jnp.asarray(3.0), "python": 4.0, "kernel": kernel}
    params = {"weak": jnp.asarray(-2.0), "python": 1.0, "kernel": kernel}
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    assert avals(updates) == avals(grads)
    assert avals(after) == avals(state)
    if is_projection(tx):
        assert avals(tx(params)) == avals(params)


@every_case
def test_scalars_of_every_dtype_together(case: Case) -> None:
    tx = default(case)
    tree = {np.dtype(d).name: np.asarray(3, d) for d in FLOATS} | {"kernel": np.ones((2, 1), np.float32)}
    updates, _ = jax.eval_shape(functools.partial(step, tx), tree, tree)
    after = jax.eval_shape(optax.apply_updates, tree, updates)
    assert avals_of(after) == avals_of(jax.eval_shape(lambda x: x, tree))
    if not bounds_the_weights(case):
        assert avals_of(updates) == avals_of(after)


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
# Containers.


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


def containers(kernel: Any, bias: Any) -> list[Any]:
    kernel, bias = np.asarray(kernel, np.float32), np.asarray(bias, np.float32)
    return [
        (kernel, [bias]),
        Layer(kernel, bias),
        Dense(kernel, bias),
        {"kernel": kernel, "zbias": bias},
        Layer(kernel),
        kernel,
    ]


def program(tx: Any, grads: Any, params: Any) -> tuple[str, Any]:
    """What is computed, in words that do not depend on the container; and the shapes of the results."""
    jaxpr, results = jax.make_jaxpr(functools.partial(step, tx), return_shape=True)(grads, params)
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr)), results


@every_case
def test_containers(case: Case) -> None:
    """The same computation whatever the container, which comes back as it was."""
    tx = default(case)
    found = []
    every_grads, every_params = containers(4 * KERNEL, np.ones(3)), containers(-KERNEL, np.zeros(3))
    for grads, params in zip(every_grads, every_params, strict=True):
        text, (updates, state) = program(tx, grads, params)
        assert avals_of(updates) == avals_of(jax.eval_shape(lambda x: x, grads))
        assert avals_of(state) == avals_of(jax.eval_shape(tx.init, params))
        found.append(text)
    assert found[0] == found[1] == found[2] == found[3]
    assert found[4] == found[5]
    assert found[0] != found[4]


def test_containers_have_the_same_results() -> None:
    """That equal computations have equal bits, seen once."""
    tx = clipjax.clip_by_global_norm(1.0)
    results = [
        bits(jax.tree.leaves(run(tx, grads, grads)[0])) for grads in containers(4 * KERNEL, np.ones(3))
    ]
    assert results[0] == results[1] == results[2] == results[3]
    assert results[4] == results[5]
