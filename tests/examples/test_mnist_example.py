"""The example examples/mnist.py: its reader, its four methods, its checkpoints and its errors."""

import gzip
import re
import signal
import struct
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import ROOT

for module in ("flax", "orbax.checkpoint", "sklearn", "matplotlib", "rich"):
    pytest.importorskip(module)

EXAMPLES = ROOT / "examples"

import idx  # noqa: E402
import mnist  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402

NAMES = {
    "train_x": "train-images-idx3-ubyte",
    "train_y": "train-labels-idx1-ubyte",
    "test_x": "t10k-images-idx3-ubyte",
    "test_y": "t10k-labels-idx1-ubyte",
}


def as_idx(array, magic=None):
    magic = 0x0800 + array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.astype(np.uint8).tobytes()


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "train_x": rng.integers(0, 256, (50, 4, 3)),
        "train_y": np.arange(50) % 10,
        "test_x": rng.integers(0, 256, (20, 4, 3)),
        "test_y": np.arange(20) % 10,
    }


@pytest.fixture
def write(tmp_path, arrays):
    """Write the four files, some of them replaced: by an array, by bytes, or by None for no file."""

    def write(suffix="", **replaced):
        directory = tmp_path / "data"
        directory.mkdir()
        for name, content in {**arrays, **replaced}.items():
            if content is not None:
                raw = content if isinstance(content, bytes) else as_idx(content)
                raw = gzip.compress(raw) if suffix and not isinstance(content, bytes) else raw
                (directory / f"{NAMES[name]}{suffix}").write_bytes(raw)
        return directory

    return write


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_reader_returns_what_was_written(write, arrays, suffix):
    read = idx.read_mnist(write(suffix))
    for found, wanted in zip(read, arrays.values(), strict=True):
        np.testing.assert_array_equal(found, wanted.reshape(len(wanted), -1).squeeze())
        assert found.dtype == np.uint8


X, Y = np.zeros((50, 4, 3)), np.zeros(50)


@pytest.mark.parametrize(
    ("replaced", "file", "message"),
    [
        ({"train_y": None}, "train_y", "no such file"),
        ({"train_x": as_idx(X, 0x0802)}, "train_x", "starts with 0x00000802, but must with 0x00000803"),
        ({"train_x": as_idx(X, 0x0D03)}, "train_x", "starts with 0x00000d03"),
        ({"train_y": as_idx(X)}, "train_y", "starts with 0x00000803, but must with 0x00000801"),
        ({"test_y": b"\0\0\x08"}, "test_y", "3 bytes, too short for a header of 8"),
        ({"train_x": as_idx(X)[:-1]}, "train_x", "615 bytes, but its shape (50, 4, 3) needs 616"),
        ({"train_x": as_idx(X) + b"\0"}, "train_x", "617 bytes, but its shape (50, 4, 3) needs 616"),
        ({"train_x": np.zeros((50, 0, 3))}, "train_x", "is empty"),
        ({"train_y": Y[1:]}, "train_x", "50 images, but 49 labels in train-labels"),
        ({"test_y": np.full(20, 10)}, "test_y", "labels must be 0 to 9, but one is 10"),
    ],
)
def test_the_reader_says_which_file_is_wrong(write, replaced, file, message):
    with pytest.raises(idx.IdxError, match=re.escape(message)) as raised:
        idx.read_mnist(write(**replaced))
    assert NAMES[file] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_images_of_two_sizes_are_refused(write):
    with pytest.raises(idx.IdxError, match="have 12 pixels, test images 9"):
        idx.read_mnist(write(test_x=np.zeros((20, 3, 3))))


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda raw: raw[:-20],
        lambda raw: raw[:30] + bytes(64) + raw[94:],
        lambda raw: raw[:-8] + bytes(8),
        lambda raw: b"not gzip" + raw,
    ],
    ids=["truncated", "damaged", "checksum", "not gzip"],
)
def test_a_corrupt_gzip_file_is_refused(write, arrays, corrupt):
    raw = corrupt(gzip.compress(as_idx(arrays["train_x"])))
    with pytest.raises(idx.IdxError, match=r"train-images-idx3-ubyte\.gz: cannot be read"):
        idx.read_mnist(write(".gz", train_x=raw))


