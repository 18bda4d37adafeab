"""`record_norms(keep=n)` keeps the last bad steps, and `bad_steps` returns them."""

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support import programs

NAN, INF = np.nan, np.inf
KEEP, STEPS = 6, 120
RECORD = clipjax.record_norms("leaf", stacked="blocks", keep=KEEP)


def shapes(wide: str) -> dict[str, Any]:
    """Leaves of each kind: a stack of two layers, 16 bits, 32 and perhaps 64."""
    return {
        "blocks": np.ones((2, 3, 4), np.float32),
        "half": np.ones(5, jnp.bfloat16),
        "short": np.ones(3, np.float16),
        "wide": np.ones((4, 2), wide),
        "count": np.ones(2, np.int32),
    }


def run_of(dtype: str) -> tuple[Any, np.ndarray]:
    """Gradients and losses of a run in which more than `KEEP` steps are bad."""
    rng = np.random.default_rng(0)
    sizes = np.exp(0.2 * rng.standard_normal(STEPS))
    sizes[[10, 40, 70, 71, 100]] *= 200  # the first comes before the windows are warm

    def draw(x: Any) -> Any:
        draws = rng.standard_normal((STEPS, *x.shape))
        return (sizes.reshape(-1, *[1] * x.ndim) * draws).astype(x.dtype)

    grads = jax.tree.map(draw, shapes(dtype))
    losses = np.exp(0.1 * rng.standard_normal(STEPS)).astype(np.float32)
    losses[[20, 60]] = NAN, INF
    losses[80] = 50
    grads["wide"][90, 1, 0] = NAN
    grads["half"][90, 2] = INF
    grads["blocks"][110, 1] = NAN
    return grads, losses


def norms_of(grads: Any, step: int) -> dict[str, float]:
    """The norms of the groups, in float64."""
    each = {"blocks/0": grads["blocks"][step, 0], "blocks/1": grads["blocks"][step, 1]}
    each |= {name: grads[name][step] for name in ("half", "short", "wide")}
    return {k: float(np.linalg.norm(np.float64(x).ravel())) for k, x in each.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bad_steps_are_those_that_skip_spikes_skips(dtype: str) -> None:
    """Number for number, in a scan and in a loop that donates its state."""
    with jax.enable_x64(dtype == "float64"):
        grads, losses = run_of(dtype)
        tx = optax.chain(RECORD, clipjax.skip_spikes(optax.identity()))

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: Any, inputs: Any) -> Any:
            updates, loss = inputs
            state = tx.update(updates, state, loss=loss)[1]
            return state, clipjax.metrics(state)

        init = jax.jit(tx.init)
        first = init(shapes(dtype))
        state, history = jax.lax.scan(step, first, (grads, losses))
        assert clipjax.bad_steps(first) == []
        skipped = np.flatnonzero(history["skip_spikes/skipped_last"])
        assert list(skipped) == [20, 40, 60, 70, 71, 80, 90, 100, 110]
        found = clipjax.bad_steps(state)
        assert [each.step for each in found] == list(skipped[-KEEP:])
        for each in found:
            for name in ("norm", "threshold", "loss", "loss_threshold"):
                exact = history[f"skip_spikes/{name}"][each.step]
                np.testing.assert_array_equal(getattr(each, name), exact)
            exact = norms_of(grads, each.step)
            assert each.groups == pytest.approx(exact, rel=1e-5, nan_ok=True)
            assert list(each.groups) == sorted(exact)

        donated = init(shapes(dtype))
        for i in range(STEPS):
            inputs = jax.tree.map(lambda x, i=i: x[i], (grads, losses))
            donated, _ = step(donated, inputs)
        assert repr(clipjax.bad_steps(donated)) == repr(found)


