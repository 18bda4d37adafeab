"""The published results of examples/published: their bars, what they rest on, and the command."""

import importlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clipjax

for module in ("flax", "scipy", "sklearn", "matplotlib", "rich", "tyro"):
    pytest.importorskip(module)


from examples.published import __main__ as command  # noqa: E402
from examples.published import bias, constrained_optimum, row  # noqa: E402

FAST = [name for name in command.NAMES if name not in command.SLOW]


def measured(name):
    return importlib.import_module(f"examples.published.{name}").measure()


@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        pytest.param("temporal_order", marks=pytest.mark.slow),
        pytest.param("deep_network", marks=pytest.mark.slow),
    ],
)
def test_the_bars_are_met(name):
    rows = measured(name)
    assert rows
    assert [found for found in rows if not found.met] == []


@pytest.mark.slow
def test_max_norm_permits_a_huge_rate():
    """But half of the networks without it survive the rate, more than the page's bar has room for."""
    huge, dropout = measured("learning_rate")
    assert float(re.search(r"without, ([\d.]+) ±", huge.figure)[1]) <= 6
    assert dropout.met


@pytest.mark.parametrize("name", ["smoothness", "bias", "heavy_tails", "constrained_optimum"])
def test_without_its_bound_a_result_misses_its_bar(name, monkeypatch):
    """The figures come from what clipjax does: take that away, and they show it."""
    monkeypatch.setattr(clipjax, "clip_by_global_norm", lambda *_: optax.identity())
    monkeypatch.setattr(clipjax, "max_norm", lambda *_: clipjax.project(lambda params: params))
    monkeypatch.setattr(constrained_optimum, "TOLERANCES", {"float64": 1e-12})  # one precision will do
    jax.clear_caches()  # of what was traced with the bound
    missed = [found for found in measured(name) if not found.met]
    jax.clear_caches()
    assert missed


@pytest.mark.parametrize("bound", [2.0, 5.0, 8.0, 20.0])
def test_the_expected_bias_is_where_the_clipped_mean_is_zero(bound):
    x = bias.expected(np.array(bound))
    samples = np.array([x + bias.A, x - bias.P * bias.A / (1 - bias.P)])
    clipped = np.clip(samples, -bound, bound)
    np.testing.assert_allclose(clipped @ [bias.P, 1 - bias.P], 0, atol=1e-15)


def test_the_constrained_optimum_fulfils_its_conditions():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 6)), 3 * rng.standard_normal((40, 4))
    a, b = x.T @ x / 40, x.T @ y / 40
    weights, multipliers = constrained_optimum.optimum(a, b)
    np.testing.assert_allclose(a @ weights + multipliers * weights, b, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(weights, axis=0), constrained_optimum.RADIUS, rtol=1e-13)
    assert (multipliers > 0).all()


# --------------------------------------------------------------------------------------------------
# The command.


@pytest.fixture
def pretend(monkeypatch):
    """Replace what is measured by one row."""

    def pretend(met):
        rows = [row.Row("a | claim [of it]", "1.5", "at most 2", met)]
        for name in command.NAMES:
            module = importlib.import_module(f"examples.published.{name}")
            monkeypatch.setattr(module, "measure", lambda: rows)

    return pretend


