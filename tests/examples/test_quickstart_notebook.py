"""The notebook examples/quickstart.ipynb: it runs as a whole, and is stored without what it printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
SOURCES = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_nothing_of_a_run_is_stored() -> None:
    for cell in CELLS:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert not re.search(r"/(home|root|work|tmp|Users)/", NOTEBOOK.read_text(encoding="utf-8"))


def test_one_cell_installs_and_only_what_is_missing() -> None:
    installing = [source for source in SOURCES if "pip" in source]
    assert installing == SOURCES[:1]
    exec(compile(installing[0], "the first cell", "exec"), found := {})  # where all is there
    assert found["missing"] == []


@pytest.mark.slow
def test_it_runs_and_holds_what_it_claims(tmp_path: Path, monkeypatch: Any) -> None:
    """Its last cell asserts: no unit beyond the radius, no norm above the threshold, a better accuracy."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # or there is nothing to see
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 3
    printed = "".join(output.get("text", "") for output in outputs)
    assert "gradient norms, all finite" in printed
    scores = [float(score) for score in re.findall(r"test accuracy ([\d.]+)%", printed)]
    assert len(scores) == 3
    assert min(scores[1:]) > 90
