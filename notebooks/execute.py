"""Runs the notebooks of this folder and stores their outputs: ``make notebooks``.

``python notebooks/execute.py NAME.ipynb`` runs one of them. Run it after a change to a notebook or
to what it shows. A test checks that the stored outputs are of the code as it stands, and another
one runs the code.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def code_digest(cells: list[dict[str, Any]]) -> str:
    """Of all code: outputs with another one are of other code. Sources are texts or lines."""
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()


def execute(path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=180, resources={"metadata": {"path": path.parent}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}  # when it ran
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "executed": code_digest(notebook.cells),
    }
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # the kernel's debugger would complain
    for name in sys.argv[1:] or sorted(path.name for path in FOLDER.glob("*.ipynb")):
        path = FOLDER / Path(name).name
        execute(path)
        sys.stdout.write(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB\n")
