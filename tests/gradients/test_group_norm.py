"""`clip_by_group_norm`: one norm and one bound for each group, also for each layer of a stack."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax.serialization import msgpack_restore, to_bytes

import clipjax
from tests.support.oracles import exact_tree_norm
from tests.support.trees import same_bits

BOUNDS = {"experts/*": 1.0, "head*": 0.25, "*": 2.0}
LAYERS = 3


def gradients(seed: int, scale: float, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def leaf(*shape: int) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(dtype)

    return {
        "experts": {"in": leaf(LAYERS, 4, 3), "out": leaf(LAYERS, 3)},
        "head": leaf(3, 2),
        "trunk": [leaf(5), leaf(2, 2)],
    }


def parts(tree: Any) -> dict[str, Any]:
    """The groups of BOUNDS."""
    return {"experts/*": tree["experts"], "head*": tree["head"], "*": tree["trunk"]}


def layers(tree: Any) -> list[Any]:
    """The experts of each layer; the axis of layers is the first."""
    return [jax.tree.map(lambda x, i=i: x[i], tree["experts"]) for i in range(LAYERS)]


def judge(before: Any, after: Any, bound: float, ord: float = 2) -> None:  # noqa: A002
    """A tree is at or a little below its bound, by one factor; one that was inside keeps its bits."""
    norm, new = (float(exact_tree_norm(tree, ord)) for tree in (before, after))
    if norm <= bound:
        assert same_bits(before, after)
        return
    assert new <= bound
    eps = float(ml_dtypes.finfo(jax.tree.leaves(before)[0].dtype).eps)
    assert new >= bound * (1 - 4 * eps)
    for old, changed in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        expected = np.asarray(old, np.float64) * (bound / norm)
        np.testing.assert_allclose(np.asarray(changed, np.float64), expected, rtol=4 * eps)


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_each_group_has_its_own_norm(dtype: Any, ord: float) -> None:  # noqa: A002
    tx = clipjax.clip_by_group_norm(BOUNDS, ord=ord)
    update = jax.jit(tx.update)
    state = tx.init(gradients(0, 1.0, dtype))
    for seed, scale in enumerate((1e-3, 0.1, 1.0, 1e3, 1e-30, 1e30)):
        grads = gradients(seed, scale, dtype)
        clipped, state = update(grads, state)
        seen = clipjax.metrics(state)
        for name, before in parts(grads).items():
            judge(before, parts(clipped)[name], BOUNDS[name], ord)
            norm = float(exact_tree_norm(before, ord))
            got = {
                key: float(seen[f"clip_by_group_norm/{key}/{name}"])
                for key in ("norm", "norm_after", "scale")
            }
            assert got["norm"] == pytest.approx(norm, rel=1e-6)
            assert got["scale"] == pytest.approx(min(1, BOUNDS[name] / norm), rel=1e-6)
            assert got["norm_after"] == pytest.approx(min(norm, BOUNDS[name]), rel=1e-6)
    norms = [float(exact_tree_norm(part, ord)) for part in parts(grads).values()]
    assert float(seen["clip_by_group_norm/norm"]) == pytest.approx(max(norms), rel=1e-6)


@pytest.mark.parametrize("axis", [0, -1])
def test_each_layer_of_a_stack_is_a_group(axis: int) -> None:
    bounds = np.array([0.5, 1.0, 4.0], np.float32)
    tx = clipjax.clip_by_group_norm({"experts/*": bounds, "*": 2.0}, stack={"experts/*": axis})

    def turned(tree: Any) -> Any:
        return tree | {"experts": jax.tree.map(lambda x: np.moveaxis(x, 0, axis), tree["experts"])}

    grads = gradients(0, 1.0)
    grads["experts"]["in"][1] *= 100
    clipped, state = jax.jit(tx.update)(turned(grads), tx.init(turned(grads)))
    back = clipped | {"experts": jax.tree.map(lambda x: np.moveaxis(x, axis, 0), clipped["experts"])}
    for before, after, bound in zip(layers(grads), layers(back), bounds, strict=True):
        judge(before, after, float(bound))
    judge([grads["head"], grads["trunk"]], [clipped["head"], clipped["trunk"]], 2.0)
    seen = clipjax.metrics(state)
    for i, layer in enumerate(layers(grads)):
        norm = seen[f"clip_by_group_norm/norm/experts/*/{i}"]
        assert float(norm) == pytest.approx(float(exact_tree_norm(layer)), rel=1e-6)
    assert "clip_by_group_norm/norm/*" in seen


def test_a_bad_group_does_not_touch_the_others() -> None:
    tx = clipjax.clip_by_group_norm(BOUNDS, stack={"experts/*": 0})
    good, bad = gradients(0, 1.0), gradients(0, 1.0)
    bad["experts"]["out"][1, 0] = np.nan
    update = jax.jit(tx.update)
    expected, _ = update(good, tx.init(good))
    clipped, state = update(bad, tx.init(bad))
    assert same_bits(parts(clipped)["*"], parts(expected)["*"])
    assert same_bits(clipped["head"], expected["head"])
    for i, (got, fine) in enumerate(zip(layers(clipped), layers(expected), strict=True)):
        assert same_bits(got, fine) == (i != 1)
        assert all(np.isnan(x).all() == (i == 1) for x in jax.tree.leaves(got))
    assert int(clipjax.metrics(state)["clip_by_group_norm/nonfinite_count"]) == 1


def test_leaves_of_no_group_pass() -> None:
    grads = gradients(0, 1e3)
    grads["trunk"][0][0] = np.nan
    tx = clipjax.clip_by_group_norm({"experts/*": 1.0})
    clipped, _ = tx.update(grads, tx.init(grads))
    assert same_bits([clipped["trunk"], clipped["head"]], [grads["trunk"], grads["head"]])


def test_bounds_may_be_schedules_and_counts_are_of_each_group() -> None:
    tx = clipjax.clip_by_group_norm({"a": lambda step: 10.0 - 4.0 * step, "b": np.inf})
    grads = {"a": np.array([3.0, 4.0], np.float32), "b": np.array([1e30], np.float32)}
    state = tx.init(grads)
    update = jax.jit(tx.update)
    for bound in (10.0, 6.0, 2.0, 0.0):
        clipped, state = update(grads, state)
        assert float(np.linalg.norm(clipped["a"])) == pytest.approx(min(5.0, bound), rel=1e-6)
    seen = clipjax.metrics(state)
    assert float(seen["clip_by_group_norm/clipped_fraction/a"]) == 0.5
    assert float(seen["clip_by_group_norm/clipped_fraction/b"]) == 0


def test_a_restored_state_has_its_metrics_and_goes_on() -> None:
    grads = gradients(0, 10.0)
    tx = clipjax.clip_by_group_norm(BOUNDS, stack={"experts/*": 0})
    state = tx.update(grads, tx.init(grads))[1]
    restored = msgpack_restore(to_bytes(state))
    assert type(restored) is dict
    assert same_bits(clipjax.metrics(restored), clipjax.metrics(state))


def test_optax_clips_group_after_group() -> None:
    """As `optax.partition` with a clip for each group does, which needs labels and a state for each."""
    labels = {"experts": "experts/*", "head": "head*", "trunk": "*"}
    theirs = optax.partition({k: optax.clip_by_global_norm(v) for k, v in BOUNDS.items()}, labels)
    ours, grads = clipjax.clip_by_group_norm(BOUNDS), gradients(3, 5.0)
    expected = theirs.update(grads, theirs.init(grads))[0]
    got = ours.update(grads, ours.init(grads))[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)


def test_derivatives_are_those_of_each_group() -> None:
    tx = clipjax.clip_by_group_norm({"a": 1.0, "*": 1.0})

    def total(grads: Any) -> Any:
        return sum(jnp.sum(x**3) for x in jax.tree.leaves(tx.update(grads, None)[0]))

    def plain(grads: Any) -> Any:
        def unit(parts: Any) -> Any:
            norm = jnp.sqrt(sum(jnp.sum(x**2) for x in parts))
            return sum(jnp.sum((x / jnp.maximum(norm, 1.0)) ** 3) for x in parts)

        return unit([grads["a"]]) + unit([grads["b"], grads["c"]])

    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.5, -2.0]), "c": jnp.array([1.0])}
    got, expected = jax.jit(jax.grad(total))(grads), jax.grad(plain)(grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)
    zeros = jax.tree.map(jnp.zeros_like, grads)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.grad(total)(zeros)))


@pytest.mark.parametrize(
    ("max_norms", "options", "error", "text"),
    [
        (1.0, {}, TypeError, r"max_norms must be a mapping.*got 1.0"),
        ({}, {}, ValueError, "max_norms must name at least one group"),
        ({0: 1.0}, {}, TypeError, "max_norms must be a mapping from path patterns"),
        ({"*": -1.0}, {}, ValueError, r"max_norms\['\*'\] must be at least 0, got -1.0"),
        ({"*": "1"}, {}, TypeError, r"max_norms\['\*'\] must be a number"),
        ({"*": np.ones(3)}, {}, ValueError, r"max_norms\['\*'\] must be a scalar"),
        ({"*": 1.0}, {"ord": 0.5}, ValueError, "ord must be at least 1"),
        ({"*": 1.0}, {"stack": 0}, TypeError, "stack must be a mapping"),
        ({"*": 1.0}, {"stack": {"a": 0}}, ValueError, "stack: 'a' is not a pattern of max_norms"),
        ({"*": 1.0}, {"stack": {"*": "0"}}, TypeError, r"stack\['\*'\] must be an axis, got '0'"),
    ],
)
def test_bad_arguments(max_norms: Any, options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        clipjax.clip_by_group_norm(max_norms, **options)


@pytest.mark.parametrize(
    ("max_norms", "stack", "text"),
    [
        ({"expert/*": 1.0}, None, r"max_norms: the pattern 'expert/\*' matches no leaf(.|\n)*experts/in"),
        (
            {"*": 1.0, "experts/*": 0.5},
            None,
            r"the first match wins, and '\*' takes all leaves of",
        ),
        (
            {"*": 1.0},
            {"*": 0},
            r"the leaves have different numbers of layers: 'experts/in' has 3",
        ),
        ({"*": 1.0}, {"*": 1}, r"stack: axis 1 is out of range for leaf 'trunk/0' of shape \(5,\)"),
        (
            {"experts/*": np.ones(2)},
            {"experts/*": 0},
            r"experts/\*'\] must broadcast to shape \(3,\)",
        ),
    ],
)
def test_what_does_not_fit_the_tree(max_norms: Any, stack: Any, text: str) -> None:
    tx, grads = clipjax.clip_by_group_norm(max_norms, stack=stack), gradients(0, 1.0)
    with pytest.raises(ValueError, match=text):
        tx.update(grads, tx.init(grads))
