"""JAX's transformations and modes around members: the results are the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export, lax
from jax.experimental import checkify

import clipjax
from tests.devices import members as of_members
from tests.devices.members import assert_same, members

VARIANTS = (
    "clip_by_group_norm",
    "clip_by_rms",
    "clip_by_norm, infinity",
    "clip_by_global_norm, 1",
    "non_negative",
)
MEMBERS = {name: tx for name, tx in members(0).items() if name not in VARIANTS}
RNG = np.random.default_rng(0)


def tree(*batch: int) -> Any:
    sizes = {"w": (4, 3), "b": (3,)}
    return {
        name: RNG.normal(size=(*batch, *size)).astype(np.float32)
        for name, size in sizes.items()
    }


PARAMS, GRADS = tree(), tree(3)


def init(params: Any) -> Any:
    return of_members.init(MEMBERS, params)


def step(states: Any, grads: Any) -> Any:
    return of_members.step(MEMBERS, states, grads, PARAMS)


def at(i: Any) -> Any:
    return jax.tree.map(lambda x: x[i], GRADS)


@pytest.fixture(scope="module")
def plain() -> Any:
    """Three steps, whose states are donated, by a function that is compiled once."""
    jitted, states, updates = jax.jit(step, donate_argnums=0), init(PARAMS), []
    for i in range(3):
        before, (states, each) = states, jitted(states, at(i))
        assert before["clip_by_norm"].step.is_deleted()
        assert before["autoclip"].memory[0].is_deleted()
        updates.append(each)
    assert jitted._cache_size() == 1
    return states, updates


def test_scan_and_vmap_take_the_same_steps(plain: Any) -> None:
    """Two runs, of which the first does what it did alone."""
    runs = jax.vmap(lambda grads: lax.scan(step, init(PARAMS), grads))
    both = jax.tree.map(lambda x: np.stack([x, 2 * x]), GRADS)
    states, updates = jax.device_get(jax.jit(runs)(both))
    assert_same(jax.tree.map(lambda x: x[0], states), plain[0])
    for i in range(3):
        assert_same(jax.tree.map(lambda x, i=i: x[0, i], updates), plain[1][i])


def test_an_exported_step_survives_bytes(plain: Any) -> None:
    pytest.importorskip("flatbuffers")
    names = ("clip_by_norm", "autoclip", "adagc", "record_norms", "max_norm", "bounded")
    table = {name: MEMBERS[name] for name in names}
    leaves, treedef = jax.tree.flatten(of_members.init(table, PARAMS))

    @jax.jit
    def flat(*leaves: Any) -> Any:
        states = treedef.unflatten(leaves)
        return jax.tree.leaves(of_members.step(table, states, at(0), PARAMS)[1])

    restored = export.deserialize(export.export(flat)(*leaves).serialize())
    expected = {name: plain[1][0][name] for name in sorted(table)}
    like = jax.tree.structure(expected)
    assert_same(like.unflatten(restored.call(*leaves)), expected)


def test_strict_promotion_and_leak_checks_find_nothing() -> None:
    params = PARAMS | {"half": PARAMS["w"].astype(jnp.bfloat16)}
    skip = clipjax.skip_spikes(optax.sgd(0.1))
    bound = jnp.bfloat16(2)
    of_bounds = (
        clipjax.clip_by_value(low=-1.0, high=bound),
        clipjax.box(bound, np.inf),
        clipjax.min_max_norm(bound, lambda step: 10 - step),
    )
    with jax.numpy_dtype_promotion("strict"):
        for tx in (*MEMBERS.values(), *of_bounds):
            jax.eval_shape(lambda p, tx=tx: tx.update(p, tx.init(p), p), params)
        for number in (jnp.bfloat16(2), jnp.int32(2), 2):
            jax.eval_shape(
                lambda p, x=number: skip.update(p, skip.init(p), p, loss=x), PARAMS
            )
    with jax.checking_leaks():
        for name in ("clip_by_global_norm", "min_max_norm", "bounded"):
            tx = MEMBERS[name]
            jax.eval_shape(lambda p, tx=tx: tx.update(p, tx.init(p), p), PARAMS)


def test_steps_without_jit_compile_nothing_after_the_first() -> None:
    """A function made anew at each step, as in a loop, would be compiled each time."""
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: (
            compiled.append(event)
            if event.endswith("backend_compile_duration")
            else None
        )
    )
    jax.jit(lambda x: x + len(compiled))(1)
    assert compiled
    others = {
        "bounded": clipjax.skip_nonfinite(optax.sgd(0.1)),
        "spectral_cap": clipjax.spectral_cap(0.1),
    }
    alike = dict.fromkeys(PARAMS, PARAMS["w"])  # what is compiled is of one shape
    for name, tx in (MEMBERS | others).items():  # MultiSteps in `bounded` makes one
        state = tx.init(alike)
        for _ in range(3):
            compiled.clear()
            _, state = tx.update(alike, state, alike)
        assert not compiled, name


def test_no_operation_makes_nan_at_zero() -> None:
    """Which `jax_debug_nans` would show to whoever looks for one of their own."""
    zeros = jax.tree.map(np.zeros_like, PARAMS)

    def all_updates(grads: Any, infinite: Any) -> Any:
        updates = [tx.update(grads, tx.init(zeros), zeros) for tx in MEMBERS.values()]
        # No product in the forward pass.
        return updates, clipjax.scale_gradient(infinite, 0.0)

    checked = jax.jit(checkify.checkify(all_updates, errors=checkify.nan_checks))
    for grads in (zeros, at(0)):
        error, _ = checked(grads, np.float32([1, -np.inf]))
        error.throw()


def test_without_jit_and_with_checkpoint() -> None:
    alike = {"w": PARAMS["w"], "v": at(0)["w"]}  # each operation compiles one program

    def updates(grads: Any) -> Any:
        return {
            name: MEMBERS[name].update(grads, MEMBERS[name].init(alike), alike)[0]
            for name in ("clip_by_global_norm", "clip_by_value", "bounded")
        }

    # A constant NaN raises here, whether it is taken or not.
    with jax.disable_jit(), jax.debug_nans(True):
        eager = updates(alike)
    assert_same(jax.jit(updates)(alike), eager)

    projection = clipjax.max_norm(1.0)

    def loss(params: Any) -> Any:
        clipped = MEMBERS["clip_by_global_norm"].update(
            projection.apply(params), MEMBERS["clip_by_global_norm"].init(params)
        )[0]
        return jnp.sum(clipped["w"] ** 3) + jnp.sum(clipped["b"])

    first, second = jax.jit(
        lambda p: (jax.grad(loss)(p), jax.grad(jax.checkpoint(loss))(p))
    )(PARAMS)
    assert_same(first, second)


def test_float64_leaves_have_norms_and_bounds_in_float64() -> None:
    with jax.enable_x64(True):
        grads = {
            "w": jnp.asarray(RNG.normal(size=(50, 3))),
            "b": jnp.ones(3, jnp.float32),
        }
        clip, projection = clipjax.clip_by_global_norm(1.0), clipjax.max_norm(1.0)
        clipped, state = jax.jit(clip.update)(grads, clip.init(grads))
        project = jax.jit(projection.apply)
        kernel = np.asarray(project(grads)["w"])
        assert jax.tree.map(jnp.result_type, clipped) == {
            "w": np.float64,
            "b": np.float32,
        }
        found = clipjax.metrics(state)["clip_by_global_norm/norm"]
        exact = np.sqrt(
            sum((np.asarray(x, np.float64) ** 2).sum() for x in grads.values())
        )
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, exact, rtol=1e-14)
        # The float32 leaf is a little smaller than the bound asks; the float64 one ends
        # within its margin.
        ratio = np.asarray(clipped["w"]) * exact / np.asarray(grads["w"])
        for norms in (ratio, np.linalg.norm(kernel, axis=0)):
            assert (norms <= 1 + 1e-15).all()
            assert (norms >= 1 - 2.0**-47).all()
        same = project(grads | {"w": kernel / 2})["w"]
        np.testing.assert_array_equal(same, kernel / 2)
        accumulate = clipjax.bounded(optax.sgd(1.0), accumulate=2)
        update = jax.jit(accumulate.update)
        _, state = update(grads, accumulate.init(grads), grads)
        updates, _ = update(grads, state, grads)
        np.testing.assert_allclose(updates["w"], -grads["w"], rtol=1e-15)
        # Norms and losses of 1e100 are finite, and enter the past as they are.
        skip = clipjax.skip_spikes(optax.identity(), warmup_steps=1)
        large = {"w": jnp.full(4, 1e100)}
        update, state = jax.jit(skip.update), skip.init(large)
        for factor in (1.0, 1.0, 100.0):
            _, state = update(
                jax.tree.map(lambda g, f=factor: f * g, large),
                state,
                large,
                loss=jnp.float64(1e100),
            )
        found = clipjax.metrics(state)
        assert (found["skip_spikes/norm"], found["skip_spikes/skipped"]) == (2e102, 1)
        assert np.isfinite(
            [found["skip_spikes/z_score"], found["skip_spikes/threshold"]]
        ).all()
