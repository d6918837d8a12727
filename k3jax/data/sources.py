"""Where documents come from: random access to texts, one document per index.

A source has a `name`, a length and `source[i]`, so it is a `grain.sources.RandomAccessDataSource`.
Invariant: the same files give the same documents in the same order, and what cannot be read raises
BadDocument for its index alone; whoever reads a source (`tokenizers.tokenize`) counts those and goes on.
"""

import os
import sysconfig
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from k3jax.config import ConfigError

Split = Literal["train", "held_out"]
HELD_OUT_ONE_IN = 20
# Packages of the installation, tests (much repeated text, little of it code that someone reads) and caches.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Code pages: over a hundred near copies of one file, which would leak from one split into the other.
SKIPPED_AT_TOP = {"encodings"}


class BadDocument(ValueError):
    """One record of a source that cannot serve as a document. `reason` is the word it is counted under."""

    def __init__(self, reason: str, where: str):
        super().__init__(f"{where}: {reason}")
        self.reason = reason
        self.where = where


@runtime_checkable
class Source(Protocol):
    """Random access: `source[i]`, 0 <= i < len(source), gives one document or raises BadDocument."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes | str: ...


def is_held_out(relative_path: str) -> bool:
    """Whether a file belongs to the held-out part: about one in twenty, whatever else is installed.

    `relative_path` is relative to the source's root with `/` between folders (`json/decoder.py`). The file
    is held out when sha256(path as UTF-8), all 32 bytes of the digest read as one unsigned big-endian
    integer, is a multiple of 20.
    """
    digest = sha256(relative_path.encode()).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


class StandardLibrary:
    """The .py files of this Python's own standard library; a document is the bytes of one file.

    Left out: folders named as in SKIPPED_FOLDERS at any depth and those of SKIPPED_AT_TOP. Documents are in
    the order of their relative path. `split` chooses the part by `is_held_out`; `root` defaults to where
    this Python keeps its library. Raises ConfigError where there is no such file.
    """

    def __init__(self, split: Split, root: Path | None = None):
        if split not in ("train", "held_out"):
            raise ValueError(f"split must be train or held_out, got {split!r}")
        self.root = Path(root or sysconfig.get_path("stdlib"))
        self.name = f"stdlib/{split}"
        self.paths = [path for path in _python_files(self.root) if is_held_out(path) == (split == "held_out")]
        if not self.paths:
            raise ConfigError(f"data.source: no .py file for the part {split} under {self.root}")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        path = self.paths[index]
        try:
            document = (self.root / path).read_bytes()
        except OSError as error:
            raise BadDocument("unreadable", path) from error
        if not document:
            raise BadDocument("empty", path)
        return document

    def __repr__(self) -> str:
        return f"StandardLibrary({self.name}, {len(self)} files under {self.root})"


def _python_files(root: Path) -> list[str]:
    """Relative posix paths of all .py files below `root` that are not left out, sorted."""
    paths: list[str] = []

    def unreadable(error: OSError) -> None:
        # A folder that cannot be listed joins the list: reading it fails and is counted like a file's
        # failure.
        if Path(error.filename) != root:
            paths.append(Path(error.filename).relative_to(root).as_posix())

    for folder, folders, files in os.walk(root, onerror=unreadable):
        skipped = SKIPPED_FOLDERS | (SKIPPED_AT_TOP if Path(folder) == root else set())
        folders[:] = [name for name in folders if name not in skipped]
        inside = Path(folder).relative_to(root)
        paths += [(inside / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(paths)
