"""Which files a spec means, under which names, and the mistakes."""

import os

import pytest

from k3jax.config import ConfigError, MachineError
from k3jax.data.files import find, kind


def names(spec) -> list[str]:
    return [found.name for found in find("data.source", str(spec)) if not found.bad]


@pytest.fixture
def tree(write, tmp_path):
    for name in ("a.txt", "b/c.md", "b/d/e.py", "b/d/f.jsonl", "b/.hidden.txt", ".git/g.txt", "h.png", "b/LICENSE"):
        write(f"tree/{name}", name)
    (tmp_path / "tree/loop").symlink_to(tmp_path / "tree")
    return tmp_path / "tree"


def test_folder(tree):
    assert names(tree) == ["a.txt", "b/c.md", "b/d/e.py", "b/d/f.jsonl"]
    passed_over = [(found.name, found.bad.reason) for found in find("data.source", str(tree)) if found.bad]
    assert passed_over == [("b/LICENSE", "unknown extension"), ("h.png", "unknown extension")]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("*.txt", ["a.txt"]),
        ("**", ["a.txt", "b/c.md", "b/d/e.py", "b/d/f.jsonl"]),
        ("**/*.md", ["b/c.md"]),
        ("b/**/*.[pj]*", ["d/e.py", "d/f.jsonl"]),
        ("*/*.md", ["b/c.md"]),
        ("b/?.md", ["c.md"]),
        ("b/**/d/**/e.py", ["d/e.py"]),
        ("b/.*.txt", [".hidden.txt"]),
        ("loop/*.txt", ["a.txt"]),
    ],
)
def test_globs(tree, glob, expected):
    assert names(tree / glob) == expected


def test_one_file_and_relative_paths(tree, monkeypatch):
    assert names(tree / "b/d/e.py") == ["e.py"]
    monkeypatch.chdir(tree)
    assert names("a.txt") == ["a.txt"] and names("b") == ["c.md", "d/e.py", "d/f.jsonl"] == names("./b/**")
    assert names("*/*.md") == ["b/c.md"] and names("**/e.py") == ["b/d/e.py"]
    monkeypatch.setenv("HOME", str(tree))
    assert names("~/a.txt") == ["a.txt"]
    (tree / "what[is]this.txt").write_text("x")
    assert names("what[is]this.txt") == ["what[is]this.txt"]  # a file of that name comes before a glob


def test_links_to_files(tree):
    (tree / "b/z.md").symlink_to(tree / "b/c.md")
    (tree / "b/y.md").symlink_to(tree / "nowhere")
    assert names(tree / "b/*.md") == ["c.md"]
    assert [(one.name, one.bad.reason) for one in find("data.source", str(tree / "b/*.md")) if one.bad] == [
        ("y.md", "unreadable"), ("z.md", "a link to another"),
    ]  # fmt: skip


def test_extensions():
    assert kind("A.TXT") == ".txt" and kind("x.JsonL") == ".jsonl" and kind("x.parquet") == ".parquet"
    assert kind("x.json") is kind("x") is kind(".txt") is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{tree}/none.txt", "no file or folder {tree}/none.txt"),
        ("{tree}/none/*.txt", "no folder {tree}/none"),
        ("{tree}/*.rst", "{tree}/*.rst matches no file"),
        ("{tree}/h.png", "{tree}/h.png has the unknown extension '.png'"),
        ("{tree}/b/LICENSE", "has the unknown extension ''"),
        ("{tree}/empty", "{tree}/empty matches no file"),
        ("s3://bucket/a.txt", "s3://bucket/a.txt is neither a local path nor gs://"),
        ("{tree}/a\0.txt", "no file or folder"),
    ],
)
def test_mistakes(tree, spec, message):
    (tree / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        find("data.source", spec.format(tree=tree))
    assert str(caught.value).startswith("data.source: ") and message.format(tree=tree) in str(caught.value)


def test_folder_that_cannot_be_listed(tree, monkeypatch):
    scandir = os.scandir

    def refuse(folder):
        if str(folder).rstrip("/").endswith("b/d"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    found = [(one.name, one.bad.reason) for one in find("data.source", str(tree)) if one.bad]
    assert ("b/d", "unreadable") in found and names(tree) == ["a.txt", "b/c.md"]


def test_bucket(bucket):
    for name in ("books/a.txt", "books/b/c.md", "books/b/d.png", "books/b/e.jsonl"):
        bucket(name, b"x")
    assert names("gs://bucket/books") == ["a.txt", "b/c.md", "b/e.jsonl"] == names("gs://bucket/books/**")
    assert names("gs://bucket/books/*/*.md") == ["b/c.md"] and names("gs://bucket/books/a.txt") == ["a.txt"]
    with pytest.raises(ConfigError, match=r"^data.source: no file or folder gs://bucket/none.txt$"):
        find("data.source", "gs://bucket/none.txt")


def test_bucket_without_its_library_or_login(monkeypatch):
    from etils.epath import backend

    def missing(name):
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", missing)
    with pytest.raises(MachineError, match=r"gs://bucket/a.txt needs the package gcsfs: pip install 'k3jax\[gcs\]'"):
        find("data.source", "gs://bucket/a.txt")

    class NoLogin(Exception):
        pass

    def refused(name):
        raise NoLogin("no credentials")

    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", refused)
    with pytest.raises(MachineError, match=r"gs://bucket/a\.txt: NoLogin: no credentials"):
        find("data.source", "gs://bucket/a.txt")
