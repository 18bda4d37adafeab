"""`clipjax.plots` draws what it was given, on the axes it was given, and leaves everything else as it was."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.norm_logs import filled, some

mpl = pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402

from clipjax import _drawing, plots  # noqa: E402

NAN, INF = np.nan, np.inf
NORMS = np.array([0.5, 4.0, 0.0, NAN, 2.0, 0.25, INF])


def axes() -> Any:
    return Figure().subplots()


def lines(ax: Any) -> dict[str, tuple[list[float], list[float]]]:
    """What is drawn: x and y by label, without the share in it."""
    return {
        line.get_label().partition(" (")[0]: (list(line.get_xdata()), list(line.get_ydata()))
        for line in ax.lines
    }


def run(tx: optax.GradientTransformation, norms: Any) -> dict[str, Any]:
    """The metrics of a run over gradients of these norms, stacked."""

    def step(state: Any, norm: Any) -> Any:
        state = tx.update(jnp.stack([norm, 0 * norm]), state, jnp.ones(2))[1]
        return state, clipjax.metrics(state)

    return jax.jit(lambda norms: jax.lax.scan(step, tx.init(jnp.ones(2)), norms)[1])(jnp.asarray(norms))


def rows(history: dict[str, Any]) -> list[dict[str, Any]]:
    """The same as a training loop has it: a dict for each step."""
    return [{key: x[i] for key, x in history.items()} for i in range(len(next(iter(history.values()))))]


def test_norms_show_before_after_and_the_bound() -> None:
    ax = plots.norms(NORMS, after=np.minimum(NORMS, 1.0), bound=1.0, ax=axes())
    drawn = lines(ax)
    assert drawn["not clipped"] == ([1, 6], [0.5, 0.25])
    assert drawn["before clipping"] == ([2, 5], [4.0, 2.0])
    assert drawn["after"] == ([2, 5], [1.0, 1.0])
    assert drawn["bound 1"][1] == [1.0, 1.0]
    assert drawn["not finite"][0] == [4, 7]
    assert ax.get_yscale() == "log"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "norm of the gradient")
    low, high = ax.get_ylim()
    assert low < 0.25
    assert high > 4.0
    (share,) = (text.get_text() for text in ax.legend_.get_texts() if "before" in text.get_text())
    assert share == "before clipping (40.0%)"  # of the five steps whose norm is finite


def test_norms_of_a_run_are_read_from_metrics_however_they_come() -> None:
    history = run(clipjax.clip_by_global_norm(1.0), some(50))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(history))
    writer.writeheader()
    writer.writerows({key: float(x) for key, x in row.items()} for row in rows(history))
    read = list(csv.DictReader(io.StringIO(text.getvalue())))
    before = np.asarray(history["clip_by_global_norm/norm"], np.float64)
    clipped = before > 1
    for form in (history, rows(history), read, jax.device_get(history)):
        drawn = lines(plots.norms(form, bound=1.0))
        assert drawn["before clipping"][1] == list(before[clipped])
        assert drawn["not clipped"][1] == list(before[~clipped])
        assert max(drawn["after"][1]) <= 1
    # Every tenth step logged: where a point stands is what the metrics say.
    sparse = lines(plots.norms(rows(history)[9::10]))
    assert sorted(sparse["not clipped"][0] + sparse["before clipping"][0]) == [10, 20, 30, 40, 50]
    assert set(lines(plots.norms(run(clipjax.clip_by_global_norm(INF), some(50))))) == {"each step"}
    log = filled([1.0, *some(30)], capacity=30)
    assert lines(plots.norms(log))["each step"][0] == list(range(2, 32))
    assert lines(plots.norms(log, bound=1.0))["clipped"][1] == [x for x in log.norms if x > 1]


def test_norms_of_other_rules() -> None:
    drawn = lines(plots.norms(run(clipjax.zclip(), some(60))))
    assert {"before clipping", "after", "threshold"} <= set(drawn)
    spikes = run(clipjax.skip_spikes(optax.sgd(1.0), warmup_steps=4), [1.0, 1.1, 0.9, 1.0, 100.0, 1.0])
    drawn = lines(plots.norms(spikes))
    assert drawn["skipped"] == ([5], [100.0])
    assert len(drawn["not clipped"][0]) == 5
    assert lines(plots.norms(NORMS, clipped=NORMS == 4, skipped=NORMS == 2))["skipped"] == ([5], [2.0])
    weights = run(clipjax.max_norm(1.0, axes=None), [1.0, 2.0])
    assert plots.norms(weights, "max_norm").get_ylabel() == "norm of the weights"
    recorded = run(clipjax.record_norms(), [1.0, 2.0])
    assert lines(plots.norms(recorded, "record_norms/updates"))["each step"] == ([1, 2], [1.0, 2.0])


def test_norms_of_a_group_stand_beside_its_own() -> None:
    tx = clipjax.clip_by_group_norm({"a": 1.0, "b": 10.0})
    state = tx.init({"a": jnp.ones(1), "b": jnp.ones(1)})
    history = []
    for size in (0.5, 2.0, 20.0):
        state = tx.update({"a": jnp.array([size]), "b": jnp.array([size])}, state)[1]
        history.append(clipjax.metrics(state))
    drawn = lines(plots.norms(history, "clip_by_group_norm/norm/b"))
    assert drawn["before clipping"] == ([3], [20.0])
    assert drawn["after"][1] == [10.0]


def test_units_stand_in_the_row_of_their_layer() -> None:
    rng = np.random.default_rng(0)
    kernels = {
        f"Dense_{i}": {"kernel": rng.standard_normal((4, n)), "bias": np.ones(n)}
        for i, n in enumerate((30, 5))
    }
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), kernels)
    project = clipjax.max_norm(1.5)
    ax = plots.unit_norms(params, project, ax=axes())
    exact = [np.linalg.norm(np.asarray(layer["kernel"], np.float64), axis=0) for layer in params.values()]
    every = np.concatenate(exact)
    drawn = lines(ax)
    np.testing.assert_allclose(drawn["in bounds"][0], every[every <= 1.5], rtol=1e-12)
    np.testing.assert_allclose(drawn["out of bounds"][0], every[every > 1.5], rtol=1e-12)
    assert len(drawn["out of bounds"][0]) == len(clipjax.verify(params, project))
    places = dict(zip(*drawn["in bounds"], strict=True)) | dict(zip(*drawn["out of bounds"], strict=True))
    for row, norms in enumerate(exact):
        assert all(abs(place - row) < 0.5 for norm, place in places.items() if np.isclose(norm, norms).any())
    assert drawn["bound 1.5"][0] == [1.5, 1.5]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["Dense_0", "Dense_1"]
    assert ax.get_xlabel() == "norm of a unit's weights"
    assert "0 of 30" in [text.get_text() for text in ax.texts]

    projected = plots.unit_norms(project(params), project)
    assert "out of bounds" not in lines(projected)
    counts = [f"{np.sum(norms > 1.5)} of {len(norms)}" for norms in exact]
    assert [text.get_text() for text in projected.texts] == ["at the bound", *counts]
    by_radius = plots.unit_norms(params, radius=1.5, axes=clipjax.fan_in)
    assert lines(by_radius).keys() == drawn.keys()
    assert set(lines(plots.unit_norms(params))) == {"a unit"}
    assert list(plots.unit_norms(params).texts) == []


def test_units_with_bounds_of_several_kinds() -> None:
    params = {"a": jnp.array([[0.5, 1.0]]), "b": jnp.array([[1.0, 2.0]])}
    both = lines(plots.unit_norms(params, clipjax.min_max_norm(0.75, 1.5)))
    assert {"bound 0.75", "bound 1.5"} <= set(both)
    assert both["out of bounds"][0] == [0.5, 2.0]
    one = plots.unit_norms(params, clipjax.unit_norm())
    assert [label for label in lines(one) if label.startswith("bound")] == ["bound 1"]
    of_each = plots.unit_norms(params, clipjax.max_norm(jnp.array([0.25, 3.0])))
    assert [len(piece.get_segments()) for piece in of_each.collections] == [2, 2]
    strange = plots.unit_norms({"a": jnp.array([[NAN, 1.0, 2.0]])}, clipjax.max_norm(1.5))
    assert len(lines(strange)["out of bounds"][0]) == 2


def test_clip_rates_are_those_of_the_metrics_or_of_norms() -> None:
    history = rows(run(clipjax.chain(clipjax.clip_by_global_norm(2.0), clipjax.clip_by_norm(1.0)), some(40)))

    def bars(ax: Any) -> dict[str, float]:
        names = [label.get_text() for label in ax.get_yticklabels()]
        return dict(zip(names, [bar.get_width() for bar in ax.patches], strict=True))

    found = bars(plots.clip_rates(history, ax=axes()))
    assert list(found) == ["clip_by_global_norm", "clip_by_norm"]
    for name, share in found.items():
        np.testing.assert_allclose(share, 100 * history[-1][f"{name}/clipped_fraction"], rtol=1e-6)
    assert bars(plots.clip_rates(history[-1])) == found

    recorded = {
        f"record_norms/updates/{name}": x for name, x in {"b": [1.0, 3.0, NAN], "a": [1.0] * 3}.items()
    }
    recorded["record_norms/steps"] = [1, 2, 3]
    assert bars(plots.clip_rates(recorded, bound=2.0)) == {"b": 50.0, "a": 0.0}
    assert bars(plots.clip_rates(recorded, bound={"a": 0.5})) == {"a": 100.0}
    groups = {"clip_by_group_norm/norm/a": [1.0, 3.0], "clip_by_group_norm/steps": [1, 2]}
    assert bars(plots.clip_rates(groups, bound=2.0)) == {"a": 50.0}
    whole = rows(run(clipjax.clip_by_global_norm(INF), [1.0, 3.0, 4.0, 5.0]))
    assert bars(plots.clip_rates(whole, bound=2.0)) == {"clip_by_global_norm": 75.0}
    ax = plots.clip_rates({"layer": [1.0, 2.0]}, bound=1.5)
    assert bars(ax) == {"layer": 50.0}
    assert ax.get_xlabel() == "steps clipped"
    assert ax.xaxis.get_major_formatter()(50) == "50%"


def test_thresholds_are_those_of_the_replays() -> None:
    log = filled([*some(300), NAN, 0.0])
    rules = {"autoclip": clipjax.autoclip(), "replayed": log.replay(clipjax.zclip())}
    drawn = plots.thresholds(log, rules, ax=axes())
    found = {line.get_label(): line for line in drawn.lines}
    rates = {name: suggestion.clip_rate for name, suggestion in log.suggest(rules).items()}
    for name, replay in (("autoclip", log.replay(rules["autoclip"])), ("replayed", rules["replayed"])):
        line = found[f"{name}: clips {rates[name]:.0%}"]
        finite = np.isfinite(replay.thresholds)
        np.testing.assert_array_equal(line.get_ydata()[finite], replay.thresholds[finite])
    assert len(found["norm"].get_ydata()) == 300
    assert list(found["not finite"].get_xdata()) == [301]

    constants = plots.threshold_rates(log, rules)
    curve = constants.lines[0]
    np.testing.assert_array_equal(curve.get_ydata(), 100 * log.clip_rate(curve.get_xdata()))
    settled = {line.get_label(): line for line in constants.lines[1:]}
    for name, suggestion in log.suggest(rules).items():
        assert settled[name].get_xdata()[0] == suggestion.threshold
        assert settled[name].get_ydata()[0] == 100 * log.clip_rate(suggestion.threshold)


PICTURES = {
    "norms": lambda **ax: plots.norms(NORMS, after=np.minimum(NORMS, 1.0), bound=1.0, **ax),
    "unit_norms": lambda **ax: plots.unit_norms({"w": jnp.eye(3)}, clipjax.max_norm(0.5), **ax),
    "clip_rates": lambda **ax: plots.clip_rates({"layer": [1.0, 2.0]}, bound=1.5, **ax),
    "thresholds": lambda **ax: plots.thresholds(filled(NORMS), {"q": clipjax.clip_by_quantile()}, **ax),
    "threshold_rates": lambda **ax: plots.threshold_rates(filled(NORMS), {"q": clipjax.autoclip()}, **ax),
}


def test_every_picture_is_listed_here() -> None:
    assert set(PICTURES) == set(plots.__all__)


@pytest.mark.parametrize("name", PICTURES)
def test_axes_come_back_and_nothing_else_changes(name: str) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = dict(mpl.rcParams)
    given = axes()
    given.set_title("mine", loc="left")
    assert PICTURES[name](ax=given) is given
    new = PICTURES[name]()
    assert new is not given
    assert pyplot.get_fignums() == []
    assert dict(mpl.rcParams) == before
    assert given.get_title(loc="left") == "mine"
    for ax in (given, new):
        assert ax.get_xlabel()
        assert ax.get_ylabel() or ax.get_yticklabels()
        ax.figure.canvas.draw()
        if ax.legend_ is not None:  # above the axes: it covers no data
            bottom = ax.legend_.get_window_extent().y0
            assert bottom >= ax.get_window_extent().y1 - 1
        if name != "clip_rates":
            assert ax.legend_ is not None
    if given.legend_ is not None:
        title = given._left_title.get_window_extent()
        assert title.y0 >= given.legend_.get_window_extent().y1 - 4


def luminance(color: str) -> float:
    parts = np.array(mpl.colors.to_rgb(color))
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("color", ["GRAY", "VERMILION", "BLUE", "GREEN", "PURPLE", "OCHRE"])
def test_colors_stand_out_on_white_and_on_black(color: str) -> None:
    light = luminance(getattr(_drawing, color)) + 0.05
    assert 1.05 / light >= 3
    assert light / (luminance("#121212") + 0.05) >= 3


def test_what_cannot_be_drawn_is_an_error() -> None:
    for history, message in (
        ({"loss": [1.0]}, r"must hold one norm.*\[\]"),
        (np.ones((2, 2)), r"shape \(steps,\), got \(2, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            plots.norms(history)
    with pytest.raises(ValueError, match="name: 'zclip' has no norm"):
        plots.norms({"autoclip/norm": [1.0]}, "zclip")
    for name in ("after", "bound", "clipped", "skipped"):
        with pytest.raises(ValueError, match=rf"{name} must have the shape of the norms, \(7,\), got \(2,\)"):
            plots.norms(NORMS, **{name: np.ones(2)})
    state = clipjax.clip_by_global_norm(1.0).init(jnp.ones(2))
    for history in (state, [state], "norms"):
        with pytest.raises(TypeError, match=r"history must be norms, .*clipjax\.metrics of each step"):
            plots.norms(history)
    for draw, none in ((plots.clip_rates, []), (plots.norms, []), (plots.norms, clipjax.NormLog())):
        with pytest.raises(ValueError, match="history: it contains no steps"):
            draw(none)
    with pytest.raises(ValueError, match="there is no clipped_fraction in \\['loss'\\]"):
        plots.clip_rates({"loss": [1.0]})
    with pytest.raises(ValueError, match=r"bound: \['b'\] name no norm; there are \['a'\]"):
        plots.clip_rates({"record_norms/updates/a": [1.0]}, bound={"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="no finite norm"):
        plots.threshold_rates(filled([NAN]), {})


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    program = """
import sys
sys.modules["matplotlib"] = None  # as if it were not there
import clipjax
log = clipjax.NormLog()
log.append(1.0)
log.summary({})
for use in (lambda: clipjax.plots, lambda: log.plot("norms.png", {})):
    try:
        use()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == 2 * 'clipjax.plots needs Matplotlib: pip install "clipjax[plots]"\n'
