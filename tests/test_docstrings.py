"""Public modules, classes and functions say what they are."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(p for folder in ("k3jax", "pallas_kernels", "configs") for p in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has none"
    missing = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            missing += [] if ast.get_docstring(node) else [node.name]
    assert not missing, f"without docstring: {', '.join(missing)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= 500
