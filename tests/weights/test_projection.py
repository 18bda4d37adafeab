"""A projection as a link, in 16 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.trees import DTYPES, bits

RNG = np.random.default_rng(0)


def drawn(exponent: int, dtype: str) -> np.ndarray:
    return (RNG.normal(size=(64, 8)) * 2.0**exponent).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_updates_to_weights_inside_are_not_changed(dtype: str) -> None:
    """For 16 bits p + ((p + u) - p) would often be another number than p + u."""
    params, updates = drawn(0, dtype), drawn(-3, dtype)
    link = clipjax.max_norm(100.0)
    after, _ = jax.jit(link.update)(updates, link.init(params), params)
    assert after.dtype == np.float32
    assert bits(after) == bits(updates.astype(np.float32))


@jax.jit
def measured(params: Any, updates: Any) -> Any:
    """Return the sizes of the weights that a projection is given as a link."""
    seen = []
    link = clipjax.project(lambda tree: seen.append(tree) or tree)
    link.update(updates, link.init(params), params)
    return jax.tree.map(lambda x: jnp.abs(x.astype(np.float32)) * 1.0, seen[-1])


@pytest.mark.parametrize("exponent", [0, -14, -18])
def test_a_link_measures_the_weights_that_will_be(exponent: int) -> None:
    """Rounded to the dtype, with float16's subnormal numbers."""
    params = {dtype: drawn(exponent, dtype) for dtype in DTYPES}
    updates = {dtype: drawn(exponent - 4, dtype) for dtype in DTYPES}
    found = measured(params, updates)
    for dtype, x in found.items():
        # NumPy rounds a sum in 16 bits as the dtype does.
        want = np.abs((params[dtype] + updates[dtype]).astype(np.float32))
        np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("of_weights", ["float32", "float16"])
def test_updates_of_another_dtype_keep_weights_inside(
    dtype: str, of_weights: str
) -> None:
    """As from a model in 16 bits whose float32 weights an optimizer without moments
    updates; also when skipped.
    """
    projections = (clipjax.non_negative(), clipjax.box(-0.3, 0.3))

    @jax.jit
    def moved(params: Any, grads: Any) -> Any:
        found = []
        for project in projections:
            tx = clipjax.bounded(optax.sgd(1.0), project=project, nonfinite="skip")
            params = project.apply(params)
            updates, _ = tx.update(grads, tx.init(params), params)
            found.append((params, updates))
        return found

    @jax.jit
    def beside(each: Any) -> Any:
        summed = [optax.apply_updates(*pair) for pair in each]
        each = zip(summed, projections, strict=True)
        return [(x, project.apply(x)) for x, project in each]

    error = float(jnp.finfo(of_weights).eps) / 2
    for after, projected in beside(moved(drawn(0, of_weights), drawn(0, dtype))):
        np.testing.assert_allclose(after, projected, rtol=0, atol=error)


@pytest.mark.parametrize(("param", "update"), [(3.0 + 4.0j, 0.0), (3.0, 0)])
def test_updates_of_other_kinds(param: complex, update: float) -> None:
    """Of real and of whole numbers, which `optax.apply_updates` takes, too."""

    @jax.jit
    def moved(params: Any, updates: Any) -> Any:
        step, _ = clipjax.max_norm(1.0).update(updates, optax.EmptyState(), params)
        return optax.apply_updates(params, step)

    after = moved(jnp.array([[param]]), jnp.array([[update]]))
    np.testing.assert_allclose(after, np.array([[param]]) / abs(param), rtol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_compiler_may_leave_out_the_rounding(dtype: str) -> None:
    """A compiler may leave it out of p + u, as those for a CPU seldom do."""
    x = np.ones((3, 2), jnp.dtype(dtype))
    link = clipjax.max_norm(1.0)
    update = jax.make_jaxpr(lambda u, p: link.update(u, optax.EmptyState(), p))
    assert "reduce_precision" in str(update(x, x))


def test_it_is_a_transformation_of_optax() -> None:
    assert isinstance(clipjax.max_norm(1.0), optax.GradientTransformationExtraArgs)


def test_a_function_of_the_weights_leaves_integers_alone() -> None:
    to_zero = clipjax.project(lambda tree: jax.tree.map(jnp.zeros_like, tree))
    found = to_zero.apply({"i": jnp.arange(3), "w": jnp.ones(2)})
    assert (found["i"].tolist(), found["w"].tolist()) == ([0, 1, 2], [0, 0])


def test_a_schedule_takes_the_step_by_name() -> None:
    weights = {name: jnp.ones((4, 2, 3)) for name in ("query", "key")}
    projection = clipjax.qk_clip(lambda step: 4.0 - step)
    logits = jnp.array([1.0, 8.0])
    clipped = projection.apply(weights, max_logits=logits, step=2)
    np.testing.assert_allclose(clipped["key"][:, 1], 0.5, rtol=1e-6)
