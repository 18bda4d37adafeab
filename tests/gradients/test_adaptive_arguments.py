"""The arguments of the adaptive clips: what cannot work is an error, and what may change may change."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.norm_rules import PARAMS, leaves_of_norm, runner
from tests.support.oracles import exact_tree_norm

BAD = [
    ("autoclip", "percentile", -1, ValueError),
    ("autoclip", "percentile", 101.0, ValueError),
    ("autoclip", "percentile", math.nan, ValueError),
    ("autoclip", "percentile", "10", TypeError),
    ("autoclip", "percentile", np.ones(2), ValueError),
    ("autoclip", "percentile", optax.constant_schedule(1.0), TypeError),
    ("autoclip", "window", 0, ValueError),
    ("autoclip", "window", 10.0, TypeError),
    ("autoclip", "window", True, TypeError),
    ("zclip", "z_threshold", -0.1, ValueError),
    ("zclip", "decay", 1.0, ValueError),
    ("zclip", "decay", -0.1, ValueError),
    ("zclip", "warmup_steps", -1, ValueError),
    ("zclip", "warmup_steps", 2.5, TypeError),
    ("zclip", "max_norm", -1.0, ValueError),
    ("zclip", "mode", "zscore", ValueError),
    ("zclip", "mode", None, ValueError),
    ("zclip", "clip_factor", -1.0, ValueError),
    ("zclip", "eps", -1e-6, ValueError),
    ("zclip", "update_on_spike", 1, TypeError),
    ("adagc", "relative_bound", -1.0, ValueError),
    ("adagc", "decay", 1, ValueError),
    ("adagc", "warmup_steps", -5, ValueError),
    ("adagc", "max_norm", math.nan, ValueError),
    ("adagc", "warmup_norms", "both", ValueError),
    ("adagc", "axes", 0.5, TypeError),
    ("clip_by_moving_max", "decay", 1.0, ValueError),
    ("clip_by_moving_max", "decay", "0.9", TypeError),
    ("normalize_by_moving_norm", "b1", -0.1, ValueError),
    ("normalize_by_moving_norm", "b2", 1.0, ValueError),
    ("normalize_by_moving_norm", "eps", -1e-8, ValueError),
    ("clip_by_lognormal", "std_factor", -2.0, ValueError),
    ("clip_by_lognormal", "decay", 1.5, ValueError),
    ("clip_by_lognormal", "max_norm", "1", TypeError),
    ("clip_by_lognormal", "eps", 0.0, ValueError),
    ("clip_by_quantile", "quantile", 0.0, ValueError),
    ("clip_by_quantile", "quantile", 1.0, ValueError),
    ("clip_by_quantile", "learning_rate", 0, ValueError),
    ("clip_by_quantile", "initial_max_norm", 0.0, ValueError),
    ("clip_by_quantile", "initial_max_norm", math.inf, ValueError),
    ("adaptive_grad_clip", "clipping", -0.01, ValueError),
    ("adaptive_grad_clip", "eps", math.nan, ValueError),
    ("adaptive_grad_clip", "axes", 0.5, TypeError),
]


@pytest.mark.parametrize(("name", "argument", "value", "error"), BAD)
def test_bad_arguments_raise_when_built(name: str, argument: str, value: Any, error: type) -> None:
    with pytest.raises(error) as caught:
        getattr(clipjax, name)(**{argument: value})
    assert argument in str(caught.value)
    assert ("a function" if callable(value) else repr(value)) in str(caught.value)


def test_bounds_may_be_schedules() -> None:
    falling = optax.linear_schedule(2.0, 0.0, 10)
    follow = runner(
        {
            "zclip": clipjax.zclip(max_norm=falling),
            "clip_by_lognormal": clipjax.clip_by_lognormal(max_norm=falling),
            "adagc": clipjax.adagc(max_norm=falling),
        }
    )
    expected = np.maximum(2 - 0.2 * np.arange(12), 0)
    for name, done in follow(leaves_of_norm(np.full(12, 5.0))).items():
        np.testing.assert_allclose(done.clipped, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_hyperparameters_can_be_injected_and_changed() -> None:
    stacked = leaves_of_norm([3.0, 1.0, 4.0, 9.0])
    grads = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(4)]
    scheduled = optax.inject_hyperparams(clipjax.autoclip)(
        percentile=optax.linear_schedule(0.0, 100.0, 2), window=16
    )
    changed = optax.inject_hyperparams(clipjax.zclip)(warmup_steps=3)

    @jax.jit
    def step(grads: Any, one: Any, two: Any) -> Any:
        return scheduled.update(grads, one), changed.update(grads, two)

    one, two = scheduled.init(PARAMS), changed.init(PARAMS)
    two.hyperparams["z_threshold"] = jnp.asarray(0.0)
    clipped = []
    for g in grads:
        (updates, one), (last, two) = step(g, one, two)
        clipped.append(float(exact_tree_norm(updates)))
    np.testing.assert_allclose(clipped[:3], [3, 1, 4], rtol=1e-6)  # percentiles 0, 50 and 100
    np.testing.assert_allclose(exact_tree_norm(last), 8 / 3, rtol=1e-5)


def test_a_traced_window_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"window.*static_args"):
        jax.eval_shape(lambda n: clipjax.autoclip(window=n).init(PARAMS), 5)
