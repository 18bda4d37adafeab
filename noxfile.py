"""The tests on every Python, with the oldest and the newest versions.

`pip install "nox[uv]" && nox`.
"""

import nox

nox.options.default_venv_backend = "uv"

RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}


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
