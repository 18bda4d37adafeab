"""Versions and addresses are the same wherever they stand, and the README can be read away from here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import clipjax
from tests.packaging.artifacts import (
    PROJECT,
    URLS,
    build,
    description,
    description_faults,
    metadata_of,
    sdist_faults,
    try_out,
    wheel_faults,
)
from tests.support import ROOT

CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_version_is_the_same_everywhere() -> None:
    assert CITATION["version"] == clipjax.__version__
    latest = re.search(
        r"^## \[?(\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert latest is not None
    assert latest[1] == clipjax.__version__


def test_the_citation_has_what_its_format_requires() -> None:
    assert {"cff-version", "message", "title", "authors"} <= set(CITATION)
    assert CITATION["authors"] == PROJECT["project"]["authors"]
    assert CITATION["license"] == PROJECT["project"]["license"]


def test_addresses_are_those_of_the_project() -> None:
    assert CITATION["repository-code"] == URLS["Homepage"]
    assert CITATION["url"] == URLS["Documentation"]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(URLS)
    host, name = URLS["Homepage"].rsplit("/", 2)[0], URLS["Homepage"].rsplit("/", 1)[1]
    elsewhere = re.compile(rf"{re.escape(host)}/[\w-]+/{name}\b")
    pages = [
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml")
    ]
    for page in [*pages, *(ROOT / "docs").glob("*.md")]:
        assert set(elsewhere.findall(page.read_text(encoding="utf-8"))) <= {URLS["Homepage"]}, page


def test_the_readme_has_absolute_links_where_it_is_published(tmp_path: Path) -> None:
    assert description_faults(description("1.2.3"), "1.2.3", tmp_path) == []


@pytest.mark.parametrize(
    ("written", "published"),
    [
        ("[a](docs/a.md#b)", "[a]({0}/blob/v1/docs/a.md#b)"),
        ("![a b](docs/a.png)", "![a b]({0}/raw/v1/docs/a.png)"),
        ('<img alt="" src="docs/a.png" width="9">', '<img alt="" src="{0}/raw/v1/docs/a.png" width="9">'),
        ("[![a](docs/a.png)](docs/a.md)", "[![a]({0}/raw/v1/docs/a.png)]({0}/blob/v1/docs/a.md)"),
        ("[a](#b)", "[a]({0}#b)"),
        ("[a](https://example.com/b.md)", "[a](https://example.com/b.md)"),
        ("![a](https://example.com/b.png)", "![a](https://example.com/b.png)"),
        ("`f[0](x, y)`", "`f[0](x, y)`"),
    ],
)
def test_what_becomes_of_a_link(
    written: str, published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text(written, encoding="utf-8")
    monkeypatch.setattr("tests.packaging.artifacts.ROOT", tmp_path)
    assert description("1") == published.format(URLS["Homepage"])


def test_each_lower_bound_is_given() -> None:
    """Without one, the oldest versions that the tests run with would be those of years ago."""
    listed = PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()
    for requirement in (Requirement(text) for group in listed for text in group):
        bounded = any(part.operator == ">=" for part in requirement.specifier)
        assert bounded or requirement.name == "clipjax" or requirement.extras, requirement


@pytest.mark.slow
def test_what_is_built_holds_what_it_should(tmp_path: Path) -> None:
    pytest.importorskip("build")
    built = build(tmp_path)
    metadata = metadata_of(built.wheel)
    version = metadata["Version"]
    assert version == clipjax.__version__
    assert dict(line.split(", ") for line in metadata.get_all("Project-URL")) == URLS
    assert wheel_faults(built.wheel) == []
    assert sdist_faults(built.sdist) == []
    assert description_faults(str(metadata.get_payload()), version, tmp_path) == []
    try_out(built.wheel, tmp_path, with_dependencies=False)
