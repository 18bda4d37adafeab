"""The examples examples/spikes.py and examples/norm_log.py: what they show, and their errors."""

import re

import numpy as np
import pytest

for module in ("flax", "orbax.checkpoint", "sklearn", "matplotlib", "rich", "tyro"):
    pytest.importorskip(module)


import norm_log  # noqa: E402
import spikes  # noqa: E402

import clipjax  # noqa: E402
from tests.support.scripts import ran, refused  # noqa: E402

pytestmark = pytest.mark.usefixtures("unoptimized")
METHODS = list(spikes.methods(1.0))


def table(out):
    """The rows of the table: accuracy in percent, loss, and the steps clipped, skipped and not finite."""
    rows = {}
    for line in out.splitlines():
        cells = [cell.strip() for cell in re.split("[│|]", line) if cell.strip()]
        if cells and cells[0] in METHODS:
            rows[cells[0]] = [float(cell.rstrip("%")) for cell in cells[1:]]
    return rows


def test_a_run_shows_what_each_method_withstands_and_its_log_is_read(tmp_path, capsys):
    plot, log = tmp_path / "figure.png", tmp_path / "log.npz"
    arguments = ["--steps", "605", "--spikes", "0.03", "--nans", "0.02"]
    assert spikes.main([*arguments, "--plot", str(plot), "--log", str(log)]) == 0
    rows = table(capsys.readouterr().out)
    assert list(rows) == METHODS
    assert plot.read_bytes().startswith(b"\x89PNG")

    factors = spikes.broken_batches(600, 0.03, 0.02, 0)
    bright, nans = np.sum(factors > 1), np.sum(np.isnan(factors))
    assert bright >= 5
    assert nans >= 5
    for name, (accuracy, loss, clipped, skipped, nonfinite) in rows.items():
        if name == "none":  # from the first NaN on there is nothing else
            assert nonfinite == 600 - np.argmax(np.isnan(factors))
            assert accuracy < 15
            assert np.isnan(loss)
            continue
        assert nonfinite == nans
        assert skipped == nans + (bright if name == "skip_spikes" else 0)
        if name in ("skip_nonfinite", "skip_spikes"):
            assert clipped == 0
        else:
            assert bright <= clipped <= 600 - nans
        assert (accuracy > 90) == (name != "skip_nonfinite"), (name, accuracy)

    norms = clipjax.NormLog.load(log).norms
    np.testing.assert_array_equal(np.isnan(norms), np.isnan(factors))
    assert norms[factors > 1].min() > 10 * norms[factors == 1].max()

    shown = tmp_path / "norms.png"
    assert norm_log.main([str(log), "--thresholds", "1", "1e9", "--plot", str(shown)]) == 0
    out = capsys.readouterr().out
    assert f"600 gradient norms, skip_spikes, {nans} of them not finite" in out
    assert "a constant of 1e+09 would clip 0.0% of the steps" in out
    assert "zclip" in out
    assert shown.read_bytes().startswith(b"\x89PNG")


def test_the_batches_are_broken_as_often_as_asked_for_and_not_at_the_start():
    factors = spikes.broken_batches(10_000, 0.02, 0.05, 3)
    assert np.all(factors[:500] == 1)
    np.testing.assert_allclose(np.mean(factors[500:] == spikes.BRIGHTER), 0.02, atol=0.005)
    np.testing.assert_allclose(np.mean(np.isnan(factors[500:])), 0.05, atol=0.01)


def test_the_quick_mode_is_short():
    assert spikes.Settings(quick=True).steps == 300


@pytest.mark.parametrize(
    ("main", "arguments", "mention"),
    [
        (spikes.main, ["--steps", "9"], "--steps: must be a whole number of at least 10, got 9"),
        (spikes.main, ["--spikes", "0.6"], "--spikes: must be a number from 0 to 0.5"),
        (spikes.main, ["--nans", "nan"], "--nans"),
        (spikes.main, ["--clip", "0"], "--clip: must be a number above 0"),
        (spikes.main, ["--plot", "{tmp}/figure.pdf"], "must end in .png"),
        (spikes.main, ["--log", "{tmp}/file/log.npz"], "--log: {tmp}/file is not a directory"),
        (norm_log.main, [], "Required options"),
        (norm_log.main, ["{tmp}/missing.npz"], "No such file"),
        (norm_log.main, ["{tmp}/file"], "{tmp}/file was not written by NormLog.save"),
        (norm_log.main, ["{tmp}/empty.npz"], "{tmp}/empty.npz has no finite norm"),
        (norm_log.main, ["{tmp}/empty.npz", "--thresholds", "-1"], "--thresholds"),
        (norm_log.main, ["{tmp}/empty.npz", "--plot", "{tmp}/figure.pdf"], "must end in .png"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(main, arguments, mention, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    clipjax.NormLog().save(tmp_path / "empty.npz")
    result = ran(main, [text.format(tmp=tmp_path) for text in arguments], capsys)
    assert mention.format(tmp=tmp_path) in refused(f"{main.__module__}.py", result)
