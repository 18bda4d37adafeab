"""The axes of Equinox models, in which a weight has its units along the first axis."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import SKIP

pytest.importorskip("equinox")
import equinox as eqx
from equinox import nn

from clipjax.equinox import unit_axes

KEY = jax.random.key(0)


def stack(make: Any, count: int) -> Any:
    return eqx.filter_vmap(make)(jax.random.split(KEY, count))


PROJECTIONS = (
    "query_proj/weight",
    "key_proj/weight",
    "value_proj/weight",
    "output_proj/weight",
)
# A layer, and the axes of those of its parameters that are not skipped.
LAYERS: list[tuple[Any, dict[str, Any]]] = [
    (lambda key: nn.Linear(3, 4, key=key), {"weight": (1,)}),
    (lambda key: nn.Linear("scalar", "scalar", key=key), {"weight": (1,)}),
    (lambda key: nn.Conv2d(4, 6, (3, 2), groups=2, key=key), {"weight": (1, 2, 3)}),
    (lambda key: nn.ConvTranspose1d(2, 3, 2, key=key), {"weight": (1, 2)}),
    (lambda key: nn.Embedding(7, 3, key=key), {"weight": (1,)}),
    (lambda key: nn.GRUCell(2, 3, key=key), {"weight_ih": (1,), "weight_hh": (1,)}),
    (lambda key: nn.LSTMCell(2, 3, key=key), {"weight_ih": (1,), "weight_hh": (1,)}),
    (
        lambda key: nn.MultiheadAttention(2, 4, use_query_bias=True, key=key),
        dict.fromkeys(PROJECTIONS, (1,)),
    ),
    (
        lambda key: [
            nn.LayerNorm((2, 3)),
            nn.GroupNorm(2, 4),
            nn.RMSNorm(4),
            nn.PReLU(),
        ],
        {},
    ),
    (lambda key: nn.BatchNorm(3, axis_name="batch", mode="ema"), {}),
    (lambda key: nn.WeightNorm(nn.Linear(3, 4, key=key)), {"layer/weight": (1,)}),
    (
        lambda key: nn.SpectralNorm(nn.Linear(3, 4, key=key), "weight", key=key),
        {"layer/weight": (1,)},
    ),
    (
        lambda key: nn.Sequential([nn.Linear(3, 4, key=key), nn.Lambda(jax.nn.relu)]),
        {"layers/0/weight": (1,)},
    ),
    (lambda _: stack(lambda key: nn.Conv1d(2, 5, 3, key=key), 4), {"weight": (2, 3)}),
    (
        lambda _: stack(lambda key: nn.MLP(3, 4, 3, 0, key=key), 3),
        {"layers/0/weight": (2,)},
    ),
    (lambda key: {"a": [nn.Linear(3, 4, key=key)], "head": None}, {"a/0/weight": (1,)}),
]


def test_layers() -> None:
    for make, expected in LAYERS:
        model = eqx.filter_eval_shape(make, KEY)
        axes = unit_axes(model)
        assert {
            path: each for path, each in axes.items() if each is not SKIP
        } == expected, model


def model() -> Any:
    stacked = stack(lambda key: nn.Linear(3, 4, key=key), 2)
    return {
        "mlp": nn.MLP(2, 3, 5, 1, key=KEY),
        "stack": stacked,
        "w": jnp.ones((2, 3)),
        "count": 0,
    }


def test_a_model_in_a_projection() -> None:
    params = eqx.filter(eqx.filter_jit(model)(), eqx.is_inexact_array)
    projection = clipjax.unit_norm(axes=unit_axes(params, other={"w": 0}))
    after = jax.jit(projection.apply)(params)
    first, second = after["mlp"].layers
    for weight in (first.weight, second.weight, *after["stack"].weight, after["w"].T):
        norms = np.linalg.norm(np.asarray(weight, np.float64), axis=1)
        np.testing.assert_allclose(norms, 1, rtol=3e-6)
    np.testing.assert_array_equal(after["stack"].bias, params["stack"].bias)


def test_unknown_parameters_and_wrong_calls() -> None:
    abstract = eqx.filter_eval_shape(model)
    with pytest.raises(
        ValueError, match=r"w of shape \(2, 3\): 'w' of dict, which is not known"
    ):
        unit_axes(abstract)
    assert unit_axes(abstract, other={"w": 0, "stack/*": None})["stack/weight"] is None
    with pytest.raises(ValueError, match="other: the pattern 'head' matches no leaf"):
        unit_axes(abstract, other={"w": 0, "head": 0})
    last = eqx.filter_vmap(
        lambda key: nn.Linear(3, 4, key=key), out_axes=eqx.if_array(-1)
    )
    assert unit_axes(eqx.filter_eval_shape(last, jax.random.split(KEY, 2)))[
        "weight"
    ] == (1,)
    for out_axis in (0, -1):
        cube = eqx.filter_vmap(
            lambda key: nn.Linear(3, 3, key=key), out_axes=eqx.if_array(out_axis)
        )
        with pytest.raises(
            ValueError,
            match=r"'weight' of Linear, itself of shape \(3, 3\): which axes "
            "are a stack",
        ):
            unit_axes(eqx.filter_eval_shape(cube, jax.random.split(KEY, 3)))
    for wrong in ({"kernel": jnp.ones((2, 3))}, nn.Linear):
        with pytest.raises(TypeError, match="model must be an Equinox module"):
            unit_axes(wrong)
    with pytest.raises(TypeError, match=r"other.*w"):
        unit_axes(abstract, other={"w": "0"})
