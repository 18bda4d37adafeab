"""The bound is a bound, measured in float64: never exceeded, missed by little, and inside it nothing moves.

What holds for every input is judged by hypothesis, with the checks that `python -m tests.soak` runs for
longer.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import clipjax
from clipjax import functional
from tests.support.oracles import exact_norm, exact_tree_norm, ulp
from tests.support.properties import CHECKS, MIXTURES, Trial, with_wide_bounds
from tests.support.trees import DTYPES, same_bits


def trials(*mixtures: str) -> st.SearchStrategy[Trial]:
    return st.builds(
        Trial,
        mixture=st.sampled_from(mixtures),
        seed=st.integers(0, 2**30),
        place=st.floats(0, 1, width=16),
        spread=st.sampled_from([0.0, 1.0, 4.0, 20.0]),
        bound=st.sampled_from([0.0, 1e-30, 1e-3, 0.1, 0.5, 0.999, 1.0, 1.001, 3.0]),
        sparse=st.booleans(),
    )


every_kind = pytest.mark.parametrize("kind", list(DTYPES))


@given(trials("f32", "bf16", "f16"))
@example(Trial("f32", 0, 0.0, 0.0, 1.0))  # the smallest normal numbers
@example(Trial("bf16", 0, 1.0, 0.0, 1.0))  # near the largest ones
@example(Trial("f16", 0, 0.0, 0.0, 0.5))  # subnormal
def test_norms_are_right(trial: Trial) -> None:
    assert not list(CHECKS["norms"](trial))


@given(trials(*MIXTURES))
@example(Trial("f32", 0, 1.0, 4.0, 1e-30))
@example(Trial("mixed", 0, 0.5, 0.0, 0.5))
@example(Trial("bf16", 41383501, 0.09171473713390443, 20.0, 0.05269387719658645))  # units far apart
def test_a_clipped_norm_is_inside_its_bound(trial: Trial) -> None:
    assert not list(CHECKS["clips"](trial))


@given(trials("f32", "bf16", "f16"))
@example(Trial("f32", 2**20, 0.0, 0.0, 0.0))  # a large leaf
def test_units_with_bounds_of_their_own_are_inside_them(trial: Trial) -> None:
    assert not list(CHECKS["units"](trial))


@given(trials("f32", "bf16", "mixed"))
@example(Trial("mixed", 483548212, 0.7963242702872942, 4.0, 0.001, True))
@example(Trial("bf16", 901815916, 0.5094958815215094, 4.0, 0.5))
def test_a_projected_norm_is_inside_its_radius(trial: Trial) -> None:
    assert not list(CHECKS["projection"](trial))


# --------------------------------------------------------------------------------------------------
# One matrix, bounded in every way.


def bounded(bound: Any, leaf: Any) -> dict[str, Any]:
    tx = optax.chain(optax.sgd(0.5), clipjax.max_norm(bound, axes=None))
    start = leaf * np.asarray(0.5, leaf.dtype)
    updates = tx.update(-leaf, tx.init(start), start)[0]
    return {
        "tree": functional.clip_by_global_norm({"a": leaf, "b": leaf}, bound)[0],
        "leaf": functional.clip_by_norm(leaf, bound),
        "units": functional.clip_by_norm(leaf, bound, 0),
        "ball": clipjax.max_norm(bound)(leaf),
        "step": optax.apply_updates(start, updates),
        "value": functional.clip_by_value(leaf, -bound, bound),
    }


bounded_by_a_number = jax.jit(bounded, static_argnums=0)
bounded_by_an_argument = with_wide_bounds(bounded)


def check_bounded(found: dict[str, Any], bound: float, leaf: np.ndarray, kind: str) -> None:
    """For a bound that every norm and some entries were above."""
    values = np.asarray(found.pop("value"), np.float64)
    assert np.abs(values).max() <= bound
    assert bound - np.abs(values).max() < ulp(bound, DTYPES[kind])
    eps = float(jnp.finfo(DTYPES[kind]).eps)
    for name, after in found.items():
        norms = exact_tree_norm(after) if name in ("tree", "leaf", "step") else exact_norm(after, 0)
        assert (norms <= bound).all(), name
        # A step is as exact as the weights from which it started.
        lost = 4 * eps * max(bound, exact_tree_norm(leaf) / 2 if name == "step" else 0)
        assert (norms >= bound - lost).all(), name


def matrix(seed: int, kind: str, scale: float = 8.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((64, 8))).astype(DTYPES[kind])


BOUNDS = [0.1, 0.3, 1 / 3, 1e-3, 1.0, 2.0, math.pi]


@pytest.mark.parametrize(
    ("bound", "kind"),
    [
        pytest.param(bound, kind, marks=[pytest.mark.full] * ((bound, kind) != (0.1, "f32")))
        for bound in BOUNDS
        for kind in DTYPES
    ],
)
def test_the_python_float_is_the_bound(bound: float, kind: str) -> None:
    """0.1 is below the float32 that is nearest to it, and so must the norm be."""
    leaf = matrix(0, kind)
    check_bounded(bounded_by_a_number(bound, leaf), bound, leaf, kind)


@every_kind
def test_no_bound_is_exceeded_and_little_is_lost(kind: str) -> None:
    """The bounds in float64, as Python floats are."""
    for bound in BOUNDS:
        leaf = matrix(0, kind)
        check_bounded(bounded_by_an_argument(bound, leaf), bound, leaf, kind)
    for seed in range(150):
        rng = np.random.default_rng(seed)
        leaf = matrix(seed, kind, 10 ** rng.uniform(-1, 1))
        bound = float(np.min(exact_norm(leaf, 0)) * rng.uniform(0.1, 0.3))
        check_bounded(bounded_by_an_argument(bound, leaf), bound, leaf, kind)


@every_kind
def test_what_is_inside_does_not_move(kind: str) -> None:
    leaf = matrix(0, kind)
    found = bounded_by_an_argument(1e3, leaf)
    assert all(same_bits(found[name], leaf) for name in ("leaf", "units", "ball", "step", "value"))
    assert same_bits(found["tree"], {"a": leaf, "b": leaf})


def test_norms_at_the_bound_exactly_stay() -> None:
    """3-4-5 is exact in every dtype: a norm equal to the bound is inside."""
    trees = {
        kind: (
            {"a": np.asarray([[3.0], [0.0]], dtype), "b": np.asarray([[-4.0], [-0.0]], dtype)},
            np.asarray([[3.0, 0.6], [4.0, -0.0]], dtype),
        )
        for kind, dtype in DTYPES.items()
    }

    @jax.jit
    def bounded(trees: Any) -> Any:
        return {
            kind: (
                functional.clip_by_global_norm(tree, 5.0)[0],
                [
                    clipjax.max_norm(5.0)(one),
                    functional.clip_by_norm(one, 5.0, 0),
                    functional.clip_by_value(one, -4.0, 4.0),
                ],
            )
            for kind, (tree, one) in trees.items()
        }

    assert same_bits(bounded(trees), {kind: (tree, [one] * 3) for kind, (tree, one) in trees.items()})


# --------------------------------------------------------------------------------------------------
# Units beside each other, and weights far away.


@with_wide_bounds
def bounded_beside(bound: Any, trees: Any) -> Any:
    """Each matrix of a tree, clipped and projected unit by unit."""
    return jax.tree.map(lambda x: (functional.clip_by_norm(x, bound, 0), clipjax.max_norm(bound)(x)), trees)


@given(
    seed=st.integers(0, 2**30),
    place=st.floats(0, 1, width=16),
    bound=st.sampled_from([0.0, 1e-38, 1e-30, 1e-10, 0.1, 1.0, 3.0, 1e30]),
)
@example(0, 1.0, 1e-38)
@example(0, 0.0, 1e-38)
def test_the_number_of_units_beside_it_changes_no_bit_of_a_unit(
    seed: int, place: float, bound: float
) -> None:
    """Leaves of few entries are multiplied in another way, and a part of a split leaf may be one of them."""
    trees = {}
    for kind, dtype in DTYPES.items():
        info = jnp.finfo(dtype)
        low, high = math.log2(float(info.tiny)), math.log2(float(info.max)) - 4
        units = np.random.default_rng(seed).standard_normal((16, 4)) * 2.0 ** (low + place * (high - low))
        few = units.astype(dtype)
        trees[kind] = (few, np.tile(few, (1, 80)))
    for few, many in bounded_beside(bound, trees).values():
        assert same_bits(jax.tree.map(lambda x: np.tile(x, (1, 80)), few), many)


def step_onto_the_sphere(grads: Any, params: Any) -> Any:
    tx = optax.chain(optax.sgd(1.0), clipjax.max_norm(1.0))
    return optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])


STEPS = {"eager": step_onto_the_sphere, "jit": jax.jit(step_onto_the_sphere)}


@pytest.mark.parametrize(
    ("kind", "far", "how"),
    [
        pytest.param(
            kind, far, how, marks=[pytest.mark.full] * (how == "eager" and (kind, far) != ("bf16", 16e3))
        )
        for kind in DTYPES
        for far in (1.0, 100.0, 16e3)
        for how in STEPS
    ],
)
def test_far_away_weights_come_back_to_the_sphere(kind: str, far: float, how: str) -> None:
    """From 16000 no bfloat16 update leads to 1; the projection must not end at 0."""
    dtype = DTYPES[kind]
    rng = np.random.default_rng(1)
    unit = rng.standard_normal((16, 4))
    params = {"kernel": jnp.asarray((far * 1.5 * unit / np.linalg.norm(unit, axis=0)).astype(dtype))}
    grads = {"kernel": jnp.asarray((1e-3 * far * rng.standard_normal((16, 4))).astype(dtype))}
    norms = np.asarray(exact_norm(STEPS[how](grads, params)["kernel"], 0), np.float64)
    allowed = 4 * ulp(np.maximum(np.asarray(exact_norm(params["kernel"], 0), np.float64), 1), dtype)
    if kind != "f32":  # the update is a float32, and much finer than the parameter
        allowed = 8 * ulp(1.0, dtype)
    assert (norms <= 1).all()
    assert (norms >= 1 - allowed).all()
