"""A clip is no linear function of the gradient, so it has no forward mode, and says what to do instead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipjax
from tests.support.backward import close


@pytest.mark.parametrize("name", ["value", "norm", "global_norm"])
def test_clips_say_what_to_do(name):
    def f(x):
        return jnp.sum(getattr(clipjax, f"clip_gradient_by_{name}")(x, 1.0) ** 2)

    x = np.ones(3, np.float32)
    for attempt in (
        lambda: jax.jvp(f, (x,), (x,)),
        lambda: jax.jacfwd(f)(x),
        lambda: jax.jit(jax.jacfwd(f))(x),
        lambda: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
        lambda: jax.jvp(jax.jit(f), (x,), (x,)),
        lambda: jax.linearize(f, x)[1](x),
        lambda: jax.jacfwd(jax.jacfwd(f))(x),
        lambda: jax.jvp(lambda x: lax.scan(lambda c, _: (c + f(x), None), 0.0, None, 2)[0], (x,), (x,)),
    ):
        with pytest.raises(TypeError, match=f"(?s)clip_gradient_by_{name} has no forward-mode.*reverse"):
            attempt()


def test_a_linearized_clip_transposes():
    x = np.array([3.0, 4.0], np.float32)
    _, linear = jax.linearize(lambda x: clipjax.clip_gradient_by_norm(x, 1.0), x)
    close(jax.jit(lambda c: jax.linear_transpose(linear, x)(c)[0])(x), [0.6, 0.8])


def test_scaling_has_both_modes():
    def f(x):
        return jnp.sum(jnp.sin(clipjax.scale_gradient(x, 3.0)))

    @jax.jit
    def derivatives(x, v):
        modes = (jax.jacfwd, jax.jacrev)
        wrapped = (f, jax.jit(f), jax.checkpoint(f))
        second = [outer(inner(g))(x) for outer in modes for inner in modes for g in wrapped]
        return jax.jvp(f, (x,), (v,)), jax.grad(f)(x), second

    x, v = np.array([0.5, 1.0], np.float32), np.array([2.0, -1.0], np.float32)
    (value, tangent), gradient, second = derivatives(x, v)
    close(value, np.sin(x).sum())
    close(tangent, 3 * np.vdot(np.cos(x), v))
    close(gradient, 3 * np.cos(x))
    # The gradient is 3 cos(x): it was scaled once, and this is its derivative.
    for jacobian in second:
        close(jacobian, np.diag(-3 * np.sin(x)))