def test_what_is_not_known_is_nan_or_infinite() -> None:
    tx = clipjax.record_norms(keep=2)
    state = tx.init(jnp.ones(1))
    with jax.debug_nans(True):
        for size in (1.0, INF):
            _, state = jax.jit(tx.update)(jnp.array([size]), state)
        _, state = jax.jit(tx.update)(jnp.ones(1), state, loss=-INF)
    found, other = clipjax.bad_steps(state)
    assert repr(found) == repr(clipjax.bad_steps(state)[0])
    assert other.loss == -INF
    assert found[:3] == (1, INF, INF)
    assert found.loss is None
    assert found.groups == {}


def test_a_group_that_is_never_finite_does_not_hide_others() -> None:
    tx = clipjax.record_norms("leaf", keep=3)
    sizes = ({"a": np.float32([i]), "b": np.float32([NAN])} for i in range(5))
    _, state = programs.stepped(tx, *sizes)
    found = clipjax.bad_steps(state)
    assert [each.step for each in found] == [0, 3, 4]
    assert [each.groups["a"] for each in found] == [0, 3, 4]
    assert all(math.isnan(each.groups["b"]) for each in found)


@pytest.mark.parametrize("keep", [1, 5])
def test_the_first_of_a_row_is_kept_and_how_many_followed(keep: int) -> None:
    tx = clipjax.record_norms(keep=keep)

    @jax.jit
    def states(norms: Any) -> Any:
        def step(state: Any, norm: Any) -> Any:
            state = tx.update(norm[None], state)[1]
            return state, state

        return jax.lax.scan(step, tx.init(jnp.ones(1)), norms)[1]

    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, (20, 2))  # of rows of fine steps, and of bad ones
    bad = np.concatenate([np.repeat([False, True], pair) for pair in lengths])
    after = jax.device_get(states(np.where(bad, NAN, 1).astype(np.float32)))
    for i in range(len(bad)):
        found = clipjax.bad_steps(jax.tree.map(lambda x, i=i: x[i], after))
        seen = np.flatnonzero(bad[: i + 1])
        assert len(found) == min(keep, len(seen))
        firsts = [j for j in seen if not (j and bad[j - 1])]
        kept = {each.step: each.followed_by for each in found}
        if not firsts:
            continue
        assert {firsts[-1], seen[-1]} <= {*kept} or keep == 1
        assert firsts[-1] in kept
        for j, followed_by in kept.items():
            is_end = ~bad[j : i + 1]
            length = np.argmax(is_end) if is_end.any() else i + 1 - j
            assert followed_by == (length - 1 if j in firsts else 0)
        if len(seen) == len(firsts):
            assert [*kept] == firsts[-keep:]


def test_a_run_that_stays_broken_shows_where_it_broke() -> None:
    tx = clipjax.record_norms(keep=4)
    steps = [np.float32([1.0])] * 37 + [np.float32([NAN])] * 23
    found = clipjax.bad_steps(programs.stepped(tx, *steps)[1])
    assert [each.step for each in found] == [37, 57, 58, 59]
    assert str(found[0]).endswith("; followed by 22 more")
    assert "followed" not in str(found[1])


def test_groups_keep_their_norms_where_text_has_another_order() -> None:
    """As "layers/10" comes before "layers/2"."""
    tx = clipjax.record_norms("leaf", stacked="layers", keep=1)
    sizes = jnp.arange(12.0).at[11].set(INF)
    state = tx.init({"layers": sizes})
    (found,) = clipjax.bad_steps(jax.jit(tx.update)({"layers": sizes}, state)[1])
    assert found.groups == {f"layers/{i}": float(x) for i, x in enumerate(sizes)}


def test_steps_of_several_recorders_are_in_one_order() -> None:
    tx = optax.chain(
        clipjax.record_norms(keep=2),
        clipjax.zero_nonfinite(),
        optax.scale(INF),
        clipjax.record_norms(keep=2),
    )
    _, state = programs.stepped(tx, *np.float32([[1], [2], [3], [NAN]]))
    assert [each.step for each in clipjax.bad_steps(state)] == [0, 3, 3]


