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
_cells = pytest.importorskip("clipjax.plots._cells")
NAN, INF = np.nan, np.inf


def drawn(ax: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Return what is visible, x and y by label, after it was drawn; and close the
    figure.
    """
    ax.figure.canvas.draw()
    plt.close(ax.figure)
    pairs = {line.get_label(): np.array(line.get_data(), float) for line in ax.lines}
    return {
        label: tuple(map(list, xy[:, np.isfinite(xy[1])]))
        for label, xy in pairs.items()
    }


def test_norms_show_what_was_clipped_and_what_is_not() -> None:
    norms = [0.5, 4.0, NAN, 2.0, 0.25, INF]
    history = {"clip/norm": norms, "clip/threshold": [1.0] * 6}
    ax = plots.norms(history)
    found = drawn(ax)
    assert found["norm"] == ([0, 1, 3, 4], [0.5, 4.0, 2.0, 0.25])
    assert found["clipped (50%)"] == ([1, 3], [4.0, 2.0])
    assert found["threshold 1"] == ([0, 1, 2, 3, 4, 5], [1.0] * 6)
    assert found["not finite"][0] == [2, 5]
    labels = (ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale())
    assert labels == ("step", "norm of the gradient", "linear")
    assert [text.get_text() for text in ax.legend_.get_texts()] == list(found)
    history |= {"clip/threshold": [INF, INF, 3, 3, 3, 4]}
    history |= {"clip/scale": [0.5, 1, NAN, 1, 1, 0]}
    found = drawn(plots.norms(history))
    assert found["clipped (25%)"] == ([0], [0.5])
    assert found["threshold"][0] == [2, 3, 4, 5]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_norms_show_a_whole_run_from_its_metrics(accumulate: int) -> None:
    """A fixed threshold is told by what it clipped; a skip shows the norm that came."""
    clip = clipjax.clip_by_global_norm(2.0)
    tx = clipjax.bounded(optax.sgd(1.0), clip=clip, accumulate=accumulate)
    tx = clipjax.skip_spikes(tx, z_threshold=INF, max_norm=100.0)
    norms = jnp.array([1.0, 1.1, 1.0, 3.0, NAN, 1.2, 500.0, 1.3, 1.1])

    def step(state: Any, norm: jax.Array) -> Any:
        state = tx.update(norm[None], state, jnp.zeros(1))[1]
        return state, clipjax.metrics(state)

    history = jax.lax.scan(step, tx.init(jnp.zeros(1)), norms)[1]
    found = drawn(plots.norms(history))
    taken = [0, 1, 2, 3, 5, 7, 8] if accumulate == 1 else [1, 3, 7]
    assert found["norm"][0] == sorted([*taken, 6])
    assert found["skipped (22.2%)"] == ([6], [500.0])
    assert found["not finite"][0] == [4]
    if accumulate == 1:
        assert found["clipped (14.3%)"] == ([3], [3.0])
        assert found["threshold 2"][0] == taken
    of_skip = drawn(plots.norms(history, "skip_spikes"))
    assert of_skip["norm"][0] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert not any("clipped" in label for label in of_skip)


def test_a_layer_called_norm_is_none_of_a_clip() -> None:
    history = {
        "record_norms/updates/norm": [5.0, 6.0],
        "record_norms/updates/w": [7.0, 8.0],
        "zclip/norm": [1.0, 2.0],
        "zclip/threshold": [9.0, 9.0],
    }
    assert drawn(plots.norms(history))["norm"][1] == [1, 2]


def test_a_step_that_was_skipped_before_a_history_is_not_drawn() -> None:
    history = {
        "skip_nonfinite/norm": [1.0, 2.0, INF],
        "skip_nonfinite/skipped": [5, 5, 6],
        "skip_nonfinite/skipped_last": [0.0, 0.0, 1.0],
        "clip_by_global_norm/norm": [1.0, 2.0, 2.0],
    }
    labels = list(drawn(plots.norms(history)))
    assert "skipped (33.3%)" in labels


def test_the_skips_of_another_optimizer_are_not_drawn() -> None:
    def part(name: str) -> Any:
        clip = clipjax.clip_by_global_norm(1.0)
        tx = clipjax.bounded(optax.sgd(0.1), clip=clip, nonfinite="skip")
        return clipjax.named(name, tx)

    parts, w, history = {"gen": part("gen"), "critic": part("critic")}, jnp.ones(1), []
    states = {name: tx.init(w) for name, tx in parts.items()}
    updates = {name: jax.jit(tx.update) for name, tx in parts.items()}
    for i in range(4):
        for name, size in (("gen", NAN if i == 2 else 50.0), ("critic", 0.5)):
            _, states[name] = updates[name](size * w, states[name], w)
        history.append(clipjax.metrics(states))
    critic = drawn(plots.norms(history, "critic/clip_by_global_norm"))
    assert critic["norm"] == ([0, 1, 2, 3], [0.5] * 4)
    assert not any(label.startswith("skipped") for label in critic)
    gen = drawn(plots.norms(history, "gen/clip_by_global_norm"))
    assert "skipped (25%)" in gen


def test_what_is_measured_outside_of_a_skip_is_drawn_at_a_skipped_step() -> None:
    history = {
        "record_norms/params/w": [1.0, 1.0, 2.0],
        "record_norms/steps": [1, 2, 3],
        "skip_nonfinite/norm": [5.0, 500.0, 6.0],
        "skip_nonfinite/skipped": [0, 1, 1],
    }
    ax = plots.norms(history, "record_norms/params/w")
    assert ax.get_ylabel() == "norm of the weights"
    assert drawn(ax)["norm"] == ([0, 1, 2], [1, 1, 2])


def test_the_norm_of_a_clip_of_groups_is_drawn_without_a_threshold() -> None:
    tx = clipjax.clip_by_group_norm({"a": 1.0, "*": 2.0})
    grads = {"a": jnp.ones(2), "b": jnp.ones(3)}
    _, state = tx.update(grads, tx.init(grads))
    found = drawn(plots.norms([clipjax.metrics(state)]))
    assert found.keys() == {"norm", "clipped (100%)"}
    np.testing.assert_allclose(found["norm"][1], 3**0.5, rtol=1e-6)


def test_a_skipped_step_has_no_norm_of_a_group() -> None:
    clip = clipjax.clip_by_group_norm({"a": 9.0, "b": 9.0})
    tx = clipjax.bounded(optax.sgd(0.1), clip=clip, nonfinite="skip")
    params, history = {"a": jnp.ones(1), "b": jnp.ones(1)}, []
    state, update = tx.init(params), jax.jit(tx.update)
    for size in (3.0, NAN, 4.0):
        _, state = update({"a": 2 * params["a"], "b": jnp.full(1, size)}, state, params)
        history.append(clipjax.metrics(state))
    for name in ("clip_by_group_norm/b/norm", "clip_by_group_norm/norm_after"):
        assert drawn(plots.norms(history, name))["norm"][0] == [0, 2], name
    # A module may be called "norm".
    inside = {
        "record_norms/updates/norm": [1.0, 1.0, 2.0],
        "record_norms/steps": [1, 1, 2],
    }
    skip = {
        "skip_nonfinite/norm": [5.0, 500.0, 6.0],
        "skip_nonfinite/skipped": [0, 1, 1],
    }
    found = drawn(plots.norms(inside | skip, "record_norms/updates/norm"))
    assert found["norm"] == ([0, 2], [1, 2])
    assert drawn(plots.norms(history, "clip_by_group_norm"))["not finite"][0] == [1]


def test_a_history_may_begin_with_a_skipped_step() -> None:
    clip = clipjax.clip_by_global_norm(1.0)
    tx = clipjax.bounded(optax.sgd(0.1), clip=clip, nonfinite="skip")
    w, history = jnp.ones(1), []
    state, update = tx.init(w), jax.jit(tx.update)
    for size in (1.0, NAN, 0.5):
        _, state = update(size * w, state, w)
        history.append(clipjax.metrics(state))
    found = drawn(plots.norms(history[1:], "clip_by_global_norm"))
    assert found["norm"] == ([1], [0.5])
    assert found["not finite"][0] == [0]


def test_several_norms_need_a_name() -> None:
    history = {"a/norm": [1.0], "b/norm": [2.0], "record_norms/updates/c": [3.0]}
    with pytest.raises(ValueError, match=r"name must say .* of a/norm, b/norm"):
        plots.norms(history)
    for name, norm in {"a": 1, "b/norm": 2, "record_norms/updates/c": 3}.items():
        assert drawn(plots.norms(history, name))["norm"] == ([0], [norm])


def test_entries_of_a_user_are_no_skips_and_parts_of_metrics_are_drawn() -> None:
    history = {"clip/norm": [1.0, 3.0], "data/skipped": [0, 4], "loss": [2.0, 1.0]}
    for more in ({}, {"clip/norm_after": [1.0, 2.0]}):
        found = drawn(plots.norms(history | more))
        assert found == {"norm": ([0, 1], [1.0, 3.0])}


@pytest.mark.parametrize("values", [[1e308, 1], [5e-324, 1], [1.7e308], [0, 1e308]])
def test_norms_at_the_ends_of_float64_are_drawn(values: list[float]) -> None:
    history = {"norm": values}
    assert len(drawn(plots.norms(history))["norm"][0]) == len(values)
    assert len(drawn(plots.group_norms(history))["norm"][0]) == len(values)


@pytest.mark.parametrize(
    ("values", "bound", "scale"),
    [
        ([1, 30], 1, "log"),
        ([1, 30, 0], 1, "symlog"),
        ([1, 30], 0, "symlog"),
        ([2], 0, "linear"),
        ([0, 0], 0, "linear"),
    ],
)
def test_the_scale_is_logarithmic_where_values_vary_and_shows_zeros(
    values: Any, bound: Any, scale: str
) -> None:
    ax = plots.norms({"a/norm": values, "a/threshold": [bound] * len(values)})
    drawn(ax)
    assert ax.get_yscale() == scale
    assert ax.get_ylim()[0] <= min([bound, *values])
    # A dot where there is no line.
    assert ax.lines[0].get_markevery() == ([0] if values == [2] else None)


def test_groups_are_lines_from_metrics_however_they_come() -> None:
    names = ("layer_1", "layer_2", "layer_10", "steps")
    params = {name: jnp.ones(2) for name in names}
    tx = clipjax.record_norms("leaf")

    def step(state: Any, size: Any) -> Any:
        state = tx.update(jax.tree.map(lambda x: x * size, params), state)[1]
        return state, clipjax.metrics(state)

    stacked = jax.lax.scan(step, tx.init(params), jnp.array([1.0, 2.0, NAN]))[1]
    for history in (
        stacked,
        [{key: x[i] for key, x in stacked.items()} for i in range(3)],
    ):
        found = drawn(plots.group_norms(history))
        assert list(found) == [
            "updates/layer_1",
            "updates/layer_2",
            "updates/layer_10",
            "updates/steps",
            "not finite",
        ]
        np.testing.assert_allclose(
            found["updates/layer_10"], [[0, 1], [2**0.5, 8**0.5]], rtol=1e-6
        )
    waits = {
        "record_norms/steps": [0, 0, 1, 1, 2],
        "record_norms/updates": [0.0, 0.0, 3.0, 3.0, 3.0],
    }
    assert drawn(plots.group_norms(waits)) == {"updates": ([0, 1], [3, 3])}
    clip = clipjax.clip_by_group_norm({"layer_1": 1.0, "layer_*": 2.0})
    state = clip.update(params, clip.init(params))[1]
    clips = drawn(plots.group_norms([clipjax.metrics(state)]))
    assert {name: round(y[0], 3) for name, (_, y) in clips.items()} == {
        "layer_*": 2.0,
        "layer_1": 1.414,
    }


def test_of_many_groups_the_largest_are_colored_and_patterns_choose() -> None:
    few = plots.group_norms({f"g{i}": [1.0, 2.0] for i in range(8)})
    assert len({line.get_color() for line in few.lines}) == 8
    drawn(few)
    many = plots.group_norms({f"g{i}": [1.0, i, NAN] for i in range(200)})
    assert [line.get_ydata()[1] for line in many.lines[:200]] == list(range(200))
    assert [text.get_text() for text in many.legend_.get_texts()] == [
        f"g{i}" for i in range(192, 200)
    ] + ["not finite"]
    assert many.legend_.get_title().get_text() == "the 8 largest of 200 groups"
    assert len({line.get_color() for line in many.lines[:192]}) == 1
    drawn(many)
    both = {
        f"record_norms/{of}/blocks/{i}": [1.0]
        for of in ("gradients", "params")
        for i in range(3)
    }
    assert list(drawn(plots.group_norms(both, only="gradients/*"))) == [
        f"gradients/blocks/{i}" for i in range(3)
    ]
    assert list(drawn(plots.group_norms(both, only=["blocks/1"]))) == [
        "gradients/blocks/1",
        "params/blocks/1",
    ]
    styles = {
        line.get_label().partition("/")[0]: line.get_linestyle()
        for line in plots.group_norms(both).lines
    }
    assert styles == {"gradients": "-", "params": "--"}
    plt.close("all")
    with pytest.raises(
        ValueError, match=r"only: 'heads' matches none of .*gradients/blocks/0"
    ):
        plots.group_norms(both, only="heads")


def test_probes_and_ratios_have_styles_and_each_kind_has_colors() -> None:
    """Activations are far larger than gradients, which stay in color beside them."""
    sizes = {"updates": 1.0, "params": 5.0, "ratio": 1e-3, "forward": 100.0}
    history = {
        f"record_norms/{of}/blocks/{i}": [size * (i + 1), size, size]
        for of, size in sizes.items()
        for i in range(4)
    }
    # The second `update` got no taps.
    history["record_norms/backward/blocks/0"] = [2.0, 0.0, NAN]
    for i in range(4):
        history[f"record_norms/forward/blocks/{i}"][1] = 0.0
    ax = plots.group_norms(history)
    colored = {line.get_label(): line for line in ax.lines}
    styles = {
        kind: colored[f"{kind}/blocks/3"].get_linestyle()
        for kind in ("updates", "params", "forward", "ratio")
    }
    assert styles == {"updates": "-", "params": "--", "forward": ":", "ratio": "--"}
    assert colored["backward/blocks/0"].get_linestyle() == "-."
    assert ax.get_ylabel() == "norm, or ratio of two norms, log scale"
    title = ax.legend_.get_title().get_text()
    assert title == "the 8 largest of 17 groups, by kind"
    found = drawn(ax)
    assert found["forward/blocks/3"] == ([0, 2], [400, 100])
    assert found["backward/blocks/0"] == ([0], [2])
    assert found["updates/blocks/3"] == ([0, 1, 2], [4, 1, 1])
    assert found["not finite"][0] == [2]
    for kind, label in {
        "forward": "norm of the activations",
        "ratio": "norm of the update / norm of the weights",
    }.items():
        alone = plots.group_norms(history, only=f"{kind}/*")
        assert alone.get_ylabel() == label
        assert {line.get_linestyle() for line in alone.lines} == {"-"}
        assert len(drawn(alone)) == 4


def test_what_is_before_the_names_of_a_history_is_left_out() -> None:
    """But what is before a second recorder tells the two apart."""
    for before in ("", "train/", "critic/"):
        first = {f"{before}record_norms/updates/{i}": [2.0, 1.0] for i in range(2)}
        second = {f"{before}record_norms_1/forward/{i}": [0.0, 1.0] for i in range(2)}
        for history, names in (
            (first, ["updates/0", "updates/1"]),
            (second, ["forward/0", "forward/1"]),
            (first | second, [f"{before}record_norms_1/forward/1"]),
        ):
            found = drawn(plots.group_norms(history))
            assert {*names} <= {*found}
            assert len(found) == len(history)
            kinds = [np.size(x) for name, (x, _) in found.items() if "forward" in name]
            assert kinds == [1] * len(kinds)
        rows = cells_of(plots.heat_map(first))[1]
        assert rows == ["0", "1"]


def cells_of(ax: Any) -> tuple[Any, list[str]]:
    """Return the colors of the cells of a heat map, by row, and the rows' names."""
    ax.figure.canvas.draw()
    mesh = ax.collections[0]
    colors = mesh.to_rgba(mesh.get_array())
    return colors, [text.get_text() for text in ax.get_yticklabels()]


def test_a_heat_map_has_a_row_for_each_group_and_a_color_for_what_is_not_finite() -> (
    None
):
    names = ["blocks/0", "blocks/2", "blocks/10", "embed"]
    norms = [[1.0, 0.0, 10.0], [1.0, NAN, 2.0], [5.0, INF, 1.0], [1.0, 100.0, 1e3]]
    history = {
        f"record_norms/gradients/{name}": each
        for name, each in zip(names, norms, strict=True)
    }
    history["record_norms/forward/blocks/0"] = [1.0, 1.0, 1.0]
    ax = plt.subplots()[1]
    rows = ["gradients/embed", "gradients/*"]
    assert plots.heat_map(history, only=rows, ax=ax) is ax
    colors, labels = cells_of(ax)
    assert labels == ["embed", "blocks/0", "blocks/2", "blocks/10"]
    assert ax.get_ylim() == (3.5, -0.5)
    mesh = ax.collections[0]
    not_finite = mesh.cmap.get_over()
    np.testing.assert_array_equal(colors[[2, 3], 1], [not_finite, not_finite])
    assert sum((colors == not_finite).all(-1).ravel()) == 2
    assert colors[1, 1, 3] == 0  # a norm of 0
    # A larger norm is darker, on a light ground.
    brightness = colors[0, :, :3].sum(1)
    assert (np.diff(brightness) < 0).all()
    assert mesh.norm.vmax == 1e3
    bar = ax.figure.axes[1]
    assert bar.get_ylabel() == "norm of gradients"
    assert bar.get_title(loc="left") == "not finite"
    plt.close(ax.figure)
    _, labels = cells_of(plots.heat_map(history))
    assert labels[:2] == ["forward/blocks/0", "gradients/blocks/0"]
    with plt.style.context("dark_background"):
        colors, _ = cells_of(plots.heat_map(history, only="gradients/embed"))
    assert (np.diff(colors[0, :, :3].sum(1)) > 0).all()
    plt.close("all")


@pytest.mark.parametrize("values", [[0.0], [NAN], [1.0], [1e308, 5e-324], [2.0, 2.0]])
def test_a_heat_map_of_any_norms_is_drawn(values: list[float]) -> None:
    ax = plots.heat_map({"w": values})
    colors, labels = cells_of(ax)
    assert (labels, colors.shape) == (["w"], (1, len(values), 4))
    plt.close(ax.figure)


def test_a_column_of_a_long_run_is_the_largest_of_several_steps() -> None:
    norms = np.ones(5000)
    norms[[1234, 4321]] = 100.0, NAN
    ax = plots.heat_map({"w": norms}, ax=plt.subplots(figsize=(4, 4))[1])
    colors, _ = cells_of(ax)
    edges = ax.collections[0].get_coordinates()[0, :, 0] + 0.5
    assert (edges[0], edges[-1]) == (0, 5000)
    # Of the same width, but for the last.
    assert len({*np.diff(edges)[:-1]}) == 1
    assert 60 < len(edges) < 120
    of_nan, of_outlier = (np.searchsorted(edges, x, "right") - 1 for x in (4321, 1234))
    not_finite = ax.collections[0].cmap.get_over()
    assert np.flatnonzero((colors[0] == not_finite).all(-1)) == [of_nan]
    colors[0, of_nan] = 1
    assert np.argmin(colors[0, :, :3].sum(1)) == of_outlier
    assert ax.get_xlim() == (-0.5, 4999.5)
    plt.close(ax.figure)


def test_a_heat_map_marks_bad_steps_and_the_layer_that_their_text_names() -> None:
    tx = clipjax.record_norms("leaf", keep=8, probes={"blocks": 2})
    layers = {"0": np.ones(1, np.float32), "1": np.ones(1, np.float32)}
    grads = {"blocks": layers, "head": np.ones(1, np.float32)}
    fine, broken = np.float32([[3, 0, 1, 3, 0, 1], [2, 1, 1, 3, 3, 0]])
    update = jax.jit(tx.update)
    state, history = tx.init(grads), []
    nan = np.float32([NAN])
    runs = [
        (grads, fine),
        ({"blocks": {"0": nan, "1": nan}, "head": nan}, broken),
        ({"blocks": {"0": nan, "1": layers["1"]}, "head": grads["head"]}, fine),
        ({"blocks": {"0": nan, "1": nan}, "head": grads["head"]}, fine),
    ]
    for each, of_second in runs:
        taps = {"blocks": np.stack([fine, of_second])}
        _, state = update(each, state, taps=taps)
        history.append(clipjax.metrics(state))
    bad = clipjax.bad_steps(state)
    outlier = bad[0]._replace(
        step=0,
        norm=5.0,
        threshold=3.0,
        groups={"blocks/0": 3.0, "head": 4.0},
        forward={},
        backward={},
    )
    of_loss = outlier._replace(step=1, norm=1.0, threshold=2.0, loss=INF)
    later = bad[0]._replace(step=9)
    ax = plots.heat_map(history, only="updates/*", bad=[outlier, of_loss, *bad, later])
    _, labels = cells_of(ax)
    assert labels == ["blocks/0", "blocks/1", "head"]
    triangles, rings, _ = ax.lines
    assert list(triangles.get_xdata()) == [0, 1, 1, 2, 3]
    # Step 3 broke in the backward pass, in no single group.
    assert sorted(zip(*rings.get_data(), strict=True)) == [(0, 2), (1, 1), (2, 0)]
    plt.close(ax.figure)
    # A history may begin in the middle of a run.
    ax = plots.heat_map(history[2:], only="updates/*", bad=bad)
    assert list(ax.lines[0].get_xdata()) == [0, 1]
    plt.close(ax.figure)
    # Of a layer that probes tell, the row of the pass is marked, too.
    ax = plots.heat_map(history, bad=bad[:1])
    rows = [cells_of(ax)[1][int(row)] for row in ax.lines[1].get_ydata()]
    assert rows == ["forward/blocks/1", "updates/blocks/1"]
    plt.close(ax.figure)
    # So is a step that one of several recorders has kept, at its own counter.
    two = [
        {f"in/{key}": x for key, x in history[0].items()}
        | {f"out/{key}": x for key, x in row.items()}
        for row in history
    ]
    of_out = [x._replace(recorder="out/record_norms") for x in bad]
    ax = plots.heat_map(two, only=["in/*/updates/*", "out/*/updates/*"], bad=of_out)
    triangles, rings, _ = ax.lines
    assert list(triangles.get_xdata()) == [1, 2, 3]
    names = [cells_of(ax)[1][int(row)] for row in rings.get_ydata()]
    assert names == [f"out/record_norms/updates/blocks/{i}" for i in (1, 0)]
    plt.close(ax.figure)
    # Behind a prefix, the recorder with the fewest names is the one without a name.
    more = [
        {f"train/critic/{key}": x for key, x in history[0].items()}
        | {f"train/{key}": x for key, x in row.items()}
        for row in history
    ]
    ax = plots.heat_map(more, bad=bad)
    assert list(ax.lines[0].get_xdata()) == [1, 2, 3]
    plt.close(ax.figure)
    alone = plots.heat_map(history, only="updates/head", bad=bad)
    assert len(alone.lines[1].get_xdata()) == 0
    plt.close(alone.figure)


def test_units_are_sorted_and_those_at_the_bound_are_counted() -> None:
    rng, dtypes = np.random.default_rng(0), {"a": np.float32, "b": np.float16}
    params = {
        name: jnp.asarray(rng.standard_normal((4, 50)), dtype)
        for name, dtype in dtypes.items()
    }
    ax = plt.subplots()[1]
    projected = clipjax.max_norm(1.5).apply(params)
    assert plots.unit_norms(projected, radius=1.5, ax=ax) is ax
    found = drawn(ax)
    for name, x in params.items():
        exact = np.sort(np.linalg.norm(np.asarray(x, np.float64), axis=0))
        share, norms = found[f"{name}: {np.mean(exact > 1.5):.0%} at the radius"]
        np.testing.assert_allclose(share, np.arange(1, 100, 2))
        # In 16 bits each entry is rounded once more, and the margin of a bound is as
        # large.
        np.testing.assert_allclose(
            norms, np.minimum(exact, 1.5), rtol=1e-5 if name == "a" else 2.0**-10
        )
    assert found["radius 1.5"][1] == [1.5, 1.5]
    assert list(drawn(plots.unit_norms({"w": jnp.zeros((2, 3))}, radius=0))) == [
        "w: 100% at the radius",
        "radius 0",
    ]
    assert list(drawn(plots.unit_norms(params, axes={"a": 1}))) == ["a"]
    hidden = plots.unit_norms({"_w": jnp.ones((2, 3))})  # as Matplotlib would hide it
    assert [text.get_text() for text in hidden.legend_.get_texts()] == [" _w"]
    of_one_name = {"a/b": jnp.ones((4, 3)), "a": {"b": 2 * jnp.ones((4, 3))}}
    found = drawn(plots.unit_norms(of_one_name))
    assert sorted(norms[0] for _, norms in found.values()) == [2.0, 4.0]


def test_bad_steps_are_bars_of_their_groups() -> None:
    tx = clipjax.record_norms("leaf", keep=4)
    grads = {f"layer_{i}": np.float32([i]) for i in range(12)}
    state, update = tx.init(grads), jax.jit(tx.update)
    assert drawn(plots.bad_steps(state)) == {}
    for bad in ({"layer_2": NAN, "layer_10": INF}, {"layer_3": NAN}, {}):
        step = grads | {name: np.float32([x]) for name, x in bad.items()}
        _, state = update(step, state, loss=np.float32(0 if bad else INF))
    ax = plots.bad_steps(state)
    ax.figure.canvas.draw()
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels == ["0: norm nan", "1: norm nan", "2: loss inf"]
    legend = [text.get_text() for text in ax.legend_.get_texts()]
    groups = [f"layer_{i}" for i in (2, 3, 6, 7, 8, 9, 10, 11)]
    assert legend == [*groups, "not finite"]
    assert ax.legend_.get_title().get_text() == "8 of 12 groups"
    widths = np.reshape([bar.get_width() for bar in ax.patches], (3, 9))
    np.testing.assert_allclose(widths[0], [50, 0, 0, 0, 0, 0, 50, 0, 0], atol=1e-9)
    np.testing.assert_allclose(widths[1], [0, 100, 0, 0, 0, 0, 0, 0, 0], atol=1e-9)
    squares = np.array([2, 3, 6, 7, 8, 9, 10, 11]) ** 2
    others = 1 + 4**2 + 5**2
    shares = 100 * np.array([*squares, others]) / (squares.sum() + others)
    np.testing.assert_allclose(widths[2], shares, rtol=1e-6)
    plt.close(ax.figure)
    each_and_all = optax.chain(tx, clipjax.record_norms(["layer_9", "*"], keep=1))
    state = each_and_all.init(grads)
    _, state = jax.jit(each_and_all.update)(step, state, loss=np.float32(INF))
    ax = plots.bad_steps(state)
    assert {"layer_9", "*"} <= {text.get_text() for text in ax.legend_.get_texts()}
    widths = np.reshape([bar.get_width() for bar in ax.patches], (2, -1))
    np.testing.assert_allclose(widths.sum(1), 100)
    plt.close(ax.figure)
    whole = clipjax.record_norms(keep=1)
    _, state = jax.jit(whole.update)(np.float32([NAN]), whole.init(np.ones(1)))
    with pytest.raises(ValueError, match=r"opt_state: .* one norm for all leaves"):
        plots.bad_steps(state)


def with_probes() -> Any:
    """Return a state with three bad steps: without taps, and broken in each pass."""
    tx = clipjax.record_norms("leaf", keep=4, probes={"blocks": 2})
    grads = {"body": np.float32([NAN]), "head": np.float32([NAN])}
    fine, forward = np.float32([[3, 0, 1, 3, 0, 1], [2, 1, 1, 3, 3, 0]])
    backward = np.float32([3, 0, 1, 3, 1, 1])
    state = tx.init(grads)
    for taps in (None, [fine, forward], [backward, fine]):
        given = {} if taps is None else {"taps": {"blocks": np.stack(taps)}}
        _, state = jax.jit(tx.update)(grads, state, **given)
        grads = {"body": np.float32([NAN]), "head": np.float32([1.0])}
    return state


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_norms_of_probes_are_beside_the_bars_and_a_star_is_where_a_step_broke(
    is_by_hand: bool,
) -> None:
    own = plt.figure().add_axes((0.1, 0.1, 0.8, 0.8)) if is_by_hand else None
    ax = plots.bad_steps(with_probes(), ax=own)
    assert own in (None, ax)
    beside = next(other for other in ax.figure.axes if other is not ax)
    ax.figure.canvas.draw()
    ours, theirs = ax.get_window_extent(), beside.get_window_extent()
    assert ours.x1 < theirs.x0
    assert abs(ours.width - theirs.width) < 2
    names = [text.get_text() for text in beside.get_xticklabels()]
    assert names == ["blocks/0", "blocks/1", "blocks/1", "blocks/0"]  # in time
    of_time = dict(zip(beside.get_xticks(), ("f0", "f1", "b1", "b0"), strict=True))
    cells = {
        (row, of_time[cell.get_x() + 0.5]): bool(cell.get_hatch())
        for cell in beside.patches
        for row in [round(cell.get_y() + cell.get_height() / 2)]
    }
    bad = {key for key, is_bad in cells.items() if is_bad}
    assert len(cells) == 8  # the first step got no taps
    assert bad == {(1, "f1"), (1, "b1"), (2, "b0")}
    (star,) = beside.lines
    stars = star.get_xydata().tolist()
    assert [(row, of_time[x]) for x, row in stars] == [(1, "f1"), (2, "b0")]
    words = [text.get_text() for text in beside.texts]
    assert "first in the forward pass, at blocks/1" in words
    assert "in the backward pass, at blocks/0" in words
    legend = [text.get_text() for text in ax.legend_.get_texts()]
    assert legend == ["body", "head", "not finite", "where it broke"]
    plt.close(ax.figure)


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_larger_norms_of_probes_differ_more_from_the_ground(style: str) -> None:
    with plt.style.context(style):
        ax = plt.subplots()[1]
    values = np.array([[1e-3, 1.0], [1e3, 1.0], [0.0, INF]])
    light = _cells.shades(ax, values)[..., :3].mean(-1)
    light = light if style == "dark_background" else -light
    assert light[0, 0] < light[0, 1] == light[1, 1] < light[1, 0]
    assert light[2, 0] == light[0, 0]
    assert np.isfinite(_cells.shades(ax, np.array([0.0, NAN]))).all()
    plt.close(ax.figure)


def texts_at_top(ax: Any) -> dict[float, str]:
    """Return what is written at crosses, by x."""
    texts = {text.xy[0]: text.get_text().partition(": ") for text in ax.texts}
    assert {x: float(step) for x, (step, *_) in texts.items()} == {x: x for x in texts}
    return {x: text for x, (*_, text) in texts.items()}


def test_crosses_say_which_groups_are_not_finite() -> None:
    names = [f"blocks/{i}" for i in range(12)] + ["head"]
    sizes = {name: np.ones(8) for name in names}
    bad = {1: ["head"], 2: names, 3: names[8:11], 4: ["head"], 5: [names[1], "head"]}
    bad[6] = names[::2]
    for step, broken in bad.items():
        for name in broken:
            sizes[name][step] = NAN
    history = {f"record_norms/gradients/{name}": x for name, x in sizes.items()}
    ax = plots.group_norms(history)
    assert texts_at_top(ax) == {
        1: "gradients/head",
        2: "all groups",
        3: "gradients/blocks/8 to 10",
    }
    rows = [text.xy[1] for text in ax.texts]
    norms = ax.transLimits.transform(ax.transScale.transform((0, 1.0)))[1]
    assert norms < min(rows) < max(rows) < 1
    drawn(ax)
    history["clip/norm"] = np.where(
        [*range(8)] == np.r_[0, 9, 2, 3, 9, 9, 9, 9], 1, NAN
    )
    history["clip/threshold"] = np.ones(8)
    ax = plots.norms(history, "clip")
    assert texts_at_top(ax) == {  # where this norm is not finite
        1: "gradients/head",
        5: "gradients/blocks/1, gradients/head",
        6: "gradients/blocks/0 and 6 more",
    }
    drawn(ax)
    alone = plots.group_norms({"a": [1.0, NAN]})
    assert not alone.texts
    drawn(alone)


def test_crosses_say_what_broke_first() -> None:
    history = {
        "record_norms/gradients/head": [1.0, NAN, NAN, NAN],
        "record_norms/gradients/body": [1.0, NAN, NAN, NAN],
        "record_norms/forward/0": [1.0, 1.0, 1.0, 1.0],
        "record_norms/forward/1": [1.0, INF, 1.0, 1.0],
        "record_norms/backward/0": [1.0, INF, INF, INF],
        "record_norms/backward/1": [1.0, INF, 1.0, INF],
    }
    ax = plots.group_norms(history)
    assert texts_at_top(ax) == {
        1: "forward/1",
        2: "backward/0",
        3: "all of the backward pass",
    }
    drawn(ax)


def test_what_did_not_happen_is_not_in_the_legend() -> None:
    skip = {"skip/norm": [1.0] * 3000, "skip/skipped": np.zeros(3000)}
    assert list(drawn(plots.norms(skip))) == ["norm"]
    skip["skip/skipped"][7:] = 1  # few are not none
    assert list(drawn(plots.norms(skip))) == ["norm", "skipped (0.0333%)"]


def test_axes_say_what_they_show() -> None:
    norms = [1.0, 100.0]
    for name, label in {
        "clip/norm": "norm of the gradient",
        "record_norms/params": "norm of the weights",
        "record_norms/forward/0": "norm of the activations",
        "record_norms/ratio": "norm of the update / norm of the weights",
    }.items():
        ax = plots.norms({name: norms})
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", f"{label}, log scale")
        plots.norms({name: norms}, ax=ax)
        assert ax.get_ylabel() == f"{label}, log scale"  # once
        plt.close(ax.figure)


@pytest.mark.parametrize("width", [4, 8])
def test_the_legend_is_off_the_data(width: int) -> None:
    ax = plt.subplots(figsize=(width, 4), layout="constrained")[1]
    plots.group_norms({f"layer_{i}/kernel": [1.0, 2.0] for i in range(8)}, ax=ax)
    ax.figure.canvas.draw()
    legend, label = ax.legend_.get_window_extent(), ax.xaxis.label.get_window_extent()
    if width == 8:
        assert legend.x0 >= ax.get_window_extent().x1
    else:
        assert legend.y1 <= label.y0
    assert legend.x1 <= ax.figure.bbox.x1
    assert legend.y0 >= 0
    assert ax.get_window_extent().height > 100
    plt.close(ax.figure)


def test_text_and_marks_are_light_in_a_dark_figure() -> None:
    """As the axes are, which may be older than the style that is used now."""
    with plt.style.context("dark_background"):
        axes = [plt.subplots(layout="constrained")[1] for _ in range(4)]
    params = {"w": jnp.ones((2, 3))}
    groups = {"a": [1.0, 2.0], "b": [1.0, NAN]}
    plots.norms({"norm": [1.0, NAN]}, ax=axes[0])
    plots.group_norms(groups, ax=axes[1])
    plots.unit_norms(params, radius=1.0, ax=axes[2])
    plots.bad_steps(with_probes(), ax=axes[3])
    for ax in axes:
        legend = [ax.legend_.get_title(), *ax.legend_.get_texts()]
        for text in [*legend, *ax.texts]:
            assert rgba(text.get_color()) == (1, 1, 1, 1), text
        assert (0, 0, 0, 1) not in {rgba(line.get_color()) for line in ax.lines}
        assert {bar.get_edgecolor() for bar in ax.patches} <= {(0, 0, 0, 1)}
        plt.close(ax.figure)


def test_people_who_are_color_blind_can_tell_the_colors_apart() -> None:
    """In CIELAB, as Machado et al. (2009) simulate each kind of color vision."""
    protan = [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    deutan = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    tritan = [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]
    to_xyz = [
        [0.4339, 0.3762, 0.1899],
        [0.2127, 0.7152, 0.0722],
        [0.0178, 0.1095, 0.8727],
    ]
    codes = np.array([rgba(color)[:3] for color in plots.COLORS])
    linear = np.where(codes <= 0.04045, codes / 12.92, ((codes + 0.055) / 1.055) ** 2.4)
    for kind in (np.eye(3), protan, deutan, tritan):
        x, y, z = np.cbrt(to_xyz @ np.clip(np.array(kind) @ linear.T, 1e-3, 1))
        lab = np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
        distances = np.linalg.norm(lab[:, :, None] - lab[:, None], axis=0)
        assert distances[~np.eye(8, dtype=bool)].min() > 15
    light = linear @ [0.2126, 0.7152, 0.0722] + 0.05
    assert (1.05 / light > 2.2).all()  # on white
    assert (light / 0.055 > 2.2).all()  # on nearly black


def test_what_cannot_be_drawn_is_an_error() -> None:
    plt.close("all")  # those of other tests in this process
    for draw, value, error in (
        (plots.norms, {"norm": []}, "history must have at least one step"),
        (plots.norms, [], r"name must say which norm to draw, of none"),
        (plots.norms, {"norm": 1.0}, r"history\['norm'\] must have shape \(steps,\)"),
        (
            plots.group_norms,
            {"a": [1.0], "b": [1.0, 2.0]},
            r"equally many steps, got \['a', 'b'\]",
        ),
        (plots.group_norms, [], r"equally many steps, got \[\]"),
        (plots.heat_map, [], r"equally many steps, got \[\]"),
        (plots.heat_map, {"a": []}, "history must have at least one step"),
        (
            plots.norms,
            {"a/norm": [1.0, 2.0], "a/scale": [1.0]},
            r"history\['a/scale'\] must have 2 steps, as 'a/norm' has, got 1",
        ),
        (
            lambda x: plots.unit_norms(jnp.ones((2, 2)), radius=x),
            -1,
            "radius must be at least 0",
        ),
    ):
        with pytest.raises(ValueError, match=error):
            draw(value)
    for history in (
        {"clip_by_norm/norm": [1.0], "clip_by_norm/steps": [1]},
        [{"clip_by_norm/norm": 1.0}],
        [{"record_norms/updates": 1.0}, {"record_norms/params": 1.0}],
    ):
        with pytest.raises(TypeError, match="history must be "):
            plots.group_norms(history)
    with pytest.raises(
        TypeError, match=r"ax must be one of Matplotlib's axes, .* got 3"
    ):
        plots.group_norms({"a": [1.0]}, ax=3)
    assert not plt.get_fignums()


def test_what_is_on_the_axes_stays_in_the_picture() -> None:
    ax = plt.subplots()[1]
    ax.axvspan(0, 1, label="warm-up")
    plots.norms({"norm": [10.0, 9.0, 8.0]}, ax=ax)
    plots.norms({"norm": [1.0, 2.0, 3.0]}, ax=ax)
    assert ax.get_ylim()[0] <= 1
    assert ax.get_ylim()[1] >= 10
    plots.norms({"norm": [0.1, 2.0]}, ax=ax)
    assert ax.get_yscale() == "log"
    assert "warm-up" in [text.get_text() for text in ax.legend_.get_texts()]
    drawn(ax)
