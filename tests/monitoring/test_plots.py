"""`clipjax.plots` draws what it was given, on the axes it was given, and what is
special stays visible.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax

plt = pytest.importorskip("matplotlib.pyplot")
rgba = pytest.importorskip("matplotlib.colors").to_rgba
plots = pytest.importorskip("clipjax.plots")
NAN, INF = np.nan, np.inf
ORANGE = rgba("#f05a00")


@pytest.fixture(autouse=True)
def _close_figures() -> Any:
    yield
    plt.close("all")


def history_of(label: str, **metrics: Any) -> dict[str, Any]:
    """Return metrics at all steps as `metrics` names them, with a counter of steps."""
    (count,) = {len(x) for x in metrics.values()}
    named = {f"{label}/{name}": x for name, x in metrics.items()}
    return {f"{label}/steps": np.arange(count) + 1} | named


def recorded(norms: dict[str, Any], label: str = "record_norms") -> dict[str, Any]:
    return history_of(label, **norms)


def drawn(ax: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Return what is visible, x and y by label, after it was drawn."""
    ax.figure.canvas.draw()
    found: dict[str, Any] = {}
    for line in ax.lines:
        x, y = np.array(line.get_data(), float)
        known = np.isfinite(y)
        before = found.get(line.get_label(), ([], []))
        found[line.get_label()] = [*before[0], *x[known]], [*before[1], *y[known]]
    return found


def drawn_at(ax: Any, count: int) -> list[list[tuple[float, float]]]:
    """Return the points of the first lines."""
    pairs = [line.get_xydata() for line in ax.lines[:count]]
    return [[(x, y) for x, y in each if np.isfinite(x)] for each in pairs]


def legend_of(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.legend_.get_texts()]


def rows_of(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_yticklabels()]


def cells_of(ax: Any) -> np.ndarray:
    """Return the colors of the cells of a map, (rows, columns, 4)."""
    ax.figure.canvas.draw()
    mesh = ax.collections[0]
    return mesh.to_rgba(mesh.get_array())


def test_norms_show_what_was_clipped_and_what_is_not_finite() -> None:
    norms = [0.5, 4.0, NAN, 2.0, 0.25, INF]
    scale = [1.0, 0.25, NAN, 0.5, 1.0, 0.0]
    history = history_of("zclip", norm=norms, scale=scale, threshold=[1.0] * 6)
    history["loss"] = [3.0] * 6
    ax = plots.norms(history)
    found = drawn(ax)
    assert found["norm"] == ([0, 1, 3, 4], [0.5, 4.0, 2.0, 0.25])
    assert found["clipped (50%)"][0] == [1, 3]
    assert found["not finite"][0] == [2, 5]
    assert set(found["threshold 1"][1]) == {1.0}
    assert legend_of(ax) == ["norm", "clipped (50%)", "threshold 1", "not finite"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "norm")
    history["zclip/threshold"] = [INF, INF, 3, 3, 3, 4]
    assert drawn(plots.norms(history))["threshold"] == ([2, 3, 4, 5], [3, 3, 3, 4])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_norms_show_a_whole_run_from_its_metrics(accumulate: int) -> None:
    """A fixed threshold is told by what it clipped."""
    clip = clipjax.clip_by_global_norm(2.0)
    tx = clipjax.bounded(optax.sgd(1.0), clip=clip, accumulate=accumulate)
    tx = clipjax.skip_spikes(tx, z_threshold=INF, max_norm=100.0)
    norms = jnp.array([1.0, 1.1, 1.0, 3.0, NAN, 1.2, 500.0, 1.3, 1.1])

    def step(state: Any, norm: jax.Array) -> Any:
        state = tx.update(norm[None], state, jnp.zeros(1))[1]
        return state, clipjax.metrics(state)

    history = jax.lax.scan(step, tx.init(jnp.zeros(1)), norms)[1]
    found = drawn(plots.norms(history))
    # The clip does not see a skipped step.
    assert found["norm"][0] == ([0, 1, 2, 3, 5, 7, 8] if accumulate == 1 else [1, 3, 7])
    assert found["skipped (22.2%)"][0] == [4, 6]
    assert "not finite" not in found
    if accumulate == 1:
        assert found["clipped (14.3%)"] == ([3], [3.0])
        assert found["threshold 2"][1] == pytest.approx([2, 2])
    # The skip sees all.
    of_skip = drawn(plots.norms(history, name="skip_spikes"))
    assert of_skip["norm"][0] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert (6, 500) in zip(*of_skip["skipped (22.2%)"], strict=True)
    assert of_skip["not finite"][0] == [4]
    rows = [{key: x[i] for key, x in history.items()} for i in range(4, 9)]
    assert drawn(plots.norms(rows))["skipped (40%)"][0] == [0, 2]


