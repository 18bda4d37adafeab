"""`zclip` and `clip_by_lognormal` do what their authors' code does."""

import functools
import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

import clipjax
from clipjax.gradients.zclip import ZclipMode
from tests.gradients.norm_runs import check_against, clipped_steps, runs, with_bad_steps


def zclip(
    norms,
    z_threshold=2.5,
    decay=0.97,
    warmup_steps=25,
    max_norm=math.inf,
    mode="adaptive",
    clip_factor=1.0,
    eps=1e-6,
    update_on_spike=True,
):
    first = max(warmup_steps, 1)
    mean, var = norms[:first].mean(), norms[:first].var()
    after = [min(n, max_norm) for n in norms[:first]]
    spikes = 0
    for i, n in enumerate(norms[first:], first):
        std = math.sqrt(var)
        width = std if mode == "percentile" else std + eps
        spike = n > mean + z_threshold * width
        to = n
        if spike and mode == "adaptive":
            to = (
                mean + z_threshold * std * z_threshold / ((n - mean) / width)
            ) * clip_factor
        elif spike:
            to = mean if mode == "mean" else mean + z_threshold * std
        after.append(min(n, to, max_norm))
        if not spike or update_on_spike:
            mean = decay * mean + (1 - decay) * to
            var = decay * var + (1 - decay) * (to - mean) ** 2
        spikes = spikes + 1 if spike else max(spikes - 1.25 / z_threshold**2, 0)
        if spikes > 50 - 1e-4:  # ours alone: a new level
            options = (
                z_threshold,
                decay,
                warmup_steps,
                max_norm,
                mode,
                clip_factor,
                eps,
                update_on_spike,
            )
            return after + zclip(norms[i + 1 :], *options)
    return after


def lognormal(norms, z_threshold=2.0, decay=0.95, max_norm=math.inf, eps=1e-8):
    """As in TensorFlow, by the moving means of the logarithm and of its square."""
    mean = square = 0.0
    after = []
    for t, n in enumerate(norms):
        log, keep = math.log(n + eps), min(decay, t / (t + 1))
        mean = keep * mean + (1 - keep) * log
        square = keep * square + (1 - keep) * log**2
        std = math.sqrt(max(eps, square - mean**2))
        after.append(
            min(
                n if n < math.exp(mean + z_threshold * std) else math.exp(mean),
                max_norm,
            )
        )
    return after


ZCLIP: list[dict[str, Any]] = [
    {},
    {"mode": "mean", "z_threshold": 1.5},
    {"mode": "percentile", "z_threshold": 1.0, "decay": 0.9},
    {"clip_factor": 0.6, "warmup_steps": 5},
    {"warmup_steps": 0},
    {"warmup_steps": 1, "z_threshold": 4.0},
    {"update_on_spike": False, "mode": "percentile", "warmup_steps": 10},
    {"max_norm": 0.5, "mode": "mean", "eps": 0.0},
]
LOGNORMAL: list[dict[str, Any]] = [
    {},
    {"z_threshold": 0.5, "decay": 0.8},
    {"max_norm": 1.0},
]


def test_zclip_follows_the_paper() -> None:
    stacks = with_bad_steps()
    done = runs({str(options): clipjax.zclip(**options) for options in ZCLIP}, stacks)
    for options in ZCLIP:
        check_against(zclip, done[str(options)], stacks, options)
        assert clipped_steps(done[str(options)].state).max() >= 5


def test_a_level_that_lasts_starts_the_statistics_anew() -> None:
    norms = np.repeat(np.float32([1, 5]), [40, 140]) * np.exp(
        0.02 * np.random.default_rng(0).standard_normal(180)
    )
    done = runs(
        {"zclip": clipjax.zclip()},
        {"w": norms[None, :, None].astype(np.float32)},
        {"w": np.ones(1, np.float32)},
    )
    after = np.abs(done["zclip"].updates["w"][0, :, 0])
    assert (after[40:90] < 1.3).all()  # the paper's rule, which takes them for spikes
    # A warm-up.
    np.testing.assert_array_equal(after[90:115], norms[90:115].astype(np.float32))
    np.testing.assert_array_equal(np.isinf(done["zclip"].thresholds[0][90:115]), True)
    assert np.mean(after[115:] < norms[115:] * 0.999) < 0.2


def test_the_lognormal_rule_follows_tensorflow() -> None:
    stacks = with_bad_steps()
    done = runs(
        {str(options): clipjax.clip_by_lognormal(**options) for options in LOGNORMAL},
        stacks,
    )
    for options in LOGNORMAL:
        check_against(lognormal, done[str(options)], stacks, options)
        assert clipped_steps(done[str(options)].state).max() >= 5


