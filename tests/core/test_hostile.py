"""Hostile inputs: the answer that is promised to each, measured in NumPy's float64."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax import functional

DTYPES = pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["f32", "bf16", "f16"]
)
NONFINITE = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])


def norm64(tree):
    leaves = [np.asarray(leaf).astype(np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(leaves))


def update(tx, grads, params=None):
    return tx.update(grads, tx.init(grads), params)[0]


def assert_same_bits(x, y):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# Precision and range.


def test_a_sum_over_many_bfloat16_leaves_does_not_stagnate():
    grads = [jnp.ones(1000, jnp.bfloat16)] * 300
    wanted = np.sqrt(300_000)
    assert float(functional.global_norm(grads)) == pytest.approx(wanted, rel=1e-6)
    # Each entry loses at most one of bfloat16's steps of 2^-7 to the rounding towards zero.
    assert 1 - 2**-7 < norm64(update(clipjax.clip_by_global_norm(1.0), grads)) <= 1


@COMPILED
@pytest.mark.parametrize(
    ("entry", "count", "dtype", "bound"),
    [
        (1e20, 100, jnp.float32, 1.0),
        (3e38, 1000, jnp.float32, 1e-3),
        (1e-25, 100, jnp.float32, 1e-26),
        (1e30, 64, jnp.bfloat16, 1.0),
        (50.0, 100, jnp.float16, 1.0),
        (6e4, 1000, jnp.float16, 1.0),
        (1e-4, 10, jnp.float16, 1e-4),
        (6e-8, 9, jnp.float16, 1e-7),
    ],
)
def test_norms_neither_overflow_nor_underflow(entry, count, dtype, bound, compiled):
    grads = jnp.full(count, entry, dtype)
    tx = clipjax.clip_by_global_norm(bound)
    run = jax.jit(tx.update) if compiled else tx.update
    clipped, state = run(grads, tx.init(grads))
    expected = norm64(grads)
    if expected < np.finfo(np.float32).max:
        assert float(state.seen.norm) == pytest.approx(expected, rel=1e-6)
    # A subnormal float16 has steps of 6e-8, which is what an entry may lose.
    lost = float(jnp.finfo(dtype).eps) + np.sqrt(count) * float(jnp.finfo(dtype).smallest_subnormal) / bound
    assert bound * (1 - lost) * (1 - 4e-7) <= norm64(clipped) <= np.float64(bound)


@DTYPES
def test_mixed_dtypes_keep_theirs(dtype):
    grads = {"a": jnp.full(4, 3, dtype), "b": jnp.full(4, 3.0), "c": jnp.full(4, 3, jnp.float16)}
    clipped = update(clipjax.clip_by_global_norm(1.0), grads)
    assert jax.tree.map(lambda x: x.dtype, clipped) == jax.tree.map(lambda x: x.dtype, grads)
    assert 0.98 < norm64(clipped) <= 1


# Non-finite entries.


@NONFINITE
@COMPILED
def test_a_clip_propagates_a_nonfinite_entry_to_all_that_share_its_norm(bad, compiled):
    grads = (jnp.array([bad, 4.0]), jnp.array([1.0]))
    for tx, reached in [
        (clipjax.clip_by_global_norm(1.0), (True, True)),
        (clipjax.clip_by_norm(0.5), (True, False)),
        (clipjax.clip_by_rms(0.5), (True, False)),
    ]:
        run = jax.jit(tx.update) if compiled else tx.update
        clipped, state = run(grads, tx.init(grads))
        assert [bool(jnp.isnan(x).all()) for x in clipped] == list(reached)
        assert [bool(jnp.isnan(x).any()) for x in clipped] == list(reached)
        assert int(state.seen.nonfinite) == 1


@NONFINITE
def test_a_projection_of_a_nonfinite_unit_is_loud(bad):
    kernel = jnp.array([[bad, 3.0], [4.0, 4.0]])
    projected = np.asarray(clipjax.max_norm(1.0)(kernel))
    assert np.isnan(projected[:, 0]).all()
    assert np.linalg.norm(projected[:, 1].astype(np.float64)) == pytest.approx(1, rel=1e-6)


def test_value_clipping_takes_infinity_to_the_limit_and_leaves_nan():
    clipped = update(clipjax.clip_by_value(1.0), jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.5]))
    np.testing.assert_array_equal(clipped, [np.nan, 1, -1, 0.5])


def test_nonfinite_entries_can_be_zeroed_and_are_counted():
    tx = optax.chain(clipjax.zero_nonfinite(), clipjax.clip_by_global_norm(1.0))
    grads = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3.0])
    clipped, state = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(clipped, [0, 0, 0, 1], rtol=1e-6)
    assert int(clipjax.metrics(state)["zero_nonfinite/nonfinite_count"]) == 3


@NONFINITE
def test_a_skipped_step_changes_neither_the_weights_nor_the_state(bad):
    tx = clipjax.bounded(
        optax.sgd(1.0, momentum=0.5),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.max_norm(3.0),
        nonfinite="skip",
    )
    params = jnp.ones((2, 1))
    _, before = tx.update(jnp.full((2, 1), 0.3), tx.init(params), params)
    updates, after = tx.update(jnp.array([[bad], [0.4]]), before, params)
    np.testing.assert_array_equal(updates, 0)
    for x, y in zip(jax.tree.leaves(before.inner), jax.tree.leaves(after.inner), strict=True):
        assert_same_bits(x, y)
    assert int(after.skipped) == 1


# Bounds.


@pytest.mark.parametrize(
    "make",
    [
        clipjax.clip_by_global_norm,
        clipjax.clip_by_norm,
        clipjax.clip_by_rms,
        clipjax.clip_by_value,
        lambda bound: clipjax.max_norm(bound, axes=None),
    ],
    ids=["global_norm", "norm", "rms", "value", "max_norm"],
)
@pytest.mark.parametrize("grads", [[0.0, 0.0], [3.0, -4.0]], ids=["zeros", "norm 5"])
def test_a_bound_of_zero_gives_zeros_and_one_of_infinity_nothing(make, grads):
    grads = jnp.array(grads)
    params = jnp.zeros(2)
    np.testing.assert_array_equal(update(make(0.0), grads, params), 0)
    assert_same_bits(update(make(jnp.inf), grads, params), grads)


def test_a_schedule_may_reach_zero_and_overshoot():
    tx = clipjax.clip_by_global_norm(lambda step: 1.0 - step)
    grads = jnp.array([3.0, 4.0])
    state, norms = tx.init(grads), []
    for _ in range(3):
        clipped, state = jax.jit(tx.update)(grads, state)
        norms.append(norm64(clipped))
    # Beyond zero it stays there: a negative bound would flip the sign.
    np.testing.assert_allclose(norms, [1, 0, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (clipjax.clip_by_global_norm, "max_norm"),
        (clipjax.clip_by_norm, "max_norm"),
        (clipjax.clip_by_rms, "threshold"),
        (clipjax.clip_by_value, "bound"),
        (clipjax.max_norm, "radius"),
    ],
)
@pytest.mark.parametrize(
    ("bound", "error"), [(-1.0, ValueError), (np.nan, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_a_senseless_bound_is_named_when_it_is_given(make, name, bound, error):
    with pytest.raises(error, match=rf"{name}.*{bound}"):
        make(bound)


@DTYPES
def test_an_array_is_a_bound_for_every_dtype(dtype):
    clipped = update(clipjax.clip_by_global_norm(jnp.float32(1.0)), jnp.array([3, 4], dtype))
    assert clipped.dtype == dtype
    np.testing.assert_allclose(clipped.astype(jnp.float32), [0.6, 0.8], rtol=1e-2)


# Leaves.


def test_what_is_no_float_passes_through_and_does_not_count():
    grads = {
        "w": jnp.array([3.0, 4.0]),
        "int": jnp.array([100]),
        "bool": jnp.array([True]),
        "empty": jnp.zeros((0, 3)),
        "none": None,
        "key": jax.random.key(0),
    }
    tx = clipjax.clip_by_global_norm(1.0)
    clipped, state = tx.update(grads, tx.init(grads))
    assert float(state.seen.norm) == 5
    np.testing.assert_allclose(clipped["w"], [0.6, 0.8], rtol=1e-6)
    for name in ("int", "bool"):
        assert_same_bits(clipped[name], grads[name])
    assert clipped["empty"].shape == (0, 3)
    assert clipped["none"] is None
    assert (jax.random.key_data(clipped["key"]) == jax.random.key_data(grads["key"])).all()
    assert update(clipjax.clip_by_global_norm(1.0), {}) == {}


def test_a_zero_size_leaf_has_no_nan_anywhere():
    grads = (jnp.zeros((0, 3)), jnp.array([[3.0], [4.0]]))
    for tx in (clipjax.clip_by_rms(0.1), clipjax.clip_by_norm(0.1, axes=0), clipjax.clip_by_value(0.1)):
        clipped, state = tx.update(grads, tx.init(grads))
        assert clipped[0].shape == (0, 3)
        assert np.isfinite(clipped[1]).all()
        assert np.isfinite(state.seen.norm)
        assert np.isfinite(state.seen.scale)


# The bound is a bound.


@DTYPES
def test_no_bound_is_exceeded_and_little_is_lost(dtype):
    clip = jax.jit(lambda x, c: functional.clip_by_global_norm(x, c)[0])
    project = jax.jit(lambda x, c: clipjax.max_norm(c, axes=None)(x))

    @jax.jit
    def step(x, c):
        tx = optax.chain(optax.sgd(0.1), clipjax.max_norm(c, axes=None))
        params = x * jnp.asarray(0.5, x.dtype)
        return optax.apply_updates(
            params, tx.update(x * jnp.asarray(-5, x.dtype), tx.init(params), params)[0]
        )

    eps = float(jnp.finfo(dtype).eps)
    for seed in range(150):
        random = np.random.default_rng(seed)
        x = jnp.asarray(random.standard_normal(257) * 10 ** random.uniform(-1, 1), dtype)
        bound = np.float32(norm64(x) * random.uniform(0.1, 0.9))
        for bound_to in (clip, project, step):
            norm = norm64(bound_to(x, bound))
            assert norm <= np.float64(bound)
            assert norm >= np.float64(bound) * (1 - 4 * eps)


@DTYPES
def test_what_is_inside_does_not_move(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 8)), dtype)
    for inside in (
        functional.clip_by_global_norm(x, 1e3)[0],
        functional.clip_by_norm(x, 1e3, axes=0),
        functional.clip_by_value(x, -1e3, 1e3),
        clipjax.max_norm(1e3)(x),
    ):
        assert_same_bits(inside, x)


# Derivatives, axes, devices, chains.


def test_the_gradient_through_a_clip_is_finite_at_zero_and_right_elsewhere():
    def total(x):
        return functional.clip_by_global_norm(x, 1.0)[0].sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.zeros(2)), 1)
    # d(x + y)/|v| = (y (y - x), x (x - y)) / |v|^3
    np.testing.assert_allclose(jax.grad(total)(jnp.array([3.0, 4.0])), [4 / 125, -3 / 125], rtol=1e-5)


def test_the_units_of_a_conv1d_kernel_are_its_output_channels():
    norms = functional.unit_norms(jnp.ones((5, 4, 8)), clipjax.fan_in)
    np.testing.assert_allclose(norms, np.full(8, np.sqrt(20)), rtol=1e-6)


def test_the_state_is_a_carry_of_scan():
    tx = clipjax.clip_by_global_norm(1.0)
    grads = jnp.array([3.0, 4.0])
    state, clipped = jax.lax.scan(
        lambda state, _: tx.update(grads, state)[::-1], tx.init(grads), None, length=3
    )
    assert clipped.shape == (3, 2)
    assert int(state.seen.steps) == 3
    assert float(state.seen.norm) == 5


def test_a_projection_in_the_place_of_the_clip_is_an_error():
    with pytest.raises(ValueError, match="clip"):
        clipjax.bounded(optax.adam(1.0), clip=clipjax.max_norm(1.0))


def test_a_projection_without_parameters_says_what_it_needs():
    tx = clipjax.max_norm(1.0)
    with pytest.raises(ValueError, match="params"):
        tx.update(jnp.ones((2, 2)), tx.init(jnp.ones((2, 2))))


_SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import clipjax
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
tx = clipjax.clip_by_global_norm(1.0)
def clip(grads):
    return tx.update(grads, tx.init(grads))[0]
split = jax.jit(jax.shard_map(clip, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
print(np.linalg.norm(np.asarray(split(jnp.arange(1.0, 65.0)), np.float64)))
"""


def test_the_norm_inside_shard_map_is_that_of_all_devices():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _SHARDED],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 1 - 4e-7 < float(done.stdout) <= 1
