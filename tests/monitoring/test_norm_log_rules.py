"""NormLog's rules: each is replayed as the library itself would run it, suggested, tabled and drawn."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

import clipjax
from tests.support.norm_logs import filled, some

NAN, INF = math.nan, math.inf

# Norms in a log: what is compiled for as many serves all of the tests.
STEPS = 400
DEFAULT_RULES = clipjax.monitoring.norm_log.default_rules()


def test_a_replay_is_the_transformation_step_by_step() -> None:
    norms = some(120)
    norms[[0, 30]] = NAN, INF
    for tx in (clipjax.autoclip(25.0, window=16), clipjax.zclip(), clipjax.clip_by_quantile(0.9)):
        replay = filled(norms).replay(tx)
        state, update_by = tx.init(np.zeros(2, np.float32)), jax.jit(tx.update)
        thresholds, clipped = [], []
        for norm in norms:
            update, state = update_by(np.array([norm, 0], np.float32), state)
            thresholds.append(float(state.threshold))
            clipped.append(bool(update[0] < norm))
        np.testing.assert_array_equal(replay.thresholds, thresholds)
        np.testing.assert_array_equal(replay.clipped, clipped)
        assert not replay.clipped[[0, 30]].any()
        assert replay.clipped.any()


def test_autoclip_is_suggested_as_the_percentile_of_all() -> None:
    norms = some(STEPS)
    log = filled(norms)
    suggestions = log.suggest({"a": DEFAULT_RULES["autoclip"], "b": clipjax.autoclip(90.0, window=STEPS)})
    assert list(suggestions) == ["a", "b"]
    for name, percentile in (("a", 10), ("b", 90)):
        running = [np.percentile(norms[: i + 1].astype(np.float64), percentile) for i in range(STEPS)]
        np.testing.assert_allclose(suggestions[name].threshold, np.median(running[-100:]), rtol=1e-6)
        rate = np.mean(norms > np.array(running, np.float32) * (1 + 1e-6))
        np.testing.assert_allclose(suggestions[name].clip_rate, rate, atol=0.005)


def test_steps_that_are_not_finite_do_not_count_for_the_rate() -> None:
    norms = some(120)
    norms[[0, 30, 31, 77]] = NAN, INF, -INF, NAN
    rule = clipjax.autoclip(25.0, window=16)
    log = filled(norms)
    clipped = log.replay(rule).clipped[np.isfinite(norms)]
    assert log.suggest({"rule": rule})["rule"].clip_rate == np.mean(clipped) > 0.5


def test_every_rule_of_the_whole_tree_is_suggested() -> None:
    suggestions = filled(some(STEPS)).suggest()
    assert set(suggestions) == {
        "autoclip",
        "clip_by_quantile",
        "clip_by_lognormal",
        "zclip",
        "adagc",
        "skip_spikes",
    }
    assert all(0 < s.threshold < INF and 0 < s.clip_rate < 1 for s in suggestions.values())
    # Of so few finite norms some rules have nothing to say yet.
    assert str(filled([1.0, 2.0, *[NAN] * (STEPS - 2)])).count("none") == 2


def test_the_summary_is_a_table() -> None:
    log = filled([*some(), NAN, INF], name="clip_by_global_norm", capacity=STEPS)
    shown = str(log)
    assert shown.startswith("400 gradient norms, clip_by_global_norm, 2 of them not finite; 102 before")
    assert shown == log.summary()
    header, *rows = shown.split("\n\n")[2].splitlines()
    assert header.split("  ")[0] == "rule"
    assert len(rows) == 6
    assert len({len(row) for row in (header, *rows)}) == 1, "the columns do not line up"
    median = f"{log.quantiles(0.5):.3g}"
    assert median in shown
    assert "all finite" in log.summary({}).replace("2 of them not finite", "all finite")
    assert filled(some()).summary({}).startswith("500 gradient norms, all finite")


def test_plot_draws_on_axes_or_to_a_file(tmp_path: Any) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    norms = some(STEPS)
    norms[[3, 99]] = NAN, INF
    log = filled(norms)
    axes = figure.Figure().subplots()
    autoclip = clipjax.monitoring.norm_log.default_rules()["autoclip"]
    log.plot(axes, {"autoclip": autoclip, "never": clipjax.skip_spikes(optax.identity(), INF)})
    lines = {line.get_label().partition(":")[0]: line for line in axes.lines}
    assert list(lines) == ["norm", "not finite", "autoclip", "never"]
    np.testing.assert_array_equal(lines["not finite"].get_xdata(), [4, 100])
    np.testing.assert_array_equal(lines["norm"].get_ydata(), norms[np.isfinite(norms)])
    np.testing.assert_array_equal(lines["autoclip"].get_ydata()[5:], log.replay(autoclip).thresholds[5:])
    bad = [NAN] * STEPS
    for i, each in enumerate((log, filled(bad), filled([]), filled([0.0, 1.0, *bad[2:]]))):
        path = tmp_path / f"{i}.png"
        if len(each) == each.nonfinite_count:
            with pytest.raises(ValueError, match="no finite norm"):
                each.plot(path, None if len(each) else {"autoclip": autoclip})
            assert not path.exists()
        else:
            each.plot(path)
            assert path.read_bytes().startswith(b"\x89PNG")
