"""The example examples/mnist.py: its four methods, its checkpoints and its errors."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import ROOT
from tests.support.mnist_files import write
from tests.support.scripts import ran, refused

for module in ("flax", "orbax.checkpoint", "sklearn", "matplotlib", "rich", "tyro"):
    pytest.importorskip(module)

EXAMPLES = ROOT / "examples"

import mnist  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402

pytestmark = pytest.mark.usefixtures("unoptimized")
HIDDEN = ("--hidden", 60, 30)  # the same widths everywhere, so that little is compiled anew


class Script:
    """Runs the script in this process; its figures lie in a folder."""

    def __init__(self, folder, capsys):
        self.figure = folder / "figure.png"
        self.capsys = capsys

    def __call__(self, *arguments):
        """Returns its status, output and errors."""
        return ran(mnist.main, ["--plot", self.figure, *arguments], self.capsys)


@pytest.fixture
def run(tmp_path, capsys):
    return Script(tmp_path, capsys)


def saved(directory, step=None):
    """The latest checkpoint or that of a step, read without the script: the step and the tree of arrays."""
    with ocp.CheckpointManager(directory.resolve()) as manager:
        step = manager.latest_step() if step is None else step
        items = manager.restore(step, args=ocp.args.Composite(content=ocp.args.StandardRestore()))
    return step, jax.tree.map(np.asarray, items["content"])


def largest_norm(params):
    kernels = [np.asarray(layer["kernel"], np.float64) for layer in params.values() if "kernel" in layer]
    return max(np.sqrt(np.sum(kernel**2, axis=0)).max() for kernel in kernels)


@pytest.mark.parametrize("method", ["value", "global-norm", "max-norm", "both"])
def test_each_method_keeps_its_bounds_and_no_other(run, tmp_path, method):
    status, out, err = run(
        *("--method", method, "--quick", "--clip", 0.05, "--radius", 0.9, "--checkpoint", tmp_path / "run"),
        *HIDDEN,
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
    params, momentum, rates = {"w": np.zeros((2, 2), np.float32)}, 0.0, []
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update({"w": jnp.ones((2, 2))}, state, params)
        return optax.apply_updates(params, updates), updates, state

    for _ in range(6):
        params, updates, state = step(params, state)
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


NORMALIZED = ("--batch-norm", *HIDDEN, "--epochs", 2)


@pytest.fixture(scope="module")
def whole(unoptimized, tmp_path_factory):
    """The folder of checkpoints of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = (*NORMALIZED, "--checkpoint", folder / "run", "--plot", folder / "figure.png")
    assert mnist.main([*map(str, arguments)]) == 0
    return folder / "run"


def test_batch_normalization_moves_its_statistics_and_evaluates_with_them(whole):
    one = saved(whole, 44)[1]["state"]["stats"]
    _, two = saved(whole)
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


def test_the_default_reads_at_least_96_of_100_digits(run):
    status, out, err = run()
    assert (status, err) == (0, "")
    assert float(re.search(r"test accuracy\W+([\d.]+)%", out)[1]) >= 96
    assert "≤ 1.5" in out
    clipped, projected = (float(x) for x in re.findall(r"steps that \D+([\d.]+)%", out))
    assert 1 < clipped < 99
    assert projected > 1


def test_killed_and_resumed_it_ends_with_the_same_bits(whole, run, tmp_path):
    arguments = [*map(str, (*NORMALIZED, "--save-every", 12, "--checkpoint", tmp_path / "killed"))]

    def steps():
        return [int(path.name) for path in (tmp_path / "killed").glob("*") if path.name.isdigit()]

    killed = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "mnist.py"), *arguments, "--plot", str(tmp_path / "figure.png")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # the same programs as here
            "TF_CPP_MIN_LOG_LEVEL": "3",  # some versions of XLA log an error for what JAX's cache holds
        },
    )
    while killed.poll() is None and not steps():
        time.sleep(0.005)
    killed.kill()
    assert killed.communicate() == (None, b"")
    assert killed.returncode == -signal.SIGKILL
    last = max(steps())
    status, out, err = run(*arguments)
    assert (status, err) == (0, "")
    assert f"resumed at step {last} of 88\n" in out

    (step, wanted), (resumed_step, found) = saved(whole), saved(tmp_path / "killed")
    assert step == resumed_step == 88
    assert {"params", "stats", "opt_state"} == set(found["state"])
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def fails(result, *mentions):
    said = refused("mnist.py", result)
    for text in mentions:
        assert text in said


SMALL = ("--hidden", 6, "--batch-size", 10)


@pytest.fixture(scope="module")
def trained(unoptimized, tmp_path_factory):
    """A folder with files of MNIST's format, and with checkpoints of a run on them."""
    folder = tmp_path_factory.mktemp("trained")
    data = write(folder / "data", ".gz")
    arguments = (*SMALL, "--data", data, "--checkpoint", folder / "run", "--epochs", 2)
    assert mnist.main([*map(str, arguments), "--plot", str(folder / "figure.png")]) == 0
    return folder


@pytest.fixture
def at(trained, tmp_path):
    """The arguments of that run, on a copy of its checkpoints."""
    shutil.copytree(trained / "run", tmp_path / "run")
    return (*SMALL, "--data", trained / "data", "--checkpoint", tmp_path / "run")


def test_it_trains_on_files_of_mnists_format(run, at):
    status, out, err = run(*at, "--epochs", 2)
    assert (status, err) == (0, "")
    assert "resumed at step 10 of 10" in out
    assert "test accuracy" in out


def test_a_checkpoint_of_another_run_is_refused_and_left_as_it_was(run, at, tmp_path):
    before = contents(tmp_path / "run")
    fails(run(*at, "--method", "max-norm"), "method both and not max-norm")
    fails(run(*at, "--batch-norm"), "--batch-norm")
    fails(run(*at, "--radius", 1.25), "--radius 1.5 and not 1.25")
    fails(run(*at, "--hidden", 6, 4), "--hidden [6] and not [6, 4]")
    fails(run(*at, "--epochs", 1), "step 10, past --epochs 1")
    fails(run(*SMALL, "--checkpoint", tmp_path / "run"), "data 50 images of 12 pixels")
    assert contents(tmp_path / "run") == before
    assert not (tmp_path / "figure.png").exists()


def test_a_damaged_checkpoint_is_refused_and_left_as_it_was(run, at, tmp_path):
    for path in (tmp_path / "run" / "10" / "content").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    before = contents(tmp_path / "run")
    fails(run(*at, "--epochs", 3), str(tmp_path / "run" / "10"), "cannot be read")
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (["--method", "other"], "invalid choice 'other' for argument '--method'"),
        (["--methods", "both"], "Unrecognized options: --methods"),
        (["--epochs", "0"], "--epochs: must be a whole number of at least 1, got 0"),
        (["--save-every", "1.5"], "--save-every"),
        (["--batch-size", "-3"], "--batch-size"),
        (["--batch-size", "2000"], "--batch-size: 2000, but there are only 1437 training images"),
        (["--learning-rate", "inf"], "--learning-rate"),
        (["--clip", "nan"], "--clip: must be a number above 0, got nan"),
        (["--radius", "-1"], "--radius"),
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


def test_the_help_names_every_flag(run):
    status, shown, err = run("--help")
    assert (status, err) == (0, "")
    for flag in ("method", "data", "epochs", "batch-size", "learning-rate", "clip", "radius", "hidden"):
        assert f"--{flag} " in shown
    for flag in ("batch-norm", "seed", "checkpoint", "save-every", "plot", "quick"):
        assert f"--{flag} " in shown
