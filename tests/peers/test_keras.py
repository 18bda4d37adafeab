"""The constraints of Keras, and the clips of its optimizers."""

import importlib.util
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.peers.draws import SEEDS, assert_close, draw

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
if importlib.util.find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def keras() -> Any:
    return importlib.import_module("keras")


def check(keras: Any, ours: Any, theirs: Any, weights: np.ndarray, axis: Any) -> None:
    """Compare; Keras multiplies by target / (1e-7 + norm), inside the bounds, too."""
    got = ours.apply(jnp.asarray(weights))
    want = np.asarray(
        keras.ops.convert_to_numpy(theirs(keras.ops.convert_to_tensor(weights)))
    )
    norm = np.sqrt(
        np.sum(np.square(weights, dtype=np.float64), axis=axis, keepdims=True)
    )
    np.testing.assert_allclose(
        got, want * (1 + 1e-7 / np.where(norm > 0, norm, 1)), rtol=2e-6
    )


@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((6, 5), 0),
        ((6, 5), 1),
        ((6, 5), (0, 1)),
        ((3, 3, 4, 6), (0, 1, 2)),
        ((4, 2, 3), (0, 2)),
    ],
)
def test_constraints(keras: Any, size: float, shape: Any, axis: Any) -> None:
    """Of matrices, of convolutions as Keras' documentation says, and of heads."""
    w = (size * np.random.default_rng(7).standard_normal(shape)).astype(np.float32)
    w[:, 0] = 0
    theirs, own = keras.constraints, list(axis) if isinstance(axis, tuple) else axis
    check(
        keras, clipjax.max_norm(2.0, axes=axis), theirs.MaxNorm(2.0, axis=own), w, axis
    )
    check(keras, clipjax.unit_norm(axes=axis), theirs.UnitNorm(axis=own), w, axis)
    for low, high in ((0.0, 1.0), (0.5, 2.0), (3.0, 3.0)):
        check(
            keras,
            clipjax.min_max_norm(low, high, axes=axis),
            theirs.MinMaxNorm(low, high, axis=own),
            w,
            axis,
        )
    np.testing.assert_array_equal(
        clipjax.non_negative().apply(w), keras.ops.convert_to_numpy(theirs.NonNeg()(w))
    )


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.9])
def test_a_rate_moves_part_of_the_way(keras: Any, rate: float) -> None:
    w = np.random.default_rng(8).standard_normal((6, 5)).astype(np.float32)
    ours = clipjax.min_max_norm(0.5, 1.0, rate=rate)
    theirs = keras.constraints.MinMaxNorm(0.5, 1.0, rate=rate)
    for _ in range(3):
        check(keras, ours, theirs, w, 0)
        w = np.asarray(ours.apply(w))


def test_a_bias_has_no_constraint_unless_asked(keras: Any) -> None:
    """`kernel_constraint` leaves a bias as it is, as do projections with axes=0."""
    params = {
        "kernel": jnp.full((4, 3), 9.0),
        "bias": jnp.full(3, 9.0),
        "scale": jnp.asarray(9.0),
    }
    layer = keras.layers.Dense(
        3, kernel_constraint=keras.constraints.MaxNorm(3.0, axis=0)
    )
    layer.build((None, 4))
    assert layer.bias.constraint is None
    bounds = (
        clipjax.max_norm(3.0, axes=0),
        clipjax.min_max_norm(1.0, 3.0, axes=0),
        clipjax.unit_norm(axes=0),
    )
    for projection in (*bounds, clipjax.max_norm(3.0)):
        projected = projection.apply(params)
        assert (projected["bias"] == 9).all()
        assert projected["scale"] == 9
        assert (projected["kernel"] < 2).all()


@SEEDS
@pytest.mark.parametrize("argument", ["clipvalue", "clipnorm", "global_clipnorm"])
def test_optimizers(keras: Any, seed: int, argument: str) -> None:
    leaves, bound = draw(seed)
    limit = {"clipvalue": bound / 20, "clipnorm": bound / 3, "global_clipnorm": bound}[
        argument
    ]
    variables = [keras.Variable(np.zeros_like(x)) for x in leaves]
    optimizer = keras.optimizers.SGD(1.0, **{argument: limit})
    optimizer.apply([keras.ops.convert_to_tensor(x) for x in leaves], variables)
    ours = {
        "clipvalue": lambda: functional.clip_by_value(leaves, -limit, limit),
        "clipnorm": lambda: functional.clip_by_norm(leaves, limit),
        "global_clipnorm": lambda: functional.clip_by_global_norm(leaves, limit)[0],
    }[argument]()
    assert_close(ours, [-keras.ops.convert_to_numpy(x) for x in variables])
