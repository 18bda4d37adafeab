"""An old state goes on in another chain: no moment is lost, doubled or misplaced."""

import itertools
from collections import namedtuple
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
from clipjax._core.states import MetricsState

PARAMS = {
    "dense": {"bias": np.ones(2, np.float32), "kernel": np.eye(2, dtype=np.float32)},
    "z": np.ones(3, np.float32),
}
X = jnp.ones(2)
LABELS = {"dense": "a", "z": "b"}


def gradients(step: int) -> Any:
    draws = np.random.RandomState(step)
    return jax.tree.map(lambda x: draws.normal(size=x.shape).astype("f4"), PARAMS)


def stepped(tx: Any, steps: int = 3) -> Any:
    """Return the state of a transformation after some updates."""
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for step in range(steps):
        _, state = update(gradients(step), state, PARAMS)
    return state


def adamw() -> Any:
    return optax.adamw(optax.linear_schedule(0.1, 0.01, 10))


def plain() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), adamw())


def ours() -> Any:
    clipped = optax.chain(clipjax.clip_by_global_norm(1.0), adamw())
    return optax.chain(
        clipjax.record_norms("leaf", keep=2),
        clipjax.skip_spikes(clipjax.skip_nonfinite(clipped)),
    )


def same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def moments(state: Any) -> list[Any]:
    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    return list(filter(is_adam, jax.tree.leaves(state, is_leaf=is_adam)))


# A run, and its checkpoint in each form.


def by_msgpack(state: Any, folder: Path) -> Any:
    return serialization.msgpack_restore(serialization.to_bytes(state))


def by_orbax(state: Any, folder: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", {"state": state})
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "checkpoint")["state"]


