"""The tests on every Python, with the oldest and the newest versions: `pip install "nox[uv]" && nox`."""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "uv"

RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("versions", list(RESOLUTIONS))
def tests(session: nox.Session, versions: str) -> None:
    """Run the tests, or those that follow `--`."""
    wheels = ["--only-binary", ":all:", "--no-binary", "clipjax"]  # what has no wheel is as good as not there
    session.install("--resolution", RESOLUTIONS[versions], *wheels, "-e", ".[test]")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(python="3.12")
def lint(session: nox.Session) -> None:
    """Look for mistakes and for what is not formatted, and check the types."""
    session.install("-e", ".[check]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session(python="3.12")
def package(session: nox.Session) -> None:
    """Build what is published, in `dist`, and check it."""
    session.install("build", "twine")
    session.run("python", "-m", "build")
    session.run("twine", "check", "--strict", "dist/*", external=True)


@nox.session(python="3.12")
def docs(session: nox.Session) -> None:
    """Build the site, in `site`; a warning is an error."""
    session.install("-e", ".[docs]")
    session.run("mkdocs", "build", "--strict", *session.posargs)
