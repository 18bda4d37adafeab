"""The gradient of an exploding linear network stays bounded at every step back through time."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import clipjax
from tests.support.backward import filled
from tests.support.oracles import INF, exact_norm, exact_tree_norm

STEPS, WIDTH, BOUND = 12, 4, 0.5
XS = np.random.default_rng(1).standard_normal((STEPS, WIDTH)).astype(np.float32)


def exploding(key: Any, shape: Any, dtype: Any = jnp.float32) -> Any:
    return 2.0 * jnp.eye(*shape, dtype=dtype)


class LinenCell(nn.RNNCellBase):
    """An exploding linear cell, its carry's gradient clipped, and measured on both sides."""

    bound: Any

    @nn.compact
    def __call__(self, carry, x):
        after = self.variable("probes", "after", jnp.zeros, ())
        before = self.variable("probes", "before", jnp.zeros, ())
        carry = clipjax.clip_gradient_by_norm(carry, jnp.inf, probe=after.value)
        carry = clipjax.clip_gradient_by_norm(carry, self.bound, probe=before.value)
        carry = nn.Dense(WIDTH, use_bias=False, kernel_init=exploding)(carry) + x
        return carry, carry

    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], WIDTH))

    @property
    def num_feature_axes(self):
        return 1


class NnxCell(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(exploding(None, (WIDTH, WIDTH)))

    def __call__(self, carry, x, before, after, bound):
        carry = clipjax.clip_gradient_by_norm(carry, jnp.inf, probe=after)
        carry = clipjax.clip_gradient_by_norm(carry, bound, probe=before)
        return carry @ self.kernel[...] + x


class ClippedCell(nnx.Module):
    """Any NNX cell, with the gradient of its carry clipped at each step."""

    def __init__(self, cell, bound):
        self.cell, self.bound = cell, bound

    def __call__(self, carry, x):
        return self.cell(jax.tree.map(lambda c: clipjax.clip_gradient_by_norm(c, self.bound), carry), x)

    def initialize_carry(self, *args, **kwargs):
        return self.cell.initialize_carry(*args, **kwargs)

    @property
    def num_feature_axes(self):
        return self.cell.num_feature_axes


def check(run: Any) -> None:
    """`run(bound)` gives the norms before and after clipping at each step."""
    before, _ = run(INF)
    np.testing.assert_allclose(before, 2.0 ** np.arange(STEPS, 0, -1) * 2, rtol=1e-5)  # it explodes
    before, after = run(BOUND)
    assert before.shape == after.shape == (STEPS,)
    assert np.all(np.asarray(after, np.float64) <= BOUND)
    np.testing.assert_allclose(after, np.full(STEPS, BOUND), rtol=1e-6)
    # What comes back to a step is the bound, doubled by the step; to the last, the loss' own.
    np.testing.assert_allclose(before, [2 * BOUND] * (STEPS - 1) + [4], rtol=1e-5)


@pytest.mark.parametrize("rnn", ["RNN", "scan"])
def test_linen(rnn):
    def applied(bound):
        """A function of variables, and one that makes them."""
        axes = {"variable_axes": {"probes": 0}, "variable_broadcast": "params"}
        if rnn == "RNN":
            model = nn.RNN(LinenCell(bound), return_carry=True, split_rngs={"params": False}, **axes)
            arguments = (XS[None],)
        else:
            model = nn.scan(LinenCell, split_rngs={"params": False}, **axes)(bound)
            arguments = (np.zeros(WIDTH, np.float32), XS)
        return lambda v: model.apply(v, *arguments)[0], lambda: model.init(jax.random.key(0), *arguments)

    variables = jax.jit(applied(BOUND)[1])()
    gradient = jax.jit(lambda v, bound: jax.grad(lambda v: jnp.sum(applied(bound)[0](v)))(v))

    def run(bound):
        probes = gradient(variables, bound)["probes"]
        probes = next(iter(probes.values())) if rnn == "RNN" else probes
        return probes["before"], probes["after"]

    check(run)


def test_nnx_scan():
    @nnx.jit
    def norms(cell, before, after, bound):
        @functools.partial(nnx.grad, argnums=(1, 2))
        def gradient(cell, before, after):
            @nnx.scan(in_axes=(None, nnx.Carry, 0, 0, 0), out_axes=nnx.Carry)
            def forward(cell, carry, *inputs):
                return cell(carry, *inputs, bound)

            return jnp.sum(forward(cell, jnp.zeros(WIDTH), XS, before, after))

        return gradient(cell, before, after)

    cell, zeros = NnxCell(), np.zeros(STEPS, np.float32)
    check(lambda bound: norms(cell, zeros, zeros, bound))


def test_lax_scan():
    def loss(probes, bound):
        def step(carry, inputs):
            x, (before, after) = inputs
            carry = clipjax.clip_gradient_by_norm(carry, jnp.inf, probe=after)
            carry = clipjax.clip_gradient_by_norm(carry, bound, probe=before)
            return 2.0 * carry + x, None

        return jnp.sum(lax.scan(step, jnp.zeros(WIDTH), (XS, probes))[0])

    gradient, zeros = jax.jit(jax.grad(loss)), np.zeros(STEPS, np.float32)
    check(lambda bound: gradient((zeros, zeros), bound))


def test_an_nnx_rnn_around_any_cell():
    @nnx.jit
    def at_the_start(carry, bound):
        cell = nnx.SimpleCell(
            WIDTH, WIDTH, activation_fn=lambda x: x, recurrent_kernel_init=exploding, rngs=nnx.Rngs(0)
        )
        rnn = nnx.RNN(ClippedCell(cell, bound), rngs=nnx.Rngs(1))

        def loss(rnn, carry):
            return jnp.sum(rnn(XS[None], initial_carry=carry)[:, -1])

        return nnx.grad(loss, argnums=1)(rnn, carry)

    carry = np.zeros((1, WIDTH), np.float32)
    np.testing.assert_allclose(float(exact_norm(at_the_start(carry, INF))), 2.0 ** (STEPS + 1), rtol=1e-5)
    assert 0.999 * BOUND < exact_norm(at_the_start(carry, BOUND)) <= BOUND


def test_an_lstm_under_linen_rnn():
    class Clipped(nn.OptimizedLSTMCell):
        def __call__(self, carry, x):
            return super().__call__(clipjax.clip_gradient_by_global_norm(carry, 1e-3), x)

    model = nn.RNN(Clipped(WIDTH))

    variables = filled(jax.eval_shape(model.init, jax.random.key(0), XS[None]))

    @jax.jit
    def gradient(carry):
        return jax.grad(lambda c: jnp.sum(model.apply(variables, XS[None], initial_carry=c)))(carry)

    norm = exact_tree_norm(gradient((np.zeros((1, WIDTH), np.float32),) * 2))
    assert 0.999e-3 < norm <= 1e-3
