"""What holds for every input, by hypothesis: precision, the bounds themselves, derivatives, geometry.

`checks` judges in NumPy, in float64 or wider; `python -m tests.soak` runs the same checks for longer.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import clipjax
from clipjax import functional
from tests.support.oracles import INF, exact_norm, exact_tree_norm, ulp
from tests.support.properties import CHECKS, MIXTURES, Trial
from tests.support.trees import DTYPES, flat, same_bits

trials = st.builds(
    Trial,
    mixture=st.sampled_from(sorted(MIXTURES)),
    seed=st.integers(0, 2**30),
    place=st.floats(0, 1, width=16),
    spread=st.sampled_from([0.0, 1.0, 4.0, 20.0]),
    bound=st.sampled_from([0.0, 1e-30, 1e-3, 0.1, 0.5, 0.999, 1.0, 1.001, 3.0]),
    sparse=st.booleans(),
)


@given(trials)
@example(Trial("f32", 0, 0.0, 0.0, 1.0))  # the smallest normal numbers
@example(Trial("bf16", 0, 1.0, 0.0, 1.0))  # near the largest ones
@example(Trial("f16", 0, 0.0, 0.0, 0.5))  # subnormal
def test_norms_are_right(trial: Trial) -> None:
    assert not list(CHECKS["norms"](trial))


@given(trials)
@example(Trial("f32", 0, 1.0, 4.0, 1e-30))
@example(Trial("mixed", 0, 0.5, 0.0, 0.5))
@example(Trial("bf16", 41383501, 0.09171473713390443, 20.0, 0.05269387719658645))  # units far apart
def test_a_clipped_norm_is_inside_its_bound(trial: Trial) -> None:
    assert not list(CHECKS["clips"](trial))


@given(trials)
@example(Trial("f32", 2**20, 0.0, 0.0, 0.0))  # a large leaf
def test_units_with_bounds_of_their_own_are_inside_them(trial: Trial) -> None:
    assert not list(CHECKS["units"](trial))


@given(trials)
@example(Trial("mixed", 483548212, 0.7963242702872942, 4.0, 0.001, True))
@example(Trial("bf16", 901815916, 0.5094958815215094, 4.0, 0.5))
def test_a_projected_norm_is_inside_its_radius(trial: Trial) -> None:
    assert not list(CHECKS["projection"](trial))


# --------------------------------------------------------------------------------------------------
# The bound, as a Python float.


@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize("bound", [0.1, 0.3, 1 / 3, 1e-3, 1.0, 2.0, math.pi])
def test_the_python_float_is_the_bound(bound: float, kind: str) -> None:
    """0.1 is below the float32 that is nearest to it, and so must the norm be."""
    leaf = np.random.default_rng(0).standard_normal((64, 8)).astype(DTYPES[kind]) * DTYPES[kind](8)
    clipped = functional.clip_by_global_norm({"a": leaf, "b": leaf}, bound)[0]
    assert exact_tree_norm(clipped) <= bound
    assert (exact_norm(functional.clip_by_norm(leaf, bound, 0), 0) <= bound).all()
    assert (exact_norm(clipjax.max_norm(bound)(leaf), 0) <= bound).all()
    values = np.asarray(functional.clip_by_value(leaf, -bound, bound), np.float64)
    assert np.abs(values).max() <= bound
    assert bound - np.abs(values).max() < ulp(bound, DTYPES[kind])


@given(
    kind=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 2**30),
    place=st.floats(0, 1, width=16),
    bound=st.sampled_from([0.0, 1e-38, 1e-30, 1e-10, 0.1, 1.0, 3.0, 1e30]),
)
@example("f32", 0, 1.0, 1e-38)
@example("f32", 0, 0.0, 1e-38)
def test_the_number_of_units_beside_it_changes_no_bit_of_a_unit(
    kind: str, seed: int, place: float, bound: float
) -> None:
    """Leaves of few entries are multiplied in another way, and a part of a split leaf may be one of them."""
    info = jnp.finfo(DTYPES[kind])
    low, high = math.log2(float(info.tiny)), math.log2(float(info.max)) - 4
    units = np.random.default_rng(seed).standard_normal((16, 4)) * 2.0 ** (low + place * (high - low))
    few = units.astype(DTYPES[kind])
    many = np.tile(few, (1, 80))
    for bounded in (lambda x: functional.clip_by_norm(x, bound, 0), clipjax.max_norm(bound)):
        assert same_bits(jnp.tile(bounded(few), (1, 80)), bounded(many))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("far", [1.0, 100.0, 16000.0])
@pytest.mark.parametrize("kind", list(DTYPES))
def test_far_away_weights_come_back_to_the_sphere(kind: str, far: float, jit: bool) -> None:
    """From 16000 no bfloat16 update leads to 1; the projection must not end at 0."""
    dtype = DTYPES[kind]
    rng = np.random.default_rng(1)
    unit = rng.standard_normal((16, 4))
    params = {"kernel": jnp.asarray((far * 1.5 * unit / np.linalg.norm(unit, axis=0)).astype(dtype))}
    grads = {"kernel": jnp.asarray((1e-3 * far * rng.standard_normal((16, 4))).astype(dtype))}
    tx = optax.chain(optax.sgd(1.0), clipjax.max_norm(1.0))

    def step(grads: Any, params: Any) -> Any:
        return optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])

    after = (jax.jit(step) if jit else step)(grads, params)["kernel"]
    norms = np.asarray(exact_norm(after, 0), np.float64)
    allowed = 4 * ulp(np.maximum(np.asarray(exact_norm(params["kernel"], 0), np.float64), 1), dtype)
    if kind != "f32":  # the update is a float32, and much finer than the parameter
        allowed = 8 * ulp(1.0, dtype)
    assert (norms <= 1).all()
    assert (norms >= 1 - allowed).all()


def test_many_leaves_do_not_stagnate() -> None:
    tree = {f"{i:04}": jnp.ones(1000, jnp.bfloat16) for i in range(200)}
    clipped, norm = jax.jit(lambda t: functional.clip_by_global_norm(t, 1.0))(tree)
    np.testing.assert_allclose(float(norm), math.sqrt(200_000), rtol=1e-6)
    assert 0.99 < exact_tree_norm(clipped) <= 1


@pytest.mark.parametrize("shape", [(2**17 + 3,), (2**18,), (3, 2**17), (2**17, 3), (513, 1025)])
@pytest.mark.parametrize("p", [1, 2, INF])
def test_large_leaves_are_summed_right(shape: tuple[int, ...], p: float) -> None:
    leaf = (np.random.default_rng(2).standard_normal(shape) * 1e19).astype(np.float32)
    np.testing.assert_allclose(
        float(functional.global_norm(leaf, p)), float(exact_norm(leaf, None, p)), rtol=1e-6
    )
    clipped = functional.clip_by_norm(leaf, 0.1, None, p)
    new = exact_norm(clipped, None, p)
    assert new <= 0.1
    assert 0.1 - new <= 4 * ulp(0.1, np.float32)


# --------------------------------------------------------------------------------------------------
# Derivatives, against central differences in float64.

DIFFERENTIABLE = {
    "global": lambda c: clipjax.clip_by_global_norm(c),
    "global p=3": lambda c: clipjax.clip_by_global_norm(c, ord=3),
    "global p=1": lambda c: clipjax.clip_by_global_norm(c, ord=1),
    "global inf": lambda c: clipjax.clip_by_global_norm(c, ord=INF),
    "leaves": lambda c: clipjax.clip_by_norm(c),
    "units": lambda c: clipjax.clip_by_norm(c, axes=clipjax.fan_in),
    "rms": lambda c: clipjax.clip_by_rms(c / 3),
    "value": lambda c: clipjax.clip_by_value(c / 3),
    "max_norm": lambda c: clipjax.max_norm(c),
}


@pytest.mark.parametrize("weight", [0.1, 20.0])
@pytest.mark.parametrize("bound", [1e-2, 2.0, 1e8])
@pytest.mark.parametrize("shape", [(8, 3), (512, 300)], ids=["small", "large"])
def test_derivatives_far_outside_the_bound(shape: tuple[int, int], bound: float, weight: float) -> None:
    """The products and sums of the backward pass stay in the range of a float32."""
    x = np.full(shape, 1e37).astype(np.float32)
    x[0, 0] = 0
    units = x.astype(np.float64) / np.asarray(exact_norm(x, 0), np.float64)

    def total(x: Any, bound: Any) -> jax.Array:
        return weight * jnp.sum(clipjax.max_norm(bound, axes=0)(x))

    of_x, of_bound = jax.jit(jax.grad(total, argnums=(0, 1)))(x, jnp.float32(bound))
    np.testing.assert_allclose(of_bound, weight * units.sum(), rtol=1e-6)
    slope = weight * bound / np.asarray(exact_norm(x, 0), np.float64)
    exact = slope * (1 - units * units.sum(axis=0))
    # What cancels leaves a rounding of its terms.
    np.testing.assert_allclose(of_x, exact, rtol=1e-5, atol=1e-6 * slope.max() + np.finfo(np.float32).tiny)


@pytest.mark.parametrize("bound", [0.5, 100.0], ids=["outside", "inside"])
@pytest.mark.parametrize("name", list(DIFFERENTIABLE))
def test_derivatives_equal_central_differences(name: str, bound: float) -> None:
    """With respect to the entries, and to the bound."""
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        tree = {
            "bias": jnp.asarray(rng.standard_normal(3)),
            "kernel": jnp.asarray(rng.standard_normal((3, 2))),
        }
        weights = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), tree)
        params = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), tree)

        @jax.jit
        def value(tree: Any, bound: Any) -> jax.Array:
            tx = DIFFERENTIABLE[name](bound)
            out = tx.update(tree, tx.init(tree), params)[0]
            return sum(
                jnp.sum(w * x) for w, x in zip(jax.tree.leaves(weights), jax.tree.leaves(out), strict=True)
            )

        gradient, slope = jax.jit(jax.grad(value, argnums=(0, 1)))(tree, bound)
        h = 1e-6
        for key, leaf in tree.items():
            for index in np.ndindex(leaf.shape):
                up, down = ({**tree, key: leaf.at[index].add(d)} for d in (h, -h))
                numeric = (value(up, bound) - value(down, bound)) / (2 * h)
                np.testing.assert_allclose(gradient[key][index], numeric, rtol=1e-6, atol=1e-7)
        numeric = (value(tree, bound + h) - value(tree, bound - h)) / (2 * h)
        np.testing.assert_allclose(slope, numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bound", [0.0, 1.0])
@pytest.mark.parametrize("name", list(DIFFERENTIABLE))
def test_derivatives_are_finite_at_zero(name: str, bound: float) -> None:
    zeros = {"bias": jnp.zeros(3), "kernel": jnp.zeros((3, 2))}

    def value(tree: Any, bound: Any) -> jax.Array:
        tx = DIFFERENTIABLE[name](bound)
        return sum(jnp.sum(x) for x in jax.tree.leaves(tx.update(tree, tx.init(tree), zeros)[0]))

    gradient, slope = jax.jit(jax.grad(value, argnums=(0, 1)))(zeros, bound)
    assert np.isfinite(flat(gradient)).all()
    assert np.isfinite(slope)
    if bound > 0:
        np.testing.assert_array_equal(flat(gradient), 1.0)


@pytest.mark.parametrize("p", [1, 2, 3, INF])
def test_norms_have_finite_derivatives_at_zero(p: float) -> None:
    tree = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
    assert np.isfinite(flat(jax.grad(lambda t: functional.global_norm(t, p))(tree))).all()
    assert np.isfinite(
        flat(jax.grad(lambda x: functional.unit_norms(x, 0, p).sum())(jnp.zeros((3, 2))))
    ).all()


# --------------------------------------------------------------------------------------------------
# Geometry.

seeds = st.integers(0, 2**30)
radii = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 10.0])
project = jax.jit(lambda w, r: clipjax.max_norm(r)(w))
clip = jax.jit(lambda t, c: functional.clip_by_global_norm(t, c)[0])


def weights(seed: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((6, 3))).astype(np.float32)


@given(seeds, radii, st.sampled_from([1e-3, 1.0, 30.0]))
def test_projection_is_firmly_non_expansive(seed: int, radius: float, apart: float) -> None:
    """|Px - Py|² <= <Px - Py, x - y>, for each unit."""
    x = weights(seed)
    y = x + weights(seed + 1, apart)
    px, py = (np.asarray(project(v, radius), np.float64) for v in (x, y))
    moved, before = px - py, x.astype(np.float64) - y
    slack = 1e-6 * radius * np.linalg.norm(before, axis=0)  # the rounding of Px and Py to float32
    assert ((moved**2).sum(0) <= (moved * before).sum(0) + slack).all()


@given(seeds, radii, st.integers(-20, 20))
def test_clips_and_projections_are_scale_equivariant(seed: int, radius: float, exponent: int) -> None:
    """P_{sr}(sw) = s P_r(w); bit for bit for a power of two."""
    w, s = weights(seed), np.float32(2.0**exponent)
    assert same_bits(project(s * w, radius * float(s)), s * np.asarray(project(w, radius)))
    assert same_bits(clip(s * w, radius * float(s)), s * np.asarray(clip(w, radius)))


@given(seeds, radii, radii)
def test_projections_onto_two_balls_are_that_onto_the_smaller(seed: int, r: float, s: float) -> None:
    w = weights(seed)
    np.testing.assert_allclose(project(project(w, s), r), project(w, min(r, s)), rtol=1e-6, atol=1e-30)


@given(seeds, st.sampled_from([0.1, 1.0, 100.0]))
def test_grouping_does_not_matter(seed: int, bound: float) -> None:
    w = weights(seed)
    together = np.asarray(clip(w, bound))
    columns = clip([w[:, :1], (w[:, 1:], {})], bound)
    apart = np.concatenate([columns[0], columns[1][0]], axis=1)
    np.testing.assert_allclose(apart, together, rtol=3e-7)
    flipped = np.asarray(clip({"a": w[::-1].T}, bound)["a"]).T[::-1]
    np.testing.assert_allclose(flipped, together, rtol=3e-7)


@given(seeds, st.sampled_from([0.01, 0.5, 3.0]), st.sampled_from([0.0, 0.9]))
def test_sgd_moves_at_most_as_far_as_its_clip_allows(seed: int, bound: float, momentum: float) -> None:
    """After T steps: rate · bound · T, over 1 - momentum."""
    rate, steps = 0.1, 12
    tx = optax.chain(clipjax.clip_by_global_norm(bound), optax.sgd(rate, momentum or None))
    rng = np.random.default_rng(seed)
    start = jnp.zeros((6, 3))
    grads = jnp.asarray(
        rng.standard_normal((steps, 6, 3)) * 10 ** rng.uniform(-3, 6, (steps, 1, 1)), np.float32
    )

    def one(carry: Any, g: Any) -> Any:
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    path = np.asarray(jax.jit(lambda g: jax.lax.scan(one, (start, tx.init(start)), g)[1])(grads), np.float64)
    moved = np.linalg.norm(path.reshape(steps, -1), axis=1)
    limit = rate * bound * np.arange(1, steps + 1) / (1 - momentum)
    assert (moved <= limit * (1 + 1e-6)).all()  # the sums of float32 round
    assume(bound < 1)
    assert moved.max() > 0


@given(seeds)
def test_what_is_clipped_points_the_same_way(seed: int) -> None:
    w = weights(seed, 100.0)
    clipped = np.asarray(clip(w, 1.0), np.float64)
    expected = w.astype(np.float64) / np.linalg.norm(w.astype(np.float64))
    np.testing.assert_allclose(clipped, expected, rtol=4e-7)


@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda d: np.dtype(d).name
)
def test_norms_at_the_bound_exactly_stay(dtype: Any) -> None:
    """3-4-5 is exact in every dtype: a norm equal to the bound is inside."""
    tree = {"a": jnp.asarray([[3.0], [0.0]], dtype), "b": jnp.asarray([[-4.0], [-0.0]], dtype)}
    assert same_bits(functional.clip_by_global_norm(tree, 5.0)[0], tree)
    one = jnp.asarray([[3.0, 0.6], [4.0, -0.0]], dtype)
    assert same_bits(clipjax.max_norm(5.0)(one), one)
    assert same_bits(functional.clip_by_norm(one, 5.0, 0), one)
    assert same_bits(functional.clip_by_value(one, -4.0, 4.0), one)
