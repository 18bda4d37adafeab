"""Modules of extras, where the packages of the extra are missing."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules[{package!r}] = None
import clipjax
assert {{"explain", {extra!r}}} <= {{*dir(clipjax)}}
assert not hasattr(clipjax, {extra!r})
import clipjax.{extra}
"""


@pytest.mark.parametrize(
    ("extra", "package"),
    [("flax", "flax"), ("equinox", "equinox"), ("plots", "matplotlib")],
)
def test_a_missing_package_is_named_with_its_extra(extra: str, package: str) -> None:
    program = PROGRAM.format(extra=extra, package=package)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    error = run.stderr.splitlines()[-1]
    assert error.startswith(f"ModuleNotFoundError: clipjax.{extra} needs {package}")
    assert error.endswith(f'pip install "clipjax[{extra}]"')
