"""Building what is published, and what has to be in it."""

from __future__ import annotations

import email.message
import email.parser
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from markdown_it import MarkdownIt

from tests.support import ROOT
from tests.support.pages import links

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
URLS: dict[str, str] = PROJECT["project"]["urls"]


class Built(NamedTuple):
    """The two files that are published."""

    wheel: Path
    sdist: Path


def build(folder: Path) -> Built:
    """Build the sdist, and the wheel from it."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], check=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


def wheel_faults(wheel: Path) -> list[str]:
    """What the wheel has too much, and what it lacks."""
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "clipjax").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    found = {name for name in names if ".dist-info/" not in name}
    licences = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    return [
        *(f"the wheel lacks {name}" for name in sorted(ours - found)),
        *(f"the wheel has {name}" for name in sorted(found - ours)),
        *([] if licences else ["the wheel lacks the licence"]),
    ]


def sdist_faults(sdist: Path) -> list[str]:
    """What the sdist lacks to be tested, and what is of no use in it."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = (
        "clipjax/py.typed",
        "tests/support/walk.py",
        "docs/versions.md",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    )
    hidden = sorted(name for name in names if name.startswith(".") and name != ".gitignore")
    return [
        *(f"the sdist lacks {name}" for name in needed if name not in names),
        *(f"the sdist has {name}" for name in hidden),
    ]


def metadata_of(wheel: Path) -> email.message.Message:
    """What the wheel says of itself."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.parser.Parser().parsestr(archive.read(name).decode())


def description(version: str) -> str:
    """The README as it is published, by the substitutions of pyproject.toml."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for each in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text.replace("$HFPR_VERSION", version)


def description_faults(text: str, version: str, folder: Path) -> list[str]:
    """The links of a description that lead nowhere, and what else differs from the README."""
    page = folder / "description.md"
    page.write_text(text, encoding="utf-8")
    readme = ROOT / "README.md"
    faults = []
    for there, here in zip(links(page), links(readme), strict=True):
        target = there.target
        if not urlsplit(target).scheme:
            faults.append(f"{readme.name}:{here.line}: {target} is relative")
        elif target.startswith(URLS["Homepage"] + "/") and not urlsplit(here.target).scheme:
            path = urlsplit(target).path.split(f"/v{version}/")[-1]
            if not (ROOT / path).exists():
                faults.append(f"{readme.name}:{here.line}: {target} is nothing of {path}")
    code = [
        [token.content for token in MarkdownIt().parse(of.read_text("utf-8")) if token.type == "fence"]
        for of in (page, readme)
    ]
    return faults if code[0] == code[1] else [*faults, "a block of code differs from the README's"]


def try_out(wheel: Path, folder: Path, *, with_dependencies: bool) -> None:
    """Install the wheel in an environment of its own, outside the repository, and take a step.

    Without its dependencies it takes those of this environment, which are searched after its own.
    """
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    options = [] if with_dependencies else ["--no-deps"]
    subprocess.run([python, "-m", "pip", "install", "-q", *options, str(wheel)], check=True)
    if not with_dependencies:
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.check_output([python, "-c", where], text=True).strip()
        Path(site, "others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    smoke = ROOT / "tests" / "packaging" / "smoke.py"
    subprocess.run([python, "-I", str(smoke)], check=True, cwd=folder)
