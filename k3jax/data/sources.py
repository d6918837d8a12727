"""What a source of documents is, which documents are held out, and the standard library as a source.

A `Source` is random access: a `name`, a length and `source[i]`, so it is a grain RandomAccessDataSource. `Records` are
read once, in order, as large files are (`records.py`). Invariant: the same files give the same documents in the same
order, and what cannot be read is a BadDocument in its own place alone; whoever reads (`documents.tokenize`) counts
those and goes on.
"""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from k3jax.config import ConfigError

Split = Literal["train", "held_out", "all"]
HELD_OUT_ONE_IN = 20
LOT_BITS = 58  # of the digest, below its remainder in a lot: 19 * 2^58 + 2^58 fits 63 bits
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


@dataclass(frozen=True)
class Record:
    """One record as it was read: the document (text, or a conversation's messages), or why it is none.

    `name` is what the held-out rule looks at; `size` are the bytes it took in its file, for a progress bar.
    """

    name: str
    content: bytes | str | list[Any] | BadDocument
    size: float


@runtime_checkable
class Records(Protocol):
    """Documents in order. `size` is the sum of all their records' sizes; `files` names what is read."""

    name: str
    size: int
    files: frozenset[str]

    def records(self) -> Iterator[Record]: ...


def draw_lot(name: str) -> int:
    """What decides whether a document is held out: r 2^58 + the leading 58 bits of the digest, r = digest mod 20.

    The digest is sha256(name as UTF-8), its 32 bytes read as one unsigned big-endian integer. Lots below 2^58 are held
    out, and the smallest lot is the first candidate where there is none.
    """
    digest = int.from_bytes(sha256(name.encode(errors="surrogateescape")).digest(), "big")
    return (digest % HELD_OUT_ONE_IN << LOT_BITS) | digest >> 256 - LOT_BITS


def is_held_out(name: str) -> bool:
    """Whether a document belongs to the held-out part: about one in twenty, whatever else is installed.

    A file's name is its path relative to the source's root with `/` between folders (`json/decoder.py`), a record's
    has `:` and its number behind that. It is held out when its digest (`draw_lot`) is a multiple of 20.
    """
    return draw_lot(name) >> LOT_BITS == 0


class StandardLibrary:
    """The .py files of this Python's own standard library; a document is the bytes of one file.

    Left out: folders named as in SKIPPED_FOLDERS at any depth and those of SKIPPED_AT_TOP. Documents are in
    the order of their relative path. `split` chooses the part by `is_held_out`, or both; `root` defaults to where
    this Python keeps its library. Raises ConfigError where there is no such file.
    """

    def __init__(self, split: Split, root: Path | None = None):
        if split not in ("train", "held_out", "all"):
            raise ValueError(f"split must be train or held_out, or all, got {split!r}")
        self.root = Path(root or sysconfig.get_path("stdlib"))
        self.name = "stdlib" if split == "all" else f"stdlib/{split}"
        files = _python_files(self.root)
        self.paths = [path for path in files if split == "all" or is_held_out(path) == (split == "held_out")]
        if not self.paths:
            raise ConfigError(f"data.source: no .py file for the part {split} under {self.root}")
        self.files = frozenset({"stdlib"})

    @property
    def size(self) -> int:
        """Bytes of all files that can be read."""
        return sum(self._size(path) for path in self.paths)

    def records(self) -> Iterator[Record]:
        """All documents in order, named by their path."""
        for index, path in enumerate(self.paths):
            try:
                yield Record(path, self[index], self._size(path))
            except BadDocument as error:
                yield Record(path, error, self._size(path))

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

    def _size(self, path: str) -> int:
        try:
            return (self.root / path).stat().st_size
        except OSError:
            return 0  # counted as unreadable when its turn comes

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
