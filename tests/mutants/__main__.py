"""Put one defect after the other into the library, and see whether the tests fail.

    python -m tests.mutants [--jobs 2] [--only PATTERN ...] [--list]

Prints a table of the mutants and of the first test that failed with each; the status is 1 if one survives
that is not marked as equivalent. The table is by hand, because the operators of mutmut and cosmic-ray make
thousands of mutants of this library, of which most change nothing that is promised (a cost, a message, a
type), and each would take its tests' processes and compilations anew; and because what they do not know are
the defects of this subject, as a dropped `psum`, a wrong rounding or a lost `stop_gradient`.
"""

from __future__ import annotations

import argparse
import fnmatch
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.runner import Copy, Run
from tests.mutants.table import MUTANTS


def main() -> int:
    """Return the exit status."""
    arguments = _arguments()
    chosen = _chosen(arguments.only)
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.name}\n    {mutant.file}: {mutant.old}\n    -> {mutant.new}")
        return 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="clipjax-mutants-") as folder:
        copies = [Copy(_new(Path(folder) / str(i))) for i in range(arguments.jobs)]
        print("running the tests without a change", file=sys.stderr, flush=True)
        tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests.split()))
        whole = copies[0].run(tests, arguments.timeout * 10, processes=arguments.jobs)
        if whole.outcome != "survived":
            print(f"{whole.printed}\nThe tests do not pass without a change.", file=sys.stderr)
            return 1
        runs = _run_all(chosen, copies, arguments.timeout)
    print(_table(chosen, runs))
    wrong = [f"{m.name}: {fault}" for m, run in zip(chosen, runs, strict=True) if (fault := _fault(m, run))]
    seen = sum(run.outcome == "seen" for run in runs)
    print(
        f"\n{seen} of {len(runs)} mutants were seen, in {time.monotonic() - begin:.0f} s.", *wrong, sep="\n"
    )
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants to test at a time (2)")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="names of mutants, or globs of them")
    parser.add_argument("--list", action="store_true", help="show the changes, and run nothing")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the tests of one (600)")
    return parser.parse_args()


def _chosen(patterns: Sequence[str] | None) -> list[Mutant]:
    if patterns is None:
        return list(MUTANTS)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(mutant.name, pattern) for mutant in MUTANTS):
            sys.exit(f"--only: no mutant is named {pattern!r}")
    return [m for m in MUTANTS if any(fnmatch.fnmatchcase(m.name, pattern) for pattern in patterns)]


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _run_all(mutants: Sequence[Mutant], copies: Sequence[Copy], timeout: float) -> list[Run]:
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run(mutant: Mutant) -> Run:
        copy = free.get()
        try:
            with copy.changed(mutant):
                result = copy.run(mutant.tests.split(), timeout)
        finally:
            free.put(copy)
        print(f"{result.outcome}: {mutant.name} ({result.seconds:.0f} s)", file=sys.stderr, flush=True)
        return result

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(run, mutants))


def _fault(mutant: Mutant, run: Run) -> str:
    """What is wrong with the tests, or with the table."""
    if run.outcome == "survived":
        return "" if mutant.equivalent else f"no test of {mutant.tests} fails"
    if run.outcome == "seen":
        return f"is not equivalent: {run.failed} fails" if mutant.equivalent else ""
    return f"{run.outcome}\n{run.printed[-2000:]}"


def _table(mutants: Sequence[Mutant], runs: Sequence[Run]) -> str:
    lines = ["| mutant | file | seen by | seconds |", "|---|---|---|---|"]
    for mutant, run in zip(mutants, runs, strict=True):
        by = f"`{run.failed}`" if run.outcome == "seen" else mutant.equivalent or run.outcome
        lines.append(f"| {mutant.name} | `{mutant.file}` | {by} | {run.seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
