"""The table of the reference: what stands inside Optax's wrappers, and what around.

Each of its rows runs here, with a step whose gradient has a NaN, and in 16 bits.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import clipjax

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "wrappers.md"
ADAM = optax.adam(0.1)
RATE = optax.linear_schedule(1.0, 0.0, 9)
LABELS = {"w": "a", "b": "b"}


class Row(NamedTuple):
    """A wrapper, or what stands beside the optimizer in a chain."""

    # wrap(around): the wrapper of around(optimizer).
    wrap: Callable[[Any], Any]
    # Whether a run with the skip inside it is the one without the bad step.
    skip: bool
    # Whether weights stay within the bound with the projection inside it, or the error
    # that this raises for weights of 16 bits.
    project: bool | type[Exception] = True


def beside(link: Any, *, before: bool = False) -> Callable[[Any], Any]:
    def wrap(around: Any) -> Any:
        inner = around(ADAM)
        return optax.chain(link, inner) if before else optax.chain(inner, link)

    return wrap


def even(step: Any) -> Any:
    return step % 2 == 0


ROWS = {
    "chain": Row(lambda around: optax.chain(optax.identity(), around(ADAM)), True),
    "named_chain": Row(lambda around: optax.named_chain(("a", around(ADAM))), True),
    "masked": Row(
        lambda around: optax.masked(around(ADAM), {"w": True, "b": False}), False
    ),
    "partition": Row(
        lambda around: optax.partition({"a": around(ADAM), "b": ADAM}, LABELS), False
    ),
    "multi_transform": Row(
        lambda around: optax.multi_transform({"a": around(ADAM), "b": ADAM}, LABELS),
        False,
    ),
    "selective_transform": Row(
        lambda around: optax.selective_transform(
            around(ADAM), freeze_mask={"w": False, "b": True}
        ),
        True,
    ),
    "split_real_and_imaginary": Row(
        lambda around: contrib.split_real_and_imaginary(around(ADAM)), True
    ),
    "flatten": Row(lambda around: optax.flatten(around(ADAM)), True, ValueError),
    "inject_hyperparams": Row(
        lambda around: optax.inject_hyperparams(
            lambda learning_rate: around(optax.adam(learning_rate))
        )(RATE),
        False,
    ),
    "apply_if_finite": Row(
        lambda around: optax.apply_if_finite(around(ADAM), 3), True, TypeError
    ),
    "conditionally_transform": Row(
        lambda around: optax.conditionally_transform(around(ADAM), even),
        False,
        TypeError,
    ),
    "conditionally_mask": Row(
        lambda around: optax.conditionally_mask(around(ADAM), even), False, TypeError
    ),
    "MultiSteps": Row(
        lambda around: optax.MultiSteps(around(ADAM), 2).gradient_transformation(),
        False,
    ),
    "schedule_free": Row(
        lambda around: contrib.schedule_free(around(ADAM), 0.1, b1=0.5), False
    ),
    "mechanize": Row(lambda around: contrib.mechanize(around(ADAM)), False),
    "lookahead": Row(lambda around: optax.lookahead(around(ADAM), 2, 0.5), False),
    "sam": Row(
        lambda around: optax.GradientTransformation(
            *contrib.sam(around(ADAM), optax.chain(contrib.normalize(), optax.sgd(0.1)))
        ),
        False,
    ),
    "scale_by_galore": Row(
        lambda around: contrib.scale_by_galore(rank=2, base_optimizer=around(ADAM)),
        True,
        ValueError,
    ),
    "ema": Row(beside(optax.ema(0.9), before=True), False),
    "trace": Row(beside(optax.trace(0.9)), False, TypeError),
    "apply_every": Row(beside(optax.apply_every(2)), False, TypeError),
    "add_noise": Row(beside(optax.add_noise(0.1, 0.5, 1)), False, False),
    "add_decayed_weights": Row(beside(optax.add_decayed_weights(0.1)), False, False),
    "scale_by_schedule": Row(beside(optax.scale_by_schedule(RATE)), False),
    "reduce_on_plateau": Row(beside(contrib.reduce_on_plateau(0.5, patience=1)), False),
    # Of clipjax, since they stand there, too.
    "record_norms": Row(beside(clipjax.record_norms(), before=True), True),
    "zclip": Row(beside(clipjax.zclip(warmup_steps=2), before=True), True),
    "max_norm": Row(beside(clipjax.max_norm(lambda step: 3.0 - step / 2)), False),
}


def start(name: str, params: Any) -> Any:
    return optax.LookaheadParams.init_synced(params) if name == "lookahead" else params


def weights_of(name: str, params: Any) -> Any:
    return params.fast if name == "lookahead" else params


def stepping(table: dict[str, Any], gradient: Any) -> tuple[Any, Any]:
    """Return the first carry of all transformations, and a step as one program."""

    def init(params: Any) -> Any:
        each = {name: start(name, params) for name in table}
        return {name: (p, table[name].init(p)) for name, p in each.items()}

    @jax.jit
    def step(carry: Any, size: Any) -> Any:
        after = {}
        for name, (params, state) in carry.items():
            grads = gradient(weights_of(name, params), size)
            tx = optax.with_extra_args_support(table[name])
            extra = {"value": -size} if name == "reduce_on_plateau" else {}
            updates, state = tx.update(grads, state, params, **extra)
            after[name] = optax.apply_updates(params, updates), state
        return after

    return init, step


def bits(tree: Any) -> list[bytes]:
    keys = jax.tree.map(
        lambda x: (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        ),
        tree,
    )
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(keys)]


@pytest.fixture(scope="module")
def runs() -> Any:
    """Two runs with the skip inside and outside, of which one has a bad step."""
    found = {}
    params = {
        "w": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32),
        "b": np.ones(3, np.float32),
    }

    def gradient(params: Any, size: Any) -> Any:
        """Return a gradient with one entry of the given size."""
        grads = jax.tree.map(jnp.cos, params)
        return grads | {"w": grads["w"].at[0, 0].multiply(size)}

    table = {name: row.wrap(clipjax.skip_nonfinite) for name, row in ROWS.items()}
    for place in ("inside", "outside"):
        if place == "outside":
            table = {
                name: clipjax.skip_nonfinite(row.wrap(lambda tx: tx))
                for name, row in ROWS.items()
            }
        init, step = stepping(table, gradient)
        for sizes in ((1, 2, np.nan, 3, 1), (1, 2, 3, 1)):
            history = [init(params)]
            for size in np.float32(sizes):
                history.append(step(history[-1], size))
            found[place, len(sizes)] = jax.device_get(history)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_a_skip_around_a_wrapper_leaves_all_as_it_was(name: str, runs: Any) -> None:
    with_bad, without = ([h[name] for h in runs["outside", n]] for n in (5, 4))
    before, after = with_bad[2:4]
    assert bits((before[0], before[1].memory.inner)) == bits(
        (after[0], after[1].memory.inner)
    )
    ends = [bits((p, s.memory.inner)) for p, s in (with_bad[-1], without[-1])]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ROWS)
def test_a_skip_inside_a_wrapper(name: str, runs: Any) -> None:
    with_bad, without = ([h[name][0] for h in runs["inside", n]] for n in (5, 4))
    is_same = bits(with_bad[2]) == bits(with_bad[3])
    is_same &= bits(with_bad[-1]) == bits(without[-1])
    assert is_same == ROWS[name].skip


MAX_NORM = clipjax.max_norm(1.0)


def largest_norms(table: dict[str, Any], dtype: Any) -> Any:
    """Return the largest norm of a unit after each of 60 steps outward."""
    init, step = stepping(table, lambda params, _: jax.tree.map(lambda x: -x, params))
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(64, 4)), dtype)
    first = MAX_NORM.apply({"w": weights, "b": jnp.ones(3, dtype)})

    def measured(carry: Any, _: Any) -> Any:
        after = step(carry, 1.0)
        kernels = {name: weights_of(name, p)["w"] for name, (p, _) in after.items()}
        return after, {
            name: jnp.linalg.norm(x.astype(np.float32), axis=0).max()
            for name, x in kernels.items()
        }

    return jax.jit(lambda: jax.lax.scan(measured, init(first), length=60)[1])()


@pytest.fixture(scope="module")
def norms() -> Any:
    """In bfloat16, with the projection inside and outside."""
    inside = {
        name: row.wrap(lambda tx: optax.chain(tx, MAX_NORM))
        for name, row in ROWS.items()
        if isinstance(row.project, bool)
    }
    around = {
        name: optax.chain(row.wrap(lambda tx: tx), MAX_NORM)
        for name, row in ROWS.items()
    }
    return [jax.device_get(largest_norms(t, jnp.bfloat16)) for t in (inside, around)]


@pytest.mark.parametrize("name", ROWS)
def test_a_projection_of_weights_in_16_bits(name: str, norms: Any) -> None:
    """Around any wrapper it holds; inside of some it does not, or raises."""
    inside, around = norms
    assert around[name].max() <= 1 + 2**-8
    expected = ROWS[name].project
    if isinstance(expected, bool):
        # What `schedule_free` averages may end a little outside.
        assert (inside[name].max() <= 1.03) == expected
        return
    table = {name: ROWS[name].wrap(lambda tx: optax.chain(tx, MAX_NORM))}
    with pytest.raises(expected, match=r"cond branches|scan body|max_norm|axes"):
        jax.eval_shape(lambda: largest_norms(table, jnp.bfloat16))


def test_schedule_free_has_the_projection_inside_and_mechanize_outside() -> None:
    """Where it stands otherwise, weights leave the bound, or those to evaluate do."""

    def free(tx: Any) -> Any:
        return contrib.schedule_free(tx, 0.3)

    @jax.jit
    def norms(params: Any) -> Any:
        found = {}
        for wrapper in (free, contrib.mechanize):
            sgd = optax.sgd(0.3 if wrapper is free else 10.0)
            inside = wrapper(optax.chain(sgd, MAX_NORM))
            around = optax.chain(wrapper(sgd), MAX_NORM)
            for place, tx in (("inside", inside), ("around", around)):

                def step(carry: Any, _: Any, tx: Any = tx) -> Any:
                    params, state = carry
                    updates, state = tx.update(params - 2, state, params)
                    return (optax.apply_updates(params, updates), state), params

                first = params, tx.init(params)
                (last, state), each = jax.lax.scan(step, first, length=200)
                if wrapper is free:
                    state = state if place == "inside" else state[0]
                    each = contrib.schedule_free_eval_params(state, last)
                largest = jnp.linalg.norm(each, axis=-2).max()
                found[wrapper.__name__, place] = largest
        return found

    weights = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    found = norms(MAX_NORM.apply(weights))
    assert max(found["free", "inside"], found["mechanize", "around"]) <= 1.03
    assert min(found["free", "around"], found["mechanize", "inside"]) > 1.5, found


def test_what_must_see_bad_steps_raises_inside_a_skip() -> None:
    params = {"w": jnp.ones((4, 3))}
    monitor = optax.chain(ADAM, optax.monitor({"norm": optax.tree.norm}))
    recorder = optax.chain(clipjax.record_norms(keep=2), ADAM)
    for link, error in ((monitor, "structure|mismatch"), (recorder, "Put it outside")):
        tx = clipjax.skip_nonfinite(link)
        with pytest.raises(ValueError, match=error):
            jax.eval_shape(lambda p, tx=tx: tx.update(p, tx.init(p), p), params)


def test_the_page_has_every_row() -> None:
    named = set(re.findall(r"`(\w+)", PAGE.read_text()))
    assert not ROWS.keys() - named
