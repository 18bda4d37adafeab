"""Checks on eight CPU devices: of a test module that runs itself as a script.

The devices must be asked for before JAX starts, so the checks run in a process of their own, one for
all of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tests.support import ROOT


def mesh(*shape: int, names: tuple[str, ...] = ("d",)) -> Any:
    """A mesh of the eight devices: one axis, or axes of a shape."""
    return jax.make_mesh(shape or (8,), names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def checks_of(module: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """The functions of a module whose names say that they check something."""
    return {name: value for name, value in module.items() if name.startswith("check_")}


def run(checks: Mapping[str, Callable[[], None]]) -> None:
    """Print, for each check, its name and "passed" or a traceback: for the script."""
    for name, check in checks.items():
        print(f"== {name}", flush=True)
        try:
            check()
            print("passed", flush=True)
        except Exception:
            print(traceback.format_exc(), flush=True)


def results_of(module: str) -> dict[str, str]:
    """Run a module as a script, and return what it printed for each check."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-m", module],
        env={**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    printed = re.split(r"^== (\w+)\n", done.stdout, flags=re.MULTILINE)
    found = {name: text.strip() for name, text in zip(printed[1::2], printed[2::2], strict=True)}
    assert found, f"the script failed:\n{done.stdout}\n{done.stderr}"
    return found
