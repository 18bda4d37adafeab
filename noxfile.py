"""The tests on every Python, with the oldest and the newest versions.

`pip install "nox[uv]" && nox`, and `nox -s clients` for programs that others wrote.
"""

from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"

RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
CLIENTS = sorted(path.stem for path in Path("tests/clients").glob("*_*.py"))


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
@nox.parametrize("versions", list(RESOLUTIONS))
def tests(session: nox.Session, versions: str) -> None:
    """Run the tests, or those that follow `--`."""
    # What has no wheel is as good as not there.
    wheels = ["--only-binary", ":all:", "--no-binary", "clipjax"]
    session.install("--resolution", RESOLUTIONS[versions], *wheels, "-e", ".[test]")
    session.run("python", "-m", "pytest", *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "pytest", "-m", "full")


# The newest Flax and JAX need 3.12, and no client refuses it.
@nox.session(default=False, python="3.12")
@nox.parametrize("client", CLIENTS)
def clients(session: nox.Session, client: str) -> None:
    """Train another program with clipjax, in an environment of its own."""
    script = f"tests/clients/{client}.py"
    needs = nox.project.load_toml(script)["dependencies"]
    session.install("-e", ".", *needs)
    session.run("python", script)
