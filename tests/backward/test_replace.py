"""A function with the value of one and the derivatives, of every order, of another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from tests.support.backward import close, each_dtype
from tests.support.trees import same_bits


def test_straight_through():
    x = np.array([0.2, 1.7, -3.5], np.float32)
    rounded = clipjax.replace_gradient(jnp.round, lambda x: x)

    @jax.jit
    def derivatives(x):
        value, pull = jax.vjp(rounded, x)
        return value, pull(x)[0], jax.jvp(rounded, (x,), (x,))[1], jax.vmap(jax.grad(rounded))(x)

    value, pulled_back, pushed, each = derivatives(x)
    assert same_bits(value, np.round(x))
    assert same_bits(rounded(x), np.round(x))
    np.testing.assert_array_equal(pulled_back, x)
    np.testing.assert_array_equal(pushed, x)
    np.testing.assert_array_equal(each, np.ones(3))


@each_dtype
def test_the_value_is_exact(dtype):
    x = np.array([1.5, -0.0, np.inf, np.nan, 1e-6]).astype(dtype)
    # A sum and a difference would make NaN of the infinity, and round.
    f = clipjax.replace_gradient(lambda x: x, lambda x: 3e4 * x)
    wrapped = (f, jax.vmap(f), jax.checkpoint(f))
    values, gradient = jax.jit(lambda x, g: ([g(x) for g in wrapped], jax.vjp(f, x)[1](g)[0]))(
        x, np.ones_like(x)
    )
    for value in values:
        assert value.dtype == dtype
        assert same_bits(value, x)
    np.testing.assert_array_equal(np.asarray(gradient), np.full(5, 3e4).astype(dtype))


def test_derivatives_of_every_order_are_those_of_backward():
    f = clipjax.replace_gradient(jnp.floor, lambda x: x**3)

    def outer(x):
        return jnp.sin(f(x))

    @jax.jit
    def derivatives(x):
        modes = (jax.grad, jax.jacfwd)
        first = [a(f) for a in modes]
        second = [b(g) for g in first for b in modes]
        third = [c(g) for g in second for c in modes]
        orders = [[g(x) for g in order] for order in (first, second, third)]
        return orders, jax.grad(outer)(x), jax.grad(jax.grad(outer))(x)

    orders, slope, curvature = derivatives(1.5)
    for order, want in zip(orders, (3 * 1.5**2, 6 * 1.5, 6.0), strict=True):
        for got in order:
            close(got, want)
    close(slope, np.cos(1.0) * 3 * 1.5**2)
    # The outer slope is taken at forward's value, and moves with backward's gradient.
    close(curvature, -np.sin(1.0) * (3 * 1.5**2) ** 2 + np.cos(1.0) * 9)


def test_trees_and_several_arguments():
    def forward(a, *, b):
        return {"sign": jnp.sign(a["x"]), "n": a["n"], "none": None}

    def backward(a, *, b):
        return {"sign": a["x"] * b, "n": a["n"], "none": None}

    def loss(x, b):
        out = clipjax.replace_gradient(forward, backward)({"x": x, "n": np.arange(2, dtype=np.int32)}, b=b)
        assert out["n"].dtype == jnp.int32
        return jnp.sum(out["sign"])

    value, (in_x, in_b) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(
        np.array([-2.0, 3.0], np.float32), 5.0
    )
    assert value == 0
    np.testing.assert_array_equal(in_x, [5, 5])
    assert in_b == 1


def test_values_closed_over():
    def loss(w, x):
        return clipjax.replace_gradient(lambda x: jnp.sign(w * x), lambda x: w * w * x)(x)

    @jax.jit
    def derivatives(w, x):
        return [
            (
                jax.grad(f, argnums=(0, 1))(w, x),
                jax.jvp(f, (w, x), (jnp.ones_like(w), jnp.ones_like(x))),
                jax.grad(jax.grad(f))(w, x),
            )
            for f in (loss, jax.jit(loss), jax.checkpoint(loss))
        ]

    for gradient, along, second in derivatives(3.0, 2.0):
        close(gradient, (12.0, 9.0))
        close(along, (1.0, 21.0))
        close(second, 4.0)


def test_forward_need_not_be_differentiable():
    def host(x):
        return jax.pure_callback(lambda x: np.round(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    f = clipjax.replace_gradient(host, lambda x: x)
    for call in (f, lambda x: f(x=x)):
        gradient = jax.jit(jax.grad(lambda x, call=call: jnp.sum(call(x))))(np.ones(3, np.float32))
        np.testing.assert_array_equal(gradient, np.ones(3))


def test_weak_types_and_python_numbers():
    f = clipjax.replace_gradient(lambda x: 1.0, lambda x: x)
    assert f(3.0) == 1.0
    assert jax.grad(f)(3.0) == 1.0
    assert jax.eval_shape(clipjax.replace_gradient(jnp.round, lambda x: x), 2.0).weak_type


def test_errors_name_both():
    x = np.ones((2, 3), np.float32)

    def fails(forward, backward, match):
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(clipjax.replace_gradient(forward, backward), x)

    fails(lambda x: x, lambda x: x[0], r"forward returns float32\[2, 3\], but backward returns float32\[3\]")
    fails(
        lambda x: x.astype(int), lambda x: x, r"forward returns int32\[2, 3\], but backward returns float32"
    )
    fails(lambda x: {"a": x}, lambda x: {"a": x.astype(jnp.float16)}, r"at \['a'\]")
    fails(lambda x: (x, x), lambda x: x, r"forward returns PyTreeDef.*, but backward returns PyTreeDef")
    with pytest.raises(TypeError, match="backward must be a function, got 1"):
        clipjax.replace_gradient(jnp.round, 1)
    with pytest.raises(TypeError, match="forward must be a function"):
        clipjax.replace_gradient(None, jnp.round)
