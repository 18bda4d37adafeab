"""NormLog: what it keeps, what it counts, and what it refuses."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.norm_logs import filled, some

NAN, INF = math.nan, math.inf
BATCH = 256  # of fetches: twice as many norms wait at the most


def test_it_follows_a_training_loop_whose_state_is_donated() -> None:
    tx = optax.chain(clipjax.clip_by_global_norm(1.0), optax.adam(1e-3), clipjax.max_norm(3.0))
    params = jnp.ones((2, 2))
    state, log = tx.init(params), clipjax.NormLog()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    norms = some(2 * BATCH + 50)
    for norm in norms:
        params, state = step(params, state, jnp.array([[norm, 0.0], [0.0, 0.0]]))
        log.append(clipjax.metrics(state))
        assert len(log._waiting) < 2 * BATCH
    assert len(log._waiting) == BATCH + 50  # one batch is here, and nothing else was waited for
    np.testing.assert_array_equal(log.norms, norms.astype(np.float64))
    assert len(log) == len(norms)


def test_appending_does_not_read_the_device(monkeypatch: Any) -> None:
    log, fetched = clipjax.NormLog(), []
    real = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda batch: fetched.append(len(batch)) or real(batch))
    for i in range(2 * BATCH - 1):
        log.append(jnp.float32(i))
    assert fetched == []
    log.append(jnp.float32(2 * BATCH - 1))
    assert fetched == [BATCH]
    np.testing.assert_array_equal(log.norms, np.arange(2 * BATCH))


def test_numbers_arrays_and_scans_keep_their_order() -> None:
    log = clipjax.NormLog()
    log.append(1)
    log.append(2.5)
    log.append(np.float32(3))
    log.extend([4.0, NAN])
    log.append(jnp.asarray(INF, jnp.bfloat16))
    log.extend(jax.lax.map(lambda x: x, jnp.arange(6.0, 8.0)))
    np.testing.assert_array_equal(log.norms, [1, 2.5, 3, 4, NAN, INF, 6, 7])
    assert (len(log), log.nonfinite_count) == (8, 2)
    log.append(8.0)
    assert log.norms[-1] == 8
    log.norms[:] = 0  # a copy
    assert log.norms[-1] == 8

    tx = clipjax.clip_by_global_norm(1.0)

    def step(state: Any, grad: Any) -> Any:
        state = tx.update(grad, state)[1]
        return state, clipjax.metrics(state)

    log = clipjax.NormLog()
    log.extend(jax.lax.scan(step, tx.init(jnp.zeros(())), jnp.arange(4.0))[1])
    np.testing.assert_array_equal(log.norms, np.arange(4))


@pytest.mark.parametrize("capacity", [1, 100, BATCH, 600])
def test_capacity_bounds_what_is_kept(capacity: int) -> None:
    log = clipjax.NormLog(capacity=capacity)
    for i in range(1000):
        log.append(float(i))
        assert sum(map(len, log._chunks)) <= capacity
        assert len(log._waiting) < 2 * BATCH
    np.testing.assert_array_equal(log.norms, np.arange(1000 - capacity, 1000))
    assert log.dropped == 1000 - capacity
    log.extend(np.arange(1000, 3000))
    np.testing.assert_array_equal(log.norms, np.arange(3000 - capacity, 3000))
    assert log.dropped == 3000 - capacity


def test_the_name_says_which_norm() -> None:
    tx = clipjax.skip_spikes(
        optax.chain(clipjax.clip_by_global_norm(1.0), clipjax.clip_by_norm(0.5)), warmup_steps=1
    )
    _, state = jax.jit(tx.update)(np.array([3, 4], np.float32), tx.init(np.zeros(2, np.float32)))
    seen = clipjax.metrics(state)
    for name, norm in [("skip_spikes", 5), ("clip_by_global_norm/norm", 5), ("clip_by_norm", 1)]:
        log = clipjax.NormLog(name)
        log.append(seen)
        np.testing.assert_allclose(log.norms, [norm], rtol=1e-6)
    with pytest.raises(ValueError, match=r"name.*skip_spikes/norm.*clip_by_norm/norm"):
        clipjax.NormLog().append(seen)
    with pytest.raises(ValueError, match="name: 'zclip' has no norm"):
        clipjax.NormLog("zclip").append(seen)
    with pytest.raises(ValueError, match=r"got \[\]"):
        clipjax.NormLog().append({})


def test_quantiles_and_clip_rates_are_those_of_the_finite_norms() -> None:
    norms = some()
    log = filled(np.insert(norms.astype(np.float64), [0, 77, 500], [NAN, INF, -INF]))
    assert log.nonfinite_count == 3
    q = [[0, 0.25], [0.9, 1]]
    np.testing.assert_array_equal(log.quantiles(q), np.quantile(norms.astype(np.float64), q))
    assert log.quantiles(0.5).shape == ()
    thresholds = [0, float(norms[3]), 1.0, 50.0, INF]
    expected = [np.mean(norms > t) for t in thresholds]
    np.testing.assert_allclose(log.clip_rate(thresholds), expected, rtol=0, atol=1e-12)
    assert log.clip_rate(INF) == 0
    assert log.clip_rate(0) == 1
    # What the library's own clip counts.
    tx = clipjax.clip_by_global_norm(2.0)
    state = jax.lax.scan(lambda s, g: (tx.update(g, s)[1], None), tx.init(jnp.zeros(())), jnp.asarray(norms))[
        0
    ]
    counted = float(clipjax.metrics(state)["clip_by_global_norm/clipped_fraction"])
    np.testing.assert_allclose(log.clip_rate(2.0), counted, rtol=1e-6)


def test_save_and_load(tmp_path: Any) -> None:
    log = filled([*some(), NAN, INF], name="clip_by_global_norm", capacity=400)
    path = tmp_path / "run"  # at just this path: nothing is appended to it
    log.save(path)
    assert list(tmp_path.iterdir()) == [path]
    again = clipjax.NormLog.load(str(path))
    np.testing.assert_array_equal(again.norms, log.norms)
    assert (again.name, again.capacity, again.dropped) == ("clip_by_global_norm", 400, 102)
    again.append(7.0)
    assert (again.norms[-1], again.dropped, len(again)) == (7, 103, 400)
    clipjax.NormLog().save(path)
    empty = clipjax.NormLog.load(path)
    assert (len(empty), empty.name, empty.capacity, empty.dropped) == (0, None, None, 0)


def test_what_is_no_log_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "log.npz"
    with pytest.raises(FileNotFoundError):
        clipjax.NormLog.load(path)
    for content in (b"", b"text", b"PK\x03\x04damaged"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"log\.npz was not written by NormLog\.save"):
            clipjax.NormLog.load(path)
    with path.open("wb") as file:
        np.savez(file, other=np.zeros(3))
    with pytest.raises(ValueError, match="was not written"):
        clipjax.NormLog.load(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match="was not written"):
        clipjax.NormLog.load(path)


def test_what_cannot_work_is_an_error() -> None:
    log = clipjax.NormLog()
    for bad in ("1", None, True, 1j):
        with pytest.raises(TypeError, match="norms must be real numbers"):
            log.append(bad)
    with pytest.raises(ValueError, match=r"scalar, got shape \(2,\): use extend"):
        log.append(jnp.ones(2))
    for bad in (1.0, np.ones((2, 2))):
        with pytest.raises(ValueError, match=r"norms must have shape \(steps,\)"):
            log.extend(bad)
    with pytest.raises(TypeError, match="return them from the compiled function"):
        jax.jit(log.append)(1.0)
    for use in (log.quantiles, log.suggest, log.summary, lambda: log.clip_rate(1.0)):
        with pytest.raises(ValueError, match="the log has no finite norm, of 0"):
            use()
    log.append(1.0)
    with pytest.raises(ValueError, match="thresholds must not be NaN"):
        log.clip_rate([1.0, NAN])
    with pytest.raises(ValueError, match=r"must show one threshold in its metrics, got \[\]"):
        log.replay(clipjax.clip_by_global_norm(1.0))
    with pytest.raises(TypeError, match=r"must be an optax\.GradientTransformation, got 'autoclip'"):
        log.replay("autoclip")
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        clipjax.NormLog(capacity=0)
    with pytest.raises(TypeError, match="name must be a str, got 3"):
        clipjax.NormLog(3)
