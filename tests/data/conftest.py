"""Files for the data tests."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_vocabularies import hugging_face_json, ranks_text


@pytest.fixture
def tokenizer_json(tmp_path):
    """A folder with that tokenizer.json; 109 ids."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(hugging_face_json()))
    return folder / "tokenizer.json"


@pytest.fixture
def tiktoken_model(tmp_path):
    """A folder with a tiktoken vocabulary of 265 ranks."""
    folder = tmp_path / "tiktoken"
    folder.mkdir()
    (folder / "tiktoken.model").write_text(ranks_text())
    return folder / "tiktoken.model"


@pytest.fixture
def write(tmp_path):
    """write(name, content) -> path: a file below tmp_path; text, bytes, or a list of JSON lines."""

    def write_one(name: str, content) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(entry) + "\n" for entry in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write_one


@pytest.fixture
def bucket(monkeypatch):
    """A gs:// of fsspec's memory in place of Google's: bucket(name, content) writes gs://bucket/<name>."""
    fsspec = pytest.importorskip("fsspec")
    from etils.epath import backend
    from fsspec.implementations.memory import MemoryFileSystem

    class Fake(MemoryFileSystem):
        protocol = ("gs", "gcs")
        store = {}  # noqa: RUF012
        pseudo_dirs = [""]  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + path.removeprefix("gs://").strip("/")

    fake = Fake(skip_instance_cache=True)
    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", lambda name: fake)
    assert fsspec

    def write_one(name: str, content: bytes) -> str:
        path = f"gs://bucket/{name}"
        fake.makedirs(path.rpartition("/")[0], exist_ok=True)
        with fake.open(path, "wb") as file:
            file.write(content)
        return path

    return write_one