def test_leaves_beside_stacks_have_the_name_of_the_updates() -> None:
    tx = clipjax.record_norms(stacked="blocks", name="gradients", keep=1)
    grads = {"blocks": np.ones((2, 3)), "embedding": np.array([NAN])}
    _, state = programs.stepped(tx, grads)
    (found,) = clipjax.bad_steps(state)
    assert str(found) == "step 0: norm nan; not finite in gradients"
    assert sorted(found.groups) == ["0", "1", "gradients"]


# What may be around a recorder: a transformation, and which steps are bad in it, of
# those at which the norm is not finite.
AROUND: dict[str, tuple[Any, list[int]]] = {
    "MultiSteps": (optax.MultiSteps(RECORD, 2), [1]),
    "bounded": (
        optax.chain(
            RECORD,
            clipjax.bounded(optax.adam(0.1), clip=clipjax.zclip(), nonfinite="skip"),
        ),
        [3, 4],
    ),
    "accumulate": (
        optax.chain(
            RECORD, clipjax.bounded(optax.sgd(0.1), nonfinite="skip", accumulate=2)
        ),
        [3, 4],
    ),
}


def five_steps() -> Any:
    """Gradients of five steps, of which two are bad."""
    grads = jax.tree.map(lambda x: np.stack([x] * 5), shapes("float32"))
    grads["wide"][3:, 0] = NAN
    return grads


def stepped(tx: Any, state: Any, grads: Any) -> Any:
    def step(state: Any, updates: Any) -> Any:
        after = tx.update(updates, state, shapes("float32"))[1]
        # Adam makes floats of the moments of integers.
        return jax.tree.map(lambda x, y: x.astype(y.dtype), after, state), None

    return jax.lax.scan(step, state, grads)[0]


@pytest.mark.parametrize("name", AROUND)
def test_they_are_kept_inside_of_others_and_in_checkpoints(
    name: str, tmp_path: Path
) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    tx, bad = AROUND[name]
    first = tx.init(shapes("float32"))
    state = jax.jit(functools.partial(stepped, tx))(first, five_steps())
    found = clipjax.bad_steps(state)
    assert [each.step for each in found] == bad
    assert str(found[-1]).endswith("norm nan; not finite in wide")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", first)
        plain = checkpointer.restore(tmp_path / "state")
    assert repr(clipjax.bad_steps(restored)) == repr(found)
    # Without the program that made it.
    assert repr(clipjax.bad_steps(plain)) == repr(found)
    np.testing.assert_equal(*map(jax.device_get, map(clipjax.metrics, (plain, state))))


def test_each_seed_has_its_own() -> None:
    grads = five_steps()
    both = jax.tree.map(lambda x: np.stack([x, np.ones_like(x)]), grads)
    first = RECORD.init(shapes("float32"))
    mapped = jax.vmap(functools.partial(stepped, RECORD), (None, 0))
    each = jax.device_get(jax.jit(mapped)(first, both))
    seeds = [jax.tree.map(lambda x, i=i: x[i], each) for i in range(2)]
    assert [len(clipjax.bad_steps(state)) for state in seeds] == [2, 0]
    with pytest.raises(ValueError, match=r"opt_state: it is stacked, of shape \(2,\)"):
        clipjax.bad_steps(each)


BROKEN = (
    "step 0: norm nan; no group is finite: it broke in the loss or in the forward pass"
)


