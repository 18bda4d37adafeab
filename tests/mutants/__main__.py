"""Make one mistake at a time in a copy of the package, and see whether a test fails.

`python -m tests.mutants` draws some mistakes of `clipjax/_core`. It runs the tests
without one, then for each the files of tests that are likely to find it, and then the
others. It writes nothing into the repository, and exits with 1 if more than one
mistake in twenty survives.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.operators import mutants

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__")
FOLDERS = ("core", "contract", "errors", "weights", "gradients")
ALL = ("clipjax", *(f"tests/{folder}" for folder in FOLDERS))
SECONDS = 900  # a mistake may make a loop endless

# The files of tests that are likely to find a mistake in a module, fast ones first.
LIKELY = {
    "bounds": ("core/test_bounds.py", "errors"),
    "checks": ("errors",),
    "clip": ("core", "contract/test_ends.py", "contract/test_nonfinite.py"),
    "door": ("core/test_transformation.py", "core/test_states.py", "errors"),
    "entries": ("core/test_entries.py", "core/test_bounds.py", "contract/test_ends.py"),
    "leaves": ("core", "weights/test_limits.py", "errors"),
    "norms": (
        "core/test_clipping.py",
        "contract/test_ends.py",
        "devices/test_shard_map.py",
    ),
    "states": ("core/test_states.py", "core/test_transformation.py", "errors"),
    "units": (
        "core/test_units.py",
        "contract/test_axes.py",
        "devices/test_shard_map.py",
        "errors",
    ),
}


def likely(name: str) -> tuple[str, ...]:
    """Return the tests that are likely to find a mistake in a file."""
    return tuple(f"tests/{x}" for x in LIKELY.get(Path(name).stem, ()))


def fails(folder: Path, tests: tuple[str, ...]) -> bool:
    """Return whether a test fails in a folder."""
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    # All runs share what JAX has compiled, since most programs are the same.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / ".compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    place = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=folder,
            env={**cache, **os.environ, **place},
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> int:
    """Try a sample of mistakes, and print each with what became of it."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("--file", nargs="+", help="default: all of clipjax/_core")
    parser.add_argument("--sample", type=int, default=40, help="how many (40)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--list", action="store_true", help="print them, run none")
    given = parser.parse_args()
    core = sorted((ROOT / "clipjax/_core").glob("*.py"))
    # Messages are the texts of errors.
    files = given.file or [str(x) for x in core if x.stem != "messages"]
    names = [str(Path(file).resolve().relative_to(ROOT)) for file in files]
    found = [(x, each) for x in names for each in mutants((ROOT / x).read_text())]
    drawn = random.Random(given.seed).sample(found, min(given.sample, len(found)))
    print(f"{len(drawn)} of {len(found)} mutants", flush=True)
    if given.list:
        for name, each in drawn:
            print(f"{name}:{each.line} {each.operator} {each.before} -> {each.after}")
        return 0
    survivors = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(ROOT, place, ignore=LEFT_OUT, dirs_exist_ok=True))
        for name in names:
            path = folder / name
            path.write_text(ast.unparse(ast.parse(path.read_text())))
        # Fails also if a file of tests was moved.
        if fails(folder, (*ALL, *(x for name in names for x in likely(name)))):
            print("a test fails without a mistake")
            return 1
        for name, each in drawn:
            start, path = time.monotonic(), folder / name
            right = path.read_text()
            path.write_text(each.text())
            first = likely(name)
            died = (first and fails(folder, first)) or fails(folder, ALL)
            path.write_text(right)
            survivors += not died
            print(
                f"{'died' if died else 'SURVIVED'} {name}:{each.line} "
                f"{each.operator} {each.before} -> {each.after} "
                f"({time.monotonic() - start:.0f} s)",
                flush=True,
            )
    print(f"{survivors} of {len(drawn)} survived")
    return int(survivors * 20 > len(drawn))


if __name__ == "__main__":
    sys.exit(main())
