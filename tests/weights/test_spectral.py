"""The spectral cap beside NumPy's decomposition in float64."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from clipjax._core.units import SKIP
from clipjax.weights.spectral import spectral_cap

BOUND = 0.7
DTYPES = ("float32", "bfloat16", "float16", "complex64", "float64", "complex128")
RNG = np.random.default_rng(0)
U, _, V = np.linalg.svd(RNG.normal(size=(20, 12)), full_matrices=False)
MATRICES = {
    "square": RNG.normal(size=(24, 24)),
    "wide": RNG.normal(size=(3, 40)),
    "row": RNG.normal(size=(1, 9)) + 1,
    "equal": 3 * np.linalg.qr(RNG.normal(size=(16, 16)))[0],
    "rank one": np.ones((12, 20)),
    "steep": (U * np.geomspace(1e4, 0.01, 12)) @ V,
}


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def largest(x: Any) -> np.ndarray:
    return np.linalg.svd(wide(x), compute_uv=False).max(axis=-1)


def cap(x: Any, bound: float) -> np.ndarray:
    """Cap singular values in float64."""
    u, s, vh = np.linalg.svd(wide(x), full_matrices=False)
    return (u * np.minimum(s, bound)[..., None, :]) @ vh


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cap(dtype: str) -> None:
    """In each stack the first matrix is outside, the second inside and the third 0."""
    exact = dtype in ("float64", "complex128")
    with jax.enable_x64(exact):
        turn = 1 + 0.5j if dtype.startswith("complex") else 1
        tree = {k: [turn * x, turn * x * 0.3 / largest(x), 0 * x] for k, x in MATRICES.items()}
        tree |= {"bias": [9.0, 9.0], "empty": np.zeros((0, 3))}
        given = {k: jnp.asarray(np.array(x), dtype) for k, x in tree.items()} | {"steps": jnp.full((2, 2), 9)}
        call = jax.jit(spectral_cap(BOUND, flatten=(1, 2)))
        once = call(given)
        twice = call(once)
    info = jnp.finfo(dtype)
    rounding = float(info.eps) / 2 if info.bits == 16 else 0.0
    # What the cap leaves below the bound, and what a decomposition knows of the smaller singular values.
    room, known = (1e-12, 1e-13) if exact else (2e-5, 3e-6)
    for name, x in given.items():
        assert once[name].dtype == x.dtype, name
        assert bits(once[name]) == bits(twice[name]), name
        if name not in MATRICES:
            assert bits(once[name]) == bits(x), name
            continue
        assert bits(once[name][1:]) == bits(x[1:]), name
        assert largest(once[name][0]) <= BOUND * (1 + rounding), name
        error = np.linalg.norm(wide(once[name][0]) - cap(x[0], BOUND), 2)
        assert error <= BOUND * (room + 3 * rounding) + known * largest(x[0]), name


@pytest.mark.parametrize(
    ("flatten", "order", "stack"),
    [
        (((0, 1), 2), (0, 1, 2), (24, 5)),
        ((1, 2), (0, 1, 2), (4, 6, 5)),
        ((-1, [0]), (1, 2, 0), (6, 5, 4)),
        ((2, (1, 0)), (2, 1, 0), (5, 24)),
        (lambda path, leaf: (1, 2) if leaf.ndim == 3 else SKIP, (0, 1, 2), (4, 6, 5)),
        ({"b/*": (1, 2), "a": None}, (0, 1, 2), (4, 6, 5)),
    ],
)
def test_kernels_of_higher_rank(flatten: Any, order: Any, stack: tuple[int, ...]) -> None:
    conv, dense = (RNG.normal(size=shape).astype(np.float32) for shape in ((4, 6, 5), (5, 3)))
    result = spectral_cap(0.5, flatten=flatten)({"a": dense, "b": {"c": conv}})
    moved = np.transpose(conv, order)
    wanted = np.transpose(cap(moved.reshape(stack), 0.5).reshape(moved.shape), np.argsort(order))
    np.testing.assert_allclose(result["b"]["c"], wanted, atol=2e-5)
    np.testing.assert_allclose(result["a"], dense if callable(flatten) else cap(dense, 0.5), atol=2e-5)


def test_the_forms_of_bounds() -> None:
    stack = jnp.asarray(RNG.normal(size=(3, 6, 5)), jnp.float32)
    capped = spectral_cap(np.array([0.0, 0.5, math.inf]), flatten=(1, 2))({"w": stack})["w"]
    assert not np.any(capped[0])
    np.testing.assert_allclose(largest(capped[1]), 0.5, rtol=2e-5)
    assert bits(capped[2]) == bits(stack[2])
    falling = spectral_cap(lambda step: 2.0 - step / 10, flatten=(1, 2))
    np.testing.assert_allclose(largest(falling(stack, step=5)), 1.5, rtol=2e-5)
    lost = stack.at[1, 0, 0].set(jnp.nan).at[2, 1, 1].set(jnp.inf)
    entries = np.isnan(spectral_cap(1.0, flatten=(1, 2))(lost)).sum(axis=(1, 2))
    assert entries.tolist() == [0, 30, 30]
    assert np.isnan(jax.jit(lambda bound: spectral_cap(bound)(stack[0]))(jnp.nan)).all()


POINTS = {
    "tall": RNG.normal(size=(5, 3)),
    "wide": RNG.normal(size=(3, 5)),
    "equal": 2 * np.eye(4),
    "equal on both sides": np.diag([2.0, 2.0, 0.2, 0.2]),
    "rank one": np.diag([2.0, 0.0, 0.0])[:, :2],
    "inside": 0.1 * np.eye(3),
    "complex": RNG.normal(size=(4, 3)) * (1 + 2j) + 1j,
}


def test_derivatives() -> None:
    """In both modes, along the weights and the bound, beside central differences of NumPy's cap."""

    def draw(x: np.ndarray) -> np.ndarray:
        drawn = RNG.normal(size=x.shape)
        return drawn + 1j * RNG.normal(size=x.shape) if np.iscomplexobj(x) else drawn

    def call(tree: Any, bound: Any) -> Any:
        return spectral_cap(bound)(tree)

    @jax.jit
    def slopes(tangents: Any, cotangents: Any) -> Any:
        _, along = jax.jvp(call, (POINTS, 0.5), (tangents, 1.0))
        return along, jax.vjp(call, POINTS, 0.5)[1](cotangents)

    tangents, cotangents = ({k: draw(x) for k, x in POINTS.items()} for _ in range(2))
    with jax.enable_x64(True):
        along, (pulled, by_bound) = slopes(tangents, cotangents)
    h = 1e-6
    for name, x in POINTS.items():
        wanted = (cap(x + h * tangents[name], 0.5 + h) - cap(x - h * tangents[name], 0.5 - h)) / (2 * h)
        np.testing.assert_allclose(along[name], wanted, atol=1e-5, err_msg=name)
    # JAX pairs complex numbers without conjugation.
    forward, backward = (
        sum(np.sum(np.asarray(x[name]) * y[name]).real for name in POINTS)
        for x, y in ((along, cotangents), (pulled, tangents))
    )
    np.testing.assert_allclose(forward, backward + float(by_bound), rtol=1e-9)