def test_the_skips_of_another_optimizer_are_not_drawn() -> None:
    one = {"norm": [50.0, NAN, 50.0], "skipped": [0, 1, 1], "skipped_last": [0, 1, 0]}
    other = {"norm": [0.5] * 3, "scale": [1.0] * 3}
    history = history_of("gen/skip_nonfinite", **one)
    history |= history_of("critic/clip_by_global_norm", **other)
    found = drawn(plots.norms(history))
    assert found == {"norm": ([0, 1, 2], [0.5] * 3), "clipped (0%)": ([], [])}
    assert "skipped (33.3%)" in drawn(plots.norms(history, name="gen/skip_nonfinite"))


def test_a_skip_has_its_own_marks_alone() -> None:
    """The other skip may be that of another part of `optax.partition`."""
    never = {"norm": [2.0] * 3, "skipped_last": [0] * 3}
    history = history_of("skip_nonfinite", norm=[1.0, NAN, 1.0], skipped_last=[0, 1, 0])
    history |= history_of("skip_nonfinite_1", **never)
    for name, skipped in {"": [1], "_1": []}.items():
        found = drawn(plots.norms(history, name=f"skip_nonfinite{name}"))
        marks = [x for key in found if "skipped" in key for x in found[key][0]]
        assert marks == skipped


def outlier_that_is_skipped() -> list[Any]:
    """Return a history in which no norm is NaN, and step 20 of 30 is skipped."""
    clip = clipjax.clip_by_group_norm({"*": 5.0})
    tx = clipjax.skip_spikes(clip, z_threshold=INF, max_norm=100.0)

    def step(state: Any, norm: Any) -> Any:
        state = tx.update({"w": norm[None]}, state)[1]
        return state, clipjax.metrics(state)

    norms = jnp.ones(30).at[20].set(500.0)
    history = jax.lax.scan(step, tx.init({"w": jnp.ones(1)}), norms)[1]
    return [{key: x[i] for key, x in history.items()} for i in range(30)]


@pytest.mark.parametrize("rows", [slice(20, None), slice(None, None, 10)])
def test_a_finite_step_that_was_skipped_is_never_drawn_as_not_finite(
    rows: slice,
) -> None:
    """In a tail that begins with it, and in a row of every tenth step."""
    history = outlier_that_is_skipped()[rows]
    found = drawn(plots.norms(history, name="clip_by_group_norm"))
    (skipped,) = (x for key, (x, _) in found.items() if "skipped" in key)
    assert skipped == [0 if rows.step is None else 2]
    assert "not finite" not in found
    assert "not finite" not in drawn(plots.group_norms(history))
    assert not (cells_of(plots.heat_map(history)) == ORANGE).all(-1).any()


@pytest.mark.parametrize(
    ("grads", "threshold"), [([10.0, 0.04], "threshold 5"), ([10.0, 4.0], None)]
)
def test_of_several_thresholds_the_one_of_the_largest_norm_is_drawn(
    grads: list[float], threshold: str | None
) -> None:
    """If that is the one that clips most, since a history has one factor."""
    tx = clipjax.clip_by_norm(jnp.array([5.0, 0.1]), axes=0)
    _, state = tx.update(jnp.array([grads]), tx.init(jnp.zeros((1, 2))))
    labels = legend_of(plots.norms([clipjax.metrics(state)]))
    assert [x for x in labels if "threshold" in x] == [threshold] * bool(threshold)


@pytest.mark.parametrize(
    ("norm", "after", "known"),
    [([1, 5, 1, 5], [1, 3, 1, 1], [1, 3]), ([4, 2], [4, 1], [1])],
    ids=["a schedule", "one of several, or changed during the run"],
)
def test_a_threshold_that_is_not_fixed_is_drawn_where_it_clipped(
    norm: list[float], after: list[float], known: list[int]
) -> None:
    scale = np.divide(after, norm)
    ax = plots.norms(history_of("a", norm=norm, scale=scale, norm_after=after))
    assert drawn(ax)["threshold"] == (known, [after[i] for i in known])
    (marks,) = (x for x in ax.lines if x.get_label() == "threshold")
    assert marks.get_marker() == "_"  # a line would not show single points


