"""An old state goes on in another chain: nothing that holds moments is ever lost."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization, struct
from flax.training.train_state import TrainState

import clipjax

PARAMS = {
    "dense": {"bias": np.ones(2, np.float32), "kernel": np.eye(2)},
    "z": np.ones(3),
}
PARAMS = jax.tree.map(np.float32, PARAMS)
RATE = optax.linear_schedule(0.1, 0.01, 10)


def gradients(step: int) -> Any:
    draws = np.random.RandomState(step)
    return jax.tree.map(lambda x: draws.normal(size=x.shape).astype("f4"), PARAMS)


def run(tx: Any, state: Any, weights: Any, steps: range) -> tuple[Any, Any, list[Any]]:
    update = jax.jit(tx.update)
    seen = []
    for step in steps:
        updates, state = update(gradients(step), state, weights)
        weights = optax.apply_updates(weights, updates)
        seen.append(updates)
    return state, weights, seen


def adamw() -> Any:
    return optax.adamw(RATE)


def plain() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), adamw())


def ours() -> Any:
    return optax.chain(
        clipjax.record_norms("leaf", keep=2),
        clipjax.skip_spikes(
            clipjax.skip_nonfinite(
                optax.chain(clipjax.clip_by_global_norm(1.0), adamw())
            )
        ),
    )


def close(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 2e-5, 1e-7), found, expected
    )


def moments(state: Any) -> list[Any]:
    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    return list(filter(is_adam, jax.tree.leaves(state, is_leaf=is_adam)))


def by_msgpack(state: Any, folder: Path) -> Any:
    return serialization.msgpack_restore(serialization.to_bytes(state))


def by_pickle(state: Any, folder: Path) -> Any:
    return pickle.loads(pickle.dumps(jax.device_get(state)))


def by_orbax(state: Any, folder: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", {"state": state})
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "checkpoint")["state"]


FORMS = [lambda state, folder: state, by_pickle, by_msgpack, by_orbax]


@pytest.mark.parametrize("form", FORMS, ids=["live", "pickle", "msgpack", "orbax"])
def test_a_run_of_optax_goes_on_with_skip_record_and_clip(
    form: Callable[[Any, Path], Any], tmp_path: Path
) -> None:
    before = plain()
    state, weights, _ = run(before, before.init(PARAMS), PARAMS, range(4))
    _, later, expected = run(before, state, weights, range(4, 8))
    tx = ours()
    new = tx.init(PARAMS)
    adopted = clipjax.adopt(form(state, tmp_path), new)
    assert jax.tree.structure(adopted) == jax.tree.structure(new)
    jax.tree.map(np.testing.assert_array_equal, moments(adopted), moments(state))
    after, found_weights, found = run(tx, adopted, weights, range(4, 8))
    close((found_weights, found), (later, expected))
    metrics = clipjax.metrics(after)
    assert metrics["clip_by_global_norm/steps"] == metrics["skip_nonfinite/steps"] == 4

    # And without the recorder again, which has to be asked for.
    fewer = clipjax.skip_nonfinite(
        optax.chain(clipjax.clip_by_global_norm(1.0), adamw())
    )
    saved = form(after, tmp_path / "again")
    with pytest.raises(ValueError, match=r"record_norms at '0'.*drop=True") as error:
        clipjax.adopt(saved, fewer.init(PARAMS))
    assert "skip_spikes" in str(error.value)
    assert "mu" not in str(error.value)
    last = clipjax.adopt(saved, fewer.init(PARAMS), drop=True)
    jax.tree.map(np.testing.assert_array_equal, moments(last), moments(after))
    expected = run(tx, after, found_weights, range(8, 10))[2]
    close(run(fewer, last, found_weights, range(8, 10))[2], expected)


WRAPPERS = {
    "accumulate": lambda tx: clipjax.bounded(tx, accumulate=2),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "inject_hyperparams": lambda tx: optax.chain(
        optax.inject_hyperparams(clipjax.clip_by_global_norm)(1.0), tx
    ),
    "masked": lambda tx: optax.chain(optax.masked(clipjax.clip_by_norm(1.0), True), tx),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "inner hyperparams": lambda tx: optax.inject_hyperparams(
        lambda max_norm: optax.chain(clipjax.clip_by_global_norm(max_norm), tx)
    )(1.0),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("form", FORMS[::2], ids=["live", "msgpack"])
def test_wrappers_are_looked_through(wrap: Any, form: Any, tmp_path: Path) -> None:
    state, _, _ = run(adamw(), adamw().init(PARAMS), PARAMS, range(3))
    new = wrap(adamw()).init(PARAMS)
    inside = clipjax.adopt(form(state, tmp_path), new)
    assert jax.tree.structure(inside) == jax.tree.structure(new)
    jax.tree.map(np.testing.assert_array_equal, moments(inside), moments(state))
    outside = clipjax.adopt(form(inside, tmp_path), state, drop=True)
    jax.tree.map(np.testing.assert_array_equal, outside, state)


@pytest.mark.parametrize("form", FORMS, ids=["live", "pickle", "msgpack", "orbax"])
def test_names_are_looked_through(form: Any, tmp_path: Path) -> None:
    """A transformation may get names, or lose them, but not have other ones."""
    tx = clipjax.bounded(adamw(), clip=clipjax.autoclip(), nonfinite="skip")
    wraps: list[Callable[[Any], Any]] = [
        lambda tx: tx,
        lambda tx: clipjax.named("actor", tx),
        lambda tx: clipjax.named("gan", clipjax.named("actor", tx)),
    ]
    states = [run(w(tx), w(tx).init(PARAMS), PARAMS, range(3))[0] for w in wraps]
    for i, old in enumerate(states):
        restored = form(old, tmp_path / str(i))
        for wrap, expected in zip(wraps, states, strict=True):
            adopted = clipjax.adopt(restored, wrap(tx).init(PARAMS))
            assert jax.tree.structure(adopted) == jax.tree.structure(expected)
            jax.tree.map(np.testing.assert_array_equal, adopted, expected)
    other = clipjax.named("critic", tx).init(PARAMS)
    with pytest.raises(ValueError, match="new has no place for"):
        clipjax.adopt(form(states[1], tmp_path / "other"), other)


def test_what_is_new_stays_as_init_made_it() -> None:
    state, _, _ = run(plain(), plain().init(PARAMS), PARAMS, range(3))
    tx = optax.chain(plain(), clipjax.max_norm(RATE), clipjax.record_norms(keep=2))
    adopted = clipjax.adopt(state, tx.init(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, adopted[1:], tx.init(PARAMS)[1:])


def test_a_metric_that_is_new_begins_at_0_and_others_follow() -> None:
    def own(*names: str) -> Any:
        def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
            kinds = {"a": jnp.float32(2), "b": jnp.int32(1), "c": jnp.ones((), bool)}
            kinds["norm_after"] = kinds["a"]
            return updates, {key: kinds[key] for key in names}, memory

        return clipjax.with_metrics("own", act)

    x = jnp.ones(2)
    state = own("a", "b").init(x)
    for _ in range(2):
        _, state = own("a", "b").update(x, state)
    more = clipjax.adopt(by_msgpack(state, Path()), own("a", "b", "c").init(x))
    seen = clipjax.metrics(own("a", "b", "c").update(x, more)[1])
    assert {key: float(y) for key, y in seen.items()} == {
        "own/a": 2,
        "own/b": 3,
        "own/c_fraction": np.float32(1 / 3),
        "own/steps": 3,
    }
    with pytest.raises(ValueError, match="'metrics/b' \\(\\)"):
        clipjax.adopt(state, own("a").init(x))
    fewer = clipjax.adopt(state, own("a").init(x), drop=True)
    assert clipjax.metrics(fewer)["own/a"] == 2
    # A metric that clipjax derives for its own clips is not derived for this one.
    with pytest.raises(ValueError, match="'metrics/norm_after' \\(\\)"):
        clipjax.adopt(own("a", "norm_after").init(x), own("a").init(x))


def test_bad_steps_follow_their_names() -> None:
    """Rows of bad steps have a column for each norm, wherever that is now."""
    old = clipjax.record_norms("leaf", keep=2)
    new = clipjax.record_norms("leaf", keep=2, of=("updates", "params"))
    bad = jax.tree.map(np.copy, gradients(0))
    bad["z"][0] = np.nan
    _, state = old.update(bad, old.init(PARAMS), PARAMS)
    adopted = clipjax.adopt(state, new.init(PARAMS))
    (before,), (after,) = map(clipjax.bad_steps, (state, adopted))
    np.testing.assert_equal(after.groups, before.groups)
    groups = clipjax.record_norms(1, stacked="z", keep=2)
    joined = clipjax.adopt(state, groups.init(PARAMS), drop=True)
    (known,) = clipjax.bad_steps(joined)  # what was not measured is in no group
    assert known.groups == {
        name: norm for name, norm in before.groups.items() if name in known.groups
    }
    metrics = clipjax.metrics(adopted)
    assert np.isnan(metrics["record_norms/updates/z"])
    assert metrics["record_norms/params/z"] == 0


def test_states_of_one_kind_are_matched_in_their_order() -> None:
    labels = {"dense": "a", "z": "b"}
    before = optax.partition({"a": adamw(), "b": adamw()}, labels)
    state, _, _ = run(before, before.init(PARAMS), PARAMS, range(2))
    after = optax.partition(
        {"a": clipjax.skip_nonfinite(adamw()), "b": adamw()}, labels
    )
    for form in (FORMS[0], by_msgpack):
        adopted = clipjax.adopt(form(state, Path()), after.init(PARAMS))
        jax.tree.map(np.testing.assert_array_equal, moments(adopted), moments(state))


def zclips(*names: str) -> Any:
    """A chain of named clips, whose thresholds follow the norms of two leaves."""
    of = {"dense": "dense/*", "0": "z"}
    masks = [clipjax.matching(of.get(name, "z")) for name in names]
    txs = [optax.masked(clipjax.zclip(), mask) for mask in masks]
    return optax.chain(*map(clipjax.named, names, txs))


def zclips_of(*labels: Any) -> Any:
    txs = {label: clipjax.zclip() for label in labels}
    return optax.partition(txs, dict(zip(("dense", "z"), labels, strict=True)))


def half_of(part: str) -> Any:
    txs = {"dense": optax.trace(0.9), "z": optax.trace(0.9)}
    txs[part] = optax.chain(clipjax.zclip(), txs[part])
    return optax.partition(txs, {"dense": "dense", "z": "z"})


def part_of(clipped: str, other: str) -> Any:
    txs = {clipped: clipjax.zclip(), other: optax.identity()}
    return optax.partition(txs, {"dense": "dense", "z": "z"})


def within(tx: Any) -> Any:
    return clipjax.named("run", optax.chain(tx))


def test_states_of_parts_are_matched_by_their_names() -> None:
    two = zclips("dense", "0")
    same = [
        (two, zclips("0", "dense")),
        (two, within(zclips("0", "dense"))),
        (within(two), clipjax.named("other", within(zclips("0", "dense")))),
        (zclips_of("b", "a"), zclips_of("b", "a")),
        (zclips_of(1, 0), zclips_of(1, 0)),
        # Without names, and where only one side has some, the order tells.
        (optax.chain(clipjax.zclip(), clipjax.zclip()), within(zclips("0", "1"))),
    ]
    for before, after in same[:-1]:
        state, _, _ = run(before, before.init(PARAMS), PARAMS, range(20))
        for form in (FORMS[0], by_msgpack):
            adopted = clipjax.adopt(form(state, Path()), after.init(PARAMS))
            expected, _ = before.update(gradients(20), state, PARAMS)
            updates, _ = after.update(gradients(20), adopted, PARAMS)
            jax.tree.map(np.testing.assert_array_equal, updates, expected)
    before, after = same[-1]
    assert clipjax.adopt(before.init(PARAMS), after.init(PARAMS))


def test_a_part_with_another_name_is_none_of_the_old_ones() -> None:
    """Which would be a guess: the order of labels is that of the alphabet."""
    plain = clipjax.zclip()
    for before, after, gone, expected in (
        (zclips("z", "0"), optax.chain(plain, zclips("z")), "named/0", [0, 2]),
        (optax.chain(plain, zclips("z")), zclips("z", "0"), "zclip at '0'", [0, 2]),
        (zclips_of("a", "b"), zclips_of("c", "b"), "inner_states/a", [0, 2]),
        (zclips_of(0, 1), zclips_of(2, 1), "inner_states/0", [0, 2]),
        (zclips("dense", "0"), zclips("0", "other"), "named/dense", [0, 2]),
        (zclips("dense", "0"), zclips("0"), "named/dense", [2]),
        # The only one of its kind, too.
        (half_of("dense"), half_of("z"), "inner_states/dense", [0]),
        (part_of("dense", "z"), part_of("z", "dense"), "inner_states/dense", [0]),
    ):
        state, _, _ = run(before, before.init(PARAMS), PARAMS, range(2))
        fresh = after.init(PARAMS)
        for form in (FORMS[0], by_msgpack):
            old = form(state, Path())
            with pytest.raises(ValueError, match=f"old: new has no place for .*{gone}"):
                clipjax.adopt(old, fresh)
            adopted = clipjax.adopt(old, fresh, drop=True)
            steps = sorted(int(x) for x in metrics_of(adopted, "/steps"))
            assert steps == expected


@struct.dataclass
class Agent:
    """Its attributes are not in the order of the alphabet."""

    policy_state: Any
    critic_state: Any


@pytest.mark.parametrize("form", FORMS, ids=["live", "pickle", "msgpack", "orbax"])
def test_optimizers_in_attributes_are_matched_by_name(
    form: Any, tmp_path: Path
) -> None:
    tx = adamw()
    states = [run(tx, tx.init(PARAMS), PARAMS, range(n))[0] for n in (2, 5)]
    old, fresh = Agent(*states), Agent(*[tx.init(PARAMS)] * 2)
    adopted = clipjax.adopt(form(old, tmp_path), fresh)
    jax.tree.map(np.testing.assert_array_equal, adopted, old)
    # A tuple, whose order is another one, is an error.
    with pytest.raises(ValueError, match="it is not known which"):
        clipjax.adopt(form(old, tmp_path / "again"), (fresh.critic_state,) * 2)


def test_keys_of_dicts_are_parts() -> None:
    """Whatever they are called."""
    tx = adamw()
    a, b = (run(tx, tx.init(PARAMS), PARAMS, range(n))[0] for n in (2, 5))
    fresh = tx.init(PARAMS)
    for one, two, new in (
        ("actor", "critic", "policy"),
        ("actor_state", "critic_state", "policy_state"),
        ("inner", "beginner", "winner"),
        ("counts", "last", "steps"),
    ):
        old = by_msgpack({one: a, two: b}, Path())
        more = clipjax.adopt(old, dict.fromkeys((new, one, two), fresh))
        wanted = {one: a, two: b, new: fresh}
        jax.tree.map(np.testing.assert_array_equal, more, wanted)
        with pytest.raises(ValueError, match=f"no place for .*'{one}/"):
            clipjax.adopt(old, dict.fromkeys((new, two), fresh))
    txs = {"counts": adamw(), "last": adamw()}
    tx = optax.partition(txs, {"dense": "counts", "z": "last"})
    state, _, _ = run(tx, tx.init(PARAMS), PARAMS, range(2))
    adopted = clipjax.adopt(by_msgpack(state, Path()), tx.init(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, adopted, state)


class Both(NamedTuple):
    policy_state: Any
    critic_state: Any


class Turned(NamedTuple):
    critic_state: Any
    policy_state: Any


class Third(NamedTuple):
    critic_state: Any
    target_state: Any


class Inside(NamedTuple):
    inner_opt_state: Any
    outer_opt_state: Any


class Outside(NamedTuple):
    outer_opt_state: Any
    other_opt_state: Any


class Slower(NamedTuple):
    mean_state: Any


class Faster(NamedTuple):
    mean_state: Any


@struct.dataclass
class Slow:
    m: Any


@struct.dataclass
class Fast:
    m: Any


def test_moments_do_not_change_places() -> None:
    tx, nothing = optax.trace(0.9), optax.sgd(0.1)
    x = jnp.ones(2)
    fresh = tx.init(x)
    a, b = (fresh._replace(trace=n * x) for n in (2.0, 3.0))
    part = clipjax.named

    def of(name: str, tx: Any) -> Any:
        return part(name, tx).init(x)

    turned = clipjax.adopt(Both(a, b), Turned(fresh, fresh))
    assert (turned.policy_state.trace[0], turned.critic_state.trace[0]) == (2, 3)
    types = clipjax.adopt((Slow(2 * x), Fast(3 * x)), (Fast(x), Slow(x)))
    assert (types[0].m[0], types[1].m[0]) == (3, 2)
    gen = of("gen", tx)._replace(named={"gen": a})
    for old, new in (
        (Both(a, b), Third(fresh, fresh)),
        # Keys that are digits.
        ({0: a, 1: b}, {1: fresh, 2: fresh}),
        ({"0": a, "1": b}, {"1": fresh, "2": fresh}),
        # A name beside something that has no state.
        ((gen, of("critic", nothing)), (of("gen", nothing), of("critic", tx))),
        ((gen,), (of("gen", nothing), of("critic", tx))),
        (gen, {"critic": fresh}),
        ({"gen": a, "critic": nothing.init(x)}, of("critic", tx)),
        (Slow(x), Fast(x)),
        (Slow([2 * x, 3 * x[:1]]), Slow([x[:1], x, x])),
        (by_msgpack({0: a, 1: b}, Path()), {1: fresh, 2: fresh}),
        (Inside(a, b), Outside(fresh, fresh)),
        (Slower(2 * x), Faster(x)),
    ):
        with pytest.raises(ValueError, match=r"has no place for|is not known which"):
            clipjax.adopt(old, new)
    joined = clipjax.adopt((gen, of("critic", nothing)), gen._replace(named={"gen": a}))
    assert joined.named["gen"].trace[0] == 2


@pytest.mark.parametrize("form", FORMS, ids=["live", "pickle", "msgpack", "orbax"])
def test_digits_are_keys_where_new_has_such_keys(form: Any, tmp_path: Path) -> None:
    tx, params = adamw(), {"0": jnp.ones(2), "1": jnp.ones(3)}
    old = {"params": params, "opt": {0: tx.init(params), 1: tx.init(params)}}
    old = jax.tree.map(lambda x: x + 1, old)
    adopted = clipjax.adopt(form(old, tmp_path), jax.tree.map(jnp.zeros_like, old))
    jax.tree.map(np.testing.assert_array_equal, adopted, old)


def test_nested_skips_keep_their_memories() -> None:
    def skips(*order: Any) -> Any:
        tx = adamw()
        for skip in order:
            tx = skip(tx)
        return tx

    both = clipjax.skip_nonfinite, clipjax.skip_spikes
    state, _, _ = run(skips(*both), skips(*both).init(PARAMS), PARAMS, range(3))
    turned = clipjax.adopt(state, skips(*both[::-1]).init(PARAMS))
    assert turned.memory.inner.metrics.keys() == state.metrics.keys()
    jax.tree.map(
        np.testing.assert_array_equal,
        turned.memory.inner.memory.past,
        state.memory.past,
    )


@struct.dataclass
class Moments:
    """With the fields of a state of Optax."""

    count: Any
    mu: Any
    nu: Any


@pytest.mark.parametrize("form", FORMS, ids=["live", "pickle", "msgpack", "orbax"])
def test_states_of_a_users_own_go_on(form: Any, tmp_path: Path) -> None:
    x = jnp.ones(2)
    old = (Moments(jnp.ones((), np.int32), x, 2 * x), optax.trace(0.9).init(x))
    zeros = jax.tree.map(jnp.zeros_like, old)
    adopted = clipjax.adopt(form(old, tmp_path), zeros)
    jax.tree.map(np.testing.assert_array_equal, adopted, old)


def test_a_name_comes_around_states_in_and_outside_of_names() -> None:
    def chain(first: Any, second: Any) -> Any:
        return optax.chain(first, clipjax.named("m", optax.chain(second, adamw())))

    tx = chain(clipjax.zclip(), clipjax.zclip())
    state, _, _ = run(tx, tx.init(PARAMS), PARAMS, range(3))
    around = clipjax.named("run", tx)
    for form in (FORMS[0], by_msgpack):
        adopted = clipjax.adopt(form(state, Path()), around.init(PARAMS))
        jax.tree.map(np.testing.assert_array_equal, adopted.named["run"], state)
        back = clipjax.adopt(form(adopted, Path()), tx.init(PARAMS))
        jax.tree.map(np.testing.assert_array_equal, back, state)


def test_paths_tell_which_state_gets_a_name_or_another_place() -> None:
    def masked(name: str) -> Any:
        return optax.masked(optax.adam(0.1), {key: key == name for key in PARAMS})

    def recorders(*names: str) -> Any:
        each = [clipjax.record_norms(1, name=name, keep=2) for name in names]
        return optax.chain(*each)

    tx = optax.chain(masked("dense"), masked("z"))
    state, _, _ = run(tx, tx.init(PARAMS), PARAMS, range(3))
    other = optax.chain(clipjax.named("z", masked("z")), masked("dense"))
    adopted = clipjax.adopt(state, other.init(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, adopted[1], state[0])
    jax.tree.map(np.testing.assert_array_equal, adopted[0].named["z"], state[1])
    two, turned = recorders("a", "b"), recorders("b", "a")
    state, _, _ = run(two, two.init(PARAMS), PARAMS, range(3))
    adopted = clipjax.adopt(state, turned.init(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, adopted, state[::-1])


def test_a_name_joins_within_a_label() -> None:
    labels = {"dense": "a", "z": "b"}
    tx = optax.partition({"a": adamw(), "b": adamw()}, labels)
    parts = {name: clipjax.named(name, adamw()) for name in ("a", "b")}
    named = optax.partition(parts, labels)
    state, _, _ = run(tx, tx.init(PARAMS), PARAMS, range(2))
    for form in (FORMS[0], by_msgpack):
        adopted = clipjax.adopt(form(state, Path()), named.init(PARAMS))
        jax.tree.map(np.testing.assert_array_equal, moments(adopted), moments(state))
        back = clipjax.adopt(form(adopted, Path()), tx.init(PARAMS))
        jax.tree.map(np.testing.assert_array_equal, back, state)


@pytest.mark.parametrize("name", ["trace", "count", "mu", "inner_state", "named"])
def test_keys_may_be_called_as_the_fields_of_states(name: str) -> None:
    tx, x = optax.trace(0.9), jnp.ones(2)
    state = tx.init(x)._replace(trace=2 * x)
    by_hand = {"count": jnp.ones((), np.int32), "mu": 2 * x, "nu": 3 * x}
    part = optax.partition({name: tx}, {"x": name}).init({"x": x})
    for old in ({name: state}, part, by_hand):
        zeros = jax.tree.map(jnp.zeros_like, old)
        for form in (FORMS[0], by_msgpack):
            adopted = clipjax.adopt(form(old, Path()), zeros)
            jax.tree.map(np.testing.assert_array_equal, adopted, old)


@pytest.mark.parametrize("name", ["run", "named", "inner_states"])
def test_places_in_a_chain_below_any_name_are_no_names(name: str) -> None:
    x = jnp.ones(2)
    two, more = (optax.trace(0.9),) * 2, (optax.scale(1.0), *[optax.trace(0.9)] * 2)

    def by_hand(*txs: Any) -> Any:
        return {name: optax.chain(*txs).init(x)}

    for made in (
        lambda *txs: clipjax.named(name, optax.chain(*txs)).init(x),
        lambda *txs: optax.partition({name: optax.chain(*txs)}, name).init(x),
        by_hand,
    ):
        old = jax.tree.unflatten(jax.tree.structure(made(*two)), [2 * x, 3 * x])
        # A restored dict with one key, which is a field of a state, is this state.
        for form in (FORMS[0], *[by_msgpack] * (made is not by_hand or name == "run")):
            adopted = clipjax.adopt(form(old, Path()), made(*more))
            moments_now = np.stack(jax.tree.leaves(adopted))
            np.testing.assert_array_equal(moments_now, [2 * x, 3 * x])


def test_a_name_that_both_have_is_not_looked_through() -> None:
    momentum = optax.sgd(0.1, momentum=0.9)
    old = clipjax.named("gen", adamw()).init(PARAMS)
    other = (
        clipjax.named("gen", momentum).init(PARAMS),
        clipjax.named("critic", adamw()).init(PARAMS),
    )
    with pytest.raises(ValueError, match=r"no place for .*'named/gen"):
        clipjax.adopt(old, other)
    state, _, _ = run(adamw(), adamw().init(PARAMS), PARAMS, range(2))
    both = clipjax.named("run", optax.chain(adamw(), clipjax.named("gen", adamw())))
    adopted = clipjax.adopt(old._replace(named={"gen": state}), both.init(PARAMS))
    assert [int(x) for x in jax.tree.leaves(adopted) if x.dtype == np.int32] == [
        0,
        0,
        2,
        2,
    ]


def test_what_has_no_state_of_its_shapes_is_left_out() -> None:
    def recorders(*names: str) -> Any:
        records = [clipjax.record_norms("leaf", name=name) for name in names]
        return optax.chain(*records, adamw())

    two, one = recorders("gradients", "updates"), recorders("gradients")
    state, _, _ = run(two, two.init(PARAMS), PARAMS, range(2))
    with pytest.raises(ValueError, match="no place for record_norms at '1'"):
        clipjax.adopt(state, one.init(PARAMS))
    adopted = clipjax.adopt(state, one.init(PARAMS), drop=True)
    jax.tree.map(np.testing.assert_array_equal, adopted, (state[0], state[2]))


def metrics_of(state: Any, end: str) -> list[Any]:
    return [x for key, x in clipjax.metrics(state).items() if key.endswith(end)]


def test_long_chains_keep_their_order() -> None:
    """In a mapping, "10" is sorted before "2"."""
    tx = optax.chain(*[clipjax.clip_by_norm(1.0 + i) for i in range(12)])
    state, _, _ = run(tx, tx.init(PARAMS), PARAMS, range(2))
    adopted = clipjax.adopt(by_msgpack(state, Path()), tx.init(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, adopted, state)


def test_two_optimizers_in_one_state_are_not_swapped() -> None:
    tx = optax.contrib.sam(optax.sgd(0.1, 0.9), optax.sgd(0.2, 0.9), opaque_mode=False)
    state, _, _ = run(tx, tx.init(PARAMS), PARAMS, range(3))
    for form in (FORMS[0], by_msgpack):
        adopted = clipjax.adopt(form(state, Path()), tx.init(PARAMS))
        jax.tree.map(np.testing.assert_array_equal, adopted, state)


def test_what_is_ambiguous_is_an_error_that_names_both_sides() -> None:
    adam = optax.adam(0.1)
    two = optax.chain(adam, adam).init(PARAMS)
    for old, new in ((adam.init(PARAMS), two), (two, adam.init(PARAMS))):
        for drop in (False, True):
            for form in (FORMS[0], by_msgpack):
                with pytest.raises(ValueError, match="equally many") as error:
                    clipjax.adopt(form(old, Path()), new, drop=drop)
                assert "'0/0'" in str(error.value)
                assert "'1/0'" in str(error.value)


def test_states_of_one_kind_are_told_apart_by_what_they_contain() -> None:
    """A second `inject_hyperparams` joins, or an optimizer for other leaves."""
    before = optax.inject_hyperparams(optax.adam)(0.1)
    clip = optax.inject_hyperparams(clipjax.clip_by_global_norm)(1.0)
    state = before.init(PARAMS)
    _, state = before.update(gradients(0), state)
    for form in (FORMS[0], by_msgpack):
        new = optax.chain(clip, before, clip).init(PARAMS)
        adopted = clipjax.adopt(form(state, Path()), new)
        jax.tree.map(np.testing.assert_array_equal, adopted[1], state)
        jax.tree.map(np.testing.assert_array_equal, adopted[::2], new[::2])

    def both(**parts: Any) -> Any:
        return optax.partition(parts, {"dense": "x", "z": "y"}).init(PARAMS)

    one = both(x=optax.sgd(0.1), y=optax.adam(0.1))
    one = jax.tree.map(lambda x: x + 1, one)
    two = clipjax.adopt(one, both(x=optax.adam(0.1), y=optax.adam(0.1)))
    first, second = moments(two)
    assert (first.count, second.count) == (0, 1)
    assert second.mu["z"][0] == 1


def test_other_shapes_names_and_numbers_are_errors_that_name_both_sides() -> None:
    adam = optax.adam(0.1)
    old = adam.init({"w": jnp.ones((4, 3))})
    cases: list[tuple[Any, str]] = [
        ({"w": jnp.ones((5, 3))}, r"'0/mu/w' is float32\[4, 3\].*float32\[5, 3\]"),
        ({"v": jnp.ones((4, 3))}, r"'0/mu/w' \(4, 3\).*'0/mu/v' \(4, 3\)"),
        ({"w": jnp.ones((4, 3), int)}, r"'0/mu/w' is float32\[4, 3\].*int32\[4, 3\]"),
    ]
    for params, text in cases:
        for drop in (False, True):
            with pytest.raises(ValueError, match=text):
                clipjax.adopt(old, adam.init(params), drop=drop)
    # A layer more, or less, is told.
    both = {"w": jnp.ones((4, 3)), "v": jnp.ones(2)}
    assert "v" in clipjax.adopt(old, adam.init(both))[0].mu
    with pytest.raises(ValueError, match=r"'0/mu/v' \(2,\).*drop=True"):
        clipjax.adopt(adam.init(both), adam.init({"w": jnp.ones((4, 3))}))


def test_other_optimizers_are_not_taken_for_each_other() -> None:
    """Adam and AdaBelief have states of the same fields."""
    belief = optax.scale_by_belief().init(PARAMS)
    adam = optax.scale_by_adam().init(PARAMS)
    with pytest.raises(ValueError, match="ScaleByBeliefState"):
        clipjax.adopt(belief, adam)
    amsgrad = optax.scale_by_amsgrad().init(PARAMS)
    for form in (FORMS[0], by_msgpack):
        with pytest.raises(ValueError, match="no place"):
            clipjax.adopt(form(amsgrad, Path()), adam)


def test_parameters_may_have_the_names_of_fields() -> None:
    """What is in a moment is never taken for a state."""
    params = {"count": jnp.ones(2), "mu": jnp.ones(2), "nu": {"inner": jnp.ones(2)}}
    old = optax.adam(0.1)
    _, state = old.update(params, old.init(params))
    tx = clipjax.skip_nonfinite(optax.chain(optax.trace(0.9), old))
    for form in (FORMS[0], by_msgpack):
        adopted = clipjax.adopt(form(state, Path()), tx.init(params))
        jax.tree.map(np.testing.assert_array_equal, moments(adopted), moments(state))


def test_moments_take_the_dtype_of_new() -> None:
    old = optax.adam(0.1, mu_dtype=jnp.bfloat16)
    _, state = old.update(PARAMS, old.init(PARAMS))
    adopted = clipjax.adopt(state, optax.adam(0.1).init(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, adopted[0].mu, state[0].mu)
    assert adopted[0].mu["z"].dtype == jnp.float32
    assert clipjax.adopt(adopted, state)[0].mu["z"].dtype == jnp.bfloat16


def test_arrays_go_to_the_devices_of_new() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.device_put(PARAMS, spread)
    state, _, _ = run(plain(), plain().init(PARAMS), PARAMS, range(2))
    for form in (FORMS[0], by_msgpack):
        adopted = clipjax.adopt(form(state, Path()), plain().init(params))
        assert moments(adopted)[0].mu["z"].sharding == spread


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_state_moves_to_another_mesh(kind: str) -> None:
    """Counters and bad steps, too, which are committed to the devices that they leave,
    and moments of which no device holds all.
    """
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    tx = optax.chain(ours(), optax.add_noise(0.1, 0.1, jax.random.key(0)))
    update = jax.jit(tx.update)

    def placed(devices: list[Any]) -> tuple[Any, Any]:
        types = (getattr(jax.sharding.AxisType, kind),)
        mesh = jax.make_mesh((len(devices),), ("x",), types, devices=devices)
        split, whole = (
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
            for axes in (("x",), ())
        )
        with jax.set_mesh(mesh):
            weights = jax.device_put({"w": jnp.arange(8.0).reshape(4, 2)}, split)
            state = tx.init(weights)
        if kind == "Auto":
            return weights, state
        on_mesh = [
            x if len(x.sharding.device_set) > 1 else jax.device_put(x, whole)
            for x in jax.tree.leaves(state)
        ]
        return weights, jax.tree.structure(state).unflatten(on_mesh)

    weights, state = placed(jax.devices()[:4])
    with jax.set_mesh(weights["w"].sharding.mesh):
        for size in (1.0, np.nan, 2.0):
            _, state = update({"w": size * weights["w"]}, state, weights)
    expected = jax.device_get(clipjax.metrics(state))
    fewer, new = placed(jax.devices()[2:4])
    with jax.set_mesh(fewer["w"].sharding.mesh):
        on_host = serialization.to_state_dict(jax.device_get(state[0]))
        for old in (state, {"0": on_host, "1": serialization.to_state_dict(state[1])}):
            adopted = clipjax.adopt(old, new)
            assert repr(clipjax.bad_steps(adopted)) == repr(clipjax.bad_steps(state))
            for key, x in jax.device_get(clipjax.metrics(adopted)).items():
                np.testing.assert_array_equal(x, expected[key], err_msg=key)
            _, after = update(fewer, adopted, fewer)
            assert after[0][0].step == 4


class Net(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(3, 2, rngs=nnx.Rngs(0))


def step(net: Net, optimizer: nnx.Optimizer[Net], number: int) -> None:
    draws = np.random.RandomState(number)
    graph = nnx.state(net, nnx.Param)
    grads = jax.tree.map(lambda x: draws.normal(size=x.shape).astype("f4"), graph)
    optimizer.update(net, grads)


def test_an_nnx_optimizer_goes_on() -> None:
    nets = [Net(), Net()]
    before = [nnx.Optimizer(net, plain(), wrt=nnx.Param) for net in nets]
    for net, optimizer in zip(nets, before, strict=True):
        for number in range(3):
            step(net, optimizer, number)
    (_, net), (kept, old) = nets, before
    for state in (old.opt_state, nnx.state(old)["opt_state"]):
        optimizer = nnx.Optimizer(net, ours(), wrt=nnx.Param)
        optimizer.opt_state = clipjax.adopt(state, optimizer.opt_state)
        found, expected = (
            [x[...] for x in jax.tree.leaves(each, is_leaf=_is_variable)]
            for each in (moments(optimizer.opt_state), moments(kept.opt_state))
        )
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    for number in range(3, 5):
        step(nets[0], kept, number)
        step(net, optimizer, number)
    close(nnx.state(net), nnx.state(nets[0]))
    assert clipjax.metrics(optimizer)["skip_nonfinite/steps"] == 2


@pytest.mark.parametrize("name", ["inject", "partition"])
def test_states_of_nnx_go_on_as_mappings(name: str, tmp_path: Path) -> None:
    """What is empty may be left out, or kept with its type."""
    net = Net()

    def labels(tree: Any) -> Any:
        return jax.tree.map(lambda x: "a", tree, is_leaf=_is_variable)

    adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    txs = {"a": optax.adam(0.1), "b": optax.trace(0.9)}
    tx = {"inject": adam, "partition": optax.partition(txs, labels)}[name]
    both = [nnx.Optimizer(net, clipjax.bounded(tx), wrt=nnx.Param) for _ in range(2)]
    step(net, both[0], 0)
    state = nnx.state(both[0])
    for old in (state["opt_state"], by_orbax(state, tmp_path)["opt_state"]):
        both[1].opt_state = clipjax.adopt(old, both[1].opt_state)
        found, expected = (nnx.state(each)["opt_state"] for each in both)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    skips = nnx.state(nnx.Optimizer(net, clipjax.skip_nonfinite(tx), wrt=nnx.Param))
    with pytest.raises(TypeError, match="new must be the state that init returns"):
        clipjax.adopt(state, skips)


def test_labels_without_parameters_and_plain_trees_go_on_from_nnx(
    tmp_path: Path,
) -> None:
    net = Net()

    def labels(tree: Any) -> Any:
        return jax.tree.map(lambda x: "a", tree, is_leaf=_is_variable)

    rate = optax.linear_schedule(0.1, 0.2, 9)
    average = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: 2 * x, params),
        lambda updates, state, params=None: (updates, state),
    )
    txs = {
        "same": optax.partition({"a": optax.adam(rate), "b": optax.adam(rate)}, labels),
        "other": optax.partition({"a": optax.adam(0.1), "b": optax.adam(rate)}, labels),
        "plain": optax.chain(optax.adam(0.1), average),
    }
    for name, tx in txs.items():
        both = [nnx.Optimizer(net, tx, wrt=nnx.Param) for _ in range(2)]
        both[0].update(net, jax.tree.map(jnp.ones_like, nnx.state(net, nnx.Param)))
        state = nnx.state(both[0])
        restored = by_orbax(state, tmp_path / name)
        for old in (state, nnx.to_pure_dict(state), restored):
            both[1].opt_state = clipjax.adopt(old["opt_state"], both[1].opt_state)
            found, expected = (nnx.state(each)["opt_state"] for each in both)
            jax.tree.map(np.testing.assert_array_equal, found, expected)
    old = nnx.Optimizer(net, txs["other"], wrt=nnx.Param)
    old.update(net, jax.tree.map(jnp.ones_like, nnx.state(net, nnx.Param)))
    clipped = optax.chain(clipjax.clip_by_norm(1.0), txs["other"])
    new = nnx.Optimizer(net, clipped, wrt=nnx.Param)
    adopted = clipjax.adopt(nnx.state(old)["opt_state"], new.opt_state)
    jax.tree.map(np.testing.assert_array_equal, adopted[1], old.opt_state)


def test_a_label_without_parameters_makes_no_state_of_another() -> None:
    params = {"w": jnp.ones(3)}

    def parts(*txs: Any) -> Any:
        return optax.partition(dict(zip("ab", txs, strict=True)), {"w": "a"})

    rms = optax.scale_by_rms(bias_correction=True)
    old = by_msgpack(parts(rms, optax.identity()).init(params), Path())
    new = parts(optax.scale_by_adam(), optax.scale_by_adam()).init(params)
    with pytest.raises(ValueError, match=r"new has no place for count at .*, nu/w"):
        clipjax.adopt(old, new)


def test_mappings_in_place_of_the_states_of_new_are_told() -> None:
    net, adam = Net(), optax.adam(0.1)
    old = nnx.Optimizer(net, adam, wrt=nnx.Param).opt_state
    for tx in (adam, clipjax.named("a", adam), optax.MultiSteps(adam, 2)):
        new = nnx.state(nnx.Optimizer(net, tx, wrt=nnx.Param))["opt_state"]
        with pytest.raises(TypeError, match="new must be the state that init returns"):
            clipjax.adopt(old, new)


def test_a_checkpoint_of_nnx_goes_on_without_a_template(tmp_path: Path) -> None:
    """Orbax restores mappings, with `value` around each array."""
    net = Net()
    optimizer = nnx.Optimizer(net, ours(), wrt=nnx.Param)
    step(net, optimizer, 0)
    restored = by_orbax(nnx.state(optimizer), tmp_path)["opt_state"]
    assert "value" in restored["0"]["step"]
    tx = optax.chain(clipjax.clip_by_norm(1.0), ours())
    new = nnx.Optimizer(net, tx, wrt=nnx.Param)
    new.opt_state = clipjax.adopt(restored, new.opt_state)
    both = map(jax.tree.leaves, (new.opt_state[1], optimizer.opt_state))
    for found, expected in zip(*both, strict=True):
        np.testing.assert_array_equal(found, expected)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def test_a_train_state_goes_on() -> None:
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=plain())
    state = state.apply_gradients(grads=gradients(0))
    tx = ours()
    new = clipjax.adopt(state.opt_state, tx.init(state.params))
    after = state.replace(tx=tx, opt_state=new)
    both = [x.apply_gradients(grads=gradients(1)).params for x in (state, after)]
    close(*both)
