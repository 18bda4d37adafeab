"""The axes of NNX layers that `nnx.vmap` stacks: each layer of the stack has units of its own.

A live model does not say how its layers were stacked: its shapes and what is stacked beside them must.
"""

from __future__ import annotations

from typing import Any

import pytest

from clipjax import SKIP

pytest.importorskip("flax")
from flax import nnx

from clipjax.flax import unit_axes


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs, bias: bool = True) -> None:
        self.linear = nnx.Linear(width, 6, use_bias=bias, rngs=rngs)
        self.conv = nnx.Conv(2, 5, (3, 3), use_bias=bias, rngs=rngs)
        self.norm = nnx.LayerNorm(7, rngs=rngs)


def stacked_blocks(axis: int, size: int, *more: Any) -> nnx.Module:
    return stacked(lambda rngs: Block(4, rngs, *more), axis, size)


def stacked(make: Any, axis: int, size: int) -> nnx.Module:
    make_all = nnx.split_rngs(splits=size)(nnx.vmap(make, in_axes=0, out_axes=axis))
    return nnx.eval_shape(lambda: make_all(nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("axis", "linear", "conv"), [(0, (1,), (1, 2, 3)), (1, (0,), (0, 2, 3)), (-1, (0,), (0, 1, 2))]
)
def test_stacked_nnx_layers_have_units_of_their_own(axis: int, linear: Any, conv: Any) -> None:
    axes = unit_axes(stacked_blocks(axis, 2))
    assert (axes["linear/kernel"], axes["conv/kernel"]) == (linear, conv)
    assert axes["norm/scale"] is axes["conv/bias"] is SKIP


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("axis", "size", "linear", "conv"),
    [(0, 4, (1,), (1, 2, 3)), (0, 3, (1,), (1, 2, 3)), (1, 3, (0,), (0, 2, 3)), (-1, 3, (0,), (0, 1, 2))],
)
def test_sizes_that_coincide_are_told_apart_by_what_is_stacked_beside(
    axis: int, size: int, linear: Any, conv: Any, bias: bool
) -> None:
    """Three layers whose windows are 3 by 3: what is not of this size shows the index of the stack."""
    axes = unit_axes(stacked_blocks(axis, size, bias))
    assert (axes["linear/kernel"], axes["conv/kernel"]) == (linear, conv)


def test_a_stack_that_cannot_be_told_is_named() -> None:
    model = stacked(lambda rngs: nnx.Linear(3, 3, rngs=rngs), 0, 3)
    with pytest.raises(ValueError, match=r"kernel of shape \(3, 3, 3\): .* itself of shape \(3, 3\)"):
        unit_axes(model)
    assert unit_axes(model, other={"kernel": 1}) == {"kernel": 1, "bias": SKIP}