def test_an_nnx_optimizer_has_them() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, optax.chain(clipjax.record_norms("leaf", keep=2)), wrt=nnx.Param
    )
    grads = jax.tree.map(lambda x: x * NAN, nnx.state(model, nnx.Param))
    jitted = nnx.jit(lambda optimizer, *given: optimizer.update(*given))
    jitted(optimizer, model, grads)
    (found,) = clipjax.bad_steps(optimizer)
    assert str(found) == BROKEN
    plain = nnx.to_pure_dict(nnx.state((model, optimizer)))
    for state in (nnx.state((model, optimizer)), plain, jax.device_get(plain)):
        assert repr(clipjax.bad_steps(state)) == repr([found])
        assert set(clipjax.metrics(state)) == set(clipjax.metrics(optimizer))
    inside = jax.jit(clipjax.metrics)(nnx.state(optimizer))
    assert set(inside) == set(clipjax.metrics(optimizer))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_norms_and_losses_are_those_of_all_devices() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = clipjax.record_norms("leaf", keep=3)
    params = {"split": jnp.ones(16), "held": jnp.ones(3)}
    rng = np.random.default_rng(0)
    grads = {k: rng.normal(size=(40, *x.shape)) for k, x in params.items()}
    grads["split"][35, 9] = NAN  # on one device
    grads["split"][36, 9] = 5e3
    losses = rng.random((40, 8))
    losses[37, 2] = INF

    def run(state: Any, grads: Any, losses: Any) -> Any:
        def step(state: Any, inputs: Any) -> Any:
            updates, loss = inputs
            return tx.update(updates, state, loss=jnp.mean(loss))[1], None

        return jax.lax.scan(step, state, (grads, losses))[0]

    inputs = jax.tree.map(jnp.float32, (grads, losses))
    specs = {"split": P(None, "data"), "held": P()}, P(None, "data")
    on_devices = jax.shard_map(run, mesh=mesh, in_specs=(P(), *specs), out_specs=P())
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), inputs, specs
    )
    state = jax.jit(on_devices)(tx.init(params), *placed)
    assert all(x.is_fully_replicated for x in jax.tree.leaves(state))
    found = clipjax.bad_steps(state)
    expected = clipjax.bad_steps(jax.jit(run)(tx.init(params), *inputs))
    assert [each.step for each in found] == [35, 36, 37]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[:4] == pytest.approx(theirs[:4], rel=1e-5, nan_ok=True)
        assert ours.groups == pytest.approx(theirs.groups, rel=1e-5, nan_ok=True)


def bad(norm: float, threshold: float, loss: Any, **groups: float) -> Any:
    (one,) = clipjax.bad_steps(one_bad_step())
    limit = None if loss is None else 3.125
    one = one._replace(loss=loss, loss_threshold=limit, groups=groups)
    return one._replace(norm=norm, threshold=threshold)


@functools.cache
def one_bad_step() -> Any:
    return programs.stepped(clipjax.record_norms(keep=1), np.float32([NAN]))[1]


def test_what_is_printed_names_the_place() -> None:
    in_loss = "no group is finite: it broke in the loss or in the forward pass"
    after = "no group is finite, but the loss is"
    texts = {
        "norm 4.2e+03, usual up to 12; 98% of it in b": (4243, 12, None, 600, 4200),
        "norm nan; not finite in a": (NAN, INF, 1.0, NAN, 1),
        f"norm inf, usual up to 12; {after}": (INF, 12, 1, INF, NAN),
        f"loss nan, usual up to 3.1; norm nan; {in_loss}": (NAN, INF, NAN, NAN, NAN),
        f"norm nan; {in_loss}": (NAN, INF, None, NAN, NAN, 0),
        "norm inf; largest in b": (INF, INF, None, 1e19, 1.75e19),
        "norm nan; all groups are finite: it broke in weights outside of the groups": (
            NAN,
            INF,
            2.0,
            1,
            2,
        ),
        "loss nan, usual up to 3.1; norm 1.5, usual up to 12": (1.5, 12, NAN, 1, 1),
        "loss 8.5, usual up to 3.1; norm 1.5": (1.5, INF, 8.5, 1, 1),
        "loss 8.5, usual up to 3.1; norm 15, usual up to 12; 64% of it in a": (
            15,
            12,
            8.5,
            12,
            9,
        ),
    }
    for text, (norm, threshold, loss, *norms) in texts.items():
        groups = dict(zip("abc", norms, strict=False))
        assert str(bad(norm, threshold, loss, **groups)) == f"step 0: {text}"
    assert str(bad(NAN, INF, 1.0)) == "step 0: norm nan"


