"""What the bounds that follow the past add to a step, read off the compiled program without a clock."""

import functools

import jax
import numpy as np
import optax
import pytest

import clipjax
from clipjax import functional
from tests.support.programs import adam, adam_alone, cost, traffic

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the counts are those of XLA on CPU")

WHOLE_TREE = ["autoclip", "clip_by_quantile", "clip_by_lognormal", "zclip"]
LARGE = {f"kernel_{i}": jax.ShapeDtypeStruct((1024, 1024), np.float32) for i in range(3)}


def step(clip):
    return cost(optax.chain(clip, adam()))


@functools.cache
def constant():
    return step(clipjax.clip_by_global_norm(1.0))


# They differ in what they do with a norm, that of the tree; what it costs to have it is seen of all below.
@pytest.mark.parametrize(
    "name", ["autoclip", "zclip", *(pytest.param(name, marks=pytest.mark.full) for name in WHOLE_TREE[1:3])]
)
def test_a_rule_for_the_whole_tree_costs_what_a_constant_does(name):
    ours = step(getattr(clipjax, name)())
    assert ours.passes == constant().passes > adam_alone("float32").passes
    assert ours.temporary <= constant().temporary + 1e-3  # a history of 1000 floats, and its sorted copy


def test_who_looks_at_the_same_tree_shares_one_norm():
    several = [getattr(clipjax, name)() for name in WHOLE_TREE] + [clipjax.clip_by_global_norm(1.0)]
    states = [jax.eval_shape(tx.init, LARGE) for tx in several]

    def look(grads, states):
        return functional.global_norm(grads), [
            tx.update(grads, state)[1] for tx, state in zip(several, states, strict=True)
        ]

    def passes(function, *args):
        """How often a program reads or writes all of LARGE."""
        text = jax.jit(function).lower(*args).compile().as_text()
        return traffic(text, 1024 * 1024) / (4 * len(LARGE) * 1024 * 1024)

    alone = passes(functional.global_norm, LARGE)
    assert 1 <= alone < 1.2
    assert passes(look, LARGE, states) == alone


@pytest.mark.parametrize("name", ["adagc", "clip_by_moving_max", "normalize_by_moving_norm"])
def test_one_norm_for_each_leaf_is_no_pass_more(name):
    assert step(getattr(clipjax, name)()).passes == constant().passes


@pytest.mark.parametrize("stack", [None, {"*": 0}], ids=["groups", "layers"])
def test_one_norm_for_each_group_or_layer_is_no_pass_more(stack):
    assert step(clipjax.clip_by_group_norm({"*": 1.0}, stack=stack)).passes == constant().passes


def test_a_loss_and_a_norm_are_judged_without_another_pass():
    def judged(tx):
        state = jax.eval_shape(tx.init, LARGE)
        program = jax.jit(lambda g, s, p: tx.update(g, s, p, loss=1.0)).lower(LARGE, state, LARGE).compile()
        return traffic(program.as_text(), 1024 * 1024)

    clip = optax.chain(clipjax.clip_by_global_norm(1.0), optax.sgd(0.1))
    assert judged(clipjax.skip_spikes(clip, max_norm=9.0)) == judged(clipjax.skip_nonfinite(clip))


def test_what_is_relative_to_the_weights_reads_them_once():
    assert step(clipjax.adaptive_grad_clip()).passes - constant().passes == 1


def test_judging_a_step_costs_no_more_than_looking_for_nan():
    spikes, nonfinite = cost(clipjax.skip_spikes(adam())), cost(clipjax.skip_nonfinite(adam()))
    assert spikes.passes <= nonfinite.passes
    assert spikes.temporary <= nonfinite.temporary + 0.07  # the partial sums of the norm
