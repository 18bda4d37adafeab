"""Derivatives of clipped gradients, against central differences in NumPy float64.

A gradient is clipped once: what differentiates it again gets the derivative of what came out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipjax
from tests.support.backward import CLIPS, close, expected, jacobian_of, pulled

RNG = np.random.default_rng(3)
A, W = RNG.standard_normal((4, 4)), RNG.standard_normal(4)
X, V = RNG.standard_normal(4), RNG.standard_normal(4)

WRAPPERS: dict[str, Callable[[Any], Any]] = {"plain": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}
near = functools.partial(close, rtol=1e-4, atol=1e-4)


def single(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def loss_of(name: str) -> Callable[[Any], Any]:
    return lambda x: jnp.sum(single(W) * jnp.sin(CLIPS[name](single(A) @ x + x**2)))


def gradient(name: str, x: np.ndarray) -> np.ndarray:
    """Of the loss, in float64."""
    return (A + 2 * np.diag(x)).T @ expected(name, W * np.cos(A @ x + x**2))


@functools.cache
def derivatives(name: str) -> Callable[..., dict[str, Any]]:
    """Of every order, in one program."""

    def of(x: Any, v: Any) -> dict[str, Any]:
        loss = loss_of(name)
        forward_over_reverse, third = jax.jvp(jax.hessian(loss), (x,), (v,))
        return {
            "gradient": jax.grad(loss)(x),
            "forward over reverse": forward_over_reverse,
            "reverse over reverse": jax.jacrev(jax.jacrev(loss))(x),
            "third along v": third,
        }

    return jax.jit(of)


# The norms of whole leaves are those of what is wrapped.
each_other_clip = pytest.mark.parametrize(
    "name", ["value", "units", "global", pytest.param("norm", marks=pytest.mark.full)]
)


@each_other_clip
def test_second_derivatives(name):
    want = jacobian_of(functools.partial(gradient, name), X)
    if name != "value":
        assert np.abs(want - want.T).max() > 0.01  # not symmetric: the wrong orientation would show
    got = derivatives(name)(single(X), single(V))
    near(got["gradient"], gradient(name, X))
    near(got["forward over reverse"], want)
    near(got["reverse over reverse"], want)


@each_other_clip
def test_third_derivatives_are_finite_and_consistent(name):
    at, e = derivatives(name), 1e-2
    third = at(single(X), single(V))["third along v"]
    after, before = (
        np.asarray(at(single(X + s * e * V), single(V))["forward over reverse"]) for s in (1, -1)
    )
    assert np.isfinite(third).all()
    close(third, (after - before) / (2 * e), rtol=0.02, atol=0.02)


def hessian(f: Callable[[Any], Any], x: Any) -> dict[str, Any]:
    return {"forward over reverse": jax.hessian(f)(x), "reverse over reverse": jax.jacrev(jax.jacrev(f))(x)}


def products(f: Callable[[Any], Any], x: Any, v: Any) -> dict[str, Any]:
    """The Jacobian of the gradient times v, and v times it."""
    return {
        "J v": jax.jvp(jax.grad(f), (x,), (v,))[1],
        "v J": jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), v))(x),
    }


def judge(name: str, found: dict[str, Any]) -> None:
    jacobian = jacobian_of(functools.partial(gradient, name), X)
    want = {"J v": jacobian @ V, "v J": jacobian.T @ V}
    for key, got in found.items():
        near(got, want.get(key, jacobian))


@pytest.mark.parametrize(
    "name", ["norm", *(pytest.param(name, marks=pytest.mark.full) for name in ("value", "units", "global"))]
)
def test_second_derivatives_of_what_is_wrapped(name):
    @jax.jit
    def found(x, v):
        fs = [wrap(loss_of(name)) for wrap in WRAPPERS.values()]
        return [hessian(f, x) | products(f, x, v) for f in fs]

    for of_one in found(single(X), single(V)):
        judge(name, of_one)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("norm", "jit"),
        *(
            pytest.param(name, wrap, marks=pytest.mark.full)
            for name in CLIPS
            for wrap in WRAPPERS
            if (name, wrap) != ("norm", "jit")
        ),
    ],
)
def test_outside_of_jit(name, wrap):
    judge(name, products(WRAPPERS[wrap](loss_of(name)), single(X), single(V)))


def test_with_respect_to_the_cotangent():
    def jacobian(g, bound):
        return jax.jacrev(lambda g: pulled(lambda x: clipjax.clip_gradient_by_norm(x, bound), g))(g)

    g, unit = single([3, 4]), np.array([0.6, 0.8])
    outside, inside = jax.jit(lambda g: (jacobian(g, 1.0), jacobian(g, 10.0)))(g)
    close(outside, (np.eye(2) - np.outer(unit, unit)) / 5)
    close(inside, np.eye(2))


def test_finite_at_zero():
    def f(x):
        return jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0) ** 2)

    close(jax.jit(jax.hessian(f))(np.zeros(3, np.float32)), 2 * np.eye(3))


def test_with_respect_to_the_bound():
    """Through the gradient: a bound can be learned."""

    def clipped(bound):
        return jax.grad(lambda x: jnp.sum(clipjax.clip_gradient_by_norm(x, bound) ** 2) / 2)(single([3, 4]))

    for jacobian in jax.jit(lambda bound: (jax.jacrev(clipped)(bound), jax.jacfwd(clipped)(bound)))(1.0):
        close(jacobian, [0.6, 0.8])


def test_a_scan_of_clips():
    def loss(x):
        def step(c, _):
            return (jnp.sin(2 * clipjax.clip_gradient_by_norm(c, 0.5)), None)

        return jnp.sum(lax.scan(step, x, None, length=3)[0])

    def by_hand(x):
        carries = [x]
        for _ in range(3):
            carries.append(np.sin(2 * carries[-1]))
        g = np.ones(3)
        for carry in reversed(carries[:3]):
            g = expected("norm", 2 * np.cos(2 * carry) * g)
        return g

    x = np.array([0.1, -0.4, 0.2])
    want = jacobian_of(by_hand, x)
    assert np.abs(want - want.T).max() > 0.01
    for f in (loss, jax.checkpoint(loss)):
        got, hessians = jax.jit(lambda x, f=f: (jax.grad(f)(x), hessian(f, x)))(single(x))
        close(got, by_hand(x))
        for jacobian in hessians.values():
            close(jacobian, want, rtol=1e-4, atol=1e-5)