def test_derivatives_at_zero_and_in_16_bits_are_finite() -> None:
    points = {"zero": jnp.zeros((3, 2)), "half": jnp.ones((3, 2), jnp.bfloat16), "none": jnp.zeros((0, 2))}
    slope = jax.jit(jax.grad(lambda tree, bound: sum(map(jnp.sum, spectral_cap(bound)(tree).values()))))
    for bound in (0.0, 1.0):
        assert all(np.isfinite(x.astype(jnp.float32)).all() for x in slope(points, bound).values())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes(kind: AxisType) -> None:
    """Shardings stay under jit, on explicit mesh axes too; a leaf that differs inside shard_map is an error."""
    mesh, project = jax.make_mesh((1,), ("d",), axis_types=(kind,)), spectral_cap(1.0, flatten=(1, 2))
    for spec in (P("d"), P(None, None, "d")):
        x = jax.device_put(np.ones((2, 4, 4), np.float32), NamedSharding(mesh, spec))
        result = jax.jit(project)(x)
        assert jax.typeof(result) == jax.typeof(x)
        assert result.sharding.is_equivalent_to(x.sharding, 3)
        np.testing.assert_allclose(result, 0.25, rtol=2e-5)
        with pytest.raises(ValueError, match=r"spectral_cap: inside shard_map, leaf .* differs over"):
            jax.shard_map(project, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def test_errors() -> None:
    for flatten in (1, (1,), (0, "1"), (0, 1.0), "ab", {}, {0: (0, 1)}, {"a": 3}):
        with pytest.raises(TypeError, match="flatten"):
            spectral_cap(1.0, flatten=flatten)  # type: ignore[arg-type]
    params = {"conv": jnp.ones((2, 3, 4))}
    assert spectral_cap(1.0, flatten={"conv": SKIP})(params) == params
    for flatten, message in (
        (None, "flatten: leaf 'conv' of shape .* Pass flatten={'conv'"),
        ((0, 3), r"flatten: \(\(0,\), \(3,\)\) is out of range for leaf 'conv'"),
        (((0, 1), -2), "names an axis twice for leaf 'conv'"),
        ({"con": (0, 1)}, "the pattern 'con' matches no leaf"),
        ((1, 2), "bound must broadcast to shape .2,., for the matrices of leaf 'conv'"),
    ):
        with pytest.raises(ValueError, match=message):
            spectral_cap(np.ones(3), flatten=flatten).init(params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none of these is a matrix: leaf 'b'"):
        spectral_cap(1.0)({"b": jnp.ones(3)})
    assert spectral_cap(1.0)({"none": None}) == {"none": None}