def test_after_the_warm_up_zclip_knows_mean_and_standard_deviation() -> None:
    """At scales whose squares are no normal float32 numbers, too."""
    norms = np.random.default_rng(3).uniform(1, 2, 26) * np.array(
        [[1e-16], [1.0], [1e17]]
    )
    tx = clipjax.zclip(mode="percentile", z_threshold=1.0)
    thresholds = runs(
        {"zclip": tx}, norms.astype(np.float32), np.zeros((), np.float32)
    )["zclip"].thresholds
    assert (thresholds[:, :25] == np.inf).all()
    expected = norms[:, :25].mean(axis=1) + norms[:, :25].std(axis=1)
    np.testing.assert_allclose(thresholds[:, 25], expected, rtol=1e-5)


def test_thresholds_may_be_schedules_and_infinite() -> None:
    """Also where norms in the warm-up are equal, so that the deviation is 0."""
    norms = {"w": np.float32([1, 1, 1, 1, 9, 9, 9, 9])[None, :, None]}

    def make(z: Any) -> dict[str, Any]:
        modes = {
            mode: clipjax.zclip(z, warmup_steps=2, mode=mode)
            for mode in get_args(ZclipMode)
        }
        return modes | {
            "lognormal": clipjax.clip_by_lognormal(z),
            "eps": clipjax.zclip(z, warmup_steps=2, eps=0.0),
        }

    thresholds = {
        "never": math.inf,
        "later": lambda step: jnp.where(step < 4, math.inf, 1.0),
        "number": 1.0,
    }
    rules = {
        (k, name): tx for k, z in thresholds.items() for name, tx in make(z).items()
    }
    with jax.debug_nans(True):
        done = runs(rules, norms, np.zeros(1, np.float32))
    for name in make(1.0):
        never, later, number = (done[k, name].updates["w"] for k in thresholds)
        np.testing.assert_array_equal(never, norms["w"], err_msg=name)
        np.testing.assert_array_equal(later, number, err_msg=name)
        assert (later < 9)[0, 4], name


def test_a_threshold_that_clips_nothing_has_the_derivative_of_the_identity() -> None:
    """Though the exponential of so many deviations is infinite."""
    thresholds, grads = [500.0, 1e6, math.inf], np.float32([3, 4])

    def total(grads: Any, tx: Any) -> Any:
        return jnp.sum(tx.update(grads, tx.init(grads))[0])

    @jax.jit
    def slopes(traced: Any) -> Any:
        txs = [
            make(threshold)
            for threshold in thresholds
            for make in (
                clipjax.zclip,
                clipjax.clip_by_lognormal,
                functools.partial(clipjax.adagc, warmup_steps=0),
            )
        ]
        of_thresholds = [
            jax.grad(lambda z: total(grads, clipjax.zclip(z, warmup_steps=0)))(z)
            for z in traced
        ]
        return [jax.grad(total)(grads, tx) for tx in txs], of_thresholds

    of_gradients, of_thresholds = slopes(thresholds)
    np.testing.assert_array_equal(of_gradients, np.ones((9, 2)))
    assert of_thresholds == [0, 0, 0]


def test_the_deviation_is_never_below_0() -> None:
    """It is 0, but for a rounding, where a norm replaces all before it: after a
    restart, or by a decay of 0.
    """
    norms = np.exp(0.1 * np.random.default_rng(0).standard_normal((8, 400))).astype(
        np.float32
    )
    # Equal ones, which are taken for spikes until the statistics start anew.
    norms[:, 50:190] = norms[:, 50:51] * 8
    txs = (
        clipjax.zclip(),
        clipjax.zclip(decay=0.0),
        clipjax.clip_by_lognormal(decay=0.0),
    )

    def step(states: Any, norm: Any) -> Any:
        states = [tx.update(norm, s)[1] for tx, s in zip(txs, states, strict=True)]
        *of_zclip, of_lognormal = (state.memory for state in states)
        moments = [*(memory.moments for memory in of_zclip), of_lognormal]
        return states, [each.std for each in moments]

    @jax.jit
    @jax.vmap
    def deviations(run: Any) -> Any:
        return jax.lax.scan(step, [tx.init(run[0]) for tx in txs], run)[1]

    for stds in deviations(norms):
        assert np.isfinite(stds).all()
        assert (stds >= 0).all()
