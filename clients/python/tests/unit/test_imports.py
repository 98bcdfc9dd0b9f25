"""The modules of the package have an order: none imports another that imports it."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import kubefan

SOURCE = Path(kubefan.__file__).parent


def imported(file: Path) -> set[str]:
    """The modules that a file imports, also inside of functions and for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found.update(name.split(".")[0] for name in names)
    return found


def test_no_module_imports_one_that_imports_it() -> None:
    imports = {file.stem: imported(file) for file in SOURCE.glob("*.py")}
    assert "_watch" in imports["client"]
    # Raises CycleError, which names the modules.
    TopologicalSorter(imports).prepare()