def test_two_limits_of_elements_are_no_threshold() -> None:
    """But all steps that they clip are marked."""
    tx, history = clipjax.clip_by_value(-1.0, 2.0), []
    state = tx.init(jnp.zeros(2))
    for grads in ([-4.0, 1.5], [3.0, -0.5], [-1.5, 1.9]):
        _, state = tx.update(jnp.array(grads), state)
        history.append(clipjax.metrics(state))
    assert legend_of(plots.norms(history)) == ["norm", "clipped (100%)"]


def test_a_run_whose_chain_changed_is_drawn_where_each_part_was_in_it() -> None:
    """Here with a recorder that joins, leaves, and comes back as a new one."""
    tx = clipjax.record_norms("leaf", keep=2)
    sizes, state, history = [1.0, NAN, 1.0], None, []
    for part in ("with", "without", "with"):
        state = tx.init({"a": jnp.ones(1), "b": jnp.ones(1)})
        for i, size in enumerate(sizes):
            _, state = tx.update({"a": jnp.ones(1), "b": jnp.array([size])}, state)
            own = clipjax.metrics(state) if part == "with" else {}
            history.append({"loss": 1.0} | own | ({"validation": 2.0} if i else {}))
    history.insert(0, {"loss": 1.0})
    found = drawn(plots.group_norms(history))
    assert found["b"][0] == [1, 3, 7, 9]
    assert found["a"][0] == [1, 2, 3, 7, 8, 9]
    assert found["not finite"][0] == [2, 8]
    ax = plots.heat_map(history, bad=clipjax.bad_steps(state))
    colors = cells_of(ax)
    is_blank = [0, 4, 5, 6]
    assert np.flatnonzero(colors[0, :, 3] == 0).tolist() == is_blank
    assert np.argwhere((colors == ORANGE).all(-1)).tolist() == [[1, 2], [1, 8]]
    triangles, rings, _ = drawn_at(ax, 3)
    assert [x for x, _ in triangles] == [8]
    assert [(x, rows_of(ax)[int(row)]) for x, row in rings] == [(8, "b")]


def test_a_name_chooses_among_several_norms() -> None:
    history = history_of("a", norm=[1.0]) | history_of("b", norm=[2.0])
    history |= recorded({"updates/norm": [3.0]})
    with pytest.raises(ValueError, match=r"name must say .* of a/norm, b/norm"):
        plots.norms(history)
    names = {"a": 1, "b/norm": 2, "record_norms/updates/norm": 3}
    for name, norm in names.items():
        assert drawn(plots.norms(history, name=name))["norm"] == ([0], [norm])
    history |= history_of("zclip", norm=[4.0], scale=[1.0])  # the only clip
    assert drawn(plots.norms(history))["norm"] == ([0], [4])


def test_the_norm_of_a_clip_of_groups_is_that_of_its_largest_group() -> None:
    tx = clipjax.clip_by_group_norm({"a": 1.0, "*": 2.0})
    grads = {"a": jnp.ones(2), "b": jnp.ones(3)}
    _, state = tx.update(grads, tx.init(grads))
    history = [clipjax.metrics(state)]
    found = drawn(plots.norms(history))
    assert found.keys() == {"norm", "clipped (100%)"}
    assert found["norm"][1] == pytest.approx([3**0.5])
    of_a = drawn(plots.norms(history, name="clip_by_group_norm/a"))
    assert of_a["threshold 1"][1] == pytest.approx([1, 1])
    assert list(drawn(plots.group_norms(history))) == ["*", "a"]


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1, 30], "log"), ([1, 30, 0], "log"), ([2], "linear"), ([0, 0], "linear")],
)
def test_the_scale_is_logarithmic_where_values_vary(values: Any, scale: str) -> None:
    ax = plots.norms(history_of("a", norm=values))
    drawn(ax)
    assert ax.get_yscale() == scale
    assert ax.get_ylim()[0] <= min([x for x in values if x] or [0])


