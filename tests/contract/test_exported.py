"""A step is exported for any size of an axis, as `jax.export` writes it."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import export

import clipjax
from tests.contract.members import ROWS
from tests.support.programs import is_transformation

# Matrices are divided into as many blocks as their sizes say.
OF_KNOWN_SIZES = {"spectral_cap"}
MEMBERS = {
    row.id: row.make(0.6875)
    for row in ROWS
    if (is_transformation(row) or row.kind == "projection")
    and row.tree != "heads"
    and row.name not in OF_KNOWN_SIZES
}


def exported(tx: Any, *sizes: str) -> Any:
    """Export a step whose leaves have a symbolic first axis."""
    shapes = export.symbolic_shape(", ".join(sizes))
    tree = {
        name: jax.ShapeDtypeStruct((size, 4), np.float32)
        for name, size in zip(("a", "c_"), shapes, strict=True)
    }
    known = {name: np.ones((4, 4), np.float32) for name in tree}
    state = tx.init(known)
    return export.export(jax.jit(tx.update))(tree, state, tree), state


@pytest.mark.parametrize("name", MEMBERS)
def test_a_symbolic_axis(name: str) -> None:
    exported(MEMBERS[name], "b", "4*b")


def test_an_exported_root_mean_square_is_that_of_each_size() -> None:
    tx = clipjax.clip_by_rms(0.5)
    step, state = exported(tx, "b", "4*b")
    rng = np.random.default_rng(0)
    for b in (1, 5):
        draw = {"a": (b, 4), "c_": (4 * b, 4)}
        tree = {k: rng.normal(size=x).astype(np.float32) for k, x in draw.items()}
        found, _ = step.call(tree, state, tree)
        wanted, _ = jax.jit(tx.update)(tree, state, tree)
        for key, x in wanted.items():
            np.testing.assert_allclose(found[key], x, rtol=1e-6)


def test_heads_of_any_number_of_features() -> None:
    (features,) = export.symbolic_shape("b")
    kernel = jax.ShapeDtypeStruct((features, 3, 4), np.float32)
    logits = jax.ShapeDtypeStruct((3,), np.float32)
    apply = clipjax.qk_clip(0.5).apply
    heads = {"query": kernel, "key": kernel}
    clip = jax.jit(lambda heads, logits: apply(heads, max_logits=logits))
    result, _ = export.export(clip)(heads, logits).out_avals
    assert result.shape == kernel.shape
