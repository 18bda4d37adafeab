"""The spectral cap beside NumPy's decomposition in float64."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import programs
from benchmarks.platforms import devices_of
from clipjax import SKIP
from clipjax.weights.spectral import spectral_cap
from tests.support.platforms import skip_where_missing
from tests.support.trees import bits

BOUND = 0.7
DTYPES = ("float32", "bfloat16", "float16", "complex64", "float64", "complex128")
SHAPES = ((16, 40), (200, 8), (24, 24), (1, 9), (1, 1))
RNG = np.random.default_rng(0)


def with_values(s: Any, rows: int, columns: int) -> np.ndarray:
    """Return a matrix with these singular values, as multiples of the bound."""
    u, _, vh = np.linalg.svd(RNG.normal(size=(rows, columns)), full_matrices=False)
    return BOUND * (u * np.asarray(s)[: len(vh)]) @ vh


def hard(rows: int, columns: int) -> dict[str, np.ndarray]:
    """Return matrices that are hard to cap, by how; float64 is exact for all."""
    n = min(rows, columns)
    drawn = with_values(
        np.linalg.svd(RNG.normal(size=(n, n)), compute_uv=False), rows, columns
    )
    values = {
        "steep": np.geomspace(2, 2e-6, n),
        "deficient": np.where(np.arange(n) < n / 3, 2, 0),
        "at": np.ones(n),
    }
    for top in (1, 1.6, 2.4, 4):
        for near in (1e-6, 1e-5, 1e-4, 1e-3):
            values[f"{near} near, {top}"] = np.r_[
                top, 1 + near * RNG.uniform(-1, 1, size=n - 1)
            ]
    made = {name: with_values(s, rows, columns) for name, s in values.items()}
    made |= {
        f"drawn {share}": share * drawn / np.linalg.norm(drawn, 2)
        for share in (0.75, 1, 30, 700)
    }
    return made | {
        "ones": np.ones((rows, columns)),
        "signs": np.sign(drawn),
        "huge": 1e30 * drawn,
    }


def inside(rows: int, columns: int) -> dict[str, np.ndarray]:
    n = min(rows, columns)
    values = {
        "half": np.linspace(0.5, 0, n),
        "just": np.full(n, 1 - 2e-5),
        "tiny": np.full(n, 1e-30),
        "0": np.zeros(n),
    }
    return {name: with_values(s, rows, columns) for name, s in values.items()}


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def largest(x: Any) -> np.ndarray:
    return np.linalg.svd(wide(x), compute_uv=False).max(axis=-1)


def cap(x: Any, bound: float) -> np.ndarray:
    """Cap singular values in float64."""
    u, s, vh = np.linalg.svd(wide(x), full_matrices=False)
    return (u * np.minimum(s, bound)[..., None, :]) @ vh


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cap(dtype: str) -> None:
    """Of each shape one stack, of what is outside first; in 16 bits "just" inside is
    not, once it is rounded.
    """
    exact, info = dtype in ("float64", "complex128"), jnp.finfo(dtype)
    dtype = jnp.dtype(dtype)
    turn = (1 + 0.5j) / abs(1 + 0.5j) if dtype.kind == "c" else 1
    shapes = SHAPES[: {"float32": 5, "complex128": 1}.get(dtype.name, 2)]
    outer, inner = ([kind(*shape) for shape in shapes] for kind in (hard, inside))
    for x, y in zip(outer, inner, strict=True):
        if info.bits == 16:
            x.pop("huge"), y.pop("just"), y.pop("tiny")
    with jax.enable_x64(exact):
        tree = {
            shape: [*x.values(), *y.values()]
            for shape, x, y in zip(map(str, shapes), outer, inner, strict=True)
        }
        given = {
            "bias": np.full(2, 9, dtype),
            "empty": np.zeros((2, 0, 3), dtype),
            "steps": np.full((2, 2), 9, np.int32),
        }
        given |= {name: (turn * np.array(x)).astype(dtype) for name, x in tree.items()}
        call = jax.jit(spectral_cap(BOUND, flatten=(1, 2)).apply)
        once = jax.device_get(call(given))
        twice = jax.device_get(call(once))
    rounding = float(info.eps) / 2 if info.bits == 16 else 0.0
    # What the cap leaves below the bound, and what it knows of the smaller singular
    # values.
    room, known = (1e-13, 1e-15) if exact else (2.5e-5, 1e-7)
    for name, x in given.items():
        assert once[name].dtype == x.dtype, name
        if name not in tree:
            assert bits(once[name]) == bits(x), name
            continue
        results, kept = (wide(y) for y in (once[name], twice[name]))
        before, count = largest(x), len(outer[list(tree).index(name)])
        assert bits(once[name][count:]) == bits(x[count:]), name
        assert (largest(results) <= BOUND * (1 + rounding)).all(), name
        above = before > BOUND * (1 + rounding)
        assert above.sum() > count / 3
        assert (largest(results)[above] >= BOUND * (1 - 2e-5 - 3 * rounding)).all(), (
            name
        )
        errors = np.linalg.norm(results - cap(x, BOUND), 2, axis=(-2, -1))
        # From far above the smallest singular values are lost, but those of drawn
        # matrices are large enough.
        assert (
            errors
            <= BOUND * (room + 3 * rounding) + known * np.minimum(before, 1e3 * BOUND)
        ).all(), name
        assert (
            np.linalg.norm(kept - results, 2, axis=(-2, -1)) <= 1e-6 * BOUND
        ).all(), name


def test_large_matrices() -> None:
    """Where many roundings add up: all singular values at the bound, just inside."""
    rotation = with_values(np.ones(256), 256, 256)
    at, just = (np.float32(s * rotation) for s in (1.0, 1 - 2e-5))
    capped, kept = jax.jit(spectral_cap(BOUND, flatten=(1, 2)).apply)(
        np.stack([at, just])
    )
    assert 1 - 2e-5 < largest(capped) / BOUND <= 1
    assert bits(kept) == bits(just)


def test_nothing_is_decomposed_forward() -> None:
    params = {"a": jnp.ones((8, 4)), "b": jnp.ones((3, 5, 5), jnp.complex64)}
    project = spectral_cap(BOUND, flatten=(1, 2))
    found = re.findall(
        r"= (svd|eigh|eig|qr|lu|cholesky|householder\w*|schur)\b",
        str(jax.make_jaxpr(project.apply)(params)),
    )
    assert not found
    assert "custom_call" not in jax.jit(project.apply).lower(params).as_text()


def test_transformations() -> None:
    """What vmap, scan and jit make of it is what it makes of each matrix; finite ones
    raise nothing when debugged.
    """
    stack = jnp.asarray(
        [
            0.1 * with_values([4, 1], 5, 2),
            with_values([9, 0.3], 5, 2),
            with_values([1e3, 1e-3], 5, 2),
        ]
    )
    bounds = jnp.array([BOUND, 0.5, jnp.inf])

    def one(w: Any, bound: Any) -> Any:
        return spectral_cap(bound).apply(w)

    with jax.debug_nans(True):
        wanted = [one(w, bound) for w, bound in zip(stack, bounds, strict=True)]
        zeros = spectral_cap(jnp.array([0.0, 1.0, 0.5]), flatten=(1, 2)).apply(
            jnp.zeros_like(stack)
        )
    mapped = jax.jit(jax.vmap(one))(stack, bounds)
    _, scanned = jax.lax.scan(lambda _, each: (None, one(*each)), None, (stack, bounds))
    for found in (mapped, scanned, spectral_cap(bounds, flatten=(1, 2)).apply(stack)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert not zeros.any()


# Forms of `flatten`, and the order of axes and the shape that make them stacks.
FORMS: list[tuple[Any, Any, tuple[int, ...]]] = [
    (((0, 1), 2), (0, 1, 2), (24, 5)),
    ((1, 2), (0, 1, 2), (4, 6, 5)),
    ((-1, [0]), (1, 2, 0), (6, 5, 4)),
    ((2, (1, 0)), (2, 1, 0), (5, 24)),
    (lambda path, leaf: (1, 2) if leaf.ndim == 3 else SKIP, (0, 1, 2), (4, 6, 5)),
    ({"b/*": (1, 2), "a": None}, (0, 1, 2), (4, 6, 5)),
]


def test_kernels_of_higher_rank() -> None:
    conv, dense = (
        RNG.normal(size=shape).astype(np.float32) for shape in ((4, 6, 5), (5, 3))
    )

    @jax.jit
    def every(tree: Any) -> Any:
        return [
            spectral_cap(0.5, flatten=flatten).apply(tree) for flatten, _, _ in FORMS
        ]

    results = every({"a": dense, "b": {"c": conv}})
    for (flatten, order, stack), result in zip(FORMS, results, strict=True):
        moved = np.transpose(conv, order)
        wanted = np.transpose(
            cap(moved.reshape(stack), 0.5).reshape(moved.shape), np.argsort(order)
        )
        np.testing.assert_allclose(result["b"]["c"], wanted, atol=2e-5)
        np.testing.assert_allclose(
            result["a"], dense if callable(flatten) else cap(dense, 0.5), atol=2e-5
        )


def test_the_forms_of_bounds() -> None:
    stack = jnp.asarray(RNG.normal(size=(3, 6, 5)), jnp.float32)
    capped = spectral_cap(np.array([0.0, 0.5, math.inf]), flatten=(1, 2)).apply(
        {"w": stack}
    )["w"]
    assert not np.any(capped[0])
    np.testing.assert_allclose(largest(capped[1]), 0.5, rtol=2e-5)
    assert bits(capped[2]) == bits(stack[2])
    falling = spectral_cap(lambda step: 2.0 - step / 10, flatten=(1, 2))
    np.testing.assert_allclose(largest(falling.apply(stack, step=5)), 1.5, rtol=2e-5)
    lost = stack.at[1, 0, 0].set(jnp.nan).at[2, 1, 1].set(jnp.inf)
    entries = np.isnan(spectral_cap(1.0, flatten=(1, 2)).apply(lost)).sum(axis=(1, 2))
    assert entries.tolist() == [0, 30, 30]
    assert np.isnan(
        jax.jit(lambda bound: spectral_cap(bound).apply(stack[0]))(jnp.nan)
    ).all()


SPECIAL = ([2.0] * 4, [2.0, 2.0, 0.2, 0.2], [2.0, 0, 0, 0], [0.1] * 4)
POINTS = {
    "wide": RNG.normal(size=(3, 5)),
    # Equal ones, on both sides; of rank one; inside.
    "stack": np.stack([np.diag(s) for s in SPECIAL]),
    "complex": RNG.normal(size=(4, 3)) * (1 + 2j) + 1j,
}
AS_STACKS = {"stack": (1, 2), "*": (0, 1)}


def test_derivatives() -> None:
    """In both modes, along weights and bound, beside differences of NumPy's cap."""

    def draw(x: np.ndarray) -> np.ndarray:
        drawn = RNG.normal(size=x.shape)
        return drawn + 1j * RNG.normal(size=x.shape) if np.iscomplexobj(x) else drawn

    def call(tree: Any, bound: Any) -> Any:
        return spectral_cap(bound, flatten=AS_STACKS).apply(tree)

    @jax.jit
    def slopes(tangents: Any, cotangents: Any) -> Any:
        _, along = jax.jvp(call, (POINTS, 0.5), (tangents, 1.0))
        return along, jax.vjp(call, POINTS, 0.5)[1](cotangents)

    tangents, cotangents = ({k: draw(x) for k, x in POINTS.items()} for _ in range(2))
    with jax.enable_x64(True):
        along, (pulled, by_bound) = slopes(tangents, cotangents)
    h = 1e-6
    for name, x in POINTS.items():
        wanted = (
            cap(x + h * tangents[name], 0.5 + h) - cap(x - h * tangents[name], 0.5 - h)
        ) / (2 * h)
        np.testing.assert_allclose(along[name], wanted, atol=1e-5, err_msg=name)
    # JAX pairs complex numbers without conjugation.
    forward, backward = (
        sum(np.sum(np.asarray(x[name]) * y[name]).real for name in POINTS)
        for x, y in ((along, cotangents), (pulled, tangents))
    )
    np.testing.assert_allclose(forward, backward + float(by_bound), rtol=1e-9)