def test_groups_are_lines_from_metrics_however_they_come() -> None:
    names = ("layer_1", "layer_2", "layer_10", "steps")
    params = {name: jnp.ones(2) for name in names}
    tx = clipjax.record_norms("leaf")

    def step(state: Any, size: Any) -> Any:
        state = tx.update(jax.tree.map(lambda x: x * size, params), state)[1]
        return state, clipjax.metrics(state)

    stacked = jax.lax.scan(step, tx.init(params), jnp.array([1.0, 2.0, NAN]))[1]
    rows = [{f"train/{key}": x[i] for key, x in stacked.items()} for i in range(3)]
    for history in (stacked, rows):
        ax = plots.group_norms(history)
        assert ax.get_ylabel() == "norm of updates"
        found = drawn(ax)
        assert legend_of(ax) == [*names, "not finite"]
        np.testing.assert_allclose(found["layer_10"], [[0, 1], [2**0.5, 8**0.5]])
        assert set(found["not finite"][0]) == {2}
    waits = {"record_norms/steps": [0, 0, 1, 1, 2], "record_norms/updates": [0] * 5}
    assert drawn(plots.group_norms(waits)) == {"updates": ([2, 4], [0, 0])}


def test_of_many_groups_the_largest_are_colored_and_patterns_choose() -> None:
    norms = {f"updates/{i}": [1.0, i] for i in range(200)}
    many = plots.group_norms(recorded(norms))
    assert legend_of(many) == [str(i) for i in range(192, 200)]
    assert many.legend_.get_title().get_text() == "the 8 largest of 200 groups"
    assert len({line.get_color() for line in many.lines}) == 9
    assert len(drawn(many)["_other"][0]) == 2 * 192
    both = {f"{of}/blocks/{i}": [1.0] for of in ("updates", "params") for i in (0, 1)}
    found = drawn(plots.group_norms(recorded(both), only="updates/*"))
    assert list(found) == ["blocks/0", "blocks/1"]
    in_order = ["params/blocks/1", "blocks/1", "blocks/*"]
    found = drawn(plots.group_norms(recorded(both), only=in_order))
    rest = ["updates/blocks/1", "params/blocks/0", "updates/blocks/0"]
    assert list(found) == ["params/blocks/1", *rest]
    with pytest.raises(ValueError, match=r"only: 'heads' matches none of .*blocks/0"):
        plots.group_norms(recorded(both), only="heads")


def test_several_recorders_keep_their_names() -> None:
    history = recorded({"updates": [1.0]}) | recorded(
        {"params": [1.0]}, "a/record_norms"
    )
    found = [*drawn(plots.group_norms(history))]
    assert found == ["a/record_norms/params", "record_norms/updates"]


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_a_heat_map_has_colors_for_norms_and_one_for_what_is_not_finite(
    style: str,
) -> None:
    norms = {"blocks/0": [1.0, 0.0, 10.0], "blocks/2": [1.0, NAN, 2.0]}
    norms |= {"blocks/10": [5.0, INF, 1.0], "embed": [1.0, 100.0, 1e3]}
    history = recorded({f"gradients/{name}": x for name, x in norms.items()})
    history["record_norms/forward/blocks/0"] = [1.0, 1.0, 1.0]
    with plt.style.context(style):
        ax = plt.subplots()[1]
    rows = ["gradients/embed", "gradients/*"]
    assert plots.heat_map(history, only=rows, ax=ax) is ax
    colors = cells_of(ax)
    assert rows_of(ax) == ["embed", "blocks/0", "blocks/2", "blocks/10"]
    is_orange = (colors == ORANGE).all(-1)
    assert np.argwhere(is_orange).tolist() == [[2, 1], [3, 1]]
    assert colors[1, 1, 3] == 0  # a norm of 0
    # Large norms differ most from the ground.
    brightness = colors[0, :, :3].sum(1)
    assert (np.diff(brightness) * (-1 if style == "default" else 1) > 0).all()
    bar = ax.figure.axes[1]
    assert bar.get_ylabel() == "norm of gradients"
    assert bar.get_title(loc="left") == "not finite"


@pytest.mark.parametrize("values", [[0.0], [NAN], [1.0], [2.0, 2.0]])
def test_a_heat_map_of_any_norms_is_drawn(values: list[float]) -> None:
    assert cells_of(plots.heat_map(recorded({"w": values}))).shape[1] == len(values)


