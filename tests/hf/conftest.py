"""Folders that the tests change: copies of the golden checkpoints, written through safetensors alone."""

import json
import shutil
from pathlib import Path

import pytest
from golden_files import FOLDER
from safetensors.numpy import load_file, save_file


class Copy:
    """A changeable copy of a golden folder with one weight file."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors = load_file(path / "model.safetensors")
        self.values = json.loads((path / "config.json").read_text())
        self.text = self.values.get("text_config", self.values)

    def write(self) -> Path:
        """Writes the changed config and tensors as one file."""
        self.write_config()
        save_file(self.tensors, self.path / "model.safetensors", {"format": "pt"})
        return self.path

    def write_config(self) -> Path:
        """Writes the changed config only."""
        (self.path / "config.json").write_text(json.dumps(self.values))
        return self.path

    def shard(self, count: int) -> Path:
        """Deals the tensors out to `count` files with an index."""
        self.write_config()
        (self.path / "model.safetensors").unlink()
        names, weight_map = sorted(self.tensors), {}
        for at in range(count):
            file = f"model-{at + 1:05d}-of-{count:05d}.safetensors"
            held = names[at::count]
            save_file({name: self.tensors[name] for name in held}, self.path / file, {"format": "pt"})
            weight_map |= dict.fromkeys(held, file)
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        self.write_index({"metadata": {"total_size": total}, "weight_map": weight_map})
        return self.path

    def read_index(self) -> dict:
        """The index as written."""
        return json.loads((self.path / "model.safetensors.index.json").read_text())

    def write_index(self, index: dict) -> None:
        """Replaces the index."""
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))


@pytest.fixture
def copy(tmp_path):
    """copy("kimi_k3_tiny") -> Copy in a temporary folder."""
    return lambda name: Copy(Path(shutil.copytree(FOLDER / name, tmp_path / name)))
