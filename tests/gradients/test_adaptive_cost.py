"""What the bounds that follow the past add to a step, read off the compiled program without a clock."""

import jax
import optax
import pytest

import clipjax
from tests.core.test_cost import adam, cost

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the counts are those of XLA on CPU")

WHOLE_TREE = ["autoclip", "clip_by_quantile", "clip_by_lognormal", "zclip"]


def step(clip):
    return cost(optax.chain(clip, adam()))


@pytest.mark.parametrize("name", WHOLE_TREE)
def test_a_rule_for_the_whole_tree_costs_what_a_constant_does(name):
    ours, constant = step(getattr(clipjax, name)()), step(clipjax.clip_by_global_norm(1.0))
    assert ours.passes == constant.passes
    assert ours.temporary <= constant.temporary + 1e-3  # a history of 1000 floats, and its sorted copy


def test_one_norm_for_each_leaf_is_no_pass_more():
    assert step(clipjax.adagc()).passes == step(clipjax.clip_by_norm(1.0)).passes


def test_what_is_relative_to_the_weights_reads_them_once():
    relative, constant = step(clipjax.adaptive_grad_clip()), step(clipjax.clip_by_norm(1.0, axes=0))
    assert relative.passes - constant.passes == 1


def test_judging_a_step_costs_no_more_than_looking_for_nan():
    spikes, nonfinite = cost(clipjax.skip_spikes(adam())), cost(clipjax.skip_nonfinite(adam()))
    assert spikes.passes <= nonfinite.passes
    assert spikes.temporary <= nonfinite.temporary + 0.07  # the partial sums of the norm
