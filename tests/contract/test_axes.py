"""`axes` are those that are reduced: ints and tuples for matrices only, rules, and
mappings from paths.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.contract.members import ROWS, Row
from tests.support.trees import fan_in_or_all

KERNEL = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (2, 3, 4)), np.float32)
TREE = {
    "conv": {"kernel": KERNEL, "bias": jnp.array([3.0, 4.0])},
    "dense": {"kernel": KERNEL[0]},
    "scale": jnp.array(2.0),
}
WEIGHTS = jax.tree.map(lambda x: jnp.flip(x) + 1.5, TREE)
NO = "unchanged"


def by_rank(path: Any, leaf: Any) -> Any:
    return 0 if leaf.ndim == 1 else clipjax.SKIP


# Forms of axes, and what is reduced of the two kernels, of ranks 3 and 2, of the bias
# and of the scale.
FORMS: list[tuple[Any, list[Any]]] = [
    (None, [(0, 1, 2), (0, 1), (0,), ()]),
    (0, [(0,), (0,), NO, NO]),
    (-1, [(2,), (1,), NO, NO]),
    ((0, 1), [(0, 1), (0, 1), NO, NO]),
    ({"conv/kernel": (-2, 0)}, [(0, 1), NO, NO, NO]),
    (clipjax.fan_in, [(0, 1), (0,), NO, NO]),
    (fan_in_or_all, [(0, 1), (0,), (0,), ()]),
    (by_rank, [NO, NO, (0,), NO]),
    ({"conv/kernel": (0, 1), "*": 0}, [(0, 1), (0,), NO, NO]),
    ({"kernel": 1}, [(1,), (1,), NO, NO]),
    ({"dense/*": None, "kernel": clipjax.SKIP}, [NO, (0, 1), NO, NO]),
    (
        {"bias": None, "scale": fan_in_or_all, "*": clipjax.fan_in},
        [(0, 1), (0,), (0,), ()],
    ),
]

WITH_AXES = [row for row in ROWS if row.axes]
SCALING = [row for row in WITH_AXES if row.bounds and not row.warm]
DEFAULT_IS_FAN_IN = [
    clipjax.max_norm(1.0),
    clipjax.min_max_norm(0.5, 1.0),
    clipjax.unit_norm(),
    clipjax.tangent_cone(1.0),
]


def applied(made: Any, tree: Any, weights: Any) -> Any:
    return (
        made.update(tree, made.init(tree), weights)[0]
        if hasattr(made, "_fields")
        else made(tree, *([weights] if made.needs else []))
    )


def leaves(tree: Any) -> list[Any]:
    return [
        tree["conv"]["kernel"],
        tree["dense"]["kernel"],
        tree["conv"]["bias"],
        tree["scale"],
    ]


@pytest.mark.parametrize("row", SCALING, ids=lambda row: row.id)
def test_units_are_what_axes_reduce(row: Row) -> None:
    """The entries of a unit, and no others, have one factor."""

    @jax.jit
    def every(tree: Any, weights: Any, bound: Any) -> Any:
        return [applied(row.axes(bound, axes=axes), tree, weights) for axes, _ in FORMS]

    for (axes, wanted), result in zip(FORMS, every(TREE, WEIGHTS, 0.01), strict=True):
        for before, after, reduced in zip(
            leaves(TREE), leaves(result), wanted, strict=True
        ):
            factor = np.asarray(after / before, np.float64)
            if isinstance(reduced, str):
                assert (after == before).all(), axes
                continue
            spread = factor.max(axis=reduced, keepdims=True) - factor.min(
                axis=reduced, keepdims=True
            )
            assert (factor < 0.9).all(), axes
            assert (spread <= 1e-6 * factor).all(), axes
            units = np.sort(factor.max(axis=reduced).ravel())
            assert (np.diff(units) > 1e-6 * units[:-1]).all(), axes


@pytest.mark.parametrize("row", WITH_AXES, ids=lambda row: row.id)
@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        ({"kernl": 0}, ValueError, "'kernl' matches no leaf"),
        (3, ValueError, "out of range for leaf '.*kernel'"),
        (
            (0, -3),
            ValueError,
            "out of range for leaf 'dense/kernel'|twice for leaf 'conv/kernel'",
        ),
        ({"bias": 0}, ValueError, "nothing is changed"),
        (True, TypeError, "True"),
        ("0", TypeError, "'0'"),
        (0.0, TypeError, r"0\.0"),
        ({0: 0}, TypeError, "path patterns"),
        ({"kernel": "x"}, TypeError, "'x'"),
        (lambda path, leaf: "x", TypeError, "by the rule"),
    ],
)
def test_wrong_axes_raise(row: Row, axes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: applied(row.axes(1.0, axes=axes), TREE, WEIGHTS))


@pytest.mark.parametrize(
    "made",
    DEFAULT_IS_FAN_IN,
    ids=["max_norm", "min_max_norm", "unit_norm", "tangent_cone"],
)
def test_no_axes_are_guessed_above_rank_2(made: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"leaf 'conv/kernel' .*unit_axes.*clipjax.fan_in for convolutions",
    ):
        jax.eval_shape(lambda: applied(made, TREE, WEIGHTS))


def test_functions_and_layers_take_axes_literally() -> None:
    """As NumPy does: an int applies to vectors, too."""
    bias = {"bias": TREE["conv"]["bias"]}
    np.testing.assert_allclose(
        functional.clip_by_norm(bias, 1.0, axes=0)["bias"], [0.6, 0.8], rtol=2e-6
    )
    np.testing.assert_allclose(
        functional.clip_by_norm(bias, 1.0, axes=(-1,))["bias"], [0.6, 0.8], rtol=2e-6
    )
    np.testing.assert_allclose(functional.unitwise_norms(bias, 0)["bias"], 5.0)
    layer = jax.vjp(lambda x: clipjax.clip_gradient_by_norm(x, 1.0, axes=0), bias)[1]
    np.testing.assert_allclose(layer(bias)[0]["bias"], [0.6, 0.8], rtol=2e-6)
    assert (
        functional.clip_by_norm(bias, 1.0, axes=())["bias"] <= 1
    ).all()  # each entry is a unit
    with pytest.raises(ValueError, match="out of range"):
        functional.clip_by_norm(bias, 1.0, axes=1)


def test_bounds_of_units_broadcast() -> None:
    """An array bounds units one by one; a shape that does not fit raises."""
    matrix = jnp.array([[3.0, 3.0], [4.0, 4.0]])
    np.testing.assert_allclose(
        clipjax.max_norm(jnp.array([1.0, 2.5]))(matrix),
        [[0.6, 1.5], [0.8, 2.0]],
        rtol=2e-6,
    )
    with pytest.raises(
        ValueError,
        match=r"radius must broadcast to shape \(1, 2\), .* got shape \(3,\)",
    ):
        clipjax.max_norm(jnp.ones(3))(matrix)


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 3, 3, 4, 3)])
def test_agc_refuses_ranks_that_may_be_stacks(shape: tuple[int, ...]) -> None:
    """Layers of a stack would share a norm: a gradient of 0.005 beside one of 100
    became 1e-6.
    """
    tree = {"blocks": {"kernel": jnp.ones(shape)}}
    with pytest.raises(
        ValueError, match=r"axes: leaf 'blocks/kernel' of shape .* a stack of layers"
    ):
        clipjax.adaptive_grad_clip().init(tree)
    grads = {
        "blocks": {
            "kernel": jnp.stack([jnp.full(shape[1:], x) for x in (100.0, 0.005)])
        }
    }
    axes = tuple(range(1, len(shape) - 1))
    tx = clipjax.adaptive_grad_clip(axes=axes)
    clipped, _ = tx.update(grads, tx.init(tree), tree)
    one = clipjax.adaptive_grad_clip(axes=fan_in_or_all)
    alone = jax.tree.map(lambda x: x[1], (grads, tree))
    expected, _ = one.update(alone[0], one.init(alone[1]), alone[1])
    np.testing.assert_allclose(
        clipped["blocks"]["kernel"][1], expected["blocks"]["kernel"], rtol=1e-6
    )


def test_agc_reduces_kernels_of_convolutions_and_whole_biases() -> None:
    """Ranks 2 and 4 have units, and less is one, as in the paper."""
    tree = {
        "conv": jnp.ones((3, 3, 2, 4)),
        "dense": jnp.ones((5, 4)),
        "bias": jnp.ones(4),
    }
    for x, y in zip(
        *(
            jax.tree.leaves(tx.update(tree, tx.init(tree), tree)[0])
            for tx in (
                clipjax.adaptive_grad_clip(),
                clipjax.adaptive_grad_clip(axes=fan_in_or_all),
            )
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)
