"""The table of the versions that the tests ran with is made of their records."""

from __future__ import annotations

import json
from pathlib import Path

from tests import versions
from tests.support import ROOT

PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")


def test_a_record_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    found = []
    for name, passed in (("9.8-oldest", 3), ("9.8-newest", 4), ("9.8-oldest", 5)):
        versions.record(tmp_path / f"{name}.json", {"passed": [None] * passed}, ["tests/core"])
        found.append(json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")))
    page = f"before\n\n{versions.HEAD}\n{versions.RULE}\n\nafter\n"
    assert versions.rows_of(page) == []
    once = versions.with_records(page, found[:2])
    twice = versions.with_records(once, found[2:])
    assert [row[1] for row in versions.rows_of(twice)] == ["oldest", "newest"]
    assert [row[versions.HEADS.index("passed")] for row in versions.rows_of(twice)] == ["5", "4"]
    assert twice.startswith("before\n\n|")
    assert twice.endswith("|\n\nafter\n")


def test_the_page_shows_runs_without_failures() -> None:
    rows = [dict(zip(versions.HEADS, row, strict=True)) for row in versions.rows_of(PAGE)]
    assert {row["Python"].rsplit(".", 1)[0] for row in rows} == {"3.11", "3.12", "3.13"}
    assert {row[""] for row in rows} == {"oldest", "newest"}
    for row in rows:
        assert (row["failed"], row["error"]) == ("0", "0"), row
        assert int(row["passed"]) > 100, row
