"""Projections of 16-bit weights far outside the bound: as a link, and in wrappers.

The weights end where `apply` would bring them, which an update of 16 bits could not do:
1 - 1024 is -1024 in bfloat16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax.weights.projection import Projection

RNG = np.random.default_rng(0)
DTYPES = [("bfloat16", "bfloat16"), ("float16", "float16"), ("float16", "bfloat16")]
# Norms of the columns: some within the bound of 1, others up to 1,024 times as large.
SIZES = 2.0 ** np.array([-3, -2, -1, 2, 4, 6, 8, 10])
LOGITS = np.float32([1, 1e4, 1e8])


def far_outside() -> np.ndarray:
    columns = RNG.normal(size=(64, 8))
    return columns / np.linalg.norm(columns, axis=0) * SIZES


def drop(step: Any) -> Any:
    """Return a bound that drops at the second step."""
    return jnp.where(step < 1, 1024.0, 1.0)


def by_largest(tree: Any) -> Any:
    def bounded(x: Any) -> Any:
        return x / jnp.maximum(1, jnp.abs(x).max(axis=0))

    return jax.tree.map(bounded, tree)


MATRIX = {"w": far_outside()}
HEADS = {
    name: {"kernel": RNG.normal(size=(16, 3, 4)) * 50} for name in ("query", "key")
}
PROJECTIONS: dict[str, tuple[Projection, Any]] = {
    "max_norm": (clipjax.max_norm(1.0), MATRIX),
    "max_norm, dropping": (clipjax.max_norm(drop), MATRIX),
    "min_max_norm, rate": (clipjax.min_max_norm(0.2, 1.0, rate=0.99), MATRIX),
    "unit_norm": (clipjax.unit_norm(), MATRIX),
    "box": (clipjax.box(-0.01, 0.01), MATRIX),
    "non_negative": (clipjax.non_negative(), MATRIX),
    "spectral_cap": (clipjax.spectral_cap(1.0), MATRIX),
    "spectral_cap, dropping": (clipjax.spectral_cap(drop), MATRIX),
    "keep_norm": (clipjax.keep_norm(), MATRIX),
    "qk_clip": (clipjax.qk_clip(100.0), HEADS),
    "project": (clipjax.project(by_largest), MATRIX),
}
WRAPPERS = {
    "chain": (optax.chain, 1),
    "skip_nonfinite": (clipjax.skip_nonfinite, 1),
    "skip_spikes": (clipjax.skip_spikes, 1),
    "MultiSteps": (lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(), 2),
    "accumulate": (lambda tx: clipjax.bounded(tx, accumulate=2), 2),
}
# A wrapper meets an update, and not how it was made.
PAIRS = [
    (name, wrapper)
    for name in PROJECTIONS
    for wrapper in (WRAPPERS if name == "max_norm" else ["chain"])
]


def second_step(tx: Any, calls: int, params: Any, grads: Any, extra: Any) -> Any:
    """Return the updates of the second step of an optimizer, for the same weights."""
    state = tx.init(params)
    for _ in range(2 * calls):
        updates, state = tx.update(grads, state, params, **extra)
    return updates


@pytest.fixture(scope="module", params=DTYPES, ids="-".join)
def results(request: Any) -> Any:
    """What all projections do in all wrappers, and by `apply`, in one program."""
    of_weights, of_grads = map(jnp.dtype, request.param)
    given = {}
    for name, (_, weights) in PROJECTIONS.items():
        params = jax.tree.map(lambda x: x.astype(of_weights), weights)
        if name == "keep_norm":  # the update takes them far outside
            params = jax.tree.map(lambda x: (x / SIZES).astype(of_weights), params)
        size = 16 * SIZES if name == "keep_norm" else 1e-2
        grads = jax.tree.map(
            lambda x, size=size: (size * RNG.normal(size=x.shape)).astype(of_grads),
            params,
        )
        given[name] = params, grads

    @jax.jit
    def program(given: Any) -> Any:
        found = {}
        for name, (params, grads) in given.items():
            project = PROJECTIONS[name][0]
            extra = {"max_logits": LOGITS} if name == "qk_clip" else {}
            for wrapper in (wrapper for of, wrapper in PAIRS if of == name):
                wrap, calls = WRAPPERS[wrapper]
                tx = wrap(optax.chain(optax.identity(), project))
                found[name, wrapper] = second_step(tx, calls, params, grads, extra)
        return found

    @jax.jit
    def applied(moved: Any) -> Any:
        found = {}
        for name, weights in moved.items():
            project, extra = PROJECTIONS[name][0], {}
            if name == "qk_clip":
                extra = {"max_logits": LOGITS}
            elif name == "keep_norm":
                extra = {"old": given[name][0]}
            found[name] = project.apply(weights, step=1, **extra)
        return found

    moved = {name: optax.apply_updates(*pair) for name, pair in given.items()}
    # `keep_norm` gets sums that are not rounded yet: factors are near to 1.
    wide = [jax.tree.map(jnp.float32, tree) for tree in given["keep_norm"]]
    sums = moved | {"keep_norm": optax.apply_updates(*wide)}
    return given, moved, *jax.device_get((program(given), applied(sums)))


@pytest.mark.parametrize(("name", "wrapper"), PAIRS)
def test_weights_end_where_apply_brings_them(
    name: str, wrapper: str, results: Any
) -> None:
    given, moved, found, expected = results
    params, grads = given[name]
    updates = found[name, wrapper]
    ends = optax.apply_updates(params, updates)
    for x, end, want, before, update, grad in zip(
        *map(
            jax.tree.leaves,
            (params, ends, expected[name], moved[name], updates, grads),
        ),
        strict=True,
    ):
        assert end.dtype == x.dtype
        assert update.dtype == np.float32
        # Half a unit in the last place, and the float32 rounding of the update.
        rounding = float(jnp.finfo(x.dtype).eps)
        error = 2.0**-23 * float(np.abs(x.astype(np.float32)).max())
        np.testing.assert_allclose(
            np.float32(end), np.float32(want), rtol=rounding, atol=error
        )
        stays = np.asarray(want == before)
        if name not in ("unit_norm", "keep_norm") and "spectral" not in name:
            assert 0 < stays.sum() < stays.size
        np.testing.assert_array_equal(update[stays], np.float32(grad)[stays])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_within_the_bound_a_whole_step_is_that_of_the_optimizer(dtype: str) -> None:
    """The update is rounded, and then the sum, as NumPy does it: a compiler may make
    one FMA of the optimizer's own step.
    """
    draws = np.random.default_rng(3)
    weights, grads = (
        (size * draws.normal(size=(64, 48))).astype(jnp.dtype(dtype))
        for size in (0.05, 1.0)
    )
    rate = np.asarray(-1e-2, dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def step(project: Any, weights: Any, grads: Any) -> Any:
        tx = optax.chain(optax.sgd(1e-2), project)
        updates, _ = tx.update(grads, tx.init(weights), weights)
        return optax.apply_updates(weights, updates)

    for project in (clipjax.max_norm(100.0), clipjax.box(-100.0, 100.0)):
        after = step(project, weights, grads)
        np.testing.assert_array_equal(after, weights + rate * grads)
