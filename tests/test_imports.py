"""Who may import whom (design: the house). The rule is read from each file's imports, lazy ones included."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ANYTHING = {"*"}
# Room -> rooms of ours it may import. A room is a folder or file of k3jax.
ALLOWED = {
    "config": set(),
    "hardware": set(),
    "distributed": {"config"},
    "quant": {"config"},
    "flops": {"config"},
    "parallel": {"config", "pallas_kernels"},
    "memory": {"config", "quant", "flops", "hardware"},
    "model": {"config", "parallel", "memory", "quant", "pallas_kernels"},
    "optim": {"config", "parallel"},
    "checkpoint": {"config", "parallel", "distributed"},
    "data": {"config", "parallel"},
    "metrics": {"config", "flops", "hardware"},
    "step": {"model", "optim", "parallel", "memory", "config"},
    "hf": {"config", "model", "parallel", "quant"},
    "estimate": ANYTHING,
    "generate": ANYTHING,
    "evaluate": ANYTHING,
    "train": ANYTHING | {"generate", "evaluate"},
    "launch": ANYTHING,
    "report": ANYTHING,
    "data.prepare": ANYTHING,
    "command": {"config", "distributed"},
    "workdir": {"config", "checkpoint"},
    "debug": {"config", "model"},
    "__init__": set(),
}
COMMANDS = {"train", "launch", "report", "data.prepare"}  # nothing imports a command line
KERNELS_MAY = {"jax", "numpy", "jaxtyping", "pallas_kernels", "tokamax", "jax_triton"}
STANDARD = set(__import__("sys").stdlib_module_names)


def imported(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms(names: set[str]) -> set[str]:
    """The rooms among imported names."""
    found = {"pallas_kernels"} if any(name.split(".")[0] == "pallas_kernels" for name in names) else set()
    ours = [name.split(".")[1:] for name in names if name.startswith("k3jax.")]
    return found | {"data.prepare" if parts[:2] == ["data", "prepare"] else parts[0] for parts in ours}


OURS = sorted((ROOT / "k3jax").rglob("*.py"))


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_k3jax(path):
    parts = path.relative_to(ROOT / "k3jax").with_suffix("").parts
    room = "data.prepare" if parts == ("data", "prepare") else parts[0]
    assert room in ALLOWED, f"{room} has no place in the import rule"
    found = rooms(imported(path)) - {room}
    known = {name for name in found if name in ALLOWED or name == "pallas_kernels"}
    may = set(ALLOWED) - COMMANDS | {"pallas_kernels"} if "*" in ALLOWED[room] else ALLOWED[room]
    assert known <= may, f"{room} must not import {', '.join(sorted(known - may))}"
    assert not any(name.split(".")[0] == "tests" for name in imported(path))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "pallas_kernels").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_kernels(path):
    roots = {name.split(".")[0] for name in imported(path)} - STANDARD
    assert roots <= KERNELS_MAY, f"kernels must not import {', '.join(sorted(roots - KERNELS_MAY))}"


def test_rule_catches():
    """The checker sees what it must see."""
    assert rooms({"k3jax.model.decoder", "jax", "pallas_kernels.kda"}) == {"model", "pallas_kernels"}
    assert imported(ROOT / "k3jax" / "train.py") >= {"k3jax.checkpoint", "jax"}
