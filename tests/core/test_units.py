"""Units: `SKIP`, by which a rule leaves a leaf alone, and the paths of leaves."""

import copy
import functools
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import SKIP, functional


def test_skip_stays_itself_in_copies() -> None:
    assert copy.deepcopy(SKIP) is pickle.loads(pickle.dumps(SKIP)) is SKIP


def test_auto_is_a_word_in_mappings_too() -> None:
    """The head stays, and other kernels are bounded by unit, as "auto" alone does."""
    params = {name: {"kernel": np.full((4, 3), 5.0)} for name in ("body", "head")}
    params["body"]["bias"] = np.full(3, 9.0)
    projected = clipjax.max_norm(1.0, axes={"head/*": SKIP, "*": "auto"}).apply(params)
    np.testing.assert_array_equal(projected["head"]["kernel"], 5.0)
    np.testing.assert_array_equal(projected["body"]["bias"], 9.0)
    norms = np.linalg.norm(np.asarray(projected["body"]["kernel"], float), axis=0)
    np.testing.assert_allclose(norms, 1.0, rtol=2e-6)
    conv = {"head": {"kernel": jnp.ones((3, 3, 2, 4))}}
    with pytest.raises(ValueError, match=r"'head/kernel' .* may be the kernel of"):
        clipjax.max_norm(1.0, axes={"*": "auto"}).apply(conv)
    with pytest.raises(TypeError, match=r"axes\['\*'\] must be ints"):
        clipjax.clip_by_norm(1.0, axes={"*": "auto"})


@pytest.mark.parametrize("axes", [SKIP, {"*": SKIP}, {"scale": SKIP, "bias": SKIP}])
def test_skipping_every_leaf_is_a_wish(axes: Any) -> None:
    """So a model of norms alone, of which `unit_axes` skips everything, is no error."""
    params = {"scale": jnp.ones(3), "bias": jnp.ones(3)}
    projection = clipjax.max_norm(0.5, axes=axes)
    projection.init(params)
    np.testing.assert_array_equal(projection.apply(params)["scale"], 1.0)


def test_norms_of_units_are_bounds_of_units() -> None:
    """With the reduced axes kept, what is measured is what a clip takes."""
    x = np.random.default_rng(0).standard_normal((5, 4, 3)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=1)
    def measured(x: Any, axes: Any) -> Any:
        kept = functional.unitwise_norms(x, axes=axes, keepdims=True)
        clipped = functional.clip_by_norm(x, kept / 2, axes=axes)
        return kept, functional.unitwise_norms(x, axes=axes), clipped

    for axes in (0, (0, 1), (1,), None):
        kept, squeezed, clipped = measured(x, axes)
        expected = np.linalg.norm(x.astype(float).reshape(-1)) if axes is None else None
        if axes is not None:
            expected = np.sqrt(np.sum(x.astype(float) ** 2, axes, keepdims=True))
        np.testing.assert_allclose(np.reshape(kept, np.shape(expected)), expected, 1e-6)
        assert kept.ndim == x.ndim
        np.testing.assert_allclose(clipped, x / 2, rtol=3e-6)
        np.testing.assert_array_equal(np.ravel(kept), np.ravel(squeezed))


def test_a_leaf_without_entries_needs_no_axes() -> None:
    """Nothing could be changed in it, so that "auto" need not apply to it."""
    clipjax.max_norm(1.0).apply({"bias": jnp.zeros(0)})
    with pytest.raises(ValueError, match="axes: they apply to none of: leaf 'bias'"):
        clipjax.max_norm(1.0).apply({"bias": jnp.zeros(1)})


class Box(NamedTuple):
    value: Any


class Heads(NamedTuple):
    value: Any
    query: Any


def test_value_is_no_part_of_a_path_only_where_it_is_the_one_child() -> None:
    weights = {"dense": Box(np.ones((4, 3))), "attention": Heads(*np.ones((2, 4, 3)))}
    axes = {"dense": 0, "attention/value": 0}
    projected = clipjax.max_norm(1.0, axes=axes).apply(weights)
    np.testing.assert_allclose(projected["dense"].value, 0.5, rtol=2e-6)
    np.testing.assert_allclose(projected["attention"].value, 0.5, rtol=2e-6)
    np.testing.assert_array_equal(projected["attention"].query, 1.0)
