"""What `unit_axes` does not know it names, all of it at once, and never guesses; `other` gives the answer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import SKIP
from tests.support.oracles import exact_norm
from tests.support.units import random, random_weights

pytest.importorskip("flax")
import flax.linen as nn
from flax import nnx

from clipjax.flax import unit_axes

KEY = jax.random.key(0)
LIST = getattr(nnx, "List", list)  # older versions of Flax take any


class Odd(nn.Module):
    """Parameters of its own, beside and below known layers."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        assert isinstance(train, bool), "flags stay Python values"
        x = x @ self.param("w", nn.initializers.ones, (4, 4)) + self.param("shift", nn.initializers.ones, ())
        return Inner(name="inner")(nn.Dense(4)(x))


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        mixed = self.param("mixed", lambda _: {"a": jnp.ones((4, 4)), "b": jnp.ones(4)})
        return nn.ConvTranspose(3, 2, transpose_kernel=True, name="Dense_0")(x @ mixed["a"] + mixed["b"])


OWN = ["w", "shift", "inner/mixed/a", "inner/mixed/b"]


def test_unknown_parameters_are_all_named() -> None:
    with pytest.raises(ValueError, match="it is not known which weights") as caught:
        unit_axes(Odd(), KEY, random(2, 4), train=True)
    listed = [line.split(" of shape ")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(listed) == sorted(OWN)
    assert "w of shape (4, 4): 'w' of Odd" in str(caught.value)


OTHER = {"w": 1, "shift": SKIP, "mixed/*": clipjax.fan_in}


def test_other_serves_what_is_unknown_and_wins_over_what_is_known() -> None:
    axes = unit_axes(Odd(), KEY, random(2, 4), other=OTHER, train=True)
    assert axes == {
        "inner/mixed/a": clipjax.fan_in,
        "inner/mixed/b": clipjax.fan_in,
        "inner/Dense_0/kernel": (0, 2),
        "inner/Dense_0/bias": SKIP,
        "Dense_0/kernel": (0,),
        "Dense_0/bias": SKIP,
        "w": 1,
        "shift": SKIP,
    }
    axes = unit_axes(Odd(), KEY, random(2, 4), other=OTHER | {"inner/Dense_0/kernel": None}, train=True)
    assert axes["inner/Dense_0/kernel"] is None
    assert axes["Dense_0/kernel"] == (0,)
    with pytest.raises(ValueError, match="other: the pattern 'W' matches no leaf"):
        unit_axes(Odd(), KEY, random(2, 4), other=OTHER | {"W": 0}, train=True)
    with pytest.raises(TypeError, match="other"):
        unit_axes(Odd(), KEY, random(2, 4), other={"w": "0"}, train=True)


def test_unknown_nnx_parameters_are_all_named() -> None:
    class Inner(nnx.Module):
        def __init__(self) -> None:
            self.parts = LIST([nnx.Param(random(2, 3))])
            self.pair = nnx.Param({"a": random(2, 3), "b": random(3)})

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(random(2, 3))
            self.linear = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
            self.inner = Inner()

    with pytest.raises(ValueError, match="it is not known which weights") as caught:
        unit_axes(Model())
    listed = [line.split(" of shape ")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(listed) == ["inner/pair/a", "inner/pair/b", "inner/parts/0", "w"]
    axes = unit_axes(Model(), other={"w": 0, "parts/*": 1, "pair/*": SKIP})
    own = {"inner/parts/0": 1, "inner/pair/a": SKIP, "inner/pair/b": SKIP, "w": 0}
    assert axes == own | {"linear/kernel": (0,), "linear/bias": SKIP}
    params = random_weights(lambda: nnx.state(Model()))
    projected = jax.jit(clipjax.max_norm(0.1, axes=axes).__call__)(params)
    np.testing.assert_allclose(exact_norm(projected["w"][...], 0), 0.1, rtol=1e-6)


@pytest.mark.parametrize("equation", ["...a,ab->...b", "ab,b...->a..."])
def test_an_einsum_that_is_not_understood_is_named(equation: str) -> None:
    layer = nn.Einsum((4, 3), equation, use_bias=False)
    if equation.endswith("b"):
        assert unit_axes(layer, KEY, random(2, 4)) == {"kernel": (0,)}
    else:
        with pytest.raises(ValueError, match="'kernel' of Einsum"):
            unit_axes(layer, KEY, random(2, 4))


def test_what_is_no_model() -> None:
    for model in (nn.Dense, {"kernel": random(2, 3)}, lambda x: x):
        with pytest.raises(TypeError, match="must be a Flax module"):
            unit_axes(model, KEY, random(2, 4))
    with pytest.raises(TypeError, match="takes the arguments of its init"):
        unit_axes(nn.Dense(3))
    with pytest.raises(TypeError, match="no further arguments"):
        unit_axes(nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))), KEY)
