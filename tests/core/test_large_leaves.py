"""Large leaves, which on a CPU are reduced in slices and come in turn: the same numbers as side by side.

One compiled program holds every member, once as it is and once with turns and slices switched off. Bad
entries, small weights and other dtypes are other arguments of it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import clipjax
from clipjax import functional
from clipjax._core import maxima, platforms, trees, xla_cpu
from tests.support.oracles import INF, exact_norm, ulp
from tests.support.trees import DTYPES, same_bits, within_one_ulp

# Each just large enough; the slices of the first do not come out even.
SHAPES = {"a": (517, 257), "b": (2, 600, 131), "c": (5,)}
AXES = {"a": 0, "b": 1}
BF16 = ml_dtypes.bfloat16

MEMBERS = {
    "value": clipjax.clip_by_value(1.0),
    "limits": clipjax.clip_by_value(-0.5, 1.0),
    "global": clipjax.clip_by_global_norm(1.0),
    "norm": clipjax.clip_by_norm(1.0),
    "units": clipjax.clip_by_norm(1.0, axes=AXES),
    "cubes": clipjax.clip_by_norm(1.0, ord=3),
    "link": clipjax.chain(optax.sgd(0.5), clipjax.max_norm(1.0, axes=AXES)),
    "between": clipjax.chain(optax.sgd(0.5), clipjax.min_max_norm(1.0, 1e3, axes=AXES)),
    "unit": clipjax.chain(optax.sgd(0.5), clipjax.unit_norm(axes=AXES)),
    "unchecked": optax.chain(optax.sgd(0.5), clipjax.max_norm(1.0, axes=AXES)),
}
# One for each way in which leaves come in turn; what the rest adds to them is in the norm or the bound.
COVERING = ("value", "global", "units", "link", "between")
BY_EXTREMES = ("value", "limits")  # whose metrics are made of the largest and the smallest entry
REST = tuple(name for name in MEMBERS if name not in COVERING)
every_member = pytest.mark.parametrize(
    "members", [COVERING, pytest.param(REST, marks=pytest.mark.full)], ids=["covering", "rest"]
)


def tree(seed: int, dtype: Any = np.float32, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: (scale * rng.standard_normal(s)).astype(dtype) for k, s in SHAPES.items()}


def side_by_side(patch: pytest.MonkeyPatch) -> None:
    """Switch turns and slices off in what is traced from now on."""
    for module in (platforms, maxima, trees, xla_cpu):
        patch.setattr(module, "on_single_device", lambda: jnp.zeros((), bool))


def compiled(function: Any, *args: Any, in_turn: bool) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if not in_turn:
            side_by_side(patch)
        jax.clear_caches()  # JAX remembers what it has traced
        found = jax.jit(lambda *args: function(*args)).lower(*args).compile()
        jax.clear_caches()
        return found


@functools.cache
def step(members: tuple[str, ...], dtype: Any = np.float32, in_turn: bool = True) -> Any:
    """One step of each member: its updates and its metrics."""

    def steps(grads: Any, params: Any) -> Any:
        found = {}
        for name in members:
            updates, state = MEMBERS[name].update(grads, MEMBERS[name].init(params), params)
            found[name] = updates, clipjax.metrics(state)
        return found

    run = compiled(steps, tree(0, dtype), tree(0, dtype), in_turn=in_turn)
    return lambda *args: jax.tree.map(np.asarray, run(*args))


def updates_of(members: tuple[str, ...], grads: Any, params: Any) -> dict[str, Any]:
    found = step(members, grads["a"].dtype.type)(grads, params)
    return {name: updates for name, (updates, _) in found.items()}


def test_these_leaves_are_large() -> None:
    assert [k for k, x in tree(0).items() if x.size >= xla_cpu.LARGE] == ["a", "b"]


@pytest.mark.parametrize(
    ("members", "dtype"),
    [
        pytest.param(COVERING, np.float32, id="covering"),
        pytest.param(REST, np.float32, id="rest", marks=pytest.mark.full),
        pytest.param(("value", "link"), BF16, id="bf16"),
        pytest.param(("link",), np.float16, id="f16", marks=pytest.mark.full),
    ],
)
def test_the_same_numbers_as_side_by_side(members: tuple[str, ...], dtype: Any) -> None:
    grads, params = tree(1, dtype), tree(2, dtype)
    found, expected = (step(members, dtype, in_turn)(grads, params) for in_turn in (True, False))
    for name, (updates, seen) in found.items():
        others, metrics = expected[name]
        for key in SHAPES:
            # float64 sums in another order differ in their last bits, and so a rounding in float32.
            assert within_one_ulp(updates[key], others[key]), (name, key)
        assert seen.keys() == metrics.keys()
        for key in seen:
            np.testing.assert_allclose(seen[key], metrics[key], rtol=2e-7, err_msg=f"{name}, {key}")


@every_member
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_bad_leaf_stays_alone(members: tuple[str, ...], bad: float) -> None:
    grads, params = tree(1), tree(2)
    good = updates_of(members, grads, params)
    grads["a"][3, 0] = bad
    for name, (broken, seen) in step(members)(grads, params).items():
        if name != "global":
            assert all(same_bits(broken[key], good[name][key]) for key in ("b", "c")), name
        assert not same_bits(broken["a"], good[name]["a"]), name
        if not (np.isnan(bad) and name in BY_EXTREMES):
            assert not all(np.isfinite(value) for value in seen.values()), name


@pytest.mark.parametrize(
    ("members", "dtype", "scale"),
    [
        (COVERING, np.float32, 1e-3),
        (COVERING, np.float32, 100.0),
        (("value", "link"), BF16, 1.0),
        (("link",), np.float16, 1.0),
    ],
    ids=["f32 near", "f32 far", "bf16", "f16"],
)
def test_the_link_keeps_its_bound(members: tuple[str, ...], dtype: Any, scale: float) -> None:
    grads, params = tree(3, dtype), tree(4, dtype, scale)
    apply = jax.jit(optax.apply_updates)
    after = jax.tree.map(np.asarray, apply(params, updates_of(members, grads, params)["link"]))
    for key, axis in AXES.items():
        norms = exact_norm(after[key], axis)
        assert norms.max() <= 1
        moved = np.asarray(params[key], np.float64) - 0.5 * np.asarray(grads[key], np.float64)
        outside = exact_norm(moved, axis) > 1.01
        start = np.maximum(exact_norm(params[key], axis), 1.0)
        assert np.all((norms >= 1 - 4 * ulp(start, dtype))[outside])
        assert outside.any()
    plain = {k: (-0.5 * g.astype(np.float32)).astype(dtype) for k, g in grads.items()}
    assert same_bits(after["c"], apply(params, plain)["c"])


@every_member
def test_inside_the_bound_nothing_moves(members: tuple[str, ...]) -> None:
    grads, small = tree(5, scale=1e-6), tree(6, scale=1e-6)
    moved = {k: np.float32(-0.5) * g for k, g in grads.items()}
    for name, updates in updates_of(members, grads, small).items():
        if name not in ("between", "unit"):
            assert same_bits(updates, moved if name in ("link", "unchecked") else grads), name
    if "between" in members:
        assert same_bits(updates_of(members, grads, tree(6))["between"], moved)


def test_a_complex_link_leaves_what_is_inside_to_the_last_bit() -> None:
    def drawn(*seeds: int) -> dict[str, np.ndarray]:
        re, im = (tree(seed, scale=1e-6) for seed in seeds)
        return {k: re[k] + 1j * im[k] for k in SHAPES}

    grads, params = drawn(5, 6), drawn(7, 8)
    for leaf in grads.values():
        leaf[0] = complex(-0.0, -0.0)
    tx = clipjax.chain(optax.identity(), clipjax.max_norm(1.0, axes=AXES))
    assert same_bits(jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params), grads)


@pytest.mark.parametrize(
    "members", [("link", "global"), pytest.param(("value",), marks=pytest.mark.full)], ids=str
)
def test_derivatives_and_maps_over_examples(members: tuple[str, ...]) -> None:
    txs = {name: MEMBERS[name] for name in members}
    grads, params = tree(7), tree(8)

    def derivatives(grads: Any, params: Any) -> Any:
        def loss(grads: Any, params: Any, tx: Any) -> jax.Array:
            updates, _ = tx.update(grads, tx.init(params), params)
            return sum(jnp.sum(jnp.sin(u)) for u in jax.tree.leaves(updates))

        return {name: jax.grad(loss, argnums=(0, 1))(grads, params, tx) for name, tx in txs.items()}

    in_turn, expected = (
        compiled(derivatives, grads, params, in_turn=in_turn)(grads, params) for in_turn in (True, False)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), in_turn, expected)

    @jax.jit
    @jax.vmap
    def mapped(grads: Any, params: Any) -> Any:
        return {name: tx.update(grads, tx.init(params), params)[0] for name, tx in txs.items()}

    examples = [(grads, params), jax.tree.map(lambda x: 2 * x, (grads, params))]
    found = mapped(*jax.tree.map(lambda *xs: np.stack(xs), *examples))
    for i, example in enumerate(examples):
        alone = step(COVERING, in_turn=False)(*example)
        for name in txs:
            for key in SHAPES:
                np.testing.assert_allclose(found[name][key][i], alone[name][0][key], rtol=2e-6, atol=2e-6)


# --------------------------------------------------------------------------------------------------
# Every shape by itself: short and long axes, slices that come out even or not, and several rounds of them.

ALONE = [(2**17 + 3,), (3, 2**17), (513, 1025), (2**21 + 77,)]
SIMILAR = [(2**18,), (2**17, 3)]


@jax.jit
def norms_and_clips(leaf: Any) -> Any:
    return {
        p: (functional.global_norm(leaf, p), functional.clip_by_norm(leaf, 0.1, None, p)) for p in (1, 2, INF)
    }


@pytest.mark.parametrize(
    "shape", [*ALONE, *(pytest.param(shape, marks=pytest.mark.full) for shape in SIMILAR)], ids=str
)
def test_large_leaves_are_summed_right(shape: tuple[int, ...]) -> None:
    leaf = (np.random.default_rng(2).standard_normal(shape) * 1e19).astype(np.float32)
    for p, (norm, clipped) in norms_and_clips(leaf).items():
        np.testing.assert_allclose(float(norm), float(exact_norm(leaf, None, p)), rtol=1e-6)
        new = exact_norm(clipped, None, p)
        assert new <= 0.1
        assert 0.1 - new <= 4 * ulp(0.1, np.float32)


@pytest.mark.parametrize("p", [1, 2, INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_reaches_the_norm_of_a_large_leaf(dtype: str, p: float) -> None:
    for at in (0, 2**16):
        leaf = np.ones(ALONE[0], DTYPES[dtype])
        leaf[at] = np.nan
        norm, clipped = norms_and_clips(leaf)[p]
        assert np.isnan(norm)
        assert np.isnan(clipped.astype(np.float32)).all()


def test_nan_reaches_the_metrics_of_a_clip_by_value() -> None:
    grads = tree(1)
    grads["a"][3, 0] = np.nan
    _, seen = step(COVERING)(grads, tree(2))["value"]
    assert np.isnan(seen["clip_by_value/norm"])
