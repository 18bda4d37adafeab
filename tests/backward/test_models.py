"""The plain function between two layers of a model, in Linen and in NNX."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import clipjax
from tests.support.backward import close, filled
from tests.support.oracles import exact_norm
from tests.support.trees import same_bits

X = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)


def test_linen():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, bound):
            x = nn.tanh(nn.Dense(4)(x))
            x = self.perturb("after", x)  # Flax' own way to see a gradient
            x = clipjax.clip_gradient_by_norm(x, bound)
            x = self.perturb("before", x)
            return nn.Dense(1)(x)

    variables = filled(jax.eval_shape(Model().init, jax.random.key(0), X, 1.0))
    variables["perturbations"] = jax.tree.map(np.zeros_like, variables["perturbations"])

    @jax.jit
    def gradients(variables, bound):
        return jax.grad(lambda v: 100 * jnp.mean(Model().apply(v, X, bound) ** 2))(variables)

    free, clipped = gradients(variables, np.inf), gradients(variables, 1.0)
    before, after = (clipped["perturbations"][key] for key in ("before", "after"))
    assert same_bits(before, free["perturbations"]["before"])
    assert exact_norm(before) > 2
    assert 1 - 1e-6 <= exact_norm(after) <= 1
    want = np.asarray(free["params"]["Dense_0"]["kernel"]) / float(exact_norm(before))
    close(clipped["params"]["Dense_0"]["kernel"], want, rtol=1e-5)
    assert same_bits(clipped["params"]["Dense_1"], free["params"]["Dense_1"])


def test_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x, bound, probe):
            x = clipjax.clip_gradient_by_norm(jnp.tanh(self.one(x)), bound, probe=probe)
            return self.two(x)

    model = nnx.jit(lambda: Model(nnx.Rngs(0)))()

    @nnx.jit
    def gradients(model, bound):
        def loss(m, probe):
            return 100 * jnp.mean(m(X, bound, probe) ** 2)

        return nnx.grad(loss, argnums=(0, 1))(model, jnp.zeros(()))

    (free, norm), (clipped, norm_too) = gradients(model, np.inf), gradients(model, 1.0)
    assert norm == norm_too
    assert norm > 2
    close(clipped["one"]["kernel"][...], np.asarray(free["one"]["kernel"][...]) / np.asarray(norm), rtol=1e-5)
    assert same_bits(clipped["two"]["kernel"][...], free["two"]["kernel"][...])