def test_derivatives_at_zero_and_in_16_bits_are_finite() -> None:
    points = {
        "zero": jnp.zeros((3, 2)),
        "half": jnp.ones((3, 2), jnp.bfloat16),
        "none": jnp.zeros((0, 2)),
    }
    slope = jax.jit(
        jax.grad(
            lambda tree, bound: sum(
                map(jnp.sum, spectral_cap(bound).apply(tree).values())
            )
        )
    )
    for bound in (0.0, 1.0):
        assert all(
            np.isfinite(x.astype(jnp.float32)).all()
            for x in slope(points, bound).values()
        )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes(kind: AxisType) -> None:
    """Shardings stay under jit; a leaf that differs inside shard_map is an error."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    project = spectral_cap(1.0, flatten=(1, 2))
    for spec in (P("d"), P(None, None, "d")):
        x = jax.device_put(np.ones((2, 4, 4), np.float32), NamedSharding(mesh, spec))
        result = jax.jit(project.apply)(x)
        assert jax.typeof(result) == jax.typeof(x)
        assert result.sharding.is_equivalent_to(x.sharding, 3)
        np.testing.assert_allclose(result, 0.25, rtol=2e-5)
        with pytest.raises(
            ValueError, match=r"spectral_cap: inside shard_map, leaf .* differs over"
        ):
            jax.shard_map(project.apply, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def test_leaves_that_are_left_alone() -> None:
    params = {"conv": jnp.ones((2, 3, 4))}
    assert spectral_cap(1.0, flatten={"conv": SKIP}).apply(params) == params
    assert spectral_cap(1.0).apply({"none": None}) == {"none": None}


@pytest.mark.tpu_compile
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_no_more_than_the_short_side_is_gathered(kind: AxisType) -> None:
    skip_where_missing("v5e")
    mesh = Mesh(
        np.array(devices_of("v5e")).reshape(2, 2),
        ("data", "model"),
        axis_types=(kind, kind),
    )
    for spec in (
        P("data", "model"),
        P("model", "data"),
        P("data"),
        P(None, "model"),
        P(("data", "model")),
    ):
        x = jax.ShapeDtypeStruct(
            (1024, 256), np.float32, sharding=NamedSharding(mesh, spec)
        )
        project = jax.jit(spectral_cap(1.0).apply, out_shardings=x.sharding)
        text = project.trace(x).lower(lowering_platforms=("tpu",)).compile().as_text()
        moved = [
            max(
                map(programs.bytes_of, re.findall(r"f32\[[\d,]*\]", each.type)),
                default=0,
            )
            for body in programs.parse(text).computations.values()
            for each in body
            if each.opcode.startswith(("all-", "reduce-scatter", "collective-permute"))
        ]
        assert 0 < max(moved) <= 256 * 256 * 4, spec