# Six layers in a scan after an embedding and in front of a head. One of them breaks,
# in the forward pass or in the backward pass, or the loss does.
@jax.custom_vjp
def poisoned(x: Any, is_bad: Any) -> Any:
    return x


poisoned.defvjp(
    lambda x, is_bad: (x, is_bad),
    lambda is_bad, g: (jnp.where(is_bad, NAN, g), None),
)


@jax.jit
def broken_step(forward: Any, backward: Any, loss_is_bad: Any) -> Any:
    def loss(params: Any) -> Any:
        def block(x: Any, layer: Any) -> Any:
            w, i = layer
            x = poisoned(x, backward == i)
            x = x + jnp.tanh(x @ w)
            return x * jnp.where(forward == i, INF, 1), None

        x = params["embed"] * jnp.ones((3, 4))
        x, _ = jax.lax.scan(jax.checkpoint(block), x, (params["blocks"], jnp.arange(6)))
        value = jnp.sum((x @ params["head"]) ** 2)
        return value * jnp.where(loss_is_bad, NAN, 1)

    params = {
        "blocks": jnp.stack([jnp.eye(4) + 0.1 * i for i in range(6)]),
        "embed": jnp.ones(4),
        "head": jnp.ones((4, 2)),
    }
    tx = clipjax.record_norms("leaf", stacked="blocks", keep=2)
    return tx.update(jax.grad(loss)(params), tx.init(params))[1]


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_the_layer_where_the_backward_pass_broke_is_named(layer: int) -> None:
    """Its input has a gradient that is not finite, and so has all that is before it."""
    (found,) = clipjax.bad_steps(broken_step(-1, layer, False))
    broken = ["", "blocks/0", "blocks/0 to blocks/1", "", "blocks/0 to blocks/3"][layer]
    text = ", ".join([broken, "embed"] if broken else ["embed"])
    assert str(found).endswith(f"not finite in {text}")
    fine = {f"blocks/{i}" for i in range(layer, 6)} | {"head"}
    assert {name for name, x in found.groups.items() if np.isfinite(x)} == fine


def test_no_layer_is_named_where_the_forward_pass_or_the_loss_broke() -> None:
    for step in [(layer, -1, False) for layer in (0, 3, 5)] + [(-1, -1, True)]:
        (found,) = clipjax.bad_steps(broken_step(*step))
        assert str(found).endswith("it broke in the loss or in the forward pass"), step


def test_layers_are_in_the_order_of_their_numbers() -> None:
    """Also in a dict, which sorts block_10 before block_2."""
    names = {f"block_{i}/kernel": NAN if i < 11 else 1.0 for i in range(12)}
    assert str(bad(NAN, INF, None, **dict(sorted(names.items()), head=1.0))).endswith(
        "not finite in block_0/kernel to block_10/kernel"
    )
    # Frozen layers have a gradient of 0, which is finite wherever the step broke.
    frozen = {"block_0": NAN, "block_1": 0.0, "block_2": NAN, "block_3": 1.0}
    assert str(bad(NAN, INF, None, **frozen)).endswith("in block_0 to block_2")
    only = {"block_0": 1.0, "block_1": NAN, "block_2": 1.0}
    assert str(bad(NAN, INF, None, **only)).endswith("not finite in block_1")


def test_nothing_is_kept_by_default() -> None:
    state = clipjax.record_norms("leaf").init(jnp.ones(1))
    assert state.memory == ()
    with pytest.raises(ValueError, match=r"clipjax.record_norms\('leaf', keep=16\)"):
        clipjax.bad_steps(state)


