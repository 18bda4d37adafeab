"""Build the sdist, and the wheel from it; look into both, install the wheel and take a step with it."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.packaging import artifacts

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.packaging", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave what was built there")
    parser.add_argument(
        "--with-dependencies",
        action="store_true",
        help="install what the wheel needs too, instead of using what is installed here",
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        built = artifacts.build((given.keep or folder / "dist").resolve())
        metadata = artifacts.metadata_of(built.wheel)
        faults = [
            *artifacts.wheel_faults(built.wheel),
            *artifacts.sdist_faults(built.sdist),
            *artifacts.description_faults(str(metadata.get_payload()), metadata["Version"], folder),
        ]
        if faults:
            sys.exit("\n".join(faults))
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built)], check=True)
        artifacts.try_out(built.wheel, folder, with_dependencies=given.with_dependencies)