def test_a_column_of_a_long_run_is_the_largest_of_several_steps() -> None:
    norms = np.ones(5000)
    norms[[1234, 4321]] = 100.0, NAN
    ax = plots.heat_map(recorded({"w": norms}), ax=plt.subplots(figsize=(4, 4))[1])
    colors = cells_of(ax)[0]
    edges = ax.collections[0].get_coordinates()[0, :, 0] + 0.5
    assert (edges[0], edges[-1]) == (0, 5000)
    assert 60 < len(edges) < 120
    of_outlier, of_nan = (np.searchsorted(edges, x, "right") - 1 for x in (1234, 4321))
    assert np.flatnonzero((colors == ORANGE).all(-1)) == [of_nan]
    colors[of_nan] = 1
    assert np.argmin(colors[:, :3].sum(1)) == of_outlier


def run_that_breaks() -> tuple[Any, list[Any]]:
    """Return a state and a history of four steps, of which three are bad.

    Step 1 breaks in the forward pass at blocks/1, step 2 in blocks/0, and step 3 in no
    single group.
    """
    tx = clipjax.record_norms("leaf", keep=8, probes={"blocks": 2})
    one, nan = np.ones(1, np.float32), np.float32([NAN])
    fine, broken = np.float32([[3, 0, 1, 3, 0, 1], [2, 1, 1, 3, 3, 0]])

    def grads(first: Any, second: Any, head: Any) -> Any:
        return {"blocks": {"0": first, "1": second}, "head": head}

    runs = [
        (grads(one, one, one), fine),
        (grads(nan, nan, nan), broken),
        (grads(nan, one, one), fine),
        (grads(nan, nan, one), fine),
    ]
    state, update, history = tx.init(runs[0][0]), jax.jit(tx.update), []
    for each, of_second in runs:
        _, state = update(each, state, taps={"blocks": np.stack([fine, of_second])})
        history.append(clipjax.metrics(state))
    return state, history


def test_a_heat_map_marks_bad_steps_and_the_layer_that_their_text_names() -> None:
    state, history = run_that_breaks()
    bad = clipjax.bad_steps(state)
    prefixed = [
        {f"train/critic/{key}": x for key, x in history[0].items()}
        | {f"train/{key}": x for key, x in row.items()}
        for row in history
    ]
    later = bad[0]._replace(step=9)
    for given, start in ((history, 0), (history[2:], 2), (prefixed, 0)):
        ax = plots.heat_map(given, only="*updates/*", bad=[*bad, later])
        triangles, rings, _ = drawn_at(ax, 3)
        assert {x + start for x, _ in triangles} == {*range(max(1, start), 4)}
        rows = {x + start: rows_of(ax)[int(row)] for x, row in rings}
        layers = {1: "blocks/1", 2: "blocks/0"}  # step 3 broke in no single group
        assert rows.keys() == {x for x in layers if x >= start}
        assert all(row.endswith(layers[x]) for x, row in rows.items())
        assert not any("critic" in row for row in rows.values())
        assert len(rings) == len(rows)


def test_bad_steps_are_a_map_of_what_the_state_remembers() -> None:
    state, _ = run_that_breaks()
    ax = plots.bad_steps(state)
    colors = cells_of(ax)
    groups = ["blocks/0", "blocks/1", "head"]
    probes = [f"{of}/blocks/{i}" for of in ("forward", "backward") for i in (0, 1)]
    assert rows_of(ax) == [*groups, *probes]
    texts = [text.get_text() for text in ax.get_xticklabels()]
    assert texts == ["1: norm nan, 2 more", "2: norm nan", "3: norm nan"]
    is_orange = (colors == ORANGE).all(-1)
    assert is_orange.T[:, :3].tolist() == [
        [True] * 3,
        [True, False, False],
        [True, True, False],
    ]
    assert rows_of(ax)[np.flatnonzero(is_orange[3:5, 0])[0] + 3] == "forward/blocks/1"
    marked = {(x, rows_of(ax)[int(row)]) for x, row in drawn_at(ax, 1)[0]}
    of_first = {(0, f"{of}blocks/1") for of in ("", "forward/", "backward/")}
    of_second = {(1, f"{of}blocks/0") for of in ("", "forward/", "backward/")}
    assert marked == of_first | of_second
    tx = clipjax.record_norms(keep=1)
    state = tx.init(np.ones(1))
    assert not plots.bad_steps(state).collections
    _, state = jax.jit(tx.update)(np.float32([NAN]), state)
    with pytest.raises(ValueError, match=r"opt_state: .* one norm for all leaves"):
        plots.bad_steps(state)