def test_a_skip_around_a_recorder_is_an_error() -> None:
    """It would freeze what the recorder keeps; wherever the recorder is in it."""
    record = clipjax.record_norms(keep=2)
    hidden = optax.chain(optax.masked(record, {"a": True}), optax.sgd(1.0))
    for tx, name in (
        (clipjax.skip_spikes(optax.chain(record, optax.sgd(1.0))), "spikes"),
        (clipjax.skip_nonfinite(hidden), "nonfinite"),
    ):
        with pytest.raises(ValueError, match=f"keep: .* is wrapped by skip_{name}"):
            tx.init({"a": jnp.ones(1)})


def test_a_restart_may_bring_another_order() -> None:
    """As where the order of `probes=` was wrong."""

    def loss_of(taps: Any) -> Any:
        x = clipjax.probe(jnp.full(2, jnp.inf), taps["embed"])
        return clipjax.probe(jnp.tanh(x), taps["head"]).sum()

    state: Any = None
    for names in (["head", "embed"], ["embed", "head"]):
        tx = clipjax.record_norms("leaf", keep=4, probes=dict.fromkeys(names, 0))
        state = tx.init(jnp.ones(2)) if state is None else state
        taps = jax.grad(loss_of)({name: clipjax.tap(probe=True) for name in names})
        _, state = tx.update(jnp.full(2, jnp.nan), state, taps=taps)
    found = clipjax.bad_steps(state)
    assert [list(step.forward) for step in found] == [["embed", "head"]] * 2
    assert all("at embed" in str(step) for step in found)


def test_no_finite_group_is_told_as_not_finite() -> None:
    """Of many kinds of layers, those are told that are fewer."""
    names = ["cls", "head", "pos", *(f"blocks/{i}/{x}" for i in range(6) for x in "ab")]
    fine = {"head", *names[-6:]}
    groups = {f"params/{x}": 1.0 if x in fine else NAN for x in [*names, "bias"]}
    assert str(bad(NAN, INF, None, **groups)).endswith(
        "finite only in params/blocks/3 to params/blocks/5, params/head"
    )
    groups |= {"params/blocks/3/b": NAN, "params/cls": 1.0, "params/pos": 1.0}
    assert str(bad(NAN, INF, None, **groups)).endswith(
        "not finite in params/bias, params/blocks/0 to params/blocks/2, "
        "params/blocks/3/b"
    )
    # Norms of 0 are finite, but tell nothing; and a pattern is no path.
    unused = {"a/x": NAN, "a/y": 0.0, "b/x": NAN, "c/x": NAN, "d/x": NAN, "e": 1.0}
    assert str(bad(NAN, INF, None, **unused)).endswith("finite only in e")
    patterns = {"*/a/*": NAN, "*/b/*": NAN, "/c/*": NAN, "*/d": NAN, "/e/*": 1.0}
    assert str(bad(NAN, INF, None, **patterns)).endswith("finite only in /e/*")


def test_a_loss_that_is_not_finite_says_that_the_forward_pass_broke() -> None:
    """Though the slope of a ReLU at NaN is 0, so that biases have finite gradients."""
    step = bad(NAN, INF, NAN, **{"a/kernel": NAN, "a/bias": 1.0, "b/kernel": NAN})
    text = (
        "not finite in a/kernel, b/kernel: it broke in the loss or in the forward pass"
    )
    assert str(step).endswith(text)


def test_many_leaves_are_told_by_their_layers() -> None:
    """So that the text has the last of them, where the backward pass broke."""
    one = jnp.ones(())
    layers = [{"attn": {"bias": one, "kernel": one}, "mlp": one}] * 12
    params = {"blocks": {str(i): layer for i, layer in enumerate(layers)}}
    tx = clipjax.record_norms("leaf", keep=1)
    nan = jax.tree.map(lambda x: x * jnp.nan, params["blocks"])
    grads = {"blocks": params["blocks"] | {str(i): nan[str(i)] for i in range(6)}}
    _, state = tx.update(grads, tx.init(params))
    (step,) = clipjax.bad_steps(state)
    assert str(step) == "step 0: norm nan; not finite in blocks/0 to blocks/5"
