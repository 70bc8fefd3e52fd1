"""The notebooks run from top to bottom, and are committed with the outputs that they make."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def kinds(notebook):
    """Kinds of the outputs of each code cell; text that is printed in parts is one."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        sorted({kind for output in cell.outputs for kind in output.get("data", {output.get("name"): 0})})
        for cell in cells
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_with_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any("image/png" in found for found in kinds(notebook))
    assert notebook.cells[0].source.startswith("# ")
    assert not any("error" in found or "stderr" in found for found in kinds(notebook))


@pytest.mark.filterwarnings("default")  # of Jupyter's own packages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONWARNINGS", "error::DeprecationWarning:__main__")
    notebook = nbformat.read(path, as_version=4)
    want = kinds(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": os.fspath(path.parent)}}
    )
    client.execute()  # raises the error of a cell
    assert kinds(notebook) == want


def test_there_are_notebooks():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]
