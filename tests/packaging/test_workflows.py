"""The public CI runs sessions that there are, on the Pythons and versions that are supported."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.artifacts import PROJECT
from tests.support import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NOXFILE = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
SESSIONS = {node.name for node in NOXFILE.body if isinstance(node, ast.FunctionDef)}
CONSTANTS: dict[str, Any] = {
    node.targets[0].id: ast.literal_eval(node.value)
    for node in NOXFILE.body
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id != "OUT"
}


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_there_is_one_for_tests_docs_and_releases() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_run_sessions_that_there_are(path: Path) -> None:
    workflow = loaded(path)
    assert True in workflow, "YAML reads `on` as true"
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        matrix = job.get("strategy", {}).get("matrix", {})
        named = [
            re.match(r"nox -s \"?([\w-]+|\$\{\{ matrix\.session \}\})", x.get("run", ""))
            for x in job["steps"]
        ]
        for match in filter(None, named):
            sessions = matrix["session"] if "matrix" in match[1] else [match[1].split("-")[0]]
            assert set(sessions) <= SESSIONS


def test_every_python_is_tested_with_both_ends_of_the_versions() -> None:
    matrix = loaded(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["versions"]["strategy"]["matrix"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert matrix["python"] == list(CONSTANTS["PYTHONS"]) == named
    assert matrix["versions"] == list(CONSTANTS["VERSIONS"])
