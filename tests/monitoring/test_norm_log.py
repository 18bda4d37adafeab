"""NormLog: what it keeps, what it counts, what it suggests, and what it refuses."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax

NAN, INF = np.nan, np.inf
NORMS = np.exp(0.5 * np.random.default_rng(0).standard_normal(600)).astype(np.float32)
NORMS[::50] *= 100  # spikes


def test_it_follows_a_loop_that_donates_its_state_and_does_not_wait(
    monkeypatch: Any,
) -> None:
    tx, log, fetched = clipjax.clip_by_global_norm(1.0), clipjax.NormLog(), []
    get, state = jax.device_get, tx.init(jnp.zeros(()))
    monkeypatch.setattr(
        jax, "device_get", lambda batch: fetched.append(len(batch)) or get(batch)
    )
    step = functools.partial(jax.jit, donate_argnums=0)(
        lambda state, norm: tx.update(norm, state)[1]
    )
    for i, norm in enumerate(NORMS):
        state = step(state, norm)
        log.append(clipjax.metrics(state))
        assert fetched == [256] * (
            i + 1 >= 512
        )  # only those that have long been computed
    assert (len(log), fetched) == (len(NORMS), [256, len(NORMS) - 256])
    np.testing.assert_array_equal(log.norms, NORMS.astype(np.float64))


def test_numbers_arrays_and_scans_keep_their_order() -> None:
    log, mine, tx = (
        clipjax.NormLog(),
        np.array([4.0, NAN]),
        clipjax.clip_by_global_norm(1.0),
    )
    for norm in (1, 2.5, np.float32(3)):
        log.append(norm)
    log.extend(mine)
    mine[:] = log.norms[:] = 0  # both are copies
    log.append(jnp.asarray(INF, jnp.bfloat16))

    def step(state: Any, grad: Any) -> Any:
        state = tx.update(grad, state)[1]
        return state, clipjax.metrics(state)

    log.extend(jax.lax.scan(step, tx.init(jnp.zeros(())), jnp.arange(6.0, 8.0))[1])
    np.testing.assert_array_equal(log.norms, [1, 2.5, 3, 4, NAN, INF, 6, 7])
    assert (log.norms.dtype, len(log), log.nonfinite_count) == (np.float64, 8, 2)


def test_a_saved_log_can_be_appended_to(tmp_path: Path) -> None:
    log = clipjax.NormLog("zclip")
    for i in range(1000):
        log.append(float(i))
        assert i % 99 or len(log) == i + 1  # looked at now and then
    log.save(tmp_path / "run")  # at just this path: nothing is appended to it
    again = clipjax.NormLog.load(str(tmp_path / "run"))
    again.extend(np.arange(1000, 1003))
    np.testing.assert_array_equal(again.norms, np.arange(1003))
    assert again.name == "zclip"


def test_steps_that_were_not_taken_add_no_norm() -> None:
    """A clip that is skipped, or waits for micro-batches, shows its last norm again."""
    clip = clipjax.clip_by_global_norm(1.0)
    norms = jnp.array([1.0, 2.0, NAN, 3.0, 4.0, NAN, 6.0, 6.0, 4.0])
    for k, of_clip in ((1, [1, 2, 3, 4, 6, 6, 4]), (2, [1.5, 3.5, 6])):
        tx = clipjax.bounded(optax.sgd(1.0), clip=clip, nonfinite="skip", accumulate=k)

        def step(state: Any, norm: jax.Array, tx: Any = tx) -> Any:
            state = tx.update(norm[None], state, jnp.zeros(1))[1]
            return state, clipjax.metrics(state)

        _, rows = jax.jit(
            lambda norms, tx=tx, step=step: jax.lax.scan(
                step, tx.init(jnp.zeros(1)), norms
            )
        )(norms)
        for name, expected in (
            ("clip_by_global_norm", of_clip),
            ("skip_nonfinite", norms),
        ):
            stacked, single = clipjax.NormLog(name), clipjax.NormLog(name)
            stacked.extend(rows)
            for i in range(len(norms)):
                single.append({key: x[i] for key, x in rows.items()})
            np.testing.assert_array_equal(stacked.norms, expected)
            np.testing.assert_array_equal(single.norms, expected)


def test_runs_of_one_step_and_prefixes() -> None:
    """Norms of new states count although their steps are the same, and a prefix does
    not hide the steps.
    """
    log, tx = clipjax.NormLog("train/clip_by_norm/norm"), clipjax.clip_by_norm(1.0)
    for size in (1.0, 2.0, 2.0, 3.0):
        _, state = tx.update(jnp.array([size]), tx.init(jnp.ones(1)))
        log.append({f"train/{key}": x for key, x in clipjax.metrics(state).items()})
    np.testing.assert_array_equal(log.norms, [1.0, 2.0, 3.0])


def test_the_name_says_which_norm() -> None:
    seen = {
        "a/norm": 1.0,
        "a/scale": 2.0,
        "b/norm": 3.0,
        "record_norms/updates/head": 4.0,
    }
    for name, norm in {"a": 1, "b/norm": 3, "record_norms/updates/head": 4}.items():
        log = clipjax.NormLog(name)
        log.append(seen)
        assert log.norms == [norm]
    with pytest.raises(
        ValueError, match=r"name must say which norm.*'a/norm', 'b/norm'"
    ):
        clipjax.NormLog().append(seen)


def test_quantiles_rates_and_rules_see_the_finite_norms() -> None:
    def act(
        updates: Any, params: Any, step: Any, mean: Any
    ) -> Any:  # clip to twice the mean so far
        threshold = jnp.where(step < 10, jnp.inf, 2 * mean)
        return (
            jnp.minimum(updates, threshold),
            {"threshold": threshold},
            mean + (updates - mean) / (step + 1),
        )

    log, short, exact = clipjax.NormLog(), clipjax.NormLog(), NORMS.astype(np.float64)
    log.extend(np.insert(NORMS, [0, 77], [NAN, INF]))
    short.extend(NORMS[:5])
    q, limits = [[0, 0.25], [0.9, 1]], [0, float(NORMS[3]), 1.0, INF]
    np.testing.assert_array_equal(log.quantiles(q), np.quantile(exact, q))
    np.testing.assert_allclose(
        log.clip_rate(limits), [np.mean(exact > t) for t in limits], atol=1e-12
    )
    mine = clipjax.with_metrics("mine", act, remember=jnp.zeros_like)
    thresholds = 2 * np.roll(np.cumsum(exact) / np.arange(1, 601), 1)
    found = log.suggest({"mine": mine})["mine"]
    # 600 sums in float32, and no norm is within their rounding of its threshold.
    np.testing.assert_allclose(
        found["threshold"], np.median(thresholds[-150:]), rtol=600 * 2.0**-24
    )
    np.testing.assert_allclose(
        found["clip_rate"], np.mean((exact > thresholds) & (np.arange(600) >= 10))
    )
    assert short.suggest({"mine": mine}) == {
        "mine": {"threshold": INF, "clip_rate": 0.0}
    }

    whole = optax.chain(clipjax.zclip(), optax.adam(1e-3))
    assert log.suggest({"": whole})[""] == log.suggest({"": clipjax.zclip()})[""]

    found = log.suggest()
    assert list(found) == ["autoclip", "zclip", "clip_by_quantile", "clip_by_lognormal"]
    for rule in found.values():
        assert np.median(NORMS) / 2 < rule["threshold"] < 50  # below the spikes
        assert 0.01 < rule["clip_rate"] < 1


def test_what_cannot_work_is_an_error() -> None:
    log, seen = clipjax.NormLog(), clipjax.NormLog()
    seen.append(1.0)
    for use, bad, kind, message in (
        *(
            (log.append, bad, TypeError, "norms must be real numbers")
            for bad in ("1", None, True, 1j)
        ),
        (jax.jit(log.append), 1.0, TypeError, "return them from the compiled function"),
        (log.append, jnp.ones(2), ValueError, "append takes a scalar"),
        (log.extend, 1.0, ValueError, r"extend shape \(steps,\); got shape \(\)"),
        *(
            (seen.quantiles, bad, ValueError, "q must be real numbers")
            for bad in ("x", None, True, NAN)
        ),
        *(
            (seen.clip_rate, bad, ValueError, "thresholds must be real numbers")
            for bad in ("x", None, True, NAN)
        ),
        (log.quantiles, 0.5, ValueError, "the log has no finite norm, among 0"),
        (
            seen.suggest,
            {"a": clipjax.clip_by_norm(1)},
            ValueError,
            r"rules\['a'\] must have one metric",
        ),
    ):
        with pytest.raises(kind, match=message):
            use(bad)
