"""Bounds by path: the first match wins, and a leaf without one is not changed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax

RNG = np.random.default_rng(0)
PARAMS = {
    "encoder": {
        "kernel": jnp.asarray(RNG.normal(size=(6, 4)) * 5, np.float32),
        "bias": jnp.ones(4),
    },
    "head": {"kernel": jnp.asarray(RNG.normal(size=(6, 4)) * 5, np.float32)},
    # Whose rank does not tell what it is.
    "stack": jnp.asarray(RNG.normal(size=(2, 6, 4)) * 5, np.float32),
}


def column_norms(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: np.linalg.norm(np.asarray(x, np.float64), axis=0), tree
    )


def test_max_norm_takes_a_radius_for_each_path() -> None:
    project = clipjax.max_norm(
        {"head/kernel": jnp.linspace(1.0, 2.0, 4), "kernel": lambda step: 3.0 - step}
    )
    new = jax.jit(project.apply)(PARAMS, step=1)
    norms = column_norms(PARAMS)
    np.testing.assert_allclose(
        column_norms(new)["encoder"]["kernel"],
        np.minimum(norms["encoder"]["kernel"], 2),
        rtol=2e-6,
    )
    np.testing.assert_allclose(
        column_norms(new)["head"]["kernel"], np.linspace(1, 2, 4), rtol=2e-6
    )
    for name in ("stack", ("encoder", "bias")):
        old, now = (
            (t["stack"] if name == "stack" else t["encoder"]["bias"])
            for t in (PARAMS, new)
        )
        np.testing.assert_array_equal(old, now)


def test_min_max_norm_has_no_limit_where_no_pattern_matches() -> None:
    # Norms 1 and 5.
    params = {name: jnp.asarray([[0.6, 3.0], [0.8, 4.0]]) for name in "abc"}
    new = clipjax.min_max_norm({"a": 2.0}, {"b": 3.0}).apply(params)
    for name, expected in (("a", [2, 5]), ("b", [1, 3]), ("c", [1, 5])):
        np.testing.assert_allclose(column_norms(new)[name], expected, rtol=2e-6)
    # A number is for all leaves.
    for one, other in (
        (0.5, {"b": 3.0}),
        ({"a": 2.0}, 4.0),
    ):
        new = column_norms(clipjax.min_max_norm(one, other).apply(params))
        assert new["c"][1] == (5 if one == 0.5 else pytest.approx(4, rel=2e-6))


def test_limits_of_leaves_that_stay_need_not_go_together() -> None:
    params = {name: jnp.array([0.5]) for name in "ab"}
    lows, highs = {"a": 1.0, "b": 9.0}, {"*": 2.0}
    projected = clipjax.box(lows, highs, where="a").apply(params)
    assert (projected["a"], projected["b"]) == (1, 0.5)
    with pytest.raises(ValueError, match="low must not be above high for leaf 'b'"):
        clipjax.box(lows, highs).apply(params)


def test_limits_of_leaves_that_the_axes_leave_out_need_not_go_together() -> None:
    """`axes` names one leaf only, and the limits of the other one cross."""
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
    low, high = {"a": 0.1, "b": 3.0}, {"a": 1.0, "b": 1.0}
    after = clipjax.min_max_norm(low, high, axes={"a": 0}).apply(params)
    np.testing.assert_allclose(after["a"], 0.5**0.5, rtol=1e-5)
    np.testing.assert_array_equal(after["b"], params["b"])


def test_norms_stay_at_their_first_values() -> None:
    """The recipe of docs/recipes.md: layers keep the norms that they had first."""
    params = {"in": PARAMS["encoder"]["kernel"], "out": PARAMS["head"]["kernel"] / 7}
    radii = {name: jnp.linalg.norm(x) for name, x in params.items()}
    tx = optax.chain(optax.adam(0.1), clipjax.min_max_norm(radii, radii, axes=None))
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
        params = optax.apply_updates(params, updates)
    for name, radius in radii.items():
        np.testing.assert_allclose(jnp.linalg.norm(params[name]), radius, rtol=3e-6)


def test_violations_are_those_of_the_leaves_with_a_bound() -> None:
    found = clipjax.violations(PARAMS, clipjax.max_norm({"head/kernel": 1.0}))
    assert {each.path for each in found} == {"head/kernel"}
    assert len(found) == 4


def test_spectral_cap_takes_a_bound_for_each_path() -> None:
    capped = clipjax.spectral_cap(
        {"head/kernel": 1.0, "kernel": lambda step: 2.0 + step}
    ).apply(PARAMS, step=1)
    for path, bound in (("encoder", 3.0), ("head", 1.0)):
        np.testing.assert_allclose(
            np.linalg.norm(np.asarray(capped[path]["kernel"], np.float64), 2),
            bound,
            rtol=5e-5,
        )
    np.testing.assert_array_equal(capped["stack"], PARAMS["stack"])
