"""Which files are documents, which are held out, and what happens to files that cannot be read."""

import os
from pathlib import Path

import grain
import pytest

from k3jax.config import ConfigError
from k3jax.data import BadDocument, ByteTokenizer, Source, StandardLibrary, tokenize
from k3jax.data.sources import is_held_out


# Remainders of the digests modulo 20, taken with sha256sum and shell arithmetic.
@pytest.mark.parametrize(
    "path, remainder",
    [
        ("functools.py", 0),
        ("asyncio/events.py", 0),
        ("xml/dom/minidom.py", 0),
        ("lib2to3/pgen2/tokenize.py", 0),
        ("json/decoder.py", 3),
        ("os.py", 3),
        ("asyncio/base_events.py", 6),
    ],
)
def test_held_out_by_hash(path, remainder):
    assert is_held_out(path) == (remainder == 0)


def test_standard_library_parts():
    train, held_out = StandardLibrary("train"), StandardLibrary("held_out")
    assert isinstance(train, Source) and isinstance(train, grain.sources.RandomAccessDataSource)
    assert not set(train.paths) & set(held_out.paths)
    both = train.paths + held_out.paths
    assert train.paths == sorted(train.paths) and held_out.paths == sorted(held_out.paths)
    assert {"os.py", "json/decoder.py"} <= set(train.paths) and "functools.py" in held_out.paths
    assert len(both) > 400 and 0.02 < len(held_out) / len(both) < 0.09
    folders = {folder for path in both for folder in path.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
    assert train[train.paths.index("os.py")] == Path(os.__file__).read_bytes()


def make_tree(root: Path) -> None:
    files = {
        "a.py": b"a = 1\n",
        "b/c.py": b"c = 2\n",
        "b/encodings/d.py": b"d = 3\n",  # left out at the top only
        "b/notes.txt": b"no",
        "b/tests/e.py": b"no",
        "b/idle_test/e.py": b"no",
        "test/f.py": b"no",
        "site-packages/g.py": b"no",
        "encodings/cp437.py": b"no",
        "z.py": b"\xff\xfe not UTF-8",
    }
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def test_left_out_and_order(tmp_path):
    make_tree(tmp_path)
    train, held_out = StandardLibrary("train", tmp_path), StandardLibrary("held_out", tmp_path)
    assert train.paths == ["a.py", "b/encodings/d.py", "z.py"]
    assert held_out.paths == ["b/c.py"]  # its digest is a multiple of 20, by sha256sum
    assert [train[index] for index in range(3)] == [b"a = 1\n", b"d = 3\n", b"\xff\xfe not UTF-8"]
    assert len(train) == 3 and held_out[0] == b"c = 2\n"


def test_bad_files_are_counted(tmp_path, monkeypatch):
    make_tree(tmp_path)
    (tmp_path / "b/__init__.py").touch()
    (tmp_path / "b/gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refuse(folder):
        if str(folder).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    source = StandardLibrary("train", tmp_path)
    with pytest.raises(BadDocument, match=r"^b/__init__\.py: empty$"):
        source[source.paths.index("b/__init__.py")]
    documents = tokenize(source, ByteTokenizer())
    assert documents.skipped == {"empty": 1, "unreadable": 2}
    assert documents.report() == "stdlib/train: 3 documents, 30 tokens, skipped: 1 empty, 2 unreadable"


def test_nothing_to_read(tmp_path):
    with pytest.raises(ConfigError, match=r"^data.source: no .py file for the part train under [^\n]*$"):
        StandardLibrary("train", tmp_path / "missing")
    (tmp_path / "a.py").touch()
    with pytest.raises(ConfigError, match=r"^data.source: stdlib/train holds no documents \(1 empty\)$"):
        tokenize(StandardLibrary("train", tmp_path), ByteTokenizer())
    with pytest.raises(ValueError, match="train or held_out"):
        StandardLibrary("test", tmp_path)
