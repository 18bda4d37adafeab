"""`axes` are what is reduced: ints and tuples of matrices, rules, and mappings."""

from typing import Any

import jax
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.contract.members import ROWS, Row
from tests.support.trees import fan_in_or_all

KERNEL = np.random.default_rng(0).uniform(1, 2, (2, 3, 4)).astype(np.float32)
TREE = {
    "conv": {"kernel": KERNEL, "bias": np.float32([3.0, 4.0])},
    "dense": {"kernel": KERNEL[0]},
    "scale": np.array(2.0, np.float32),
}
WEIGHTS = jax.tree.map(lambda x: np.flip(x) + np.float32(1.5), TREE)
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

WITH_AXES = [row for row in ROWS if row.takes_axes]
SCALING = [row for row in WITH_AXES if row.bounds and not row.warm]
DEFAULT_IS_FAN_IN = [
    clipjax.max_norm(1.0),
    clipjax.min_max_norm(0.5, 1.0),
    clipjax.unit_norm(),
    clipjax.tangent_cone(1.0),
]


def applied(made: Any, tree: Any, weights: Any, *, old: bool = False) -> Any:
    """Apply a projection directly, to `old` weights too, or else update."""
    if hasattr(made, "apply"):
        return made.apply(tree, *([weights] if old else []))
    return made.update(tree, made.init(tree), weights)[0]


def leaves(tree: Any) -> list[Any]:
    return [
        tree["conv"]["kernel"],
        tree["dense"]["kernel"],
        tree["conv"]["bias"],
        tree["scale"],
    ]


def check_units(before: Any, after: Any, reduced: Any, axes: Any) -> None:
    """Compare the factors within the units of a leaf, and those of its units."""
    factor = np.asarray(after, np.float64) / before
    if isinstance(reduced, str):
        assert (factor == 1).all(), axes
        return
    largest = factor.max(axis=reduced, keepdims=True)
    spread = largest - factor.min(axis=reduced, keepdims=True)
    assert (factor < 0.9).all(), axes
    assert (spread <= 1e-6 * factor).all(), axes
    units = np.sort(largest.ravel())
    assert (np.diff(units) > 1e-6 * units[:-1]).all(), axes


@pytest.mark.parametrize("row", SCALING, ids=lambda row: row.id)
def test_units_are_what_axes_reduce(row: Row) -> None:
    """The entries of a unit, and no others, have one factor."""

    @jax.jit
    def every(tree: Any, weights: Any, bound: Any) -> Any:
        made = [row.make(bound, axes=axes) for axes, _ in FORMS]
        return [applied(each, tree, weights, old=row.params) for each in made]

    for (axes, wanted), result in zip(FORMS, every(TREE, WEIGHTS, 0.01), strict=True):
        each = zip(leaves(TREE), leaves(result), wanted, strict=True)
        for before, after, reduced in each:
            check_units(before, after, reduced, axes)


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

    def layer(x: Any) -> Any:
        return clipjax.clip_gradient_by_norm(x, 1.0, axes=0)

    @jax.jit
    def clipped(x: Any) -> Any:
        by_norm = [functional.clip_by_norm(x, 1.0, axes=axes) for axes in (0, (-1,))]
        each = functional.clip_by_norm(x, 1.0, axes=())  # each entry is a unit
        norm = functional.unitwise_norms(x, axes=0)
        return [*by_norm, jax.vjp(layer, x)[1](x)[0]], each, norm

    wholes, each, norm = clipped(TREE["conv"]["bias"])
    for whole in wholes:
        np.testing.assert_allclose(whole, [0.6, 0.8], rtol=2e-6)
    assert (each <= 1).all()
    np.testing.assert_allclose(norm, 5.0)