@pytest.fixture
def run(tmp_path, capsys):
    """Run the script in this process; returns its status, output and errors."""

    def run(*arguments):
        status = mnist.main(["--plot", str(tmp_path / "figure.png"), *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def saved(directory):
    """The latest checkpoint, read without the script: its step and its tree of arrays."""
    with ocp.CheckpointManager(directory.resolve()) as manager:
        step = manager.latest_step()
        items = manager.restore(step, args=ocp.args.Composite(content=ocp.args.StandardRestore()))
    return step, jax.tree.map(np.asarray, items["content"])


def largest_norm(params):
    kernels = [np.asarray(layer["kernel"], np.float64) for layer in params.values() if "kernel" in layer]
    return max(np.sqrt(np.sum(kernel**2, axis=0)).max() for kernel in kernels)


@pytest.mark.parametrize("method", ["value", "global-norm", "max-norm", "both"])
def test_each_method_keeps_its_bounds_and_no_other(run, tmp_path, method):
    status, out, err = run(
        *("--method", method, "--quick", "--clip", 0.05, "--radius", 0.9, "--checkpoint", tmp_path / "run")
    )
    assert (status, err) == (0, "")
    step, content = saved(tmp_path / "run")
    assert step == 3 * (1437 // 32) == len(content["history"])

    largest = largest_norm(content["state"]["params"])
    assert f"{largest:.9f}" in out
    assert (largest <= 0.9) == (method in ("max-norm", "both"))
    assert ("≤ 0.9" in out) == (method in ("max-norm", "both"))

    loss, _, before, after = content["history"].T
    assert loss[-40:].mean() < loss[:10].mean()
    if method == "max-norm":
        np.testing.assert_array_equal(after, before)
    else:
        assert np.sum(before > 0.05) > 10
        assert np.all(after <= np.float32(0.05) * (1 + 1e-6))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_rate_of_max_norm_decays_polynomially_to_a_tenth():
    tx = mnist.make_optimizer("max-norm", 2.0, clip=1.0, radius=1e9, steps=4)
    params, momentum, rates = {"w": jnp.zeros((2, 2))}, 0.0, []
    state = tx.init(params)
    for _ in range(6):
        updates, state = tx.update({"w": jnp.ones((2, 2))}, state, params)
        params = optax.apply_updates(params, updates)
        momentum = 1.0 + 0.9 * momentum
        rates.append(-float(updates["w"][0, 0]) / momentum)
    wanted = [0.2 + 1.8 * (1 - min(i, 4) / 4) ** 0.9 for i in range(6)]
    np.testing.assert_allclose(rates, wanted, rtol=1e-5)


def test_both_skips_a_step_that_is_not_finite():
    network = mnist.Network((5,), batch_norm=False)
    tx = mnist.make_optimizer("both", 1e-2, clip=1.0, radius=1.5, steps=4)
    step = mnist.make_step(network, tx, "both")
    before = mnist.init_state(network, tx, pixels=4, seed=0)
    kept = jax.tree.map(np.asarray, before.params)
    after, _ = step(before, np.full((3, 4), np.nan, np.float32), np.zeros(3, np.int32))
    jax.tree.map(np.testing.assert_array_equal, kept, jax.tree.map(np.asarray, after.params))
    assert int(after.opt_state.skipped) == 1


def test_every_epoch_sees_each_image_once_in_an_order_of_its_own():
    x, y = np.arange(24.0)[:, None], np.arange(24)
    data = mnist.Data(x, y, x, y)
    first, second = (
        np.concatenate([b for _, b in mnist.batches(data, 4, 7, start, start + 6)]) for start in (0, 6)
    )
    assert sorted(first) == sorted(second) == list(range(24))
    assert list(first) != list(second)
    late = np.concatenate([b for _, b in mnist.batches(data, 4, 7, 8, 12)])
    np.testing.assert_array_equal(late, second[8:])


def test_batch_normalisation_moves_its_statistics_and_evaluates_with_them(run, tmp_path):
    flags = ("--batch-norm", "--hidden", 60, 30, "--checkpoint", tmp_path / "run")
    assert run("--epochs", 1, *flags)[0] == 0
    one = saved(tmp_path / "run")[1]["state"]["stats"]
    assert run("--epochs", 2, *flags)[0] == 0
    _, two = saved(tmp_path / "run")
    assert set(one) == {"BatchNorm_0", "BatchNorm_1"}
    for layer, stats in one.items():
        assert np.all(stats["mean"] != 0)
        assert np.all(stats["var"] != 1)
        assert np.all(stats["mean"] != two["state"]["stats"][layer]["mean"])

    network, state = mnist.Network((60, 30), batch_norm=True), mnist.State(**two["state"])
    data = mnist.load_data(None)
    assert mnist.evaluate(network, state, data.test_x, data.test_y)[1] > 0.8
    fresh = state._replace(stats=jax.tree.map(np.ones_like, state.stats))
    assert mnist.evaluate(network, fresh, data.test_x, data.test_y)[1] < 0.8


def test_it_trains_on_files_of_mnists_format(run, write):
    status, out, err = run("--data", write(".gz"), "--epochs", 2, "--batch-size", 10)
    assert (status, err) == (0, "")
    assert "test accuracy" in out


def test_the_default_reads_at_least_96_of_100_digits(run):
    status, out, err = run()
    assert (status, err) == (0, "")
    assert float(re.search(r"test accuracy\W+([\d.]+)%", out)[1]) >= 96
    assert "≤ 1.5" in out
    clipped, projected = (float(x) for x in re.findall(r"steps that \D+([\d.]+)%", out))
    assert 1 < clipped < 99
    assert projected > 1


def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path):
    def command(name):
        flags = ("--batch-norm", "--epochs", "3", "--save-every", "12")
        paths = ("--checkpoint", str(tmp_path / name), "--plot", str(tmp_path / f"{name}.png"))
        return [sys.executable, str(EXAMPLES / "mnist.py"), *flags, *paths]

    def steps(name):
        return [int(path.name) for path in (tmp_path / name).glob("*") if path.name.isdigit()]

    whole = subprocess.run(command("whole"), capture_output=True, text=True, check=True)
    assert whole.stderr == ""
    killed = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL)
    while killed.poll() is None and not steps("killed"):
        time.sleep(0.005)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    last = max(steps("killed"))
    resumed = subprocess.run(command("killed"), capture_output=True, text=True, check=True)
    assert f"resumed at step {last} of 132\n" in resumed.stdout

    (step, wanted), (resumed_step, found) = saved(tmp_path / "whole"), saved(tmp_path / "killed")
    assert step == resumed_step == 132
    assert {"params", "stats", "opt_state"} == set(found["state"])
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def fails(result, *mentions):
    status, out, err = result
    assert (status, out) == (2, "")
    assert re.fullmatch(r"mnist\.py: error: [^\n]+\n", err)
    for text in mentions:
        assert text in err


SMALL = ("--hidden", 6, "--batch-size", 10)


def test_a_checkpoint_of_another_run_is_refused_and_left_as_it_was(run, write, tmp_path):
    data, run_dir = write(), tmp_path / "run"
    at = ("--data", data, "--checkpoint", run_dir)
    assert run(*SMALL, *at, "--epochs", 2)[0] == 0
    (tmp_path / "figure.png").unlink()
    before = contents(run_dir)
    fails(run(*SMALL, *at, "--method", "max-norm"), "method both and not max-norm")
    fails(run(*SMALL, *at, "--batch-norm"), "--batch-norm")
    fails(run(*SMALL, *at, "--radius", 1.25), "--radius 1.5 and not 1.25")
    fails(run(*SMALL, *at, "--hidden", 6, 4), "--hidden [6] and not [6, 4]")
    fails(run(*SMALL, *at, "--epochs", 1), "step 10, past --epochs 1")
    fails(run(*SMALL, "--checkpoint", run_dir), "data 50 images of 12 pixels")
    assert contents(run_dir) == before
    assert not (tmp_path / "figure.png").exists()


def test_a_damaged_checkpoint_is_refused_and_left_as_it_was(run, write, tmp_path):
    command = (*SMALL, "--data", write(), "--checkpoint", tmp_path / "run")
    assert run(*command, "--epochs", 1)[0] == 0
    for path in (tmp_path / "run" / "5" / "content").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    before = contents(tmp_path / "run")
    fails(run(*command, "--epochs", 2), str(tmp_path / "run" / "5"), "cannot be read")
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (["--method", "other"], "--method: invalid choice"),
        (["--methods", "both"], "unrecognized arguments: --methods"),
        (["--epochs", "0"], "--epochs: must be a whole number of at least 1, got '0'"),
        (["--save-every", "1.5"], "--save-every"),
        (["--batch-size", "-3"], "--batch-size"),
        (["--batch-size", "2000"], "--batch-size: 2000, but there are only 1437 training images"),
        (["--learning-rate", "inf"], "--learning-rate"),
        (["--clip", "nan"], "--clip: must be a number above 0, got 'nan'"),
        (["--radius", "-1"], "--radius"),
        (["--hidden"], "--hidden"),
        (["--hidden", "10", "x"], "--hidden"),
        (["--seed", "-1"], "--seed"),
        (["--data", "{tmp}/missing"], "train-images-idx3-ubyte: no such file"),
        (["--checkpoint", "{tmp}/file"], "file is not a directory"),
        (["--checkpoint", "{tmp}/file/below"], "below cannot be made: Not a directory"),
        (["--plot", "{tmp}/file/below.png"], "file is not a directory"),
        (["--plot", "{tmp}/directory.png"], "directory.png cannot be written"),
        (["--plot", "{tmp}/figure.pdf"], "must end in .png"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(run, tmp_path, arguments, mention):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory.png").mkdir()
    fails(run(*(text.format(tmp=tmp_path) for text in arguments)), mention)
    assert contents(tmp_path) == {tmp_path / "file": b"mine"}


def test_the_help_names_every_flag(run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("--help")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("method", "data", "epochs", "batch-size", "learning-rate", "clip", "radius", "hidden"):
        assert f"--{flag} " in shown
    for flag in ("batch-norm", "seed", "checkpoint", "save-every", "plot", "quick"):
        assert f"--{flag} " in shown
