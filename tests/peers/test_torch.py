"""The clips of gradients in PyTorch, its hooks, and its straight-through estimator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.support.peers import CLOSE, SEEDS, assert_close, draw

pytestmark = pytest.mark.peer


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def gradients(torch, leaves):
    parameters = [torch.nn.Parameter(torch.zeros(leaf.shape)) for leaf in leaves]
    for parameter, leaf in zip(parameters, leaves, strict=True):
        parameter.grad = torch.tensor(leaf)
    return parameters


@SEEDS
@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
def test_clip_grad_norm(torch, seed, p):
    leaves, bound = draw(seed)
    parameters = gradients(torch, leaves)
    norm = torch.nn.utils.clip_grad_norm_(parameters, bound, norm_type=float(p))
    clipped, ours = functional.clip_by_global_norm(leaves, bound, ord=p)
    np.testing.assert_allclose(ours, norm.numpy(), **CLOSE)
    # Torch divides by its norm plus 1e-6.
    for a, parameter in zip(clipped, parameters, strict=True):
        np.testing.assert_allclose(a, parameter.grad.numpy(), rtol=2e-6 + 2e-6 / float(norm), atol=1e-37)


@SEEDS
def test_clip_grad_value(torch, seed):
    leaves, bound = draw(seed)
    parameters = gradients(torch, leaves)
    torch.nn.utils.clip_grad_value_(parameters, bound / 20)
    assert_close(functional.clip_by_value(leaves, -bound / 20, bound / 20), [p.grad for p in parameters])


@pytest.mark.parametrize("seed", range(3))
def test_hooks(torch, seed):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((2, 5, 5)).astype(np.float32)

    def theirs(hook):
        leaf = torch.tensor(x, requires_grad=True)
        y = torch.sin(leaf)
        y.register_hook(hook)
        torch.sum(y @ torch.tensor(w)).backward()
        return leaf.grad.numpy()

    def ours(layer):
        return jax.jit(jax.grad(lambda x: jnp.sum(layer(jnp.sin(x)) @ w)))(x)

    pairs = (
        (lambda y: clipjax.clip_gradient_by_value(y, -0.3, 0.5), lambda g: g.clamp(-0.3, 0.5)),
        (lambda y: clipjax.clip_gradient_by_norm(y, 0.5), lambda g: g * (0.5 / g.norm()).clamp(max=1.0)),
        (
            lambda y: clipjax.clip_gradient_by_norm(y, 0.5, axes=1),
            lambda g: g * (0.5 / g.norm(dim=1, keepdim=True)).clamp(max=1.0),
        ),
        (lambda y: clipjax.scale_gradient(y, -2.5), lambda g: -2.5 * g),
    )
    for layer, hook in pairs:
        np.testing.assert_allclose(ours(layer), theirs(hook), rtol=1e-5, atol=1e-6)


def test_straight_through(torch):
    x = np.array([0.2, 1.7, -3.4], np.float32)
    leaf = torch.tensor(x, requires_grad=True)
    torch.sum((leaf + (torch.round(leaf) - leaf).detach()) ** 2).backward()
    rounded = clipjax.replace_gradient(jnp.round, lambda x: x)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(rounded(x) ** 2))(x), leaf.grad.numpy(), rtol=1e-6)


@SEEDS
def test_orthogonal_gradients(torch, seed):
    """`tangent_space` beside the formula of OrthoGrad, in PyTorch's float64."""
    weights, grads = (draw(s)[0] for s in (seed, seed + 100))
    tx = clipjax.tangent_space()
    ours, _ = jax.jit(tx.update)(grads, tx.init(weights), weights)
    for w, g, got in zip(weights, grads, ours, strict=True):
        w, g = torch.tensor(w).double(), torch.tensor(g).double()
        tangential = g - w * torch.sum(w * g) / (torch.sum(w * w) + 1e-30)
        expected = tangential * torch.linalg.vector_norm(g) / (torch.linalg.vector_norm(tangential) + 1e-30)
        np.testing.assert_allclose(got, expected.numpy(), rtol=2e-6, atol=1e-6 * float(g.abs().max()))
