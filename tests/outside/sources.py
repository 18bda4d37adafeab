"""Where the peers' tests are: in what is installed, at a path that was given, or in a temporary folder."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """A folder of tests, and what has to be importable besides what is installed."""

    folder: Path
    extra: Path | None = None


class MissingError(Exception):
    """The tests cannot be had; the message says why, and what to do."""


def optax_tests() -> Source:
    """Find Optax's tests, which are installed with it."""
    spec = importlib.util.find_spec("optax")
    if spec is None or spec.origin is None:
        raise MissingError("optax is not installed")
    return Source(Path(spec.origin).parent)


def keras_tests(given: Path | None, scratch: Path) -> Source:
    """Find Keras's tests, which are installed with it; Keras is installed apart where it is missing."""
    found, extra = importlib.util.find_spec("keras"), None
    if found is None:
        extra = scratch / "keras"
        _pip("install", "--target", str(extra), "keras")
    installed = extra or Path(str(found and found.origin)).parent
    return Source(_file(given or installed, "constraints_test.py", "--keras").parent, extra)


def torch_tests(given: Path | None, scratch: Path) -> Source:
    """Take the tests of clipping out of torch's test_nn.py, which is in no package."""
    if importlib.util.find_spec("torch") is None:
        raise MissingError("torch is not installed")
    if given is None:
        raise MissingError(
            "torch's tests are only in its repository: --torch PATH, a checkout or its test/test_nn.py"
        )
    extra = None
    if importlib.util.find_spec("expecttest") is None:
        extra = scratch / "torch"
        _pip("install", "--no-deps", "--target", str(extra), "expecttest")
    part = only_tests(_file(given, "test_nn.py", "--torch").read_text(), ("clip_grad", "total_norm"))
    (scratch / "test_clip_grad.py").write_text(part)
    return Source(scratch, extra)


def only_tests(source: str, words: Sequence[str]) -> str:
    """The tests of a file whose names contain one of `words`, as they are, with what they need.

    The rest of the file would need the very version of the library that it was written for. What is not there
    to be imported is left out, and so are the tests that do not contain a word.
    """
    module = ast.parse(source)
    module.body = [part for statement in module.body for part in _kept(statement, words)]
    classes = {part.name for part in module.body if isinstance(part, ast.ClassDef)}
    module.body = [
        part
        for part in module.body
        # torch makes the classes for each device by a call.
        if not isinstance(part, ast.Expr) or classes & {ast.unparse(x) for x in _arguments(part.value)}
    ]
    return ast.unparse(ast.fix_missing_locations(module))


def _kept(statement: ast.stmt, words: Sequence[str]) -> Iterator[ast.stmt]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        for name in statement.names:
            one = ast.parse("try:\n    pass\nexcept ImportError:\n    pass").body[0]
            assert isinstance(one, ast.Try)
            one.body = [
                ast.Import([name])
                if isinstance(statement, ast.Import)
                else ast.ImportFrom(statement.module, [name], statement.level)
            ]
            yield one
    elif isinstance(statement, ast.ClassDef):
        tests = [x for x in statement.body if isinstance(x, ast.FunctionDef) and x.name.startswith("test")]
        wanted = [test for test in tests if any(word in test.name for word in words)]
        if wanted:
            statement.body = [x for x in statement.body if x not in tests or x in wanted]
            yield statement
    elif isinstance(statement, ast.Expr):
        yield statement


def _arguments(value: ast.expr) -> list[ast.expr]:
    return value.args if isinstance(value, ast.Call) else []


def _file(given: Path, name: str, option: str) -> Path:
    found = [given] if given.is_file() else sorted(given.rglob(name))
    if not found:
        raise MissingError(f"{option} {given}: there is no {name}")
    return found[0]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError(
            f"`pip {' '.join(arguments)}` failed: {(done.stderr.strip() or '?').splitlines()[-1]}"
        )
