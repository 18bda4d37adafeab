"""Layers that change the gradient on its way back. Oracles in NumPy float64, derivatives by differences.

Run as a script, it checks what needs eight devices, each check in turn.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import clipjax
from clipjax import functional
from tests.support.oracles import INF, exact_norm, exact_tree_norm, ulp
from tests.support.trees import DTYPES, avals, flat, random_tree, same_bits

MATRIX = jnp.array([[1.0, 2.0], [3.0, 4.0]])

CLIPS = {
    "value": lambda x, **options: clipjax.clip_gradient_by_value(x, -0.5, 0.5, **options),
    "norm": lambda x, **options: clipjax.clip_gradient_by_norm(x, 0.5, **options),
    "units": lambda x, **options: clipjax.clip_gradient_by_norm(
        x, 0.5, lambda _, leaf: 0 if leaf.ndim else None, **options
    ),
    "global": lambda x, **options: clipjax.clip_gradient_by_global_norm(x, 0.5, **options),
}
LAYERS = CLIPS | {
    "scale": lambda x: clipjax.scale_gradient(x, 0.5),
    "replace": lambda x: clipjax.replace_gradient(lambda y: y, lambda y: jax.tree.map(lambda z: z, y))(x),
}
each_clip = pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
each_dtype = pytest.mark.parametrize("dtype", [*DTYPES.values(), np.complex64], ids=[*DTYPES, "complex64"])


def back(layer: Any, cotangents: Any, primals: Any = None) -> Any:
    """What the layer makes of these cotangents."""
    primals = cotangents if primals is None else primals
    return jax.jit(lambda p, c: jax.vjp(layer, p)[1](c)[0])(primals, cotangents)


def expected(name: str, tree: Any, bound: float = 0.5) -> Any:
    """The clip of a whole tree in float64, written out."""

    def shrunk(x: np.ndarray, norm: Any) -> np.ndarray:
        return x * np.minimum(1, bound / np.maximum(norm, 1e-300))

    tree = jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    if name == "value":
        return jax.tree.map(lambda x: np.clip(x, -bound, bound), tree)
    if name == "global":
        norm = exact_tree_norm(tree)
        return jax.tree.map(lambda x: shrunk(x, norm), tree)
    if name == "norm":
        return jax.tree.map(lambda x: shrunk(x, np.linalg.norm(x)), tree)
    return jax.tree.map(
        lambda x: shrunk(x, np.linalg.norm(x, axis=0, keepdims=True) if x.ndim else abs(x)), tree
    )


def close(got: Any, want: Any, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


class TestKnownNumbers:
    """Small sums that can be done by hand."""

    def test_a_product(self):
        gradient = jax.grad(lambda x: jnp.sum(x @ MATRIX))(MATRIX)
        np.testing.assert_array_equal(gradient, [[3, 7], [3, 7]])

    def test_both_factors_clipped(self):
        def loss(x, y):
            return jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0) @ clipjax.clip_gradient_by_norm(y, 0.5))

        in_x, in_y = jax.grad(loss, argnums=(0, 1))(MATRIX, MATRIX)
        np.testing.assert_allclose(in_x, [[0.278543, 0.6499337]] * 2, rtol=1e-6)
        # The gradient in y is [[4, 4], [6, 6]] before.
        np.testing.assert_allclose(in_y, np.array([[4, 4], [6, 6]]) * 0.5 / math.sqrt(104), rtol=1e-6)

    def test_a_product_clipped_between(self):
        def loss(x):
            return jnp.sum(clipjax.clip_gradient_by_norm(x @ MATRIX, 1.0) @ MATRIX)

        np.testing.assert_allclose(jax.grad(loss)(MATRIX), [[1.57841039, 3.43536377]] * 2, rtol=1e-6)

    def test_value_and_scale(self):
        # 0.1 is larger in float32, so it is rounded inwards.
        got = jax.grad(lambda x: clipjax.clip_gradient_by_value(x, -0.1, 0.1))(3.0)
        assert 0.1 * (1 - 1e-7) < float(got) <= 0.1
        assert jax.grad(lambda x: clipjax.scale_gradient(x, 5.0))(3.0) == 5.0

    def test_each_unit(self):
        def loss(x):
            return jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0, axes=1) * MATRIX)

        want = MATRIX / np.linalg.norm(MATRIX, axis=1, keepdims=True)
        np.testing.assert_allclose(jax.grad(loss)(MATRIX), want, rtol=1e-6)

    def test_axes_by_path(self):
        def loss(p):
            return sum(
                jnp.sum(3 * x)
                for x in jax.tree.leaves(clipjax.clip_gradient_by_norm(p, 1.0, axes={"*kernel": 0}))
            )

        gradient = jax.grad(loss)({"dense": {"kernel": MATRIX, "bias": jnp.ones(2)}})
        np.testing.assert_allclose(gradient["dense"]["kernel"], np.full((2, 2), math.sqrt(0.5)), rtol=1e-6)
        np.testing.assert_array_equal(gradient["dense"]["bias"], [3, 3])


class TestForward:
    """The identity, bit for bit."""

    TREE: ClassVar[dict[str, Any]] = {
        "f32": jnp.array([1.0, -0.0, jnp.nan, jnp.inf, 1e-45]),
        "bf16": jnp.array([[1.0, 3e38]], jnp.bfloat16),
        "f16": jnp.array([6e-8, 65504], jnp.float16),
        "complex": jnp.array([1 + 2j, jnp.nan]),
        "int": jnp.arange(3),
        "bool": jnp.array([True]),
        "none": None,
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(1)),
        "empty": jnp.zeros((0, 3)),
        "nothing": (),
    }

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"])
    @each_layer
    def test_bit_for_bit(self, layer, wrap):
        tree = self.TREE
        if layer is LAYERS["value"]:
            tree = {k: v for k, v in tree.items() if k != "complex"}
        got = wrap(layer)(tree)
        assert same_bits(got, tree)
        assert avals(got) == avals(tree)

    @each_layer
    def test_float0_and_weak_types(self, layer):
        nothing = np.zeros(3, jax.dtypes.float0)
        assert layer({"x": jnp.ones(2), "nothing": nothing})["nothing"].dtype == jax.dtypes.float0
        weak = jnp.asarray(2.0)
        assert weak.weak_type
        assert layer(weak).weak_type
        assert jax.jit(layer)(2.0).weak_type
        assert not layer(jnp.float32(2)).weak_type

    @each_layer
    def test_trees_without_floats(self, layer):
        for tree in ({}, None, jnp.arange(3), jax.random.key(0)):
            assert same_bits(jax.jit(layer)(tree), tree)

    @each_layer
    def test_derivatives_of_a_mixed_tree(self, layer):
        tree = {k: v for k, v in self.TREE.items() if k not in ("complex", "f32")} | {"f32": jnp.ones(3)}
        gradient = jax.grad(
            lambda t: 9 * sum(jnp.sum(x.astype(jnp.float32)) for k, x in layer(t).items() if "f" in k),
            allow_int=True,
        )(tree)
        assert gradient["int"].dtype == gradient["key"].dtype == jax.dtypes.float0
        assert all(gradient[k].dtype == tree[k].dtype for k in ("f32", "bf16", "f16", "empty"))
        assert all(np.isfinite(np.asarray(gradient[k], np.float64)).all() for k in ("f32", "bf16", "f16"))


class TestGuarantees:
    """Those of the clips, for what comes back."""

    @each_dtype
    @pytest.mark.parametrize("seed", range(5))
    def test_the_bound_is_a_bound(self, dtype, seed):
        rng = np.random.default_rng(seed)
        scale = 10.0 ** rng.uniform(-3, 3)
        bound = float(10.0 ** rng.uniform(-3, 2))
        g = {
            "a": rng.standard_normal((17, 5)) * scale,
            "b": rng.standard_normal(3) * scale / 10,
        }
        g = {
            k: jnp.asarray((v + 1j * v[::-1] if dtype is np.complex64 else v).astype(dtype))
            for k, v in g.items()
        }

        def held(norms_before: Any, norms_after: Any) -> None:
            # Saturated, or let through: 4 ulp below at the most.
            low = np.minimum(norms_before, bound) - 4 * ulp(
                bound, np.float32 if dtype is np.complex64 else dtype
            )
            assert np.all(norms_after <= bound)
            assert np.all(norms_after >= low)

        got = back(lambda x: clipjax.clip_gradient_by_norm(x, bound), g)
        for key in g:
            assert got[key].dtype == g[key].dtype
            held(exact_norm(g[key]), exact_norm(got[key]))
        got = back(lambda x: clipjax.clip_gradient_by_norm(x, bound, axes={"a": 0}), g)
        held(exact_norm(g["a"], 0), exact_norm(got["a"], 0))
        assert same_bits(got["b"], g["b"])
        got = back(lambda x: clipjax.clip_gradient_by_global_norm(x, bound), g)
        held(exact_tree_norm(g), exact_tree_norm(got))
        got = back(lambda x: clipjax.clip_gradient_by_value(x, bound), g)
        assert np.abs(flat(got)).max() <= bound

    @each_clip
    @each_dtype
    def test_inside_nothing_moves(self, clip, dtype):
        if clip is CLIPS["value"] and dtype is np.complex64:
            pytest.skip("no order")
        g = random_tree(dtype=np.float32, scale=0.01)
        g = jax.tree.map(lambda x: x.astype(dtype), g)
        assert same_bits(back(clip, g), g)

    @pytest.mark.parametrize("name", CLIPS)
    def test_against_numpy(self, name):
        for seed in range(5):
            g = random_tree(seed)
            close(back(CLIPS[name], g), expected(name, g))

    def test_nonfinite(self):
        g = {"a": jnp.array([jnp.nan, 1.0]), "b": jnp.array([1.0, 0.1]), "c": jnp.array([jnp.inf, 1.0])}
        got = back(CLIPS["norm"], g)
        assert np.isnan(got["a"]).all()
        assert np.isnan(got["c"]).all()
        assert np.isfinite(got["b"]).all()
        assert np.isnan(flat(back(CLIPS["global"], g))).all()
        got = back(CLIPS["value"], g)
        np.testing.assert_array_equal(got["a"], [np.nan, 0.5])
        np.testing.assert_array_equal(got["c"], [0.5, 0.5])

    @pytest.mark.parametrize("bound", [0.0, INF])
    def test_bounds_at_the_ends(self, bound):
        g = random_tree()
        for layer in (
            lambda x: clipjax.clip_gradient_by_norm(x, bound),
            lambda x: clipjax.clip_gradient_by_global_norm(x, bound),
            lambda x: clipjax.clip_gradient_by_value(x, -bound, bound),
            lambda x: clipjax.clip_gradient_by_value(x, bound),
        ):
            got = back(layer, g)
            assert same_bits(got, g) if bound else not flat(got).any()
            assert not flat(back(layer, jax.tree.map(jnp.zeros_like, g))).any()

    def test_float64(self):
        with jax.enable_x64(True):
            g = {"a": jnp.array([3e200, 4e200]), "b": jnp.float32(1)}
            got = back(lambda x: clipjax.clip_gradient_by_global_norm(x, 0.1), g)
            assert got["a"].dtype == np.float64
            assert 0.1 * (1 - 1e-14) <= exact_tree_norm(got) <= 0.1

    def test_a_large_range(self):
        for size in (1e-30, 1e30):
            g = jnp.array([3.0, 4.0]) * size
            got = back(lambda x: clipjax.clip_gradient_by_norm(x, size), g)  # noqa: B023
            np.testing.assert_allclose(np.asarray(got, np.float64) / size, [0.6, 0.8], rtol=1e-6)


class TestTransformations:
    """The same under whatever JAX does to a function."""

    @pytest.mark.parametrize("name", CLIPS)
    def test_wrapped_alike(self, name):
        clip, x, w = CLIPS[name], random_tree(1), random_tree(2)

        def loss(x):
            y = clip(jax.tree.map(jnp.sin, x))
            return sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(w), jax.tree.leaves(y), strict=True))

        want = jax.tree.map(lambda a, b: np.cos(np.asarray(a, np.float64)) * b, x, expected(name, w))

        def one_step(x):
            return lax.scan(lambda c, _: (c + loss(x), None), 0.0, None, length=1)[0]

        def on_one(x):
            return jax.vmap(loss)(jax.tree.map(lambda a: a[None], x))[0]

        for wrapped in (
            loss,
            jax.jit(loss),
            jax.checkpoint(loss),
            jax.jit(jax.checkpoint(jax.jit(loss))),
            one_step,
            jax.checkpoint(one_step),
            on_one,
            jax.jit(on_one),
            lambda x: lax.cond(x["scale"] < 99, loss, lambda _: 0.0, x),
        ):
            close(jax.jit(jax.grad(wrapped))(x), want)
        close(jax.grad(loss)(x), want)

    def test_nested_in_each_other(self):
        def layer(x):
            x = clipjax.clip_gradient_by_value(x, -1.0, 1.0)
            x = clipjax.scale_gradient(x, 2.0)
            return clipjax.clip_gradient_by_norm(x, 5.0)

        g = jnp.array([3.0, 4.0, 12.0])
        np.testing.assert_allclose(back(layer, g), np.clip(2 * g * 5 / 13, -1, 1), rtol=1e-6)

    def test_each_example_by_itself(self):
        g = jnp.asarray(np.random.default_rng(0).standard_normal((6, 4)), jnp.float32)
        want = g * np.minimum(1, 0.5 / np.linalg.norm(g, axis=1, keepdims=True))

        def one(x, g):
            return jnp.vdot(CLIPS["norm"](x), g)

        close(jax.vmap(jax.grad(one))(g, g), want)
        close(jax.grad(lambda x: jnp.sum(jax.vmap(one)(x, g)))(g), want)
        close(jax.grad(lambda x: jnp.sum(jax.vmap(jax.jit(one))(x, g)))(g), want)
        # What is not mapped has one gradient, a sum; a gradient for each example is vmap of grad.
        total = g.sum(0) * 0.5 / np.linalg.norm(g.sum(0))
        close(jax.grad(lambda x: jnp.sum(jax.vmap(one, (None, 0))(x, g)))(g[0]), total)
        close(jax.vmap(jax.grad(one), (None, 0))(g[0], g), want)
        # A bound for each example.
        bounds = jnp.arange(6.0)
        got = jax.vmap(lambda g, b: back(lambda x: clipjax.clip_gradient_by_norm(x, b), g))(g, bounds)
        assert (exact_norm(got, 1) <= np.asarray(bounds)).all()

    def test_in_a_while_loop_of_steps(self):
        def step(_, x):
            return x - 0.1 * jax.grad(lambda x: jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0) ** 4))(x)

        x = jax.jit(lambda x: lax.fori_loop(0, 10, step, x))(jnp.full(4, 100.0))
        np.testing.assert_allclose(x, np.full(4, 100 - 10 * 0.1 / 2), rtol=1e-6)


class TestHigherDerivatives:
    """Against central differences of the clipped gradient, in NumPy float64."""

    RNG = np.random.default_rng(3)
    A, W = RNG.standard_normal((4, 4)), RNG.standard_normal(4)
    X, V = RNG.standard_normal(4), RNG.standard_normal(4)

    @classmethod
    def gradient(cls, name: str, x: np.ndarray, bound: float = 0.5) -> np.ndarray:
        """Of sum(w sin(clip(A x + x**2)))."""
        cotangent = cls.W * np.cos(cls.A @ x + x**2)
        return (cls.A + 2 * np.diag(x)).T @ expected(name, cotangent, bound)

    @classmethod
    def jacobian(cls, name: str) -> np.ndarray:
        e = 1e-6 * np.eye(4)
        return np.stack(
            [(cls.gradient(name, cls.X + d) - cls.gradient(name, cls.X - d)) / 2e-6 for d in e], axis=1
        )

    @classmethod
    def loss(cls, name: str) -> Any:
        a, w = jnp.asarray(cls.A, jnp.float32), jnp.asarray(cls.W, jnp.float32)
        return lambda x: jnp.sum(w * jnp.sin(CLIPS[name](a @ x + x**2)))

    @pytest.mark.parametrize("name", CLIPS)
    def test_second_derivatives(self, name):
        loss, want = self.loss(name), self.jacobian(name)
        if name != "value":
            assert np.abs(want - want.T).max() > 0.01  # not symmetric: the wrong orientation would show
        x, v = jnp.asarray(self.X, jnp.float32), jnp.asarray(self.V, jnp.float32)
        near = functools.partial(close, rtol=1e-4, atol=1e-4)
        near(jax.grad(loss)(x), self.gradient(name, self.X))
        for f in (loss, jax.jit(loss), jax.checkpoint(loss)):
            for jacobian in (jax.hessian(f), jax.jacrev(jax.jacrev(f))):
                near(jax.jit(jacobian)(x), want)
            near(jax.jvp(jax.grad(f), (x,), (v,))[1], want @ self.V)  # forward over reverse
            near(jax.grad(lambda x, f=f: jnp.vdot(jax.grad(f)(x), v))(x), want.T @ self.V)  # reverse twice

    @pytest.mark.parametrize("name", CLIPS)
    def test_third_derivatives_are_finite_and_consistent(self, name):
        loss = self.loss(name)
        x, v = jnp.asarray(self.X, jnp.float32), jnp.asarray(self.V, jnp.float32)
        third = jax.jvp(jax.hessian(loss), (x,), (v,))[1]
        e = 1e-2
        differences = (jax.hessian(loss)(x + e * v) - jax.hessian(loss)(x - e * v)) / (2 * e)
        assert np.isfinite(third).all()
        close(third, differences, rtol=0.02, atol=0.02)

    def test_with_respect_to_the_cotangent(self):
        g = jnp.array([3.0, 4.0])
        jacobian = jax.jacrev(lambda g: back(lambda x: clipjax.clip_gradient_by_norm(x, 1.0), g))(g)
        unit = np.array([0.6, 0.8])
        close(jacobian, (np.eye(2) - np.outer(unit, unit)) / 5)
        jacobian = jax.jacrev(lambda g: back(lambda x: clipjax.clip_gradient_by_norm(x, 10.0), g))(g)
        close(jacobian, np.eye(2))

    def test_finite_at_zero(self):
        def f(x):
            return jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0) ** 2)

        close(jax.hessian(f)(jnp.zeros(3)), 2 * np.eye(3))

    def test_with_respect_to_the_bound(self):
        x = jnp.array([3.0, 4.0])

        def clipped(bound):
            return jax.grad(lambda x: jnp.sum(clipjax.clip_gradient_by_norm(x, bound) ** 2) / 2)(x)

        close(jax.jacrev(clipped)(1.0), [0.6, 0.8])  # through the gradient: a bound can be learned
        close(jax.jacfwd(clipped)(1.0), [0.6, 0.8])

    def test_a_scan_of_clips(self):
        def loss(x):
            def step(c, _):
                return (jnp.sin(2 * clipjax.clip_gradient_by_norm(c, 0.5)), None)

            return jnp.sum(lax.scan(step, x, None, length=3)[0])

        def unrolled(x):
            for _ in range(3):
                x = jnp.sin(2 * clipjax.clip_gradient_by_norm(x, 0.5))
            return jnp.sum(x)

        x = jnp.array([0.1, -0.4, 0.2])
        close(jax.grad(loss)(x), jax.grad(unrolled)(x))
        for jacobian in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
            close(jacobian(loss)(x), jacobian(unrolled)(x), rtol=1e-4, atol=1e-5)
            close(jax.jit(jacobian(jax.checkpoint(loss)))(x), jacobian(unrolled)(x), rtol=1e-4, atol=1e-5)


class TestPartOfATree:
    """Gradients of some leaves, and of the others none."""

    @each_clip
    def test_some_leaves(self, clip):
        x, w = random_tree(1), random_tree(2)

        def loss(scale, probe, x):
            y = clip(x | {"scale": scale}, probe=probe)
            return sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(w), jax.tree.leaves(y), strict=True))

        def in_scan(s, p, x):
            return lax.scan(lambda c, _: (c + loss(s, p, x), None), 0.0, None, length=1)[0]

        # A zero tangent that JAX writes out as an array.
        def with_zero(s, p, x):
            return loss(s, p, x | {"dense": jax.tree.map(zeroed, x["dense"], {"bias": s, "kernel": s})})

        zero, want = jnp.zeros(()), back(clip, w)["scale"]
        _, norm = jax.grad(loss, argnums=(0, 1))(x["scale"], zero, x)
        for f in (loss, jax.jit(loss), jax.checkpoint(loss), in_scan, with_zero, jax.jit(with_zero)):
            for wrap in (lambda g: g, jax.jit):
                close(wrap(jax.grad(f))(x["scale"], zero, x), want)
                close(wrap(jax.grad(f, argnums=1))(x["scale"], zero, x), norm)


@jax.custom_jvp
def zeroed(x: Any, of: Any) -> Any:
    """A function of two arguments whose derivative is an array of zeros."""
    return x


zeroed.defjvp(lambda primals, tangents: (zeroed(*primals), jnp.zeros_like(primals[0])))


class TestForwardMode:
    @pytest.mark.parametrize("name", ["value", "norm", "global_norm"])
    def test_clips_say_what_to_do(self, name):
        def f(x):
            return jnp.sum(getattr(clipjax, f"clip_gradient_by_{name}")(x, 1.0) ** 2)

        x = jnp.ones(3)
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
            with pytest.raises(TypeError, match=f"clip_gradient_by_{name} has no forward-mode.*reverse"):
                attempt()

    def test_a_linearized_clip_transposes(self):
        x = jnp.array([3.0, 4.0])
        _, linear = jax.linearize(lambda x: clipjax.clip_gradient_by_norm(x, 1.0), x)
        close(jax.linear_transpose(linear, x)(x)[0], [0.6, 0.8])

    def test_scaling_has_both_modes(self):
        def f(x):
            return jnp.sum(jnp.sin(clipjax.scale_gradient(x, 3.0)))

        x, v = jnp.array([0.5, 1.0]), jnp.array([2.0, -1.0])
        value, tangent = jax.jvp(f, (x,), (v,))
        close(value, np.sin(x).sum())
        close(tangent, 3 * np.vdot(np.cos(x), v))
        close(jax.grad(f)(x), 3 * np.cos(x))
        # The gradient is 3 cos(x): it was scaled once, and this is its derivative.
        modes = (jax.jacfwd, jax.jacrev)
        for jacobian in (lambda f, a=a, b=b: a(b(f)) for a in modes for b in modes):
            for wrapped in (f, jax.jit(f), jax.checkpoint(f)):
                close(jacobian(wrapped)(x), np.diag(-3 * np.sin(x)))


class TestScale:
    @each_dtype
    def test_is_one_rounding(self, dtype):
        rng = np.random.default_rng(0)
        g = rng.standard_normal(100) + (1j * rng.standard_normal(100) if dtype is np.complex64 else 0)
        g = jnp.asarray(g.astype(dtype))
        got = np.asarray(back(lambda x: clipjax.scale_gradient(x, 0.3), g))
        assert got.dtype == dtype
        factor = np.float32(0.3)
        want = (np.asarray(g).astype(np.complex64 if dtype is np.complex64 else np.float32) * factor).astype(
            dtype
        )
        np.testing.assert_array_equal(got, want)

    def test_an_array_of_factors_and_a_traced_one(self):
        g = jnp.ones((2, 3))
        factors = jnp.array([[0.0], [-1.0]])
        want = np.broadcast_to(factors, (2, 3))
        np.testing.assert_array_equal(back(lambda x: clipjax.scale_gradient(x, factors), g), want)
        got = jax.jit(lambda g, f: jax.vjp(lambda x: clipjax.scale_gradient(x, f), g)[1](g)[0])(g, factors)
        np.testing.assert_array_equal(got, want)
        for dtype in DTYPES.values():
            got = jax.jit(lambda g, f: jax.vjp(lambda x: clipjax.scale_gradient(x, f), g)[1](g)[0])(
                g.astype(dtype), factors
            )
            assert got.dtype == dtype

    def test_float64(self):
        with jax.enable_x64(True):
            g = jnp.array([1 / 3])
            got = back(lambda x: clipjax.scale_gradient(x, 0.3), g)
            assert got.dtype == np.float64
            assert got[0] == 0.3 * (1 / 3)

    def test_errors(self):
        for factor, error in (
            (math.nan, ValueError),
            (INF, ValueError),
            ("2", TypeError),
            (True, TypeError),
            (1j, TypeError),
            (lambda step: 1.0, TypeError),
        ):
            with pytest.raises(error, match="factor"):
                clipjax.scale_gradient(jnp.ones(2), factor)
        with pytest.raises(ValueError, match="shape"):
            clipjax.scale_gradient(jnp.ones(2), jnp.ones(3))


class TestBounds:
    @pytest.mark.parametrize(
        ("layer", "arguments"),
        [
            (clipjax.clip_gradient_by_norm, (0.5,)),
            (clipjax.clip_gradient_by_global_norm, (0.5,)),
            (clipjax.clip_gradient_by_value, (-0.25, 0.5)),
            (clipjax.clip_gradient_by_value, (0.5,)),
            (clipjax.scale_gradient, (0.5,)),
        ],
    )
    def test_traced_alike_with_gradient_zero(self, layer, arguments):
        x = {"a": MATRIX, "n": jnp.arange(2)}

        def loss(a, bounds):
            return jnp.sum(layer(x | {"a": a}, *bounds)["a"] ** 2)

        want = jax.grad(lambda a: loss(a, arguments))(MATRIX)
        assert np.abs(want - 2 * MATRIX).max() > 0.1
        for bounds in (arguments, tuple(map(np.float32, arguments)), tuple(map(jnp.asarray, arguments))):
            got, of_bounds = jax.jit(jax.grad(loss, argnums=(0, 1)))(MATRIX, bounds)
            close(got, want)
            assert not np.any(of_bounds)
            close(jax.grad(loss)(MATRIX, bounds), want)
        # A bound that depends on what is differentiated, as a constant would.
        got = jax.grad(lambda a: loss(a, tuple(b * jnp.sum(a) / 10 for b in arguments)))(MATRIX)
        close(got, want)

    def test_full_precision(self):
        # 0.1 is larger in float32.
        g = jnp.full(7, 3.0)
        assert exact_norm(back(lambda x: clipjax.clip_gradient_by_norm(x, 0.1), g)) <= 0.1
        assert float(back(lambda x: clipjax.clip_gradient_by_value(x, 0.1), g)[0]) <= 0.1

    def test_a_traced_negative_bound_is_zero(self):
        got = jax.jit(lambda b: back(lambda x: clipjax.clip_gradient_by_norm(x, b), MATRIX))(-1.0)
        np.testing.assert_array_equal(got, np.zeros((2, 2)))

    @pytest.mark.parametrize("layer", ["norm", "global_norm"])
    @pytest.mark.parametrize(
        ("bound", "error"),
        [
            (-1.0, ValueError),
            (math.nan, ValueError),
            (np.array(-2.0), ValueError),
            ("1", TypeError),
            (True, TypeError),
            (None, TypeError),
            (1j, TypeError),
            (lambda step: 1.0, TypeError),
        ],
    )
    def test_bad_ones_raise_at_the_call(self, layer, bound, error):
        with pytest.raises(error, match="max_norm"):
            getattr(clipjax, f"clip_gradient_by_{layer}")(MATRIX, bound)

    def test_bad_limits_raise_at_the_call(self):
        with pytest.raises(ValueError, match=r"low=2\.0 and high=1\.0"):
            clipjax.clip_gradient_by_value(MATRIX, 2.0, 1.0)
        with pytest.raises(ValueError, match="bound must be at least 0"):
            clipjax.clip_gradient_by_value(MATRIX, -1.0)
        with pytest.raises(TypeError, match="high must be a number or an array here, not a schedule"):
            clipjax.clip_gradient_by_value(MATRIX, -1.0, lambda step: 1.0)
        with pytest.raises(TypeError, match="complex leaf"):
            clipjax.clip_gradient_by_value(MATRIX + 1j, -1.0, 1.0)
        with pytest.raises(ValueError, match="shape"):
            clipjax.clip_gradient_by_value(MATRIX, -1.0, jnp.ones(3))

    def test_bad_shapes_and_axes_raise_at_the_call(self):
        for bound, axes in ((jnp.ones(2), None), (jnp.ones((2, 1)), 0), (jnp.ones(3), 0)):
            with pytest.raises(ValueError, match="shape"):
                clipjax.clip_gradient_by_norm(MATRIX, bound, axes)
        with pytest.raises(ValueError, match="shape"):
            clipjax.clip_gradient_by_global_norm(MATRIX, jnp.ones(2))
        with pytest.raises(ValueError, match="axes: 2 is out of range"):
            clipjax.clip_gradient_by_norm(MATRIX, 1.0, 2)
        with pytest.raises(ValueError, match="matches no leaf"):
            clipjax.clip_gradient_by_norm({"a": MATRIX}, 1.0, {"b": 0})

    def test_a_bound_for_each_unit(self):
        got = back(lambda x: clipjax.clip_gradient_by_norm(x, jnp.array([[1.0, 2.0]]), 0), MATRIX)
        np.testing.assert_allclose(np.linalg.norm(got, axis=0), [1, 2], rtol=1e-6)


class TestProbe:
    """What was there before clipping, as the gradient of a number that changes nothing."""

    @pytest.mark.parametrize("name", CLIPS)
    def test_is_the_norm_before(self, name):
        w = random_tree(4)

        def loss(x, probe):
            y = CLIPS[name](x, probe=probe)
            return sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(w), jax.tree.leaves(y), strict=True))

        norms = {
            "value": np.abs(flat(w)).max(),
            "norm": max(exact_norm(x) for x in jax.tree.leaves(w)),
            "units": max(np.max(exact_norm(x, 0 if x.ndim else None)) for x in jax.tree.leaves(w)),
            "global": exact_tree_norm(w),
        }
        x = random_tree(5)
        for dtype in (jnp.float32, jnp.bfloat16):
            gradient, norm = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, jnp.zeros((), dtype))
            assert norm.dtype == dtype
            np.testing.assert_allclose(
                float(norm), float(norms[name]), rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6
            )
            assert same_bits(gradient, jax.jit(jax.grad(loss))(x, None))

    def test_changes_nothing(self):
        def f(x, probe):
            return jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0, probe=probe) ** 2)

        for probe in (0.0, 7.0, jnp.nan, jnp.inf):
            probe = jnp.float32(probe)
            assert f(MATRIX, probe) == 30.0
            assert same_bits(jax.grad(f)(MATRIX, probe), jax.grad(f)(MATRIX, None))
            np.testing.assert_allclose(jax.grad(f, argnums=1)(MATRIX, probe), 2 * math.sqrt(30), rtol=1e-6)

    def test_second_derivatives_with_a_probe(self):
        def f(x, probe):
            return jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0, probe=probe) ** 3)

        zero, x = jnp.zeros(()), MATRIX[0]
        close(jax.hessian(f)(x, zero), jax.hessian(f)(x, None))
        close(jax.jacrev(jax.grad(f))(x, zero), jax.hessian(f)(x, None))
        assert not np.any(jax.grad(jax.grad(f, argnums=1))(x, zero))  # it is a measurement

    def test_infinity_only_measures(self):
        g = jnp.array([3.0, 4.0])

        def f(x, probe):
            return jnp.vdot(g, clipjax.clip_gradient_by_norm(x, jnp.inf, probe=probe))

        gradient, norm = jax.grad(f, argnums=(0, 1))(g, jnp.zeros(()))
        assert same_bits(gradient, g)
        assert norm == 5

    def test_one_for_each_step_and_example(self):
        def step(c, probe):
            return (clipjax.clip_gradient_by_norm(2 * c, 1.0, probe=probe), None)

        def loss(c, probes):
            return jnp.sum(lax.scan(step, c, probes)[0])

        for f in (loss, jax.checkpoint(loss), jax.jit(loss)):
            norms = jax.grad(f, argnums=1)(jnp.ones(4), jnp.zeros(5))
            np.testing.assert_allclose(norms, [2, 2, 2, 2, 2], rtol=1e-6)

        def one(x, probe):
            return jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0, probe=probe) ** 2) / 2

        norms = jax.grad(lambda p: jnp.sum(jax.vmap(one)(MATRIX, p)))(jnp.zeros(2))
        np.testing.assert_allclose(norms, np.linalg.norm(MATRIX, axis=1), rtol=1e-6)
        norms = jax.vmap(jax.grad(one, argnums=1), (0, None))(MATRIX, jnp.zeros(()))
        np.testing.assert_allclose(norms, np.linalg.norm(MATRIX, axis=1), rtol=1e-6)
        total = jax.grad(lambda p: jnp.sum(jax.vmap(one, (0, None))(MATRIX, p)))(jnp.zeros(()))
        np.testing.assert_allclose(total, np.linalg.norm(MATRIX, axis=1).sum(), rtol=1e-6)

    def test_errors(self):
        for probe in (jnp.zeros(2), 0, jnp.zeros((), jnp.int32), 1j):
            with pytest.raises(TypeError, match="probe must be a float scalar"):
                clipjax.clip_gradient_by_norm(MATRIX, 1.0, probe=probe)


class TestReplace:
    def test_straight_through(self):
        x = jnp.array([0.2, 1.7, -3.5])
        rounded = clipjax.replace_gradient(jnp.round, lambda x: x)
        value, pull = jax.vjp(rounded, x)
        assert same_bits(value, jnp.round(x))
        np.testing.assert_array_equal(pull(x)[0], x)
        np.testing.assert_array_equal(jax.jvp(rounded, (x,), (x,))[1], x)
        np.testing.assert_array_equal(jax.jit(jax.vmap(jax.grad(rounded)))(x), np.ones(3))

    @each_dtype
    def test_the_value_is_exact(self, dtype):
        x = jnp.asarray(np.array([1.5, -0.0, np.inf, np.nan, 1e-6]).astype(dtype))
        # A sum and a difference would make NaN of the infinity, and round.
        f = clipjax.replace_gradient(lambda x: x, lambda x: 3e4 * x)
        for wrapped in (f, jax.jit(f), jax.vmap(f), jax.checkpoint(f)):
            assert same_bits(wrapped(x), x)
        assert f(x).dtype == dtype
        got = back(f, jnp.ones_like(x), x)
        np.testing.assert_array_equal(np.asarray(got), np.full(5, 3e4).astype(dtype))

    def test_derivatives_of_every_order_are_those_of_backward(self):
        f = clipjax.replace_gradient(jnp.floor, lambda x: x**3)
        orders = {"grad": jax.grad, "jacfwd": jax.jacfwd}
        for first in orders.values():
            close(first(f)(1.5), 3 * 1.5**2)
            for second in orders.values():
                close(second(first(f))(1.5), 6 * 1.5)
                for third in orders.values():
                    close(jax.jit(third(second(first(f))))(1.5), 6.0)

        def outer(x):
            return jnp.sin(f(x))

        close(jax.grad(outer)(1.5), np.cos(1.0) * 3 * 1.5**2)
        # The outer slope is taken at forward's value, and moves with backward's gradient.
        close(jax.grad(jax.grad(outer))(1.5), -np.sin(1.0) * (3 * 1.5**2) ** 2 + np.cos(1.0) * 9)

    def test_trees_and_several_arguments(self):
        def forward(a, *, b):
            return {"sign": jnp.sign(a["x"]), "n": a["n"], "none": None}

        def backward(a, *, b):
            return {"sign": a["x"] * b, "n": a["n"], "none": None}

        def loss(x, b):
            out = clipjax.replace_gradient(forward, backward)({"x": x, "n": jnp.arange(2)}, b=b)
            assert out["n"].dtype == jnp.int32
            return jnp.sum(out["sign"])

        x = jnp.array([-2.0, 3.0])
        assert loss(x, 5.0) == 0
        in_x, in_b = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, 5.0)
        np.testing.assert_array_equal(in_x, [5, 5])
        assert in_b == 1

    def test_values_closed_over(self):
        def loss(w, x):
            return clipjax.replace_gradient(lambda x: jnp.sign(w * x), lambda x: w * w * x)(x)

        for f in (loss, jax.jit(loss), jax.checkpoint(loss)):
            close(jax.grad(f, argnums=(0, 1))(3.0, 2.0), (12.0, 9.0))
            close(jax.jvp(f, (3.0, 2.0), (1.0, 1.0)), (1.0, 21.0))
            close(jax.grad(jax.grad(f))(3.0, 2.0), 4.0)

    def test_forward_need_not_be_differentiable(self):
        def host(x):
            return jax.pure_callback(lambda x: np.round(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        f = clipjax.replace_gradient(host, lambda x: x)
        np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(jnp.ones(3)), np.ones(3))

    def test_weak_types_and_python_numbers(self):
        f = clipjax.replace_gradient(lambda x: 1.0, lambda x: x)
        assert f(3.0) == 1.0
        assert jax.grad(f)(3.0) == 1.0
        assert jax.jit(clipjax.replace_gradient(jnp.round, lambda x: x))(2.0).weak_type

    def test_errors_name_both(self):
        x = jnp.ones((2, 3))
        with pytest.raises(
            ValueError, match=r"forward returns float32\[2, 3\], but backward returns float32\[3\]"
        ):
            clipjax.replace_gradient(lambda x: x, lambda x: x[0])(x)
        with pytest.raises(ValueError, match=r"forward returns int32\[2, 3\], but backward returns float32"):
            clipjax.replace_gradient(lambda x: x.astype(int), lambda x: x)(x)
        with pytest.raises(ValueError, match=r"at \['a'\]"):
            clipjax.replace_gradient(lambda x: {"a": x}, lambda x: {"a": x.astype(jnp.float16)})(x)
        with pytest.raises(ValueError, match=r"forward returns PyTreeDef.*, but backward returns PyTreeDef"):
            clipjax.replace_gradient(lambda x: (x, x), lambda x: x)(x)
        with pytest.raises(TypeError, match="backward must be a function, got 1"):
            clipjax.replace_gradient(jnp.round, 1)
        with pytest.raises(TypeError, match="forward must be a function"):
            clipjax.replace_gradient(None, jnp.round)


class TestModels:
    """The plain function between two layers, in Linen and in NNX."""

    X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 3)), jnp.float32)

    def test_linen(self):
        class Model(nn.Module):
            bound: float

            @nn.compact
            def __call__(self, x):
                x = nn.tanh(nn.Dense(4)(x))
                x = self.perturb("after", x)  # Flax' own way to see a gradient
                x = clipjax.clip_gradient_by_norm(x, self.bound)
                x = self.perturb("before", x)
                return nn.Dense(1)(x)

        variables = Model(1.0).init(jax.random.key(0), self.X)

        @functools.partial(jax.jit, static_argnums=1)
        def gradients(variables, bound):
            return jax.grad(lambda v: 100 * jnp.mean(Model(bound).apply(v, self.X) ** 2))(variables)

        free, clipped = gradients(variables, INF), gradients(variables, 1.0)
        before, after = (clipped["perturbations"][key] for key in ("before", "after"))
        assert same_bits(before, free["perturbations"]["before"])
        assert exact_norm(before) > 2
        assert 1 - 1e-6 <= exact_norm(after) <= 1
        scale = 1 / float(exact_norm(before))
        close(clipped["params"]["Dense_0"]["kernel"], free["params"]["Dense_0"]["kernel"] * scale, rtol=1e-5)
        assert same_bits(clipped["params"]["Dense_1"], free["params"]["Dense_1"])

    def test_nnx(self):
        class Model(nnx.Module):
            def __init__(self, rngs):
                self.one, self.two = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

            def __call__(self, x, bound, probe):
                x = clipjax.clip_gradient_by_norm(jnp.tanh(self.one(x)), bound, probe=probe)
                return self.two(x)

        model = Model(nnx.Rngs(0))

        @nnx.jit
        def gradients(model, bound):
            def loss(m, probe):
                return 100 * jnp.mean(m(self.X, bound, probe) ** 2)

            return nnx.grad(loss, argnums=(0, 1))(model, jnp.zeros(()))

        (free, norm), (clipped, norm_too) = gradients(model, jnp.inf), gradients(model, 1.0)
        assert norm == norm_too
        assert norm > 2
        close(clipped["one"]["kernel"][...], free["one"]["kernel"][...] / norm, rtol=1e-5)
        assert same_bits(clipped["two"]["kernel"][...], free["two"]["kernel"][...])


STEPS, WIDTH, BOUND = 12, 4, 0.5


def exploding(key: Any, shape: Any, dtype: Any = jnp.float32) -> Any:
    return 2.0 * jnp.eye(*shape, dtype=dtype)


class LinenCell(nn.RNNCellBase):
    """An exploding linear cell, its carry's gradient clipped, and measured on both sides."""

    bound: float

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


