"""The metrics are flat scalars with constant names, which say what happened."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.serialization import msgpack_restore, to_bytes

import clipjax
from tests.contract.cases import (
    default,
    every_case,
    every_variant,
    own_metrics,
    problem,
    run,
    update,
    with_identity,
)
from tests.support.oracles import exact_norm, exact_tree_norm
from tests.support.trees import avals, same_bits
from tests.support.walk import Case, build

compiled_metrics = jax.jit(clipjax.metrics)


@every_variant
def test_metrics_are_flat_scalars_with_constant_keys(case: Case) -> None:
    tx = default(case)
    grads, params = problem()
    before = clipjax.metrics(tx.init(params))
    state = run(tx, grads, params)[1]
    after, jitted = clipjax.metrics(state), compiled_metrics(state)
    assert list(before) == list(after) == sorted(jitted, key=list(after).index)
    assert same_bits(after, jitted)
    assert avals(before) == avals(after)
    for key, value in after.items():
        assert re.fullmatch(r"[a-z_0-9]+/[a-z_0-9]+(/.+)?", key), key
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


def test_counters_stop_at_their_largest_value() -> None:
    """They are int32, and a run that outlasts them must not count from below zero."""
    tx, last = clipjax.clip_by_global_norm(2.0), np.int32(np.iinfo(np.int32).max)
    for bad, counted in ((1.0, "clipped"), (math.nan, "nonfinite")):
        tree = {"a": np.array([3.0 * bad], np.float32), "b": np.array([4.0], np.float32)}
        state = tx.init(tree)
        full = state._replace(clip_by_global_norm=state[0]._replace(steps=last, clipped=last, nonfinite=last))
        seen = update(tx, tree, full, None)[1].clip_by_global_norm
        assert seen.steps == last
        assert getattr(seen, counted) == last


def test_metrics_say_what_happened() -> None:
    tx = clipjax.clip_by_global_norm(2.0)
    tree = {"a": np.array([3.0], np.float32), "b": np.array([4.0], np.float32)}
    state = tx.init(tree)
    for factor in (1.0, 0.1, math.nan, 2.0):
        _, state = update(tx, jax.tree.map(lambda x, f=factor: np.float32(f) * x, tree), state, None)
    assert {k: float(v) for k, v in clipjax.metrics(state).items()} == {
        "clip_by_global_norm/norm": 10.0,
        "clip_by_global_norm/norm_after": 2.0,
        "clip_by_global_norm/scale": pytest.approx(0.2, rel=1e-6),
        "clip_by_global_norm/steps": 4,
        "clip_by_global_norm/clipped_fraction": 0.5,
        "clip_by_global_norm/nonfinite_count": 1,
    }


STEPS = optax.chain(
    clipjax.clip_by_global_norm(1.0), clipjax.skip_nonfinite(optax.adam(1e-3)), clipjax.max_norm(1.0)
)


def test_plain_dicts_of_a_checkpoint_have_the_same_metrics() -> None:
    """What `flax.serialization` and Orbax restore without a target."""
    grads, params = problem()
    state = STEPS.update(grads, STEPS.init(params), params)[1]
    restored = msgpack_restore(to_bytes(state))
    assert type(restored) is dict
    assert list(clipjax.metrics(restored)) == list(clipjax.metrics(state))
    assert same_bits(clipjax.metrics(restored), clipjax.metrics(state))
    assert json.loads(json.dumps({name: float(value) for name, value in clipjax.metrics(restored).items()}))


def test_the_state_of_an_nnx_optimizer_has_its_metrics() -> None:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, STEPS, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(lambda w: 2 * w, nnx.state(model, nnx.Param)))
    seen = clipjax.metrics(optimizer)
    assert seen["clip_by_global_norm/steps"] == 1
    for form in (nnx.state(optimizer), nnx.to_pure_dict(nnx.state(optimizer))):
        assert same_bits(clipjax.metrics(form), seen)


@pytest.mark.parametrize("given", [{}, (), None, problem()[1], optax.adam(1e-3).init(problem()[1]), 3.0])
def test_what_has_no_metrics_is_an_error(given: Any) -> None:
    with pytest.raises(ValueError, match="opt_state: there is no state of a clipjax transformation in"):
        clipjax.metrics(given)


def _largest(tree: Any, axis: Any = None) -> Any:
    return max(np.max(exact_norm(leaf, axis)) for leaf in jax.tree.leaves(tree))


AFTER = {
    "global": (clipjax.clip_by_global_norm(2.0), exact_tree_norm),
    "p = 1": (clipjax.clip_by_global_norm(2.0, ord=1), lambda tree: exact_tree_norm(tree, 1)),
    "leaves": (clipjax.clip_by_norm(2.0), _largest),
    "units": (clipjax.clip_by_norm(1.0, axes=0), lambda tree: _largest(tree, 0)),
    "bounds of units": (clipjax.clip_by_norm(np.array([9.0, 0.5, 1.5]), axes=0), lambda t: _largest(t, 0)),
    "value": (clipjax.clip_by_value(-0.5, 1.5), lambda tree: max(np.max(np.abs(x)) for x in tree.values())),
    "max_norm": (clipjax.max_norm(1.25, axes=0), lambda tree: _largest(tree, 0)),
    "adagc": (clipjax.adagc(warmup_steps=1), exact_tree_norm),
    "adagc of units": (clipjax.adagc(warmup_steps=1, axes=0), exact_tree_norm),
    "moving max": (clipjax.clip_by_moving_max(), lambda tree: max(np.max(np.abs(x)) for x in tree.values())),
    "moving norm": (clipjax.normalize_by_moving_norm(), _largest),
}


@pytest.mark.parametrize("label", AFTER)
def test_the_norm_after_is_that_of_what_comes_out(label: str) -> None:
    """Once everything is inside, and once out of bounds: 1e-3 and 10 times as large."""
    tx, measure = AFTER[label]
    rng = np.random.default_rng(0)
    tree = {name: rng.standard_normal((4, 3)).astype(np.float32) for name in ("a", "b")}
    weights = jax.tree.map(np.zeros_like, tree)
    state = tx.init(weights)
    for scale in (1e-3, 10.0):
        updates, state = update(tx, jax.tree.map(lambda x, s=scale: np.float32(s) * x, tree), state, weights)
        seen = {key.split("/")[1]: float(value) for key, value in clipjax.metrics(state).items()}
        assert seen["norm_after"] == pytest.approx(float(measure(updates)), rel=1e-6)
        assert label == "moving norm" or (seen["norm_after"] == seen["norm"]) == (scale < 1)


def test_names_do_not_depend_on_the_order_of_a_dict() -> None:
    """`jax.jit` sorts dicts, as that of `optax.partition`; and restored tuples have their places as keys."""
    labels = {"a": "x", "b": "y"}
    parts = {"y": clipjax.clip_by_global_norm(1.0), "x": clipjax.clip_by_global_norm(2.0)}
    grads = {"a": np.array([30.0, 40.0], np.float32), "b": np.array([3.0, 4.0], np.float32)}
    for tx in (
        optax.partition(parts, labels),
        optax.chain(
            clipjax.clip_by_global_norm(9.0), *[optax.identity()] * 10, clipjax.clip_by_global_norm(1.0)
        ),
    ):
        state = tx.update(grads, tx.init(grads))[1]
        seen = clipjax.metrics(state)
        for other in (jax.tree.map(lambda x: x, state), msgpack_restore(to_bytes(state))):
            assert same_bits(clipjax.metrics(other), seen)
            assert same_bits(jax.jit(clipjax.metrics)(other), seen)


def test_members_of_a_batch_are_no_layers() -> None:
    grads = {"w": np.ones((3, 2, 4), np.float32)}
    for stack, name in ((None, "*"), ({"*": 0}, "*/1")):
        tx = clipjax.clip_by_group_norm({"*": 1.0}, stack=stack)
        state = jax.vmap(tx.update)(grads, jax.vmap(tx.init)(grads))[1]
        for key in ("norm", "clipped_fraction"):
            assert clipjax.metrics(state)[f"clip_by_group_norm/{key}/{name}"].shape == (3,)