def test_it_writes_a_page_with_every_result_date_and_versions(pretend, tmp_path, capsys):
    pretend(True)
    page = tmp_path / "docs" / "page.md"
    assert command.main(["--markdown", str(page)]) == 0
    text = page.read_text()
    assert re.search(r"Measured on 20\d\d-\d\d-\d\d", text)
    for name, version in (("jax", jax.__version__), ("optax", optax.__version__)):
        assert f"{name} {version}" in text
    assert f"clipjax {clipjax.__version__}" in text
    rows = re.findall(r"^\| (\d)\. (.*)$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 9))
    for _, cells in rows:
        assert r"a \| claim [of it] | 1.5 | at most 2 | yes | 0 |" in cells
    assert "a | claim [of it]" in capsys.readouterr().out


def test_a_missed_bar_shows(pretend, tmp_path, capsys):
    pretend(False)
    assert command.main(["--only", "bias", "--markdown", str(tmp_path / "page.md")]) == 1
    assert "at most 2 | **no** |" in (tmp_path / "page.md").read_text()
    out = capsys.readouterr().out
    assert "missed" in out
    assert "0 of 1" in out


def test_fast_leaves_the_slow_ones_out(pretend, capsys):
    pretend(True)
    assert command.main(["--fast"]) == 0
    shown = capsys.readouterr().out
    for name in command.NAMES:
        assert (name in shown) == (name not in command.SLOW)


def test_every_module_is_run():
    folder = Path(command.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if "\ndef measure()" in path.read_text()}
    assert modules == set(command.NAMES)
    for name in modules:
        module = importlib.import_module(f"examples.published.{name}")
        assert module.TITLE
        assert module.SOURCE
        assert module.ARXIV is None or re.fullmatch(r"\d{4}\.\d{5}|\d{4}\.\d{4}", module.ARXIV)


# --------------------------------------------------------------------------------------------------
# How far optimizers move. What holds for projections and SGD is in test_guarantees.py.

seeds = st.integers(0, 2**30)


def path_of(tx, start, grads):
    """The weights after each step."""

    def one(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.lax.scan(one, (start, tx.init(start)), grads)[1]


RATE = 0.1


@jax.jit
def path_of_adam(start, grads, bound):
    adam = optax.adam(RATE, eps=0.0)
    return path_of(optax.chain(clipjax.clip_by_global_norm(bound), adam), start, grads)


@jax.jit
def path_of_agc(start, grads, clipping, eps):
    return path_of(optax.chain(clipjax.adaptive_grad_clip(clipping, eps), optax.sgd(RATE)), start, grads)


@given(seeds, st.sampled_from([2.0**-20, 0.25, 8.0]))
def test_adam_does_not_see_how_small_a_clip_is(seed, factor):
    """It is invariant to a constant factor on all gradients: however small the bound, the steps stay."""
    grads = 100 * np.random.default_rng(seed).standard_normal((12, 6, 3)).astype(np.float32)
    found, wanted = (path_of_adam(jnp.zeros((6, 3)), grads, bound) for bound in (factor, 1.0))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    first = np.linalg.norm(np.asarray(found[0], np.float64))
    assert first == pytest.approx(RATE * np.sqrt(18), rel=1e-5)  # every entry by the rate
    # What bounds SGD does not bound Adam.
    assert (first > RATE * factor) == (factor < np.sqrt(18))


@given(seeds, st.sampled_from([0.01, 0.5]), st.sampled_from([1e-3, 1.0]), st.floats(-4, 4))
def test_agc_bounds_each_step_of_sgd_by_the_weights(seed, clipping, eps, size):
    """|ΔW_i| <= rate · clipping · max(|W_i|, eps), for the incoming weights of every unit."""
    rng = np.random.default_rng(seed)
    steps = 8
    start = rng.standard_normal((6, 3)) * 10.0 ** rng.uniform(-5, 2, 3)
    start[:, 0] = 0  # a unit that eps must set in motion
    grads = rng.standard_normal((steps, 6, 3)) * 10.0**size
    start, grads = start.astype(np.float32), grads.astype(np.float32)
    path = np.concatenate([start[None], path_of_agc(start, grads, clipping, eps)]).astype(np.float64)
    moved = np.linalg.norm(np.diff(path, axis=0), axis=1)
    norms = np.linalg.norm(path[:-1], axis=1)
    limit = RATE * clipping * np.maximum(norms, eps)
    # Each entry's sum is rounded to float32, as is the product with the rate.
    slack = 2.0**-24 * np.linalg.norm(path[1:], axis=1) + 2.0**-22 * limit
    assert (moved <= limit + slack).all()
    assert moved[0, 0] > 0
    if size > 2:  # large gradients are all clipped: the bound is what moves
        np.testing.assert_allclose(moved, limit, rtol=1e-4, atol=2 * slack.max())
