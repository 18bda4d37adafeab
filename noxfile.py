"""What CI runs, and anybody can: `nox --list` says what there is, `nox -s lint` runs one of it.

It needs `pip install "nox[uv]"`, which also fetches a Python that is missing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "tests", "package"]

PYTHONS = ("3.11", "3.12", "3.13")
VERSIONS = ("oldest", "newest")
OUT = Path("out").resolve()


@nox.session(python=PYTHONS)
@nox.parametrize("versions", VERSIONS, ids=VERSIONS)
def tests(session: nox.Session, versions: str) -> None:
    """Run the tests, or those that follow `--`, with the oldest or the newest versions that may be installed.

    The oldest are the lower bounds of pyproject.toml, and so it is they that are tested. What ran is kept in
    out/versions, of which `nox -s versions` makes the table in docs/versions.md.
    """
    resolution = {"oldest": "lowest-direct", "newest": "highest"}[versions]
    # What has no wheel is as good as not there, but for ourselves.
    wheels = ["--only-binary", ":all:", "--no-binary", "clipjax"]
    session.install("--resolution", resolution, *wheels, "-e", ".[test]")
    record = OUT / "versions" / f"{session.python}-{versions}.json"
    session.run("python", "-m", "pytest", *session.posargs, env={"CLIPJAX_RECORD": str(record)})


@nox.session(python=False)
def versions(session: nox.Session) -> None:
    """Write what the tests ran with, as recorded in out/versions, to docs/versions.md."""
    session.run("python", "-m", "tests.versions", "out/versions", "--write", "docs/versions.md")


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Look for mistakes and for what is not formatted, and check the types."""
    session.install("-e", ".[test]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session(python="3.11")
def package(session: nox.Session) -> None:
    """Build what is published, in `dist`; check it, and take a step with what a user installs."""
    session.install("-e", ".[package,test]")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "tests.packaging", "--with-dependencies", "--keep", "dist")


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """Build the site, as static files, in `out/site`; a warning is an error."""
    session.install("-e", ".[docs]")
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # the theme would advertise on the terminal
    session.run("mkdocs", "build", "--strict", "--site-dir", str(OUT / "site"), *session.posargs, env=quiet)
