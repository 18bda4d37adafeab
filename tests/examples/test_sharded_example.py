"""The example examples/sharded.py: sharded over eight devices, killed and resumed, and on one device.

The number of devices is fixed when JAX starts, so that eight of them need another process: one runs whole,
resumes what was killed, and leaves the checkpoints and the compiled programs in a folder.
"""

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

from benchmarks.programs import collectives, parse
from tests.support import ROOT
from tests.support.scripts import ran, refused

for module in ("flax", "orbax.checkpoint", "sklearn", "matplotlib", "rich", "tyro"):
    pytest.importorskip(module)

import orbax.checkpoint as ocp  # noqa: E402
import sharded  # noqa: E402
import sharded_cli  # noqa: E402
import sharded_model  # noqa: E402

import clipjax  # noqa: E402

pytestmark = pytest.mark.usefixtures("unoptimized")

RADIUS = 1.125
UPDATES = 20
SMALL = ["--quick", "--save-every", "4", "--radius", str(RADIUS)]
SMALL += ["--layers", "1", "--width", "16", "--heads", "2", "--batch-size", "16"]
FLOAT32 = ["--dtype", "float32"]

EIGHT_DEVICES = """
import pathlib, sys, time
sys.path[:0] = sys.argv[2:3]
import sharded

folder, small = pathlib.Path(sys.argv[1]), sys.argv[3:]
compile_step = sharded.compile_step
first = True

def start(args):
    global first
    if first:
        first = False
        started(args)

def compiled(*args):
    step = compile_step(*args)
    (folder / f"{name}.hlo").write_text(step.as_text())
    return step

started, sharded.start, sharded.compile_step = sharded.start, start, compiled
# Meanwhile the other compiles what the last two need.
for name, more in {"float32": ["--dtype", "float32"], "killed": [], "whole": []}.items():
    while name == "killed" and not (folder / "was_killed").exists():
        time.sleep(0.01)
    paths = ["--checkpoint", str(folder / name), "--plot", str(folder / f"{name}.png")]
    print("==", name, flush=True)
    assert sharded.main([*small, *more, *paths]) == 0
"""


def steps(directory):
    return [int(path.name) for path in directory.glob("*") if path.name.isdigit()]