def test_bad_steps_of_several_recorders_keep_their_names() -> None:
    tx = clipjax.record_norms("leaf", keep=2)
    state, one = {}, jnp.ones(1)
    for name, broken in {"critic": "a", "generator": "b"}.items():
        grads = {"a": one, "b": one} | {broken: jnp.array([NAN])}
        own = clipjax.named(name, tx)
        _, state[name] = jax.jit(own.update)(grads, own.init(grads))
    ax = plots.bad_steps(state)
    recorders = [f"{name}/record_norms" for name in state]
    texts = [text.get_text() for text in ax.get_xticklabels()]
    assert texts == [f"{recorder}, 0: norm nan" for recorder in recorders]
    assert rows_of(ax) == [f"{recorder}/{x}" for recorder in recorders for x in "ab"]
    assert drawn_at(ax, 1)[0] == [(0, 0), (1, 3)]


@pytest.mark.parametrize("width", [4, 8])
def test_the_legend_is_below_the_data(width: int) -> None:
    norms = {f"updates/layer_{i}/kernel": [1.0, 2.0] for i in range(8)}
    ax = plt.subplots(figsize=(width, 4), layout="constrained")[1]
    plots.group_norms(recorded(norms), ax=ax)
    ax.figure.canvas.draw()
    legend, label = ax.legend_.get_window_extent(), ax.xaxis.label.get_window_extent()
    assert 0 <= legend.y0 < legend.y1 <= label.y0
    assert legend.x1 <= ax.figure.bbox.x1
    assert ax.get_window_extent().height > 100


def test_text_and_marks_are_light_in_a_dark_figure() -> None:
    """As the axes are, which may be older than the style that is used now."""
    with plt.style.context("dark_background"):
        axes = plt.subplots(1, 2, layout="constrained")[1]
    plots.norms(history_of("a", norm=[1.0, NAN]), ax=axes[0])
    norms = {f"updates/{i}": [1.0, 2.0] for i in range(10)}
    plots.group_norms(recorded(norms), ax=axes[1])
    for ax in axes:
        for text in [ax.legend_.get_title(), *ax.legend_.get_texts()]:
            assert rgba(text.get_color()) == (1, 1, 1, 1)
        assert (0, 0, 0, 1) not in {rgba(line.get_color()) for line in ax.lines}


def test_what_is_on_the_axes_stays_in_the_picture() -> None:
    ax = plt.subplots()[1]
    ax.axvspan(0, 1, label="warm-up")
    plots.norms(history_of("a", norm=[1.0, 2.0, 3.0]), ax=ax)
    plots.norms(history_of("a", norm=[10.0, 9.0, 8.0]), ax=ax)
    assert ax.get_ylim()[0] <= 1
    assert ax.get_ylim()[1] >= 10
    plots.norms(history_of("a", norm=[0.1, 2.0]), ax=ax)
    assert ax.get_yscale() == "log"
    assert legend_of(ax) == ["warm-up", "norm"]


def test_what_cannot_be_drawn_is_an_error() -> None:
    one_step = {"zclip/norm": jnp.ones(()), "zclip/steps": jnp.ones((), int)}
    for draw in (plots.norms, plots.group_norms, plots.heat_map):
        with pytest.raises(TypeError, match=r"history.* must .* pass the list of what"):
            draw(one_step)
        with pytest.raises(ValueError, match=r"history must .* at least one step"):
            draw([])
    for draw in (plots.group_norms, plots.heat_map):
        with pytest.raises(TypeError, match=r"history must have the norms of groups"):
            draw([one_step])
    with pytest.raises(TypeError, match=r"ax must be one of Matplotlib's .* got 3"):
        plots.norms([one_step], ax=3)
    state, history = run_that_breaks()
    for bad in (state, clipjax.bad_steps(state)[0]):
        with pytest.raises(TypeError, match=r"bad must .* bad=clipjax.bad_steps\("):
            plots.heat_map(history, bad=bad)
    assert not plt.get_fignums()
