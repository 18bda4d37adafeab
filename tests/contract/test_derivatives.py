"""Derivatives are finite at 0, and elsewhere finite differences of the oracles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.contract.members import ROWS, Row
from tests.support import oracles
from tests.support.programs import apply, put, start
from tests.support.trees import exact

# No entry or norm is near a limit of 0.6875 or 64, and singular values are apart.
POINT = {"a_float32": [[1.5, -0.3], [-2.0, 0.2], [0.5, 0.4]], "c_float32": [-1.2, 0.4]}
WEIGHTS = {
    "a_float32": [[-2.0, 1.5], [0.7, -0.2], [1.1, 0.9]],
    "c_float32": [2.5, -1.0],
}
COTANGENT = {
    "a_float32": [[0.3, -1.1], [0.8, 0.9], [-0.6, 0.5]],
    "c_float32": [0.7, -0.4],
}
DIRECTION = {
    "a_float32": [[-0.5, 0.2], [1.0, -0.7], [0.4, 0.3]],
    "c_float32": [0.9, 0.6],
}
OUTSIDE, INSIDE = 0.6875, 64.0


def dot(a: Any, b: Any) -> Any:
    return sum((a[k] * b[k]).sum() for k in a)


def in_tree(row: Row, tree: Any, kind: Any) -> Any:
    """Return a tree of arrays, for heads with the shape (in, heads, head_dim)."""
    if row.tree == "heads":
        return {
            f"layer/{side}": kind(tree["a_float32"]).reshape(1, 3, 2)
            for side in ("query", "key")
        }
    return {k: kind(x) for k, x in tree.items()}


# Rows that call the code of another row, which is differentiated there. So do all
# functions of trees. Clips that follow the past are in gradients/test_history.py.
SAME_CODE = {
    *(row.id for row in ROWS if row.remembers),
    "min_max_norm",
    "clip_by_rms axes=0",
    "clip_by_value low, high",
    "clip_by_value 0.1",
    "skip_spikes",
    "record_norms",
    "record_norms keep",
    "bounded",
    "project",
}
OWN = {
    row.id: row for row in ROWS if row.kind != "function" and row.id not in SAME_CODE
}
# It has no second derivative where singular values are equal, as those of zeros are.
FIRST_ONLY_AT_0 = {"spectral_cap"}


def float32(x: Any) -> Any:
    return jnp.asarray(np.asarray(x, np.float32))


def float64(x: Any) -> Any:
    return np.asarray(x, np.float64)


def weights_of(row: Row) -> Any:
    return in_tree(row, WEIGHTS, float32) if row.params else None


@jax.jit
def all_slopes(trees: Any, states: Any, bound: Any) -> Any:
    """Return first derivatives of all members, and second ones along a direction."""
    found = {}
    for name, row in OWN.items():
        weight, along = (in_tree(row, x, float32) for x in (COTANGENT, DIRECTION))
        params = weights_of(row)

        def loss(x: Any, row: Any = row, weight: Any = weight, p: Any = params) -> Any:
            return dot(weight, apply(row, x, states[row.id], p, bound)[0])

        found[name] = jax.jvp(jax.grad(loss), (trees[name],), (along,))
    return found


@functools.cache
def slopes_at(bound: float, state_at: float, zeros: str = "", scale: float = 1) -> Any:
    """Return all derivatives at the point times a scale, at one with zeros in "some"
    places or at "all" zeros, with states for a bound.
    """
    at = {name: in_tree(row, POINT, float32) for name, row in OWN.items()}
    at = jax.tree.map(lambda x: x * np.float32(scale), at)
    states = {
        name: start(row, at[name], weights_of(row), state_at)
        for name, row in OWN.items()
    }
    if zeros:
        place = (..., 0) if zeros == "some" else ...
        at = jax.tree.map(lambda x: put(x, place, 0), at)
    return all_slopes(at, states, np.float32(bound))


@pytest.mark.parametrize("row", OWN.values(), ids=lambda row: row.id)
def test_they_are_right(row: Row) -> None:
    params = weights_of(row)

    def loss(x: Any) -> float:
        made = row.oracle(x, {} if params is None else exact(params), bound)
        return float(dot(in_tree(row, COTANGENT, float64), made))

    point, toward = in_tree(row, POINT, float64), in_tree(row, DIRECTION, float64)
    for bound in (OUTSIDE, INSIDE):
        first, second = slopes_at(bound, bound)[row.id]
        want = oracles.gradient(loss, point)
        ahead, behind = (
            oracles.gradient(
                loss, {k: x + sign * 1e-3 * toward[k] for k, x in point.items()}, 1e-3
            )
            for sign in (1, -1)
        )
        for name, x in want.items():
            np.testing.assert_allclose(first[name], x, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(
                second[name], (ahead[name] - behind[name]) / 2e-3, rtol=1e-3, atol=1e-4
            )
    for zeros in ("some", "all"):
        for bound in (0.0, OUTSIDE):
            found = slopes_at(bound, INSIDE, zeros)[row.id]
            found = found[:1] if row.name in FIRST_ONLY_AT_0 else found
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(found)), bound


@pytest.mark.parametrize(
    "row",
    # The norm that `unit_norm` gives is 1 at any scale.
    [x for x in OWN.values() if x.wide and not x.params and x.name != "unit_norm"],
    ids=lambda row: row.id,
)
def test_they_are_those_of_any_scale(row: Row) -> None:
    """The second ones of norms from 1e-12 to 1e12, the first ones up to 1e18."""
    first, second = slopes_at(OUTSIDE, OUTSIDE)[row.id]
    for scale in (2.0**-39, 2.0**37, 2.0**57):
        bound = OUTSIDE * scale
        found = slopes_at(bound, bound, scale=scale)[row.id]
        for name, x in first.items():
            np.testing.assert_allclose(found[0][name], x, rtol=1e-4, atol=1e-5)
            if scale < 1e12:
                again = scale * np.float64(found[1][name])
                np.testing.assert_allclose(again, second[name], rtol=1e-3, atol=1e-4)


def test_on_a_sphere_they_are_those_of_the_sphere() -> None:
    """Weights that have their norm already stay as they are, but not their slopes."""
    weight, along, point = (
        np.float32(x["a_float32"]) for x in (COTANGENT, DIRECTION, POINT)
    )
    unit = clipjax.unit_norm().apply(point)

    def on_sphere(x: Any) -> Any:
        return x / jnp.linalg.norm(x, axis=0)

    @functools.partial(jax.jit, static_argnums=0)
    def slopes(project: Any, x: Any) -> Any:
        return jax.jvp(jax.grad(lambda x: jnp.sum(weight * project(x))), (x,), (along,))

    for project in (
        clipjax.unit_norm().apply,
        clipjax.min_max_norm(1.0, 1.0).apply,
        lambda x: clipjax.keep_norm(axes=0).apply(x, jax.lax.stop_gradient(x)),
    ):
        for x in (unit, np.eye(3, 2, dtype=np.float32)):  # the norms are exactly 1
            np.testing.assert_array_equal(project(x), x)
            both = slopes(project, x), slopes(on_sphere, x)
            for found, wanted in zip(*both, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_forward_mode_takes_tangents_of_all_kinds() -> None:
    def scaled(x: Any) -> Any:
        return clipjax.scale_gradient(x, -0.5)

    assert jax.jvp(scaled, (3.0,), (1.0,))[1] == -0.5
    np.testing.assert_array_equal(
        jax.jvp(scaled, (jnp.ones(2),), (np.ones(2, np.float32),))[1], [-0.5, -0.5]
    )


def test_a_threshold_has_a_derivative_and_that_of_a_layer_has_none() -> None:
    """A clip may learn it; for a layer it is a constant, in second derivatives, too."""
    x, w = np.float32([1.0, -2.0, 0.1]), np.full((2, 2), 3.0, np.float32)
    ones = np.ones(1, jnp.bfloat16)  # in which 0.3 and 0.7 are rounded, one inward
    value, norm = functional.clip_by_value, functional.clip_by_norm
    clips = {
        "value": lambda s: jnp.sum(jnp.abs(value(x, -s, s))),
        "norm": lambda s: jnp.linalg.norm(norm(x, s)) * 2,
        "box": lambda s: jnp.sum(clipjax.box(-s, s).apply(w)) / 2,
        "max_norm": lambda s: jnp.sum(clipjax.max_norm(s).apply(w)) / 2**0.5,
    }
    layers = {
        "scale": clipjax.scale_gradient,
        "value": lambda x, s: clipjax.clip_gradient_by_value(x, -s, s),
        "norm": clipjax.clip_gradient_by_norm,
        "global": clipjax.clip_gradient_by_global_norm,
    }

    def slope(s: Any, layer: Any) -> Any:
        return jnp.sum(jax.grad(lambda x: jnp.sum(layer(x, s) ** 2))(x))

    @jax.jit
    def all_slopes(s: Any, limits: Any) -> Any:
        in_16_bits = jax.grad(lambda s: jnp.sum(value(ones, -s, s)).astype(np.float32))
        of_clips = {name: jax.grad(clip)(s) for name, clip in clips.items()}
        of_layers = {name: jax.grad(slope)(s, layer) for name, layer in layers.items()}
        return of_clips, [in_16_bits(limit) for limit in limits], of_layers

    of_clips, in_16_bits, of_layers = all_slopes(0.5, [0.3, 0.5, 0.7])
    for name, found in of_clips.items():
        np.testing.assert_allclose(found, 2, rtol=1e-5, err_msg=name)
    assert in_16_bits == [1, 1, 1]
    assert of_layers == dict.fromkeys(layers, 0)
