"""Processes that train one model together: the numbers of one process, the same steps skipped, no hanging."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from tests.processes.launch import TIMEOUT, Seen, Session

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="jaxlib has collectives between CPU processes for Linux"
)
pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

# The run that all have in common. The last row of a step's data, in which a NaN is, not all processes have.
STEPS, BAD_STEP, SAVED_STEP = 6, 2, 3
WHOLE = {"mesh": [2, 2], "steps": [0, STEPS], "bad": [BAD_STEP, 7]}


def resumed(name: str, path: str, *mesh: int) -> dict[str, Any]:
    """The rest of that run, on another mesh."""
    return {"name": name, "mesh": mesh, "steps": [SAVED_STEP, STEPS], "restore": path}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("processes")


def session_of(number: int, folder: Any, *others: Any, kill: int | None = None) -> Session:
    """The common run, saved in its middle, and other runs after it."""
    run = {"name": "whole", **WHOLE, "save_at": SAVED_STEP, "save": str(folder / f"saved-by-{number}")}
    return Session(number, folder / str(number), [run, *others], kill)


@pytest.fixture(scope="module")
def two(folder: Any) -> Session:
    return session_of(2, folder)


@pytest.fixture(scope="module")
def one(folder: Any, two: Session) -> Session:
    return session_of(1, folder, resumed("resumed", str(folder / "saved-by-2"), 4, 1))


@pytest.fixture(scope="module")
def four(folder: Any, two: Session) -> Session:
    """Four processes, the third of which is killed in the end."""
    return session_of(4, folder, resumed("resumed", str(folder / "saved-by-2"), 1, 4), kill=2)


@pytest.fixture(scope="module")
def again(folder: Any, four: Session) -> Session:
    """Two processes, the first of which is killed in the end: the one that the others report to."""
    runs = [resumed("resumed", str(folder / "saved-by-4"), 4, 1)]
    return Session(2, folder / "again", runs, kill=0)


def session(name: str) -> Any:
    return pytest.param(name, marks=() if name in ("one", "two") else pytest.mark.slow)


@pytest.fixture
def of(request: pytest.FixtureRequest) -> Session:
    return request.getfixturevalue(request.param)


def each(*names: str) -> Any:
    return pytest.mark.parametrize("of", [session(name) for name in names], indirect=True)


def alike(found: list[Seen], expected: Seen) -> None:
    """Every process sees the same state and metrics, to the last bit; and they are the expected ones."""
    for i, seen in enumerate(found):
        assert seen.metrics == found[0].metrics, f"process {i} reports other metrics than process 0"
        assert seen.state.keys() == expected.state.keys()
        for path, leaf in seen.state.items():
            np.testing.assert_array_equal(leaf, found[0].state[path], f"process {i}: {path}")
            np.testing.assert_allclose(leaf, expected.state[path], rtol=1e-5, atol=1e-6, err_msg=path)
    last = expected.metrics[-len(found[0].metrics) :]
    for step, (metrics, wanted) in enumerate(zip(found[0].metrics, last, strict=True)):
        assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6), f"step {step}"


@each("two", "four")
def test_the_numbers_of_one_process(of: Session, one: Session) -> None:
    alike(of.seen("whole"), one.seen("whole")[0])


@each("one", "two", "four")
def test_a_nan_on_one_process_skips_the_step_on_all(of: Session) -> None:
    for seen in of.seen("whole"):
        skipped = [metrics["skip_nonfinite/skipped"] for metrics in seen.metrics]
        assert skipped == [float(step >= BAD_STEP) for step in range(STEPS)]
        assert all(np.isfinite(leaf).all() for leaf in seen.state.values())


@each("one", "four", "again")
def test_resumed_by_another_number_of_processes_on_another_mesh(of: Session, one: Session) -> None:
    alike(of.seen("resumed"), one.seen("whole")[0])


def test_the_bounds_are_at_work(one: Session) -> None:
    """Guards the others: gradients are clipped, and weights are projected, at every step that is taken."""
    assert one.seen("whole")[0].metrics[-1]["clip_by_global_norm/clipped_fraction"] == 1
    assert one.seen("whole")[0].metrics[-1]["max_norm/clipped_fraction"] == 1
    assert one.seen("whole")[0].metrics[-1]["units beyond 1.9"] > 0


@each("four", "again")
def test_when_one_process_is_killed_the_others_stop_with_an_error(of: Session) -> None:
    """Within the time after which a silent process counts as dead, and a little more."""
    for process in of.ended:
        assert process.code != 0
        assert process.after < 2 * TIMEOUT + 10
    errors = [process.printed for process in of.ended if process.code != -9]
    assert len(errors) == of.number - 1
    for printed in errors:
        assert "Gloo" in printed or "heartbeat" in printed
