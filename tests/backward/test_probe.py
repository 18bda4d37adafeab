"""A probe: the norm before clipping, as the gradient of a number that changes nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipjax
from tests.support.backward import CLIPS, MATRIX, close, each_clip, small_tree, weighted_sum
from tests.support.oracles import exact_norm, exact_tree_norm
from tests.support.trees import DTYPES, flat, same_bits


def zero(dtype=np.float32):
    return np.zeros((), dtype)


@each_clip
def test_is_the_norm_before(name):
    """A measurement of the dtype of the probe, whose own derivatives are zero."""
    x, w = small_tree(5), small_tree(4)

    def loss(x, probe, w):
        return weighted_sum(w, CLIPS[name](x, probe=probe))

    @jax.jit
    def gradients(x, w):
        found = {key: jax.grad(loss, argnums=(0, 1))(x, zero(DTYPES[key]), w) for key in ("f32", "bf16")}
        of_the_norm = jax.grad(lambda w: jax.grad(loss, argnums=1)(x, zero(), w))(w)
        return found, jax.grad(loss)(x, None, w), of_the_norm

    found, without, of_the_norm = gradients(x, w)
    want = {
        "value": np.abs(flat(w)).max(),
        "norm": max(exact_norm(x) for x in w.values()),
        "units": max(np.max(exact_norm(x, 0 if x.ndim else None)) for x in w.values()),
        "global": exact_tree_norm(w),
    }[name]
    for key, rtol in (("f32", 1e-6), ("bf16", 1e-2)):
        gradient, norm = found[key]
        assert norm.dtype == DTYPES[key]
        np.testing.assert_allclose(float(norm), float(want), rtol=rtol)
        assert same_bits(gradient, without)
    assert not flat(of_the_norm).any()


def test_changes_nothing():
    def f(x, probe):
        return jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0, probe=probe) ** 2)

    value = jax.jit(f)
    gradient = jax.jit(jax.grad(f))
    measured = jax.jit(jax.grad(f, argnums=1))
    want = gradient(MATRIX, None)
    for probe in (0.0, 7.0, np.nan, np.inf):
        assert value(MATRIX, np.float32(probe)) == 30.0
        assert same_bits(gradient(MATRIX, np.float32(probe)), want)
        np.testing.assert_allclose(measured(MATRIX, np.float32(probe)), 2 * np.sqrt(30), rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["norm", *(pytest.param(name, marks=pytest.mark.full) for name in ("value", "units", "global"))]
)
def test_second_derivatives_with_a_probe(name):
    def f(x, probe):
        return jnp.sum(CLIPS[name](x, probe=probe) ** 3)

    @jax.jit
    def derivatives(x):
        with_probe = (jax.hessian(f)(x, zero()), jax.jacrev(jax.grad(f))(x, zero()))
        return jax.hessian(f)(x, None), with_probe, jax.grad(jax.grad(f, argnums=1))(x, zero())

    want, with_probe, of_the_norm = derivatives(MATRIX[0])
    for hessian in with_probe:
        close(hessian, want)
    assert not np.any(of_the_norm)  # it is a measurement


def test_infinity_only_measures():
    g = np.array([3.0, 4.0], np.float32)

    def f(x, probe):
        return jnp.vdot(g, clipjax.clip_gradient_by_norm(x, jnp.inf, probe=probe))

    gradient, norm = jax.jit(jax.grad(f, argnums=(0, 1)))(g, zero())
    assert same_bits(gradient, g)
    assert norm == 5


def test_one_for_each_step():
    def loss(c, probes):
        def step(c, probe):
            return (clipjax.clip_gradient_by_norm(2 * c, 1.0, probe=probe), None)

        return jnp.sum(lax.scan(step, c, probes)[0])

    @jax.jit
    def norms(c, probes):
        return [jax.grad(f, argnums=1)(c, probes) for f in (loss, jax.checkpoint(loss), jax.jit(loss))]

    for found in norms(np.ones(4, np.float32), np.zeros(5, np.float32)):
        np.testing.assert_allclose(found, [2, 2, 2, 2, 2], rtol=1e-6)


def test_one_for_each_example():
    def one(x, probe):
        return jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0, probe=probe) ** 2) / 2

    @jax.jit
    def norms(x, probes, probe):
        return (
            jax.grad(lambda p: jnp.sum(jax.vmap(one)(x, p)))(probes),
            jax.vmap(jax.grad(one, argnums=1), (0, None))(x, probe),
            jax.grad(lambda p: jnp.sum(jax.vmap(one, (0, None))(x, p)))(probe),
        )

    want = np.linalg.norm(MATRIX, axis=1)
    mapped, of_one, shared = norms(MATRIX, np.zeros(2, np.float32), zero())
    np.testing.assert_allclose(mapped, want, rtol=1e-6)
    np.testing.assert_allclose(of_one, want, rtol=1e-6)
    np.testing.assert_allclose(shared, want.sum(), rtol=1e-6)  # what is used twice adds up


def test_errors():
    for probe in (np.zeros(2, np.float32), 0, np.zeros((), np.int32), 1j):
        with pytest.raises(TypeError, match="probe must be a float scalar"):
            clipjax.clip_gradient_by_norm(MATRIX, 1.0, probe=probe)
