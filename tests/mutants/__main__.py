"""Make one mistake at a time in a copy of the package, and see which test finds it.

`python -m tests.mutants` first runs the tests without a mistake, then for each mutant
the file that should notice it, and then, if it survives, all. It writes nothing into
the tree, and exits with 1 if more than one in twenty survives.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__")


def copy(source: Path, target: Path) -> Path:
    """Copy what the tests need."""
    return shutil.copytree(source, target, ignore=LEFT_OUT, dirs_exist_ok=True)


def failing_test(folder: Path, *arguments: str) -> str | None:
    """Run pytest in a folder; return the first test that fails, or None."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    return (
        found[1] if found else (result.stdout + result.stderr).strip().splitlines()[-1]
    )


def killer(mutant: Mutant, source: Path, ignored: list[str]) -> str | None:
    """Return the test that finds a mutant, or None."""
    with tempfile.TemporaryDirectory() as name:
        folder = copy(source, Path(name))
        path = folder / "clipjax" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        likely = failing_test(folder, f"tests/{mutant.test}", *ignored)
        return likely or failing_test(folder, *ignored)


def main() -> int:
    """Run all mutants, or those with the arguments in file or text; print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__
    )
    parser.add_argument(
        "chosen",
        nargs="*",
        help="only mutants whose file or text contains one of these",
    )
    parser.add_argument(
        "--ignore", nargs="*", default=["tests/mutants"], help="tests that are left out"
    )
    given = parser.parse_args()
    ignored = [
        f"--{'deselect' if '::' in each else 'ignore'}={each}" for each in given.ignore
    ]
    chosen = [
        m
        for m in MUTANTS
        if not given.chosen or any(x in m.file or x in m.old for x in given.chosen)
    ]
    start, survivors = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        source = copy(ROOT, Path(name))
        if (broken := failing_test(source, *ignored)) is not None:
            print(f"without a mutant this fails: {broken}")
            return 1
        print(
            f"without a mutant all tests pass ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
        for mutant, test in zip(
            chosen, pool.map(lambda m: killer(m, source, ignored), chosen), strict=True
        ):
            survivors += test is None
            shown = f"{mutant.file}: {mutant.old!r} -> {mutant.new!r}"
            print(
                f"{'SURVIVED' if test is None else 'killed  '}  {shown}\n          by "
                f"{test}",
                flush=True,
            )
    print(
        f"{len(chosen) - survivors} of {len(chosen)} killed, in "
        f"{time.monotonic() - start:.0f} s"
    )
    return int(survivors * 20 > len(chosen))


if __name__ == "__main__":
    sys.exit(main())