def train(
    tx: Any, state: Any, weights: Any, steps: range
) -> tuple[Any, Any, list[Any]]:
    """Fit a small regression, and return the losses, too."""

    def loss_of(weights: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ weights["dense"]["kernel"] + weights["dense"]["bias"])
        return jnp.mean(
            (hidden @ weights["z"][:2] + weights["z"][2] - x[:, 0] ** 2) ** 2
        )

    @jax.jit
    def step(weights: Any, state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(weights, x)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    losses = []
    for i in steps:
        batch = np.random.RandomState(i).normal(size=(16, 2)).astype("f4")
        weights, state, loss = step(weights, state, batch)
        losses.append(float(loss))
    return state, weights, losses


@pytest.mark.parametrize("form", [None, by_msgpack, by_orbax])
def test_a_run_goes_on_as_if_the_chain_had_not_changed(
    form: Callable[[Any, Path], Any] | None, tmp_path: Path
) -> None:
    before, tx = plain(), ours()
    state, weights, _ = train(before, before.init(PARAMS), PARAMS, range(10))
    _, _, expected = train(before, state, weights, range(10, 30))
    old = form(state, tmp_path) if form else state
    like = jax.eval_shape(before.init, PARAMS) if form else None
    adopted = clipjax.adopt(old, into=tx.init(PARAMS), like=like)
    assert jax.tree.structure(adopted) == jax.tree.structure(tx.init(PARAMS))
    same(moments(adopted), moments(jax.device_get(state)))
    after, weights, losses = train(tx, adopted, weights, range(10, 20))
    metrics = clipjax.metrics(after)
    assert metrics["clip_by_global_norm/steps"] == metrics["skip_nonfinite/steps"] == 10

    # And without the recorder and the skips, which has to be asked for.
    fresh = before.init(PARAMS)
    gone = ("record_norms", "skip_nonfinite", "skip_spikes", "clip_by_global_norm")
    with pytest.raises(ValueError, match="no place for") as error:
        clipjax.adopt(after, into=fresh)
    assert all(name in str(error.value) for name in gone)
    assert "Adam" not in str(error.value)
    back = clipjax.adopt(after, into=fresh, drop=gone)
    losses += train(before, back, weights, range(20, 30))[2]
    np.testing.assert_allclose(losses, expected, 2e-5)


# What is around a state.


class Frozen(NamedTuple):
    """A user's wrapper, of which nothing is known."""

    base: Any
    updates: Any


def frozen(tx: Any) -> Any:
    def init(params: Any) -> Frozen:
        return Frozen(tx.init(params), jnp.zeros((), np.int32))

    return optax.GradientTransformation(init, tx.update)


def sam(tx: Any) -> Any:
    return optax.contrib.sam(tx, optax.sgd(0.2), opaque_mode=False)


WRAPPERS: dict[str, Any] = {
    "skip_nonfinite": clipjax.skip_nonfinite,
    "skip_spikes": clipjax.skip_spikes,
    "MultiStepsState": lambda tx: clipjax.bounded(tx, accumulate=2),
    "InjectStatefulHyperparamsState": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(optax.linear_schedule(1.0, 0.0, 5)),
    "ApplyIfFiniteState": lambda tx: optax.apply_if_finite(tx, 3),
    "MaskedState": lambda tx: optax.masked(tx, True),
    "PartitionState": lambda tx: optax.partition({"all": tx}, "all"),
    "NamedState": lambda tx: clipjax.named("run", tx),
    "ScheduleFreeState": lambda tx: optax.contrib.schedule_free(tx, 0.1),
    "SAMState": sam,
    "MechanicState": optax.contrib.mechanize,
    "LookaheadState": lambda tx: optax.GradientTransformation(
        lambda params: optax.lookahead(tx, 3, 0.5).init(
            optax.LookaheadParams.init_synced(params)
        ),
        tx.update,
    ),
    "Frozen": frozen,
}


def momentum_in_a_dict() -> Any:
    def init(params: Any) -> Any:
        return {"count": jnp.zeros((), np.int32), "mu": params}

    return optax.GradientTransformation(init, optax.identity().update)


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_looked_through_and_drop_their_own_state_alone(name: str) -> None:
    # In a wrapper of others, only what is called a state is known as one.
    txs = [adamw()] if name == "Frozen" else [adamw(), momentum_in_a_dict()]
    for tx in txs:
        fresh = tx.init(PARAMS)
        state = jax.tree.map(lambda x: x + 2, fresh)
        into = WRAPPERS[name](tx).init(PARAMS)
        inside = clipjax.adopt(state, into=into, like=fresh)
        has_own = len(jax.tree.leaves(into)) > len(jax.tree.leaves(state))
        drop = (name,) if has_own else ()
        same(clipjax.adopt(inside, into=fresh, drop=drop), state)
        with pytest.raises(ValueError, match="no place"):
            clipjax.adopt(inside, into=optax.sgd(0.1).init(PARAMS), drop=drop)


@struct.dataclass
class Agent:
    """Its attributes are not in the order of the alphabet."""

    policy_state: Any
    critic_state: Any


Both = namedtuple("Both", "policy_state critic_state")
Turned = namedtuple("Turned", "critic_state policy_state")
Third = namedtuple("Third", "critic_state target_state")
Slower = namedtuple("Slower", "mean_state")
Faster = namedtuple("Faster", "mean_state")


@struct.dataclass
class Slow:
    m: Any


@struct.dataclass
class Fast:
    m: Any


def part(name: str, state: Any) -> Any:
    return clipjax.named(name, optax.identity()).init(X)._replace(named={name: state})


def labeled(**states: Any) -> Any:
    return optax.transforms.PartitionState(
        {key: optax.MaskedState(state) for key, state in states.items()}
    )


A, B, NEW = (optax.TraceState(value * X) for value in (2, 3, 0))
NO = optax.EmptyState()


@pytest.mark.parametrize(
    ("old", "into", "expected"),
    [
        # The order of the chain, whatever is between.
        ((A, B), (NO, NEW, (NO, NEW)), (NO, A, (NO, B))),
        # Names of `named`, labels, keys, attributes.
        ((part("a", A), part("b", B)), (part("b", NEW), part("a", NEW)), "b a"),
        (labeled(b=A, a=B), labeled(a=NEW, c=NEW, b=NEW), labeled(a=B, c=NEW, b=A)),
        (
            {"a": A, "b": B},
            {"b": NEW, "new": NEW, "a": NEW},
            {"b": B, "new": NEW, "a": A},
        ),
        ({0: A, 1: B}, {1: NEW, 0: NEW}, {0: A, 1: B}),
        (Agent(A, B), Agent(NEW, NEW), Agent(A, B)),
        (Both(A, B), Turned(NEW, NEW), Turned(B, A)),
        ((Slow(2 * X), Fast(3 * X)), (Fast(X), Slow(X)), (Fast(3 * X), Slow(2 * X))),
        # Names that join, or leave.
        (A, part("run", (NO, NEW)), part("run", (NO, A))),
        (part("gan", part("gen", A)), part("gen", NEW), part("gen", A)),
        ((A, B), (part("a", NEW), part("b", NEW)), (part("a", A), part("b", B))),
        ((part("a", A), part("b", B)), (NEW, NEW), (A, B)),
        (labeled(a=A, b=B), labeled(a=part("x", NEW), b=part("y", NEW)), "labels"),
        ((A, part("m", B)), part("run", (NEW, part("m", NEW))), "around"),
        # A second one joins with a name, here or there.
        (A, (part("second", NEW), NEW), (part("second", NEW), A)),
        (part("gen", A), (part("critic", NEW), part("gen", NEW)), "second"),
        (part("gen", A), part("run", (NEW, part("gen", NEW))), "outside"),
    ],
)
def test_names_tell_which_is_which(old: Any, into: Any, expected: Any) -> None:
    by_word = {
        "b a": (part("b", B), part("a", A)),
        "labels": labeled(a=part("x", A), b=part("y", B)),
        "around": part("run", (A, part("m", B))),
        "second": (part("critic", NEW), part("gen", A)),
        "outside": part("run", (NEW, part("gen", A))),
    }
    wanted = by_word[expected] if isinstance(expected, str) else expected
    same(clipjax.adopt(old, into=into), wanted)


@pytest.mark.parametrize(
    ("old", "into"),
    [
        # Another name is another part, also of the only one of its kind.
        (part("gen", A), part("critic", NEW)),
        (labeled(a=A), labeled(b=NEW)),
        ((part("gen", A), part("critic", NO)), (part("gen", NO), part("critic", NEW))),
        (
            part("gen", A),
            (part("gen", optax.EmaState(jnp.int32(0), X)), {"other": NEW}),
        ),
        ((part("z", A), part("0", B)), (NEW, part("z", NEW))),
        ((A, part("z", B)), (part("z", NEW), part("0", NEW))),
        (Both(A, B), Third(NEW, NEW)),
        ({"0": A, "1": B}, {"1": NEW, "2": NEW}),
        # Another type, which may have the same fields.
        (Slow(X), Fast(X)),
        (Slower(2 * X), Faster(X)),
        (optax.scale_by_belief().init(X), optax.scale_by_adam().init(X)),
    ],
)
def test_what_has_no_place_is_an_error(old: Any, into: Any) -> None:
    with pytest.raises(ValueError, match="old: into has no place for"):
        clipjax.adopt(old, into=into)


@pytest.mark.parametrize(
    ("old", "into", "numbers"),
    [
        (A, (NEW, NEW), "old has 1 .* into has 2"),
        ((A, B), NEW, "old has 2 .* into has 1"),
        (A, {"gen": NEW, "critic": NEW}, "old has 1 .* into has 2"),
        # Keys have no order.
        (Agent(A, B), (NEW, NEW), "old has 2 .* into has 2"),
        (labeled(a=A, b=B), (NEW, NEW), "old has 2 .* into has 2"),
        (A.trace, (A.trace, A.trace), "old has 1 .* into has 2"),
    ],
)
def test_what_is_not_plain_is_an_error_with_numbers(
    old: Any, into: Any, numbers: str
) -> None:
    for drop in ((), True, ("TraceState",)):
        with pytest.raises(ValueError, match=f"{numbers}.*named.*adopt twice"):
            clipjax.adopt(old, into=into, like=old, drop=drop)


def test_the_error_says_how_one_of_two_leaves() -> None:
    names = clipjax.adopt((A, B), into=(part("a", NEW), part("b", NEW)))
    one = clipjax.adopt(names, into=part("b", NEW), drop=("TraceState",))
    same(clipjax.adopt(one, into=NEW), B)


def test_arrays_tell_what_names_do_not() -> None:
    """A second `inject_hyperparams` joins, or masked optimizers change places."""
    adam = optax.inject_hyperparams(optax.adam)(0.1)
    clip = optax.inject_hyperparams(clipjax.clip_by_global_norm)(1.0)
    new = optax.chain(clip, adam, clip).init(PARAMS)
    old = stepped(adam)
    same(clipjax.adopt(old, into=new), (new[0], old, new[2]))
    one, two = (
        optax.masked(optax.adam(0.1), {key: key == name for key in PARAMS})
        for name in PARAMS
    )
    turned = optax.chain(two, one).init(PARAMS)
    old = stepped(optax.chain(one, two))
    same(clipjax.adopt(old, into=turned), old[::-1])


# What `drop` leaves out, and what `like` and `into` are.


def test_drop_names_what_is_left_out_and_nothing_else() -> None:
    old, fresh = stepped(ours()), optax.sgd(0.1).init(PARAMS)
    names = ["record_norms", "skip_spikes", "skip_nonfinite", "clip_by_global_norm"]
    names += ["ScaleByAdamState", "ScaleByScheduleState"]
    same(clipjax.adopt(old, into=fresh, drop=names), fresh)
    same(clipjax.adopt(old, into=fresh, drop=True), fresh)
    for name in names:
        others = {*names} - {name}
        with pytest.raises(ValueError, match=f"no place for {name} at ") as error:
            clipjax.adopt(old, into=fresh, drop=others)
        assert not any(other in str(error.value) for other in others)
    for name in ("skip_spike", "TraceState"):
        with pytest.raises(ValueError, match=f"drop: {name} names nothing"):
            clipjax.adopt(old, into=fresh, drop=[*names, name])
    # Also if there is one, but `into` has a place for it: it does not start afresh.
    with pytest.raises(ValueError, match="drop: ScaleByAdamState names nothing"):
        clipjax.adopt(old, into=old_with_zeros(old), drop=("ScaleByAdamState",))


def old_with_zeros(old: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, old)


def test_metrics_that_join_begin_at_0_and_those_that_leave_are_dropped() -> None:
    few = MetricsState(jnp.int32(5), {"own": {"a": jnp.float32(7)}}, ())
    more = {"a": jnp.float32(0), "b": jnp.uint32(0)}
    many = MetricsState(jnp.int32(0), {"own": more}, ())
    adopted = clipjax.adopt(few, into=many)
    same(adopted, few._replace(metrics={"own": more | {"a": jnp.float32(7)}}))
    with pytest.raises(ValueError, match="metrics/own/b of own at the top"):
        clipjax.adopt(adopted, into=old_with_zeros(few))
    same(clipjax.adopt(adopted, into=old_with_zeros(few), drop=("own",)), few)


def test_layers_may_join_but_not_change_their_names_or_shapes() -> None:
    adam = optax.adam(0.1)
    one = {"w": jnp.ones((4, 3))}
    both, other, larger = (
        one | {"v": X},
        {"v": jnp.ones((4, 3))},
        {"w": jnp.ones((5, 3))},
    )
    old = adam.init(one)
    assert clipjax.adopt(old, into=adam.init(both))[0].mu.keys() == {"v", "w"}
    with pytest.raises(ValueError, match=r"mu/v, nu/v of ScaleByAdamState at '0'"):
        clipjax.adopt(adam.init(both), into=old)
    ints = jax.tree.map(lambda x: x.astype(int), old)
    for into, text in (
        (adam.init(other), "has mu/w, nu/w, but .* has mu/v, nu/v"),
        (adam.init(larger), r"float32\[4, 3\], but .* float32\[5, 3\]"),
        (ints, r"'mu/w' of .* is float32\[4, 3\], but .* int32\[4, 3\]"),
    ):
        for drop in ((), True):
            with pytest.raises(ValueError, match=f"{text}.*adopt twice"):
                clipjax.adopt(old, into=into, drop=drop)


def test_moments_take_the_dtype_of_into() -> None:
    half, full = optax.adam(0.1, mu_dtype=jnp.bfloat16), optax.adam(0.1)
    old = stepped(half)
    for form in (old, jax.device_get(old)):
        adopted = clipjax.adopt(form, into=full.init(PARAMS))
        same(adopted, jax.tree.map(lambda x, y: x.astype(y.dtype), old, adopted))
        same(clipjax.adopt(adopted, into=half.init(PARAMS)), old)


def test_swapped_arguments_are_told() -> None:
    old = stepped(plain())
    with pytest.raises(ValueError, match=r"into must be .*'1/0/count' is 3.* swapped"):
        clipjax.adopt(ours().init(PARAMS), into=old)
    with pytest.raises(ValueError, match="into must be what init returns, but 'step'"):
        clipjax.adopt(old, into=stepped(clipjax.clip_by_norm(1.0)))


def test_what_a_checkpoint_restored_needs_the_types_of_the_old_chain() -> None:
    old, into = stepped(plain()), ours().init(PARAMS)
    restored = by_msgpack(old, Path())
    for drop in ((), True):
        with pytest.raises(TypeError, match=r"old has dicts.*pass like=.*old chain"):
            clipjax.adopt(restored, into=into, drop=drop)
    for like in (into, adamw().init(PARAMS), {}):
        with pytest.raises(ValueError, match="like must be what init of the old chain"):
            clipjax.adopt(restored, into=into, like=like)
    # Keys and parameters may have any names, also those of fields, and places above 9.
    params = {"count": X, "value": X, "state": {"inner": X}, "0": X}
    txs = {"mu": optax.chain(*[optax.trace(0.9)] * 12), "1": optax.adam(0.1)}
    tx = optax.partition(txs, {"count": "mu", "value": "mu", "state": "1", "0": "1"})
    fresh = tx.init(params)
    numbers = itertools.count(1)
    old = jax.tree.map(lambda x: jnp.full_like(x, next(numbers)), fresh)
    same(clipjax.adopt(by_msgpack(old, Path()), into=fresh, like=fresh), old)


# Random chains. Each optimizer in them has a number, with which `init` fills its state
# where it is known, so that what is expected is made without any matching.

TYPES: dict[str, Any] = {
    "ScaleByAdamState": optax.scale_by_adam,
    "ScaleByLionState": optax.scale_by_lion,
    "ScaleByRmsState": optax.scale_by_rms,
    "TraceState": lambda: optax.trace(0.9),
    "EmaState": lambda: optax.ema(0.9),
    "zclip": clipjax.zclip,
    "clip_by_global_norm": lambda: clipjax.clip_by_global_norm(1.0),
}
AROUND = (
    "skip_nonfinite",
    "skip_spikes",
    "MultiStepsState",
    "InjectStatefulHyperparamsState",
    "ApplyIfFiniteState",
    "ScheduleFreeState",
    "Frozen",
)
Item = tuple[str, int]  # the type of an optimizer, and its number


def filled(item: Item, known: set[Item]) -> Any:
    tx = TYPES[item[0]]()

    def init(params: Any) -> Any:
        places = itertools.count(100 * item[1])

        def fill(x: Any) -> Any:
            return jnp.full_like(x, next(places) if item in known else 0)

        return jax.tree.map(fill, tx.init(params))

    return optax.GradientTransformation(init, tx.update)


class Chain(NamedTuple):
    """Parts with items, and with wrappers around items that follow each other."""

    parts: dict[str, list[Item]]
    wrappers: dict[str, tuple[str, int, int]]  # in which part, around which items
    form: str  # what tells the parts apart
    is_named: bool  # whether a name is around all of them

    def init(self, known: set[Item]) -> Any:
        """Return the first state, in which known items are filled."""
        states = {}
        for name, items in self.parts.items():
            txs = [filled(item, known) for item in items]
            for wrapper, (where, start, end) in self.wrappers.items():
                if where == name:
                    inside = optax.chain(optax.identity(), *txs[start:end])
                    txs[start:end] = [WRAPPERS[wrapper](inside)]
            tx = optax.chain(optax.identity(), *txs)
            states[name] = tx.init({"b": jnp.ones(3), "w": X})
        made: Any = states
        if self.form == "named":
            made = tuple(part(name, state) for name, state in states.items())
        elif self.form == "labels":
            made = labeled(**states)
        elif self.form == "one":
            (made,) = states.values()
        return part("run", made) if self.is_named else made


def random_change(seed: int) -> tuple[Chain, Chain, set[str]]:
    """Return two chains, and the types of the items that leave."""
    draw = np.random.RandomState(seed)
    numbers = itertools.count(1)
    form = str(draw.choice(["one", "named", "labels", "dict"]))
    names = ["gen", "critic", "third"][: 1 if form == "one" else draw.randint(1, 4)]
    before: dict[str, list[Item]] = {}
    after: dict[str, list[Item]] = {}
    gone = set()
    for name in names:
        types = list(map(str, draw.permutation([*TYPES])))
        # Several of one type stay in their order.
        kept = [(types[draw.randint(3)], next(numbers)) for _ in range(draw.randint(4))]
        leave, join = (
            [(x, next(numbers)) for x in some[: draw.randint(3)]]
            for some in (types[3:5], types[5:])
        )
        gone |= {x for x, _ in leave}
        for items, more in ((before, leave), (after, join)):
            items[name] = [*kept]
            for item in more:
                items[name].insert(draw.randint(len(items[name]) + 1), item)
    chains = []
    for items in (before, after):
        order = map(str, draw.permutation(names))
        wrappers = {}
        for wrapper in map(str, draw.permutation(AROUND)[: draw.randint(5)]):
            start = draw.randint(3)
            where = str(draw.choice(names))
            wrappers[wrapper] = where, start, start + draw.randint(1, 4)
        parts = {name: items[name] for name in order}
        chains.append(Chain(parts, wrappers, form, bool(draw.randint(2))))
    return chains[0], chains[1], gone


def adopt_at_random(seed: int) -> None:
    before, after, gone = random_change(seed)
    items = {x for each in before.parts.values() for x in each}
    old, into = before.init(items), after.init(set())
    text = ""
    try:
        clipjax.adopt(old, into=into)
    except ValueError as error:
        text = str(error)
    lost = {x for x in (*TYPES, *AROUND) if f"{x} at " in text}
    # A wrapper has no place in another part.
    assert gone <= lost <= gone | {*before.wrappers}
    for name in lost:
        with pytest.raises(ValueError, match=f"no place for {name} at"):
            clipjax.adopt(old, into=into, drop=lost - {name})
    same(clipjax.adopt(old, into=into, drop=lost), after.init(items))


def test_random_chains() -> None:
    for seed in range(40):
        adopt_at_random(seed)


# Devices, modes, and other libraries.


def test_a_state_moves_to_another_mesh() -> None:
    """Counters and keys, too, which are committed to the devices that they leave."""
    tx = optax.chain(ours(), optax.add_noise(0.1, 0.1, jax.random.key(0)))
    update = jax.jit(tx.update)

    def placed(devices: list[Any]) -> tuple[Any, Any]:
        types = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((len(devices),), ("x",), types, devices=devices)
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        with jax.set_mesh(mesh):
            weights = jax.device_put({"w": jnp.arange(8.0).reshape(4, 2)}, split)
            return weights, tx.init(weights)

    weights, old = placed(jax.devices()[:4])
    with jax.set_mesh(weights["w"].sharding.mesh):
        for size in (1.0, np.nan, 2.0):
            _, old = update({"w": size * weights["w"]}, old, weights)
    fewer, into = placed(jax.devices()[2:4])
    with jax.set_mesh(fewer["w"].sharding.mesh):
        for form in (old, jax.tree.map(on_host, old)):
            adopted = clipjax.adopt(form, into=into)
            for x, y, z in zip(
                *map(jax.tree.leaves, (adopted, old, into)), strict=True
            ):
                np.testing.assert_array_equal(*map(numbers_in, (x, y)))
                assert (x.committed, x.sharding) == (z.committed, z.sharding)
            assert update(fewer, adopted, fewer)[1][0][0].step == 4


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def on_host(x: Any) -> Any:
    return x if is_key(x) else jax.device_get(x)


def numbers_in(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(x) else x


def test_transfers_are_explicit_and_jit_may_trace_it() -> None:
    old, into = stepped(plain()), ours().init(PARAMS)
    expected = clipjax.adopt(old, into=into)
    restored = jax.device_get(old)
    with jax.transfer_guard("disallow"):
        same(clipjax.adopt(old, into=into), expected)
        same(clipjax.adopt(restored, into=into), expected)
    adopt = jax.jit(lambda old, into: clipjax.adopt(old, into=into))
    same(adopt(old, into), expected)


class Net(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(3, 2, rngs=nnx.Rngs(0))


def step(net: Net, optimizer: nnx.Optimizer[Net], number: int) -> None:
    draws = np.random.RandomState(number)
    graph = nnx.state(net, nnx.Param)
    grads = jax.tree.map(lambda x: draws.normal(size=x.shape).astype("f4"), graph)
    optimizer.update(net, grads)


def test_an_nnx_optimizer_goes_on(tmp_path: Path) -> None:
    nets = [Net(), Net()]
    before = [nnx.Optimizer(net, plain(), wrt=nnx.Param) for net in nets]
    for net, optimizer in zip(nets, before, strict=True):
        for number in range(3):
            step(net, optimizer, number)
    (_, net), (kept, old) = nets, before
    like = nnx.Optimizer(Net(), plain(), wrt=nnx.Param).opt_state
    states = nnx.state(old)
    for given, template in (
        (old.opt_state, None),
        (states["opt_state"], like),
        (nnx.to_pure_dict(states)["opt_state"], like),
        (by_orbax(states, tmp_path)["opt_state"], like),
    ):
        optimizer = nnx.Optimizer(net, ours(), wrt=nnx.Param)
        into = optimizer.opt_state
        optimizer.opt_state = clipjax.adopt(given, into=into, like=template)
        same(*(nnx.to_pure_dict(nnx.state(x)) for x in moments_of(optimizer, kept)))
    for number in range(3, 5):
        step(nets[0], kept, number)
        step(net, optimizer, number)
    for x, y in zip(*(jax.tree.leaves(nnx.state(each)) for each in nets), strict=True):
        np.testing.assert_allclose(x, y, 2e-5, 1e-7)
    assert clipjax.metrics(optimizer)["skip_nonfinite/steps"] == 2


def moments_of(*optimizers: Any) -> Any:
    return (moments(each.opt_state)[0] for each in optimizers)


def test_a_train_state_goes_on() -> None:
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=plain())
    state = state.apply_gradients(grads=gradients(0))
    adopted = clipjax.adopt(state.opt_state, into=ours().init(state.params))
    after = state.replace(tx=ours(), opt_state=adopted)
    found, expected = (x.apply_gradients(grads=gradients(1)) for x in (after, state))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 2e-5, 1e-7),
        found.params,
        expected.params,
    )
