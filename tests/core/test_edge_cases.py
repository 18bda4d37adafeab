"""Hostile inputs: the answer that is promised to each, measured in NumPy's float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.oracles import exact_tree_norm
from tests.support.trees import DTYPES, same_bits

NONFINITE = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])


def update(tx, grads, params=None):
    return tx.update(grads, tx.init(grads), params)[0]


# Non-finite entries.


def clip_in_every_way(grads):
    clips = {
        "tree": clipjax.clip_by_global_norm(1.0),
        "largest": clipjax.clip_by_global_norm(1.0, ord=np.inf),
        "leaves": clipjax.clip_by_norm(0.5),
        "rms": clipjax.clip_by_rms(0.5),
    }
    found = {name: tx.update(grads, tx.init(grads)) for name, tx in clips.items()}
    return {name: (clipped, state[0].nonfinite) for name, (clipped, state) in found.items()}


HOW = {"eager": clip_in_every_way, "jit": jax.jit(clip_in_every_way)}


@pytest.mark.parametrize(
    ("bad", "how"),
    [
        *((bad, "jit") for bad in (np.nan, np.inf, -np.inf)),
        (np.inf, "eager"),
        *(pytest.param(bad, "eager", marks=pytest.mark.full) for bad in (np.nan, -np.inf)),
    ],
)
def test_a_clip_propagates_a_nonfinite_entry_to_all_that_share_its_norm(bad, how):
    grads = (np.float32([bad, 4.0]), np.float32([1.0]))
    for name, (clipped, nonfinite) in HOW[how](grads).items():
        reached = [True, name in ("tree", "largest")]
        assert [bool(np.isnan(x).all()) for x in clipped] == reached
        assert [bool(np.isnan(x).any()) for x in clipped] == reached
        assert int(nonfinite) == 1


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
    seen = clipjax.metrics(state)
    assert int(seen["zero_nonfinite/nonfinite_count"]) == 3
    assert int(seen["zero_nonfinite/nonfinite_steps"]) == 1


@functools.cache
def step_that_may_be_skipped():
    tx = clipjax.bounded(
        optax.sgd(1.0, momentum=0.5),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.max_norm(3.0),
        nonfinite="skip",
    )
    params = np.ones((2, 1), np.float32)
    return tx.init(params), jax.jit(lambda grads, state: tx.update(grads, state, params))


@NONFINITE
def test_a_skipped_step_changes_neither_the_weights_nor_the_state(bad):
    state, step = step_that_may_be_skipped()
    _, before = step(np.full((2, 1), 0.3, np.float32), state)
    updates, after = step(np.float32([[bad], [0.4]]), before)
    np.testing.assert_array_equal(updates, 0)
    assert same_bits(before.inner, after.inner)
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
    assert same_bits(update(make(jnp.inf), grads, params), grads)


def test_a_schedule_may_reach_zero_and_overshoot():
    tx = clipjax.clip_by_global_norm(lambda step: 1.0 - step)
    grads = jnp.array([3.0, 4.0])
    state, norms = tx.init(grads), []
    step = jax.jit(tx.update)
    for _ in range(3):
        clipped, state = step(grads, state)
        norms.append(exact_tree_norm(clipped).astype(np.float64))
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


def test_an_array_is_a_bound_for_every_dtype():
    tx = clipjax.clip_by_norm(jnp.float32(1.0))
    grads = {kind: np.asarray([3, 4], dtype) for kind, dtype in DTYPES.items()}
    for kind, clipped in jax.jit(lambda grads: update(tx, grads))(grads).items():
        assert clipped.dtype == DTYPES[kind]
        np.testing.assert_allclose(np.asarray(clipped, np.float32), [0.6, 0.8], rtol=1e-2)


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
    assert float(state[0].norm) == 5
    np.testing.assert_allclose(clipped["w"], [0.6, 0.8], rtol=1e-6)
    for name in ("int", "bool"):
        assert same_bits(clipped[name], grads[name])
    assert clipped["empty"].shape == (0, 3)
    assert clipped["none"] is None
    assert (jax.random.key_data(clipped["key"]) == jax.random.key_data(grads["key"])).all()
    assert update(clipjax.clip_by_global_norm(1.0), {}) == {}


def test_a_zero_size_leaf_has_no_nan_anywhere():
    clips = (clipjax.clip_by_rms(0.1), clipjax.clip_by_norm(0.1, axes=0), clipjax.clip_by_value(0.1))

    @jax.jit
    def clip(grads):
        return [tx.update(grads, tx.init(grads)) for tx in clips]

    for clipped, state in clip((np.zeros((0, 3), np.float32), np.float32([[3.0], [4.0]]))):
        assert clipped[0].shape == (0, 3)
        assert np.isfinite(clipped[1]).all()
        assert np.isfinite(state[0].norm)
        assert np.isfinite(state[0].factor)


def test_the_state_is_a_carry_of_scan():
    tx = clipjax.clip_by_global_norm(1.0)
    grads = jnp.array([3.0, 4.0])
    state, clipped = jax.lax.scan(
        lambda state, _: tx.update(grads, state)[::-1], tx.init(grads), None, length=3
    )
    assert clipped.shape == (3, 2)
    assert int(state[0].steps) == 3
    assert float(state[0].norm) == 5


def test_a_projection_in_the_place_of_the_clip_is_an_error():
    with pytest.raises(ValueError, match="clip"):
        clipjax.bounded(optax.adam(1.0), clip=clipjax.max_norm(1.0))


def test_a_projection_without_parameters_says_what_it_needs():
    tx = clipjax.max_norm(1.0)
    with pytest.raises(ValueError, match="params"):
        tx.update(jnp.ones((2, 2)), tx.init(jnp.ones((2, 2))))