def saved(directory):
    """The last checkpoint, read without the script and onto one device: the tree of arrays."""
    content = directory.resolve() / str(UPDATES) / "content"
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as reader:
        found = reader.metadata(content).item_metadata
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), found)
        return jax.tree.map(np.asarray, reader.restore(content, like))


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """The folder, and what was printed, of the runs on eight devices."""
    folder = tmp_path_factory.mktemp("sharded")
    examples = str(ROOT / "examples")
    environment = {
        **os.environ,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # the same programs everywhere
        # Some versions of XLA warn about how they split such small activations, and some log an error for
        # every program that they read from JAX's cache.
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-c", EIGHT_DEVICES, str(folder), examples, *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as others:
        paths = ["--checkpoint", str(folder / "killed"), "--plot", str(folder / "killed.png")]
        killed = subprocess.Popen(
            [sys.executable, f"{examples}/sharded.py", *SMALL, *paths],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )
        while killed.poll() is None and not steps(folder / "killed"):
            time.sleep(0.005)
        killed.kill()
        assert killed.communicate() == (None, b"")
        assert killed.returncode == -signal.SIGKILL
        assert max(steps(folder / "killed")) < UPDATES
        (folder / "was_killed").touch()
        out, _ = others.communicate()
    assert others.returncode == 0
    return folder, dict(re.findall(r"== (\w+)\n(.*?)(?=^== |\Z)", out, re.DOTALL | re.MULTILINE))


@pytest.fixture
def on_one(monkeypatch, tmp_path, capsys):
    """Runs the script in this process, on its one device; returns its status, output and errors."""
    monkeypatch.setattr(sharded, "start", lambda args: None)

    def run(*arguments):
        return ran(sharded.main, ["--plot", tmp_path / "figure.png", *arguments], capsys)

    return run


def largest_norms(params):
    """The largest norm of a unit in each bounded leaf, in NumPy's float64."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if "scale" in name:
            continue
        axes = 1 if "embedding" in name else (0, 1) if "/out/" in name else 0
        found[name] = np.sqrt(np.square(np.asarray(leaf, np.float64)).sum(axis=axes)).max()
    return found


def test_every_unit_ends_inside_the_radius(eight):
    folder, out = eight
    params = saved(folder / "whole")["state"]["params"]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(jnp.bfloat16)}
    norms = largest_norms(params)
    assert len(norms) == 9
    assert 0.99 * RADIUS < max(norms.values()) <= RADIUS
    assert f"{max(norms.values()):.9f} ≤ {RADIUS}" in out["whole"]
    assert re.search(r"out of bounds\D+0 of 192", out["whole"])
    assert (folder / "whole.png").read_bytes().startswith(b"\x89PNG")

    loss, _, before, after, clipped, projected, violation = saved(folder / "whole")["history"].T
    assert np.all(np.isfinite(loss))
    np.testing.assert_allclose(after, np.minimum(before, 1.0), rtol=1e-6)
    np.testing.assert_allclose(clipped, np.cumsum(before > 1.0) / np.arange(1, 1 + UPDATES), rtol=1e-6)
    assert projected[-1] > 0
    assert np.all(violation == 0)


def test_moments_and_accumulators_are_float32(eight):
    state = saved(eight[0] / "whole")["state"]
    floating = {leaf.dtype for leaf in jax.tree.leaves(state["opt_state"]) if leaf.ndim}
    assert floating == {np.dtype(np.float32)}


def test_killed_and_resumed_it_ends_with_the_same_bits(eight):
    folder, out = eight
    assert re.search(r"resumed at update \d+ of 20\n", out["killed"])
    wanted, found = saved(folder / "whole"), saved(folder / "killed")
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())


def test_one_device_gives_the_same_numbers(eight, on_one, tmp_path):
    status, out, err = on_one(*SMALL, *FLOAT32, "--checkpoint", tmp_path / "one")
    assert (status, err) == (0, "")
    assert "1 cpu, 1 data by 1 model" in out
    assert "all-reduce" not in out
    one, many = saved(tmp_path / "one"), saved(eight[0] / "float32")
    assert "8 cpu, 4 data by 2 model" in eight[1]["float32"]
    np.testing.assert_allclose(one["history"], many["history"], rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(x["state"]["params"]) for x in (one, many)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_eight_devices_saved_one_goes_on_with(eight, on_one, tmp_path):
    many = saved(eight[0] / "float32")
    shutil.copytree(eight[0] / "float32", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / str(UPDATES))
    status, out, err = on_one(*SMALL, *FLOAT32, "--checkpoint", tmp_path / "run")
    assert (status, err) == (0, "")
    assert "resumed at update 16 of 20\n" in out
    np.testing.assert_allclose(saved(tmp_path / "run")["history"], many["history"], rtol=1e-5)


@pytest.mark.parametrize("name", ["whole", "float32"])
def test_the_collectives_in_the_table_are_those_of_the_program(eight, name):
    folder, out = eight
    program = (folder / f"{name}.hlo").read_text()
    counted = collectives(parse(program))
    shown = dict(re.findall(r"its ([a-z-]+)s +│ (\d+), ", out[name]))
    assert {kind: int(count) for kind, count in shown.items()} == counted
    assert counted["all-reduce"] > 0
    assert counted["all-gather"] > 0


def test_bytes_are_those_of_the_results_and_a_collective_of_two_halves_counts_once():
    program = """
  %a = (f32[4,2]{1,0}, /*index=1*/bf16[8]{0}) all-reduce(%x, %y), channel_id=1
  ROOT %b = s32[] all-reduce(%a), channel_id=2
  %c = (f32[2]{0}, f32[16]{0}) all-gather-start(%x), channel_id=3
  %d = f32[16]{0} all-gather-done(%c), metadata={op_name="all-gather("}
  %e = f32[16]{0} fusion(%all-reduce.1), calls=%f
"""
    assert sharded_cli.collectives(program) == {"all-reduce": (2, 52), "all-gather": (1, 64)}


def test_stochastic_rounding_is_right_on_average_and_leaves_what_is_exact():
    tx = sharded.round_stochastically(0)
    params = {"w": jnp.full(4096, 1.0, jnp.bfloat16), "b": jnp.ones(3)}
    updates = {
        "w": jnp.full(4096, 2.0**-9),
        "b": jnp.full(3, 2.0**-20),
    }  # a quarter of what bfloat16 can tell
    rounded, state = jax.jit(tx.update)(updates, tx.init(params), params)
    new = optax.apply_updates(params, rounded)
    moved = np.asarray(new["w"], np.float64) - 1
    assert set(moved) == {0.0, 2.0**-7}
    assert abs(np.mean(moved > 0) - 0.25) < 0.03
    np.testing.assert_array_equal(new["b"], np.float32(1 + 2.0**-20))
    assert int(state.count) == 1

    exact = {"w": jnp.full(4096, 2.0**-7), "b": jnp.zeros(3)}
    new = optax.apply_updates(params, jax.jit(tx.update)(exact, state, params)[0])
    np.testing.assert_array_equal(np.asarray(new["w"], np.float32), 1 + 2.0**-7)


def test_it_is_rounded_before_it_is_projected():
    """The other way round, some units end above the radius."""
    args = sharded.Settings(radius=1.0, accumulate=1)
    tx = sharded.make_optimizer(args, clipjax.max_norm(args.radius))
    params = {"kernel": (jax.random.normal(jax.random.key(0), (64, 32)) / 8).astype(jnp.bfloat16)}

    @jax.jit
    def step(params, state, key):
        grads = {"kernel": jax.random.normal(key, (64, 32))}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for key in jax.random.split(jax.random.key(1), 30):
        params, state = step(params, state, key)
        norms = np.sqrt(np.square(np.asarray(params["kernel"], np.float64)).sum(axis=0))
        assert np.all(norms <= 1)
    assert norms.max() > 0.99


def test_the_sums_are_all_there_once_and_right():
    rows = sharded.sums()
    lines = {"".join(sharded_model.CHARACTERS[i] for i in row) for row in rows}
    assert len(lines) == len(rows) == 10_000
    for line in list(lines)[:100]:
        a, b, total = map(int, re.fullmatch(r"(\d\d)\+(\d\d)=(\d{3})\n", line).groups())
        assert a + b == total


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (["--tensor", "3"], "the number of devices, 1, must be divisible by --tensor, which is 3"),
        (["--heads", "5"], "--width, 64, must be divisible by --heads, which is 5"),
        (["--dtype", "float16"], "invalid choice 'float16' for argument '--dtype'"),
        (["--radius", "nan"], "--radius: must be a number above 0, got nan"),
        (["--updates", "0"], "--updates: must be a whole number of at least 1, got 0"),
        (["--devices", "0"], "--devices"),
        (
            ["--coordinator", "a:1", "--processes", "2", "--process-id", "-1"],
            "--process-id: must be a whole number of at least 0",
        ),
        (["--processes", "2"], "--coordinator HOST:PORT, --processes and --process-id go together"),
        (["--coordinator", "here"], "go together"),
        (["--coordinator", "auto", "--processes", "2"], "go together"),
        (["--coordinator", "a", "--processes", "2", "--process-id", "1"], "must be HOST:PORT or auto"),
        (
            ["--coordinator", "a:1", "--processes", "2", "--process-id", "2"],
            "must be below --processes 2, got 2",
        ),
        (["--plot", "{tmp}/figure.pdf"], "must end in .png"),
        (["--checkpoint", "{tmp}/file"], "file is not a directory"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(on_one, tmp_path, arguments, mention):
    (tmp_path / "file").touch()
    assert mention in refused("sharded.py", on_one(*(text.format(tmp=tmp_path) for text in arguments)))


def test_a_checkpoint_of_another_run_is_refused(eight, on_one):
    status, _, err = on_one(*SMALL, "--radius", 2, "--checkpoint", eight[0] / "whole")
    assert status == 2
    assert f"--radius {RADIUS} and not 2.0" in err


def test_the_devices_are_shared_out_over_the_processes():
    def devices(**given):
        if "processes" in given:
            given |= {"coordinator": "a:1", "process_id": 0}
        return sharded.Settings(**given).devices

    assert devices() == 8
    assert devices(processes=2) == 4
    assert devices(processes=16) == 1
    assert devices(devices=3) == 3
