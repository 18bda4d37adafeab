"""Run the tests of other libraries on ours, put in the place of what they test.

    python -m tests.outside [--only PATTERN ...] [--keras PATH] [--torch PATH] [--jobs 2] [--unswapped]

Prints what passes, what differs for a reason that `docs/outside.md` gives, and what fails without one; the
status is 1 if anything does, or if a test passes that is listed to differ. The tests are the peers' own, as
they are: nothing of them is in this repository, and what has to be downloaded goes to a temporary folder.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.outside.differences import why
from tests.outside.runs import RUNS
from tests.outside.sources import MissingError, Source, keras_tests, optax_tests, torch_tests

ROOT = Path(__file__).parent.parent.parent
SETTINGS = {
    "optax": {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},  # what its tests of sharding ask for
    "keras": {"KERAS_BACKEND": "jax"},
    "torch": {"JAX_ENABLE_X64": "1"},  # torch's float64 needs it
}
COLUMNS = ("passed", "differs", "FAILED", "PASSED THOUGH LISTED", "skipped", "without ours")


def main() -> int:
    """Return the exit status."""
    arguments = _arguments()
    chosen = [
        run
        for run in RUNS
        if not arguments.only or any(fnmatch.fnmatch(run, pattern) for pattern in arguments.only)
    ]
    with tempfile.TemporaryDirectory(prefix="clipjax-outside-") as place:
        scratch = Path(place)
        tests: dict[str, Source] = {}
        absent: dict[str, str] = {}
        for peer in dict.fromkeys(RUNS[run].peer for run in chosen):
            try:
                tests[peer] = _tests(peer, arguments, scratch)
            except MissingError as missing:
                absent[peer] = str(missing)
        there = [run for run in chosen if RUNS[run].peer in tests]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            jobs = [
                pool.submit(_run, run, tests[RUNS[run].peer], scratch, arguments.unswapped) for run in there
            ]
            results = {run: job.result() for run, job in zip(there, jobs, strict=True)}
    wrong = _report(results)
    for peer, message in absent.items():
        print(f"not run: {peer}: {message}")
    return 1 if wrong or not results else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.outside", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help=f"some of {', '.join(RUNS)}")
    parser.add_argument("--keras", type=Path, metavar="PATH", help="a checkout, or its constraints_test.py")
    parser.add_argument("--torch", type=Path, metavar="PATH", help="a checkout, or its test/test_nn.py")
    parser.add_argument("--jobs", type=int, default=2, help="how many runs at a time (2)")
    parser.add_argument("--unswapped", action="store_true", help="the peers themselves, for comparison")
    return parser.parse_args()


def _tests(peer: str, arguments: argparse.Namespace, scratch: Path) -> Source:
    if peer == "optax":
        return optax_tests()
    if peer == "keras":
        return keras_tests(arguments.keras, scratch)
    return torch_tests(arguments.torch, scratch)


def _run(run: str, tests: Source, scratch: Path, unswapped: bool) -> dict[str, dict[str, Any]]:
    """Run one set of stand-ins in a process of its own, as what it swaps stays swapped."""
    results, printed = scratch / f"{run}.json", scratch / f"{run}.log"
    command = [sys.executable, "-m", "tests.outside.worker", run, str(tests.folder), str(tests.extra or "")]
    command += [str(results), *["--unswapped"][: int(unswapped)]]
    settings = {"JAX_PLATFORMS": "cpu", **os.environ, **SETTINGS[RUNS[run].peer]}
    with printed.open("w") as log:
        done = subprocess.run(command, cwd=ROOT, env=settings, stdout=log, stderr=log, check=False)
    if done.returncode or not results.exists():
        end = f"status {done.returncode}\n{printed.read_text()[-2000:]}"
        return {run: {"outcome": "failed", "message": end, "ours": False}}
    found: dict[str, dict[str, Any]] = json.loads(results.read_text())
    print(f"{run}: {len(found)} tests", file=sys.stderr, flush=True)
    return found


def judge(run: str, test: str, result: dict[str, Any]) -> str:
    """Name the column in which a result counts."""
    listed = why(run, test) is not None
    if result["outcome"] == "failed":
        return "differs" if listed else "FAILED"
    if result["outcome"] == "passed" and not result["ours"]:
        return "without ours"
    return "PASSED THOUGH LISTED" if result["outcome"] == "passed" and listed else str(result["outcome"])


def _report(results: dict[str, dict[str, dict[str, Any]]]) -> bool:
    """Print the table and what is wrong; return whether anything is."""
    wrong, reasons = [], defaultdict(set)
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for run, tests in results.items():
        for test, result in tests.items():
            column = judge(run, test, result)
            counts[run, test.partition("::")[0]][column] += 1
            if column == "differs":
                reasons[str(why(run, test))].add(f"{run}: {test}")
            elif column in ("FAILED", "PASSED THOUGH LISTED"):
                first = next(iter(result["message"].strip().splitlines()), "")
                wrong.append(f"{column}: {run}: {test}\n    {first}")
    print(*_table(counts), sep="\n")
    for reason, tests_of_it in reasons.items():
        print(f"\ndiffers ({len(tests_of_it)}): {reason}", *sorted(tests_of_it), sep="\n    ")
    print("", *wrong, sep="\n")
    return bool(wrong)


def _table(counts: dict[tuple[str, str], Counter[str]]) -> Iterator[str]:
    """One row for each run and file, as Markdown."""
    yield "| run | test file | " + " | ".join(COLUMNS) + " |"
    yield "|---|---|" + "---|" * len(COLUMNS)
    for (run, file), row in counts.items():
        yield f"| `{run}` | `{file}` | " + " | ".join(str(row[column]) for column in COLUMNS) + " |"
    whole = sum(counts.values(), Counter[str]())
    yield "| all | | " + " | ".join(str(whole[column]) for column in COLUMNS) + " |"


if __name__ == "__main__":
    sys.exit(main())
