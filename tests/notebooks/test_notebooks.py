"""Every notebook runs from its first cell to its last."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_something_in_its_last_cell(path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert cells[-1].outputs


def test_notebooks_are_kept_without_outputs():
    for path in NOTEBOOKS:
        assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells), path
