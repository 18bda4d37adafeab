"""The clips, projections and skips of Optax: what is equal, what its own tests ask for,
and where ours is right.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax import functional
from tests.peers.draws import SEEDS, assert_close, draw, norm_of
from tests.support.trees import fan_in_or_all

pytestmark = pytest.mark.peer
proj = optax.projections

CLIPS = {
    "value": (clipjax.clip_by_value, optax.clip),
    "global norm": (clipjax.clip_by_global_norm, optax.clip_by_global_norm),
    "rms": (clipjax.clip_by_rms, optax.clip_by_block_rms),
}
# Optax reduces rank 3 over axis 0, and rank 4 over all but the last.
LIKE_OPTAX = {"3": 0, "*": fan_in_or_all}
PROJECTIONS = [
    (
        clipjax.box(-0.5, 0.7),
        lambda tree: [proj.projection_box(x, -0.5, 0.7) for x in tree],
    ),
    (clipjax.box(0.0, 1.0), lambda tree: [proj.projection_hypercube(x) for x in tree]),
    (clipjax.non_negative(), proj.projection_non_negative),
    (
        clipjax.max_norm(0.8, axes=None),
        lambda tree: [proj.projection_l2_ball(x, 0.8) for x in tree],
    ),
    (
        clipjax.min_max_norm(0.8, 0.8, axes=None),
        lambda tree: [proj.projection_l2_sphere(x, 0.8) for x in tree],
    ),
]


def clipped(tx: Any, grads: Any, params: Any = None) -> Any:
    def update(grads: Any, params: Any) -> Any:
        state = tx.init(grads if params is None else params)
        return tx.update(grads, state, params)[0]

    return jax.jit(update)(grads, params)


@jax.jit
def by_both(grads: Any, weights: Any, bound: Any) -> dict[str, tuple[Any, Any]]:
    bounds = {"value": bound / 20, "global norm": bound, "rms": bound / 20}
    results = {
        name: tuple(clipped(make(bounds[name]), grads) for make in pair)
        for name, pair in CLIPS.items()
    }
    agc = (
        clipjax.adaptive_grad_clip(0.3, eps=0.01, axes=LIKE_OPTAX),
        optax.adaptive_grad_clip(0.3, 0.01),
    )
    results["agc"] = tuple(clipped(tx, grads, weights) for tx in agc)
    results["norm"] = ([functional.global_norm(grads)], [optax.tree.norm(grads)])
    return results


@jax.jit
def by_projections(weights: Any) -> Any:
    return [[ours.apply(weights), theirs(weights)] for ours, theirs in PROJECTIONS]


@SEEDS
def test_clips(seed: int) -> None:
    grads, bound = draw(seed)
    for ours, theirs in by_both(
        grads, draw(seed + 1 if seed < 3 else 0)[0], bound
    ).values():
        assert_close(ours, theirs)


@SEEDS
def test_projections(seed: int) -> None:
    leaves, _ = draw(seed)
    size = max(float(np.abs(x).max()) for x in leaves)
    for ours, theirs in by_projections([2 * x / size for x in leaves]):
        assert_close(ours, theirs)


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize(
    "optimizer", [optax.sgd(1.0), optax.adam(0.1)], ids=["sgd", "adam"]
)
def test_steps_that_are_not_finite(optimizer: Any, most: int) -> None:
    """A step is skipped, too many in a row are taken; the state is of those taken."""
    ours = clipjax.skip_nonfinite(optimizer, max_consecutive=most)
    theirs = optax.apply_if_finite(optimizer, most)
    w = np.zeros(2, np.float32)
    step, their_step = jax.jit(ours.update), jax.jit(theirs.update)
    state, their_state = ours.init(w), theirs.init(w)
    skipped = 0
    for good in map(int, "10100100001"):
        grads = np.float32([1.0, 2.0 if good else np.nan])
        updates, state = step(grads, state, w)
        expected, their_state = their_step(grads, their_state, w)
        inner = state.memory.inner, their_state.inner_state
        assert_close(*map(jax.tree.leaves, ((updates, inner[0]), (expected, inner[1]))))
        skipped += not good and not np.isnan(expected).any()
        assert clipjax.metrics(state)["skip_nonfinite/skipped"] == skipped
    assert (
        clipjax.metrics(state)["skip_nonfinite/nonfinite_count"]
        == their_state.total_notfinite
        == 7
    )


def trained(tx: Any, grads: np.ndarray) -> tuple[np.ndarray, Any]:
    update, w = jax.jit(tx.update), jnp.ones(3)
    state = tx.init(w)
    for g in grads:
        updates, state = update(g, state, w)
        w = optax.apply_updates(w, updates)
    return np.asarray(w), state


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_micro_batches(nonfinite: Any) -> None:
    """One clip of the mean; with "skip" a micro-batch that is not finite is left out,
    and another takes its place.
    """
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    grads = np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32)
    skip = optax.skip_not_finite if nonfinite == "skip" else None
    if skip:
        grads[4] = np.nan
    theirs = optax.MultiSteps(
        inner, 4, should_skip_update_fn=skip
    ).gradient_transformation()
    clip = clipjax.clip_by_global_norm(0.5)
    ours = clipjax.bounded(
        optax.adam(0.1), clip=clip, accumulate=4, nonfinite=nonfinite
    )
    w, state = trained(ours, grads)
    assert_close([w], [trained(theirs, grads)[0]])
    assert clipjax.metrics(state)["clip_by_global_norm/steps"] == 2


# What the tests of Optax ask of clips and projections, asked of ours.


@pytest.mark.parametrize("name", CLIPS)
def test_a_bound_that_is_large_changes_nothing_and_falling_bounds_lose_nothing(
    name: str,
) -> None:
    grads = (np.array([500.0, 5.0], np.float32), np.array([300.0, 3.0], np.float32))
    make = CLIPS[name][0]
    jax.tree.map(np.testing.assert_array_equal, clipped(make(1e6), grads), grads)
    step = jax.jit(lambda tree, bound: clipped(make(bound), tree))
    again = grads
    for i in range(1, 51):
        again, once = step(again, 1 / i), step(grads, 1 / i)
        assert_close(again, once, extra=i * 1e-6)  # each step adds a margin
        sizes = {
            "value": [np.abs(x).max() for x in again],
            "rms": [np.sqrt(np.mean(np.square(x, dtype=np.float64))) for x in again],
            "global norm": [norm_of([np.asarray(x) for x in again])],
        }[name]
        np.testing.assert_allclose(sizes, 1 / i, rtol=2e-6)
        assert max(sizes) <= np.float32(1 / i)


def test_adaptive_clips_of_kernels_of_any_rank() -> None:
    """A kernel (h, w, depth, in, out) with axes as in Optax's `axis`, where Optax'
    default takes the whole leaf.
    """
    kernel = np.ones((2, 2, 2, 3, 4), np.float32)
    forms = ((0, 1, 2), (0, 1, 2, 3), clipjax.fan_in, None)
    ours = [clipjax.adaptive_grad_clip(0.5, axes=axes) for axes in forms]
    theirs = [optax.adaptive_grad_clip(0.5, axis=axes) for axes in forms[:2]]
    every = jax.jit(lambda grads: [clipped(tx, grads, kernel) for tx in ours + theirs])
    large, small = every(2 * kernel), every(np.float32(0.1) * kernel)
    for above, inside in zip(large[:4], small[:4], strict=True):
        np.testing.assert_allclose(above, 0.5, rtol=2e-6)
        np.testing.assert_array_equal(inside, np.float32(0.1) * kernel)
    assert_close(large[:2], large[4:])


@jax.jit
def after_sgd(grads: Any, w: Any) -> list[Any]:
    """Return the weights with our link after SGD, and with theirs."""
    links = clipjax.non_negative(), optax.keep_params_nonnegative()
    txs = [optax.chain(optax.sgd(1e-2), link) for link in links]
    return [optax.apply_updates(w, clipped(tx, grads, w)) for tx in txs]


@pytest.mark.parametrize("start", [-1.0, 1.0, 0.0])
def test_weights_stay_non_negative(start: float) -> None:
    """As `keep_params_nonnegative` after SGD: negative ones end at 0, others as
    without, unless below 0.
    """
    grads, w = np.float32([500.0, -500.0, 0.0]), np.full(3, start, np.float32)
    np.testing.assert_array_equal(*after_sgd(grads, w))
    with pytest.raises(ValueError, match="params"):
        clipjax.non_negative().update(grads, clipjax.non_negative().init(w))


@pytest.mark.parametrize("place", range(4))
def test_a_projection_is_the_nearest_point(place: int) -> None:
    """It is in the set, a point of the set stays, and no other drawn one is nearer."""
    ours = PROJECTIONS[place][0].apply
    rng = np.random.default_rng(place)
    x = jnp.asarray(rng.standard_normal(4), np.float32)
    nearest = ours([x])[0]
    np.testing.assert_array_equal(ours([nearest])[0], nearest)
    others = jax.vmap(lambda y: ours([y])[0])(
        jnp.asarray(rng.standard_normal((500, 4)), np.float32)
    )
    distance = np.linalg.norm(np.asarray(others) - np.asarray(x), axis=1).min()
    assert np.linalg.norm(np.asarray(nearest - x)) <= distance + 1e-6


# Where Optax is wrong: no comparison of ours with a number, but of both with the truth.


NAN, INF = float("nan"), float("inf")
ONES = np.ones(1000, jnp.bfloat16)
THREE_FOUR = np.float32([3, 4])
# The table of docs/guarantees.md: gradients, a threshold, all entries of ours and of
# theirs, or the errors.
EDGES = [
    ([ONES] * 1000, 1.0, 0.9995e-3, 1.95e-3),
    ([np.full(100, 50, np.float16)], 1.0, 0.09998, 0.0),
    ([np.full(10, 1e-4, np.float16)], 1e-4, 9.99e-5 / 10**0.5, 1e-4),
    ([np.full(100, 1e20, np.float32)], 1.0, NAN, 0.0),
    ([np.float32([INF, 4]), np.float32([1])], 1.0, NAN, [NAN, 0, 0]),
    ([np.zeros(3, np.float32)], 0.0, 0.0, NAN),
    ([np.ones(3, np.float32)], 0.0, 0.0, 0.0),
    ([THREE_FOUR], -1.0, ValueError, [-0.6, -0.8]),
    ([THREE_FOUR], NAN, ValueError, NAN),
    ([THREE_FOUR], lambda step: 1.0, [0.6, 0.8], TypeError),
    ([THREE_FOUR, np.array([100])], 1.0, [0.6, 0.8, 100], TypeError),
]


@pytest.mark.parametrize(("grads", "bound", "ours", "theirs"), EDGES)
def test_edge_cases(grads: Any, bound: Any, ours: Any, theirs: Any) -> None:
    makes = clipjax.clip_by_global_norm, optax.clip_by_global_norm
    for make, wanted in zip(makes, (ours, theirs), strict=True):
        if isinstance(wanted, type):
            with pytest.raises(wanted):
                clipped(make(bound), grads)
        else:
            tx = make(bound)  # without jit, since a thousand leaves take long
            updates, _ = tx.update(jax.tree.map(jnp.asarray, grads), tx.init(grads))
            each = np.concatenate([np.float64(x) for x in updates])
            np.testing.assert_allclose(each, wanted, rtol=2e-3)


def test_the_derivative_at_zeros() -> None:
    def slopes(make: Any) -> Any:
        return jax.grad(lambda x: clipped(make(1.0), x).sum())(jnp.zeros(2))

    np.testing.assert_array_equal(slopes(clipjax.clip_by_global_norm), 1)
    np.testing.assert_array_equal(slopes(optax.clip_by_global_norm), NAN)
