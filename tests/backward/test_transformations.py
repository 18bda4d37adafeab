"""The same gradients under whatever JAX does to a function, and for whatever part of its arguments."""

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
from tests.support.backward import CLIPS, close, each_clip, expected, pulled, small_tree, weighted_sum
from tests.support.oracles import exact_norm


def in_a_scan(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: lax.scan(lambda c, _: (c + f(*args), None), 0.0, None, length=1)[0]


def in_a_batch(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jax.vmap(f)(*jax.tree.map(lambda a: jnp.asarray(a)[None], args))[0]


def in_a_branch(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: lax.cond(args[0]["scale"] < 99, f, lambda *_: 0.0, *args)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "remat of jit": lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
    "scan": in_a_scan,
    "remat of scan": lambda f: jax.checkpoint(in_a_scan(f)),
    "vmap": in_a_batch,
    "jit of vmap": lambda f: jax.jit(in_a_batch(f)),
    "cond": in_a_branch,
}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("global", tuple(WRAPPERS)),
        ("value", ("remat of jit", "scan", "jit of vmap")),
        ("norm", ("plain", "remat of scan", "vmap")),
        ("units", ("jit", "remat", "vmap", "cond")),
        *(pytest.param(name, tuple(WRAPPERS), marks=pytest.mark.full) for name in ("value", "norm", "units")),
    ],
)
def test_wrapped_alike(name, keys):
    x, w = small_tree(1), small_tree(2)

    def loss(x):
        return weighted_sum(w, CLIPS[name](jax.tree.map(jnp.sin, x)))

    want = jax.tree.map(lambda a, b: np.cos(np.asarray(a, np.float64)) * b, x, expected(name, w))
    got = jax.jit(lambda x: {key: jax.grad(WRAPPERS[key](loss))(x) for key in keys})(x)
    for gradient in got.values():
        close(gradient, want)


def test_each_example_by_itself():
    g = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    bounds = np.arange(6, dtype=np.float32)

    def one(x, g):
        return jnp.vdot(CLIPS["norm"](x), g)

    @jax.jit
    def gradients(g, bounds):
        each = {
            "vmap of grad": jax.vmap(jax.grad(one))(g, g),
            "grad of vmap": jax.grad(lambda x: jnp.sum(jax.vmap(one)(x, g)))(g),
            "grad of vmap over columns": jax.grad(lambda x: jnp.sum(jax.vmap(one, (1, 0))(x, g)))(g.T).T,
            "grad of vmap of jit": jax.grad(lambda x: jnp.sum(jax.vmap(jax.jit(one))(x, g)))(g),
            "vmap of grad, not mapped": jax.vmap(jax.grad(one), (None, 0))(g[0], g),
        }
        total = jax.grad(lambda x: jnp.sum(jax.vmap(one, (None, 0))(x, g)))(g[0])
        of_bounds = jax.vmap(lambda g, b: pulled(lambda x: clipjax.clip_gradient_by_norm(x, b), g))(g, bounds)
        return each, total, of_bounds

    each, total, of_bounds = gradients(g, bounds)
    want = g * np.minimum(1, 0.5 / np.linalg.norm(g, axis=1, keepdims=True))
    for got in each.values():
        close(got, want)
    # What is not mapped has one gradient, a sum; a gradient for each example is vmap of grad.
    close(total, g.sum(0) * 0.5 / np.linalg.norm(g.sum(0)))
    assert (exact_norm(of_bounds, 1) <= bounds).all()


def test_in_a_loop_of_steps():
    def step(_, x):
        return x - 0.1 * jax.grad(lambda x: jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0) ** 4))(x)

    x = jax.jit(lambda x: lax.fori_loop(0, 10, step, x))(np.full(4, 100, np.float32))
    np.testing.assert_allclose(x, np.full(4, 100 - 10 * 0.1 / 2), rtol=1e-6)


@jax.custom_jvp
def zeroed(x: Any, of: Any) -> Any:
    """A function of two arguments whose derivative is an array of zeros."""
    return x


zeroed.defjvp(lambda primals, tangents: (zeroed(*primals), jnp.zeros_like(primals[0])))


KEYS = ("plain", "jit", "remat", "scan", "zero", "jit of zero")


class TestPartOfATree:
    """Gradients in some leaves, in the probe, or in both; of the other leaves nobody asks for one."""

    W = small_tree(2)

    @classmethod
    def losses(cls, name: str) -> dict[str, Callable[..., Any]]:
        def loss(scale, probe, x):
            return weighted_sum(cls.W, CLIPS[name](x | {"scale": scale}, probe=probe))

        # A zero tangent that JAX writes out as an array.
        def with_zero(scale, probe, x):
            return loss(scale, probe, x | {"kernel": zeroed(x["kernel"], scale)})

        return {
            "plain": loss,
            "jit": jax.jit(loss),
            "remat": jax.checkpoint(loss),
            "scan": in_a_scan(loss),
            "zero": with_zero,
            "jit of zero": jax.jit(with_zero),
        }

    @classmethod
    def check(cls, name: str, gradients: Callable[..., Any]) -> None:
        x = small_tree(1)
        want = np.float64(expected(name, cls.W)["scale"])
        measured = {
            "value": lambda x: np.max(np.abs(x)),
            "norm": np.linalg.norm,
            "units": lambda x: np.max(np.linalg.norm(x, axis=0)) if np.ndim(x) else abs(x),
        }
        if name == "global":
            norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in cls.W.values()))
        else:
            norm = max(measured[name](leaf) for leaf in cls.W.values())
        for in_leaf, in_probe, in_both in gradients(x["scale"], np.float32(0), x).values():
            close(in_leaf, want)
            close(in_probe, norm)
            close(in_both, (want, norm))

    @classmethod
    def gradients(cls, name: str, keys: Any, wrap: Callable[[Any], Any], *args: Any) -> dict[str, Any]:
        losses = cls.losses(name)
        return {
            key: tuple(wrap(jax.grad(losses[key], argnums=a))(*args) for a in (0, 1, (0, 1))) for key in keys
        }

    @pytest.mark.parametrize(
        ("name", "keys"),
        [
            ("global", KEYS),
            ("value", ("jit", "zero")),
            ("norm", ("plain", "scan")),
            ("units", ("remat", "jit of zero")),
        ],
    )
    def test_compiled(self, name, keys):
        self.check(name, jax.jit(functools.partial(self.gradients, name, keys, lambda f: f)))

    def test_outside_of_jit(self):
        self.check("value", functools.partial(self.gradients, "value", ["jit of zero"], lambda f: f))

    @pytest.mark.full
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
    @each_clip
    def test_each_in_a_program_of_its_own(self, name, wrap):
        self.check(name, functools.partial(self.gradients, name, KEYS, wrap))