class TestRecurrent:
    """The gradient of an exploding linear network stays bounded at every step back."""

    XS = jnp.asarray(np.random.default_rng(1).standard_normal((STEPS, WIDTH)), jnp.float32)

    def check(self, run: Any) -> None:
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
    def test_linen(self, rnn):
        def run(bound):
            axes = {"variable_axes": {"probes": 0}, "variable_broadcast": "params"}
            if rnn == "RNN":
                model = nn.RNN(LinenCell(bound), return_carry=True, split_rngs={"params": False}, **axes)

                def apply(v):
                    return model.apply(v, self.XS[None])[0]

                variables = model.init(jax.random.key(0), self.XS[None])
            else:
                scanned = nn.scan(LinenCell, split_rngs={"params": False}, **axes)
                model = scanned(bound)
                start = jnp.zeros(WIDTH)

                def apply(v):
                    return model.apply(v, start, self.XS)[0]

                variables = model.init(jax.random.key(0), start, self.XS)
            probes = jax.jit(jax.grad(lambda v: jnp.sum(apply(v))))(variables)["probes"]
            probes = next(iter(probes.values())) if rnn == "RNN" else probes
            return probes["before"], probes["after"]

        self.check(run)

    def test_nnx_scan(self):
        cell = NnxCell()

        def run(bound):
            @nnx.jit
            @functools.partial(nnx.grad, argnums=(1, 2))
            def norms(cell, before, after):
                @nnx.scan(in_axes=(None, nnx.Carry, 0, 0, 0), out_axes=nnx.Carry)
                def forward(cell, carry, *inputs):
                    return cell(carry, *inputs, bound)

                return jnp.sum(forward(cell, jnp.zeros(WIDTH), self.XS, before, after))

            return norms(cell, jnp.zeros(STEPS), jnp.zeros(STEPS))

        self.check(run)

    def test_lax_scan(self):
        def run(bound):
            def loss(probes):
                def step(carry, inputs):
                    x, (before, after) = inputs
                    carry = clipjax.clip_gradient_by_norm(carry, jnp.inf, probe=after)
                    carry = clipjax.clip_gradient_by_norm(carry, bound, probe=before)
                    return 2.0 * carry + x, None

                return jnp.sum(lax.scan(step, jnp.zeros(WIDTH), (self.XS, probes))[0])

            return jax.jit(jax.grad(loss))((jnp.zeros(STEPS), jnp.zeros(STEPS)))

        self.check(run)

    def test_an_nnx_rnn_around_any_cell(self):
        def at_the_start(bound):
            cell = nnx.SimpleCell(
                WIDTH, WIDTH, activation_fn=lambda x: x, recurrent_kernel_init=exploding, rngs=nnx.Rngs(0)
            )
            rnn = nnx.RNN(ClippedCell(cell, bound), rngs=nnx.Rngs(1))

            def loss(rnn, carry):
                return jnp.sum(rnn(self.XS[None], initial_carry=carry)[:, -1])

            return exact_norm(nnx.grad(loss, argnums=1)(rnn, jnp.zeros((1, WIDTH))))

        np.testing.assert_allclose(float(at_the_start(INF)), 2.0 ** (STEPS + 1), rtol=1e-5)
        assert 0.999 * BOUND < at_the_start(BOUND) <= BOUND

    def test_an_lstm_under_linen_rnn(self):
        class Clipped(nn.OptimizedLSTMCell):
            def __call__(self, carry, x):
                return super().__call__(clipjax.clip_gradient_by_global_norm(carry, 1e-3), x)

        model = nn.RNN(Clipped(WIDTH))
        xs = self.XS[None]
        carry = (jnp.zeros((1, WIDTH)), jnp.zeros((1, WIDTH)))
        variables = model.init(jax.random.key(0), xs)
        gradient = jax.grad(lambda c: jnp.sum(model.apply(variables, xs, initial_carry=c)))(carry)
        assert exact_tree_norm(gradient) <= 1e-3
        assert exact_tree_norm(gradient) > 0.999e-3


