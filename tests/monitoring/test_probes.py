"""Probes: what passes at a place of the model, and where a bad step began."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipjax

INF, NAN = float("inf"), float("nan")


@jax.custom_vjp
def poisoned(x: Any, is_bad: Any) -> Any:
    """Return x; its gradient is NaN if it is bad."""
    return x


poisoned.defvjp(
    lambda x, is_bad: (x, is_bad),
    lambda is_bad, g: (jnp.where(is_bad, NAN, g), None),
)

LAYERS = 6
PROBES = {"embed": 0, "blocks": LAYERS}
RECORD = clipjax.record_norms("leaf", stacked="blocks", keep=4, probes=PROBES)
TX = optax.chain(RECORD, clipjax.skip_nonfinite(optax.sgd(0.1)))
PARAMS = {
    "blocks": np.stack([np.eye(4) * (0.1 + 0.1 * i) for i in range(LAYERS)]),
    "embed": np.ones(4),
    "head": np.ones((4, 2)),
}


def loss_of(params: Any, taps: Any, dtype: Any, where: Any) -> Any:
    forward, backward, loss_is_bad, size = where

    def block(x: Any, layer: Any) -> Any:
        w, tap, i = layer
        x = clipjax.probe(x, tap)
        x = poisoned(x, backward == i)
        x = x + jnp.tanh(x @ w)
        x = x * jnp.where(forward == i, size, 1).astype(dtype)
        return clipjax.probe(x, tap), None

    params = jax.tree.map(lambda w: w.astype(dtype), params)
    x = clipjax.probe(params["embed"] * jnp.ones((3, 4), dtype), taps["embed"])
    layers = params["blocks"], taps["blocks"], jnp.arange(LAYERS)
    x, _ = jax.lax.scan(jax.checkpoint(block), x, layers)
    value = jnp.sum((x @ params["head"]).astype(np.float32) ** 2)
    return value * jnp.where(loss_is_bad, NAN, 1)


@functools.partial(jax.jit, static_argnames="dtype")
def step(where: Any, dtype: str = "float32") -> Any:
    taps = {"embed": clipjax.tap(probe=True), "blocks": clipjax.tap(6, probe=True)}
    params = jax.tree.map(lambda w: jnp.asarray(w, np.float32), PARAMS)
    grad = jax.value_and_grad(loss_of, argnums=(0, 1))
    loss, (grads, taps) = grad(params, taps, jnp.dtype(dtype), where)
    state = TX.init(params)
    _, state = TX.update(grads, state, params, loss=loss, taps=taps)
    return state, taps, clipjax.metrics(state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layer_and_the_pass_are_told(dtype: str) -> None:
    cases = {
        (i, -1, False): f"first in the forward pass, at blocks/{i}" for i in range(6)
    }
    cases |= {(-1, i, False): f"in the backward pass, at blocks/{i}" for i in range(6)}
    cases[-1, -1, True] = "in the loss, or after blocks/5"
    for where, text in cases.items():
        (found,) = clipjax.bad_steps(step((*where, INF), dtype)[0])
        parts = str(found).split("; ")
        assert text in parts, (where, str(found))
        # No innocent: what else is named are gradients of weights.
        assert len(parts) <= 3
    assert not clipjax.bad_steps(step((-1, -1, False, 1.0), dtype)[0])


UNKNOWN = "in the loss, or in the backward pass from it to blocks"
NEAR_THE_LOSS = "in the backward pass, from the loss to blocks"


@pytest.mark.parametrize(
    ("backward", "groups", "loss", "text"),
    [
        # A gradient that still is finite after it tells that the loss was fine.
        ((INF, INF, 1.0), (NAN, NAN), None, "in the backward pass, at blocks/0"),
        ((INF, INF, 1.0), (), 1.0, "in the backward pass, at blocks/0"),
        # A part of the loss that reads the activations of a layer in between.
        ((INF, INF, 1.0), (NAN, NAN), NAN, "in the loss, or after blocks/0"),
        # A last probe that nothing reads.
        ((INF, INF, 0.0), (NAN, 0.0), None, f"{UNKNOWN}/0"),
        ((INF, INF, INF), (NAN, 1.0), 2.0, "in the backward pass, at blocks/1"),
        ((INF, INF, INF), (NAN, 1.0), None, "in the backward pass, at blocks/1"),
        # Weights that only a regularizer reads have finite gradients, too.
        ((INF, INF, INF), (NAN, 1.0), NAN, "in the loss, or after blocks/1"),
        ((INF, INF, INF), (NAN, NAN), INF, "in the loss, or after blocks/1"),
        # Unused weights have a gradient of 0.
        ((INF, INF, INF), (NAN, 0.0), NAN, "in the loss, or after blocks/1"),
        ((INF, INF, INF), (NAN, 0.0), None, f"{UNKNOWN}/1"),
        # Nothing is known of what is after the last probe, but perhaps the loss.
        ((INF, INF, INF), (NAN, NAN), None, f"{UNKNOWN}/1"),
        ((INF, INF, INF), (NAN, NAN), 2.0, f"{NEAR_THE_LOSS}/1"),
        ((INF, INF, INF), (NAN,), 2.0, f"{NEAR_THE_LOSS}/1"),
        ((INF, INF, INF), (), None, f"{UNKNOWN}/1"),
    ],
)
def test_the_place_is_told_with_few_groups(
    backward: Any, groups: Any, loss: Any, text: str
) -> None:
    """As of `record_norms(1)`, where a stack of layers is one group."""
    record = clipjax.record_norms(
        list(map(str, range(len(groups)))) or None,
        keep=1,
        probes={"embed": 0, "blocks": 2},
    )
    updates = {str(i): jnp.asarray(x) for i, x in enumerate(groups or (NAN,))}
    rows = jnp.array([(1.0, 0.0, 1.0, x > 0, x == INF, x > 0) for x in backward])
    taps = {"embed": rows[0], "blocks": rows[1:]}
    _, state = record.update(updates, record.init(updates), taps=taps, loss=loss)
    (found,) = clipjax.bad_steps(state)
    place = next(part for part in str(found).split("; ") if part.startswith("in the"))
    assert place == text
    assert ("with loss=, update would tell which" in str(found)) == (UNKNOWN in text)


def test_a_spike_of_an_activation_is_told() -> None:
    """Behind 20 usual steps, whose norms it is compared with."""

    @jax.jit
    def run(state: Any, wheres: Any) -> Any:
        def one(state: Any, size: Any) -> Any:
            taps = {"embed": clipjax.tap(probe=True)}
            taps["blocks"] = clipjax.tap(LAYERS, probe=True)
            grad = jax.value_and_grad(loss_of, argnums=(0, 1))
            where = 3, -1, False, size
            loss, (grads, taps) = grad(PARAMS, taps, jnp.float32, where)
            _, state = TX.update(grads, state, PARAMS, loss=loss, taps=taps)
            return state, None

        return jax.lax.scan(one, state, wheres)[0]

    sizes = np.ones(24, np.float32)
    sizes[20] = 1000
    params = jax.tree.map(np.float32, PARAMS)
    (found,) = clipjax.bad_steps(run(TX.init(params), sizes))
    assert found.step == 20
    assert " times its usual growth at blocks/3, in the forward pass" in str(found)
    # At the end of a run that stops there, too.
    (found,) = clipjax.bad_steps(run(TX.init(params), sizes[:21]))
    assert " times its usual growth at blocks/3, in the forward pass" in str(found)


# A mask of what is not attended to, in the second of three layers, and what breaks.
FILLS = {"-inf": -INF, "finfo": float(jnp.finfo(np.float32).min)}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("broken", ["embed", "after", "loss", "outlier", None])
def test_a_mask_is_never_accused(fill: str, broken: str | None) -> None:
    """Its sum of squares overflows, or it is infinite at usual steps, too."""
    names = ("embed", "scores", "after")
    tx = clipjax.record_norms(keep=2, probes=dict.fromkeys(names, 0))

    def loss_of(w: Any, taps: Any, bad: Any) -> Any:
        def probed(name: str, x: Any) -> Any:
            x = jnp.where((broken == name) & bad, NAN, x)
            x = x * jnp.where((broken == "outlier") & (name == "after") & bad, 1e4, 1)
            return clipjax.probe(x, taps[name])

        x = probed("embed", w * jnp.arange(1.0, 5.0))
        scores = jnp.where(jnp.arange(4) < 2, x, FILLS[fill])
        x = probed("after", jax.nn.softmax(probed("scores", scores)) * x)
        return jnp.sum(x**2) * jnp.where((broken == "loss") & bad, NAN, 1)

    @jax.jit
    def run(bad: Any) -> Any:
        def step(state: Any, bad: Any) -> Any:
            taps = dict.fromkeys(names, clipjax.tap(probe=True))
            w = jnp.ones(4)
            both = jax.value_and_grad(loss_of, argnums=(0, 1))(w, taps, bad)
            loss, (grads, seen) = both
            return tx.update(grads, state, loss=loss, taps=seen)[1], None

        return jax.lax.scan(step, tx.init(jnp.ones(4)), bad)[0]

    found = clipjax.bad_steps(run(np.arange(30) == 25))
    texts = {
        "embed": "first in the forward pass, at embed",
        "after": "first in the forward pass, at after",
        "loss": "in the loss, or after after",
        "outlier": "times its usual growth at after, in the forward pass",
    }
    assert [each.step for each in found] == ([25] if broken else [])
    for each in found:
        assert texts[str(broken)] in str(each)


def test_growth_that_is_usual_is_not_told() -> None:
    """As after a small embedding that the first layer normalizes."""
    (found,) = clipjax.bad_steps(step((3, -1, False, INF), "float32")[0])
    spike = found._replace(norm=100.0, threshold=1.0, loss=1.0, backward={})
    usual = {"embed": 0.02, "blocks/0": 8.0, "blocks/1": 8.0}
    same = spike._replace(forward=usual, usual=usual)
    assert "growth" not in str(same)
    larger = {"embed": 0.02, "blocks/0": 8.0, "blocks/1": 96.0}
    assert "12 times its usual growth at blocks/1" in str(same._replace(forward=larger))
    # Of what is 0 or not known, growth is not known.
    for other in ({"embed": 0.02, "blocks/0": 0.0, "blocks/1": 8.0}, {}):
        assert "growth" not in str(same._replace(forward=larger, usual=other))
    all_of_it = {name: 20 * norm for name, norm in usual.items()}
    assert "20 times its usual growth at embed" in str(same._replace(forward=all_of_it))


def test_statistics_are_those_of_the_elements() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 4)).astype(np.float32)
    g = rng.normal(size=(5, 3, 4)).astype(np.float32)
    x[1, 0, 0], g[2, 1, 1], g[2, 1, 2] = INF, NAN, INF

    def loss(x: Any, tap: Any, g: Any) -> Any:
        seen = clipjax.probe({"a": x, "i": jnp.arange(3)}, tap)
        return jnp.sum(seen["a"] * g)

    def mapped(x: Any, tap: Any, g: Any) -> Any:
        return jnp.sum(jax.vmap(loss, (0, None, 0))(x, tap, g))

    for of in (loss, mapped):
        of_x, of_tap = jax.jit(jax.grad(of, (0, 1)))(x, clipjax.tap(probe=True), g)
        np.testing.assert_array_equal(of_x, g)
        found = clipjax.tapped(of_tap)
        expected = {
            "count": 60,
            "forward_norm": np.linalg.norm(x[np.isfinite(x)]),
            "forward_nonfinite_count": 1,
            "backward_norm": np.linalg.norm(g[np.isfinite(g)]),
            "backward_nonfinite_count": 2,
        }
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-6, err_msg=key)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_in_shard_map_all_devices_count_once() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = np.arange(16, dtype=np.float32).reshape(8, 2)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P()
    )
    def of_tap(x: Any, tap: Any) -> Any:
        def loss(tap: Any) -> Any:
            seen = clipjax.probe(x, tap)
            return jax.lax.psum(jnp.sum(seen * 2), "data")

        return jax.grad(loss)(tap)

    found = clipjax.tapped(of_tap(x, clipjax.tap(probe=True)))
    np.testing.assert_allclose(found["count"], 16)
    np.testing.assert_allclose(found["forward_norm"], np.linalg.norm(x), rtol=1e-6)
    np.testing.assert_allclose(found["backward_norm"], 8, rtol=1e-6)


def test_metrics_have_what_probes_saw() -> None:
    state, taps, inside = step((-1, -1, False, 1.0))
    found = clipjax.metrics(state)
    assert found.keys() == inside.keys()
    seen = clipjax.tapped(taps["blocks"])
    for of in ("forward", "backward"):
        norms = [found[f"record_norms/{of}/blocks/{i}"] for i in range(LAYERS)]
        np.testing.assert_allclose(norms, seen[f"{of}_norm"], rtol=1e-6)
