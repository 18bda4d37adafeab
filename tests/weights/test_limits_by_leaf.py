"""`box` with limits by path patterns or by a rule: each leaf ends between its own."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import clipjax
from tests.support.trees import DTYPES, same_bits
from tests.support.weights import every_kind, exact, like, step_with


def tree(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def leaf(*shape: int) -> np.ndarray:
        return (3 * rng.standard_normal(shape)).astype(dtype)

    return {
        "conv": {"kernel": leaf(3, 3, 2, 4), "bias": leaf(4)},
        "dense": {"kernel": leaf(16, 8), "bias": leaf(8)},
        "scale": leaf(8),
        "steps": np.int32(7),
    }


def uniform(path: Any, leaf: Any) -> float:
    """The range that PyTorch draws kernels `(*window, in, out)` from: 1 / sqrt(fan in)."""
    return 1 / math.sqrt(leaf.size / leaf.shape[-1])


def of_array(path: Any, leaf: Any) -> np.ndarray:
    return np.linspace(0.5, 1.0, leaf.shape[-1])


LIMITS: dict[str, tuple[Any, Any, Any, dict[str, tuple[Any, Any]]]] = {
    "patterns": (
        {"dense/kernel": -0.25, "*kernel": -0.5},
        {"*kernel": 0.5},
        None,
        {"dense/kernel": (-0.25, 0.5), "conv/kernel": (-0.5, 0.5)},
    ),
    "one side": (
        {"scale": 0.0},
        {"bias": 0.1},
        None,
        {"scale": (0.0, math.inf), "conv/bias": (-math.inf, 0.1), "dense/bias": (-math.inf, 0.1)},
    ),
    "rules": (
        lambda path, leaf: -2 * uniform(path, leaf),
        lambda path, leaf: 2 * uniform(path, leaf),
        "kernel",
        {"dense/kernel": (-0.5, 0.5), "conv/kernel": (-2 / math.sqrt(18), 2 / math.sqrt(18))},
    ),
    "arrays, by a rule": (
        0.0,
        of_array,
        ["scale", "dense/bias"],
        {name: (0.0, np.linspace(0.5, 1, 8)) for name in ("scale", "dense/bias")},
    ),
    "a rule that skips": (
        -1.0,
        lambda path, leaf: 1.0 if leaf.ndim == 1 else clipjax.SKIP,
        None,
        {
            "conv/bias": (-1, 1),
            "dense/bias": (-1, 1),
            "scale": (-1, 1),
            "conv/kernel": (-1, math.inf),
            "dense/kernel": (-1, math.inf),
        },
    ),
    "a rule and SKIP in a mapping": (
        {"scale": clipjax.SKIP, "conv/*": lambda path, leaf: -0.5},
        {"conv/kernel": 0.5},
        None,
        {"conv/kernel": (-0.5, 0.5), "conv/bias": (-0.5, math.inf)},
    ),
    "schedules": ({"scale": lambda step: -1.0 - step}, {"scale": 0.5}, None, {"scale": (-1.0, 0.5)}),
    "traced": (
        {"scale": -1.0},
        {"scale": "traced", "bias": 2.0},
        None,
        {
            "scale": (-1.0, 0.75),
            "conv/bias": (-math.inf, 2.0),
            "dense/bias": (-math.inf, 2.0),
        },
    ),
}


def made(name: str, traced: Any) -> Any:
    low, high, where, _ = LIMITS[name]
    if isinstance(high, dict):
        high = {key: traced if isinstance(value, str) else value for key, value in high.items()}
    return clipjax.box(low, high, where=where)


@functools.cache
def found(kind: str) -> Any:
    """What each of the limits makes of the tree, by the call and as a link, and the metrics."""

    @jax.jit
    def of(params: Any, traced: Any) -> Any:
        results = {}
        for name in LIMITS:
            project = made(name, traced)
            called = project(params, 0)
            updates, state = project.update(like(params, 0), project.init(params), params)
            results[name] = called, step_with(project, params, like(params, 0)), clipjax.metrics(state)
            del updates
        return results

    return of(tree(DTYPES[kind]), np.float32(0.75))


@every_kind
@pytest.mark.parametrize("name", LIMITS)
def test_each_leaf_ends_between_its_own_limits(name: str, kind: str) -> None:
    limits, start = LIMITS[name][3], tree(DTYPES[kind])
    called, linked, seen = found(kind)[name]
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(start)
    }
    assert set(limits) <= set(flat)
    for result in (called, linked):
        for (path, before), after in zip(flat.items(), jax.tree.leaves(result), strict=True):
            if path not in limits:
                assert same_bits(after, before)
                continue
            low, high = (np.broadcast_to(x, before.shape) for x in limits[path])
            after, before = exact(after), exact(before)
            assert ((after >= low) & (after <= high)).all()
            eps = 2.0 ** {"f32": -23, "bf16": -7, "f16": -10}[kind]
            np.testing.assert_allclose(after, np.clip(before, low, high), rtol=eps, atol=1e-6)
            inside = (before >= low) & (before <= high)
            np.testing.assert_array_equal(after[inside], before[inside])
    bounded = [np.abs(exact(flat[path])).max() for path in limits]
    assert seen["box/norm"] == np.float32(max(bounded))
    assert seen["box/clipped_fraction"] == 1
    assert 0 < seen["box/scale"] <= 1


def test_what_is_one_limit_for_all_is_the_same_program() -> None:
    params = {name: leaf for name, leaf in tree().items() if name != "steps"}
    programs = [
        str(jax.make_jaxpr(clipjax.box(*limits).__call__)(params))
        for limits in (
            (-1.0, 1.0),
            ({"*": -1.0}, 1.0),
            (lambda path, leaf: -1.0, lambda path, leaf: np.float32(1)),
        )
    ]
    assert programs[0] == programs[1] == programs[2]


def test_measured_in_the_order_of_the_leaves() -> None:
    project = clipjax.box({"scale": 0.0, "conv/*": -1.0, "dense/bias": 0.0}, {"conv/*": 1.0})
    measured = project.measure(tree(), None)
    assert [m.path for m in measured] == ["conv/bias", "conv/kernel", "dense/bias", "scale"]
    assert [float(m.low) for m in measured] == [-1, -1, 0, 0]
    assert [float(m.high) for m in measured] == [1, 1, math.inf, math.inf]
    violations = clipjax.verify(tree(), project)
    assert {v.path for v in violations} == {m.path for m in measured}
    assert clipjax.verify(project(tree()), project) == []


def test_inside_shard_map() -> None:
    mesh, spec = Mesh(np.array(jax.devices()[:1]), "x"), PartitionSpec("x")
    project = clipjax.box({"kernel": -0.1, "bias": -0.2}, 0.1)
    params = tree()["dense"]

    def step(params: Any) -> Any:
        updates, state = project.update(like(params, 0), project.init(params), params)
        return updates, clipjax.metrics(state)

    local = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec())))
    np.testing.assert_allclose(local(params)[0]["kernel"], jax.jit(step)(params)[0]["kernel"], rtol=1e-6)
    assert local(params)[1]["box/norm"] == jax.jit(step)(params)[1]["box/norm"]


def test_weight_clipping_keeps_layers_in_the_range_of_their_initialization() -> None:
    """Biases have the range of their layer's kernel, as in the authors' code."""
    params = {name: layer for name, layer in tree().items() if name in ("conv", "dense")}
    fan_in = {name: layer["kernel"].size // layer["kernel"].shape[-1] for name, layer in params.items()}
    high = {f"{name}/*": 2 / math.sqrt(entries) for name, entries in fan_in.items()}
    clip = clipjax.box({path: -limit for path, limit in high.items()}, high)
    for name, layer in clip(params).items():
        for leaf in layer.values():
            np.testing.assert_allclose(np.abs(leaf).max(), 2 / math.sqrt(fan_in[name]), rtol=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "error", "text"),
    [
        (
            {"kernel": 2.0},
            {"kernel": 1.0},
            ValueError,
            "low must not be above high for 'kernel', got low=2.0 and",
        ),
        (
            {"kernel": 2.0},
            1.0,
            ValueError,
            "low must not be above high for 'kernel', got low=2.0 and high=1.0",
        ),
        (
            0.0,
            {"bias": 1.0, "kernel": -1.0},
            ValueError,
            "above high for 'kernel', got low=0.0 and high=-1.0",
        ),
        ({"kernel": math.nan}, 1.0, ValueError, r"low\['kernel'\] must not be NaN, got nan"),
        (0.0, {"kernel": "1"}, TypeError, r"high\['kernel'\] must be a number.*a rule.*got '1'"),
        (0.0, {"kernel": None}, TypeError, r"high\['kernel'\] must be a number.*got None"),
        ({3: 0.0}, 1.0, TypeError, "low: a path pattern must be a string, got 3"),
        (
            {"dense": {"kernel": 0.0}},
            1.0,
            TypeError,
            r"low\['dense'\] must be a limit, not a mapping.*'dense/kernel'",
        ),
        (
            lambda x, y=0: 0.0,
            1.0,
            TypeError,
            r"low: a schedule takes \(step\), a rule takes.*which fits both",
        ),
        (
            0.0,
            lambda *args: 1.0,
            TypeError,
            r"high: a schedule.*\(\*args\), which fits both: give it one argument, or two",
        ),
        (0.0, {"kernel": lambda: 1.0}, TypeError, r"high\['kernel'\]: a schedule.*\(\), which fits neither"),
    ],
)
def test_bad_limits_raise_when_built(low: Any, high: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        clipjax.box(low, high)


@pytest.mark.parametrize(
    ("low", "high", "error", "text"),
    [
        ({"kernels": 0.0}, 1.0, ValueError, r"low: the pattern 'kernels' matches no leaf(.|\n)*conv/kernel"),
        (0.0, {"scale": 1.0, "nope/*": 1.0}, ValueError, "high: the pattern 'nope/.' matches no leaf"),
        ({"conv/*": 2.0}, {"kernel": 1.0}, ValueError, "low must not be above high for leaf 'conv/kernel'"),
        (
            lambda path, leaf: 2.0,
            1.0,
            ValueError,
            "low must not be above high for leaf 'conv/bias', got low=2.0",
        ),
        (
            0.0,
            lambda path, leaf: None,
            TypeError,
            "high: what the rule returns for leaf 'conv/bias' must be a number",
        ),
        (
            0.0,
            lambda path, leaf: math.nan,
            ValueError,
            "high: what the rule returns for leaf 'conv/bias' must not be",
        ),
        (
            {},
            {},
            ValueError,
            r"low, high: nothing is bounded(.|\n)*'scale'.*no pattern of low or high matches it",
        ),
        (
            lambda p, x: np.zeros(3),
            1.0,
            ValueError,
            r"low must broadcast to shape \(4,\), for leaf 'conv/bias'",
        ),
    ],
)
def test_limits_that_fit_no_tree_raise_when_called(
    low: Any, high: Any, error: type[Exception], text: str
) -> None:
    project = clipjax.box(low, high)
    with pytest.raises(error, match=text):
        project(tree())
    if "broadcast" not in text:
        with pytest.raises(error, match=text):
            project.init(tree())


def test_skip_leaves_all_alone_without_an_error() -> None:
    project = clipjax.box(clipjax.SKIP, lambda path, leaf: clipjax.SKIP)
    assert same_bits(project(tree()), tree())