@given(
    shape=st.sampled_from([(), (0,), (3,), (2, 3)]),  # few: each is compiled anew
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e30]),
    bound=st.sampled_from([0.0, 1e-3, 1.0, 1e3, INF]),
    seed=st.integers(0, 2**31),
)
def test_the_same_as_the_function_on_trees(shape, scale, bound, seed):
    g = jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, jnp.float32)
    pairs = (
        (lambda x: clipjax.clip_gradient_by_norm(x, bound), lambda g: functional.clip_by_norm(g, bound)),
        (
            lambda x: clipjax.clip_gradient_by_global_norm(x, bound),
            lambda g: functional.clip_by_global_norm(g, bound)[0],
        ),
        (
            lambda x: clipjax.clip_gradient_by_value(x, -bound, bound),
            lambda g: functional.clip_by_value(g, -bound, bound),
        ),
    )
    for layer, function in pairs:
        assert same_bits(jax.vjp(layer, g)[1](g)[0], function(g))


@pytest.mark.peer
class TestPeers:
    @pytest.mark.parametrize("seed", range(3))
    def test_torch_hooks(self, seed):
        torch = pytest.importorskip("torch")
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

    def test_torch_straight_through(self):
        torch = pytest.importorskip("torch")
        x = np.array([0.2, 1.7, -3.4], np.float32)
        leaf = torch.tensor(x, requires_grad=True)
        torch.sum((leaf + (torch.round(leaf) - leaf).detach()) ** 2).backward()
        rounded = clipjax.replace_gradient(jnp.round, lambda x: x)
        np.testing.assert_allclose(
            jax.grad(lambda x: jnp.sum(rounded(x) ** 2))(x), leaf.grad.numpy(), rtol=1e-6
        )

    @pytest.mark.parametrize("twice", [False, True])
    def test_tensorflow_custom_gradient(self, twice):
        tf = pytest.importorskip("tensorflow")

        @tf.custom_gradient
        def clip(x):
            return tf.identity(x), lambda g: tf.clip_by_norm(g, 1.0)

        x = np.asarray(MATRIX)
        leaf = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(leaf)
            y = clip(leaf @ x) if twice else clip(leaf)
            loss = tf.reduce_sum(y @ x)
        ours = jax.grad(
            lambda a: jnp.sum(
                (
                    clipjax.clip_gradient_by_norm(a @ x, 1.0)
                    if twice
                    else clipjax.clip_gradient_by_norm(a, 1.0)
                )
                @ x
            )
        )(x)
        np.testing.assert_allclose(ours, tape.gradient(loss, leaf).numpy(), rtol=1e-6)
