"""Damaged files of every kind: a line that names the file, or a count beside what was whole. Never a silent change."""

import io
import json
import shutil
from hashlib import sha256

import numpy as np
import pytest
from data_config import config
from etils import epath

from k3jax.config import ConfigError
from k3jax.data import ByteTokenizer, load, shards
from k3jax.data import prepare as preparing
from k3jax.data.chat import Chat


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder of two token shards: text in one, a conversation in the other."""
    root = tmp_path_factory.mktemp("prepared")
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
    lines = [{"text": f"document {number} of the first"} for number in range(8)] + [{"messages": talk}] * 3
    (root / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = ByteTokenizer()
    made = {
        "format": shards.FORMAT, "dtype": "uint16", "sources": ["a"], "chat_template": "",
        "tokenizer": {"name": "bytes", "sha256": tokenizer.hash, "vocab_size": 259},
    }  # fmt: skip
    preparing.prepare([f"{root}/a.jsonl"], tokenizer, Chat(tokenizer), epath.Path(root / "out"), made, limit=450)
    assert len(list((root / "out").glob("*.bin"))) >= 3 and not (root / "out/00000.answer.bin").exists()
    return root / "out"


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy to damage."""
    return shutil.copytree(prepared, tmp_path / "shards")


def edit(change):
    """Damage to meta.json: `change` gets its fields."""

    def damage(folder):
        meta = json.loads((folder / "meta.json").read_text())
        change(meta)
        (folder / "meta.json").write_text(json.dumps(meta))

    return damage


def rewrite(name, change):
    """Damage to a file: `change` gets its bytes and gives the new ones."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def new_index(change):
    """Other offsets in 00000.idx.npy, with a hash in meta.json that fits them."""

    def damage(folder):
        offsets = change(np.load(folder / "00000.idx.npy"))
        file = io.BytesIO()
        np.save(file, offsets)
        (folder / "00000.idx.npy").write_bytes(file.getvalue())
        edit(lambda meta: meta["shards"][0]["sha256"].update({"idx.npy": sha256(file.getvalue()).hexdigest()}))(folder)

    return damage


def swapped(offsets):
    offsets[1], offsets[2] = offsets[2], offsets[1]
    return offsets


META = "meta.json"
DAMAGED_SHARDS = {
    "bin shorter": ("00000.bin", rewrite("00000.bin", lambda data: data[:-2])),
    "bin longer": ("00000.bin", rewrite("00000.bin", lambda data: data + b"\0\0")),
    "bin empty": ("00000.bin", rewrite("00000.bin", lambda data: b"")),
    "bin gone": ("00000.bin", lambda folder: (folder / "00000.bin").unlink()),
    "bin a folder": ("00000.bin", lambda folder: ((folder / "00000.bin").unlink(), (folder / "00000.bin").mkdir())),
    "one id changed": ("00000.bin", rewrite("00000.bin", lambda data: data[:10] + b"\x41\0" + data[12:])),
    "id beyond the vocabulary": ("00000.bin", rewrite("00000.bin", lambda data: data[:10] + b"\xff\xff" + data[12:])),
    "bytes swapped": ("00000.bin", rewrite("00000.bin", lambda d: np.frombuffer(d, "<u2").astype(">u2").tobytes())),
    "shards exchanged": ("0000", lambda f: shutil.copy(f / "00000.bin", f / "00001.bin")),
    "index cut": ("00000.idx.npy", rewrite("00000.idx.npy", lambda data: data[:-9])),
    "index of nothing": ("00000.idx.npy", rewrite("00000.idx.npy", lambda data: b"")),
    "index of text": ("00000.idx.npy", rewrite("00000.idx.npy", lambda data: b"[0, 1, 2]")),
    "index gone": ("00000.idx.npy", lambda folder: (folder / "00000.idx.npy").unlink()),
    "offsets decrease": ("00000.idx.npy", new_index(swapped)),
    "offsets from 1": ("00000.idx.npy", new_index(lambda offsets: np.r_[1, offsets[1:]])),
    "offsets beyond the tokens": ("00000.idx.npy", new_index(lambda offsets: np.r_[offsets[:-1], offsets[-1] + 5])),
    "an empty document": ("00000.idx.npy", new_index(lambda offsets: np.r_[0, 0, offsets[2:]])),
    "a document less": ("00000.idx.npy", new_index(lambda offsets: np.r_[0, offsets[2:]])),
    "offsets as floats": ("00000.idx.npy", new_index(lambda offsets: offsets.astype(float))),
    "offsets in 32 bits": ("00000.idx.npy", new_index(lambda offsets: offsets.astype(np.int32))),
    "offsets of objects": ("00000.idx.npy", new_index(lambda offsets: offsets.astype(object))),
    "offsets in two rows": ("00000.idx.npy", new_index(lambda offsets: np.stack([offsets, offsets]))),
    "a single number": ("00000.idx.npy", new_index(lambda offsets: offsets[0])),
    "answers gone": (".answer.bin", lambda folder: next(iter(folder.glob("*.answer.bin"))).unlink()),
    "answers cut": (".answer.bin", lambda folder: next(iter(folder.glob("*.answer.bin"))).write_bytes(b"\1")),
    "meta empty": (META, rewrite(META, lambda data: b"")),
    "meta cut": (META, rewrite(META, lambda data: data[: len(data) // 2])),
    "meta not UTF-8": (META, rewrite(META, lambda data: b"\xff" + data)),
    "meta nested": (META, rewrite(META, lambda data: b"[" * 100_000)),
    "meta a list": (META, rewrite(META, lambda data: b"[]")),
    "meta of another program": (META, rewrite(META, lambda data: b'{"dtype": "uint16"}')),
    "dtype wider": ("00000.bin", edit(lambda meta: meta.update(dtype="uint32"))),
    "dtype unknown": (META, edit(lambda meta: meta.update(dtype="float32"))),
    "dtype a number": (META, edit(lambda meta: meta.update(dtype=16))),
    "dtype a list": (META, edit(lambda meta: meta.update(dtype=["uint16"]))),
    "a count that is text": (META, edit(lambda meta: meta.update(skipped={"empty": "many"}))),
    "an example that is none": (META, edit(lambda meta: meta.update(examples={"empty": None}))),
    "no tokenizer": (META, edit(lambda meta: meta.pop("tokenizer"))),
    "another tokenizer": ("data.tokenizer", edit(lambda meta: meta["tokenizer"].update(sha256="0" * 64))),
    "no shards": (META, edit(lambda meta: meta.update(shards=[]))),
    "a shard less": (META, edit(lambda meta: meta["shards"].pop())),
    "shards a number": (META, edit(lambda meta: meta.update(shards=2))),
    "a shard without hashes": (META, edit(lambda meta: meta["shards"][0].pop("sha256"))),
    "a hash that is a number": (META, edit(lambda meta: meta["shards"][0]["sha256"].update(bin=3))),
    "a hash of a file elsewhere": (META, edit(lambda meta: meta["shards"][0]["sha256"].update({"../x": "0"}))),
    "tokens negative": ("00000", edit(lambda meta: meta["shards"][0].update(tokens=-1))),
    "tokens a truth value": (META, edit(lambda meta: meta["shards"][0].update(tokens=True))),
    "counts that do not add up": (META, edit(lambda meta: meta.update(documents=3))),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED_SHARDS)
def test_damaged_shards(folder, name):
    """Each ends in one line that names the file; the folder as it was loads."""
    named, damage = DAMAGED_SHARDS[name]
    load(config(folder), 264)
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        load(config(folder), 264)
    assert str(caught.value).startswith("data.") and named in str(caught.value) and "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_ids_of_large_shards_are_checked_when_read(folder, monkeypatch):
    """Too large to be hashed at the start: an id beyond the vocabulary ends the run, through the reading thread too."""
    rewrite("00000.bin", lambda data: data[:10] + b"\xff\xff" + data[12:])(folder)
    monkeypatch.setattr(shards, "VERIFIED_BYTES", 0)
    corpus = load(config(folder), 264)
    steps = int(corpus.steps_per_epoch) + 1
    with pytest.raises(ConfigError, match=r"^data.source: \S*/shards/00000 holds the id 65535, beyond its tokenizer"):
        for step in range(steps):
            corpus.train_batches().batch(step)
    stream = corpus.train_batches().iterate()
    with pytest.raises(ConfigError, match="holds the id 65535"):
        for _ in range(steps):
            next(stream)
    stream.close()


GOOD = [f"good document {number}" for number in range(30)]
GOOD_LINES = "".join(json.dumps({"text": text}) + "\n" for text in GOOD).encode()
NESTED = b'{"text": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001
DAMAGED_LINES = {  # beside the good lines: what else is in the file, and what is counted
    "cut at the end": (GOOD_LINES + b'{"text": "cut he', {"invalid JSON": 1}),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD_LINES, {}),
    "CRLF": (GOOD_LINES.replace(b"\n", b"\r\n"), {}),
    "blank lines": (GOOD_LINES.replace(b"\n", b"\n\n"), {"empty": 30}),
    "NUL bytes": (GOOD_LINES + b"\0\0\0\0\n", {"invalid JSON": 1}),
    "UTF-16 in the middle": (GOOD_LINES + '{"text": "x"}'.encode("utf-16") + b"\n", {"not UTF-8": 1}),
    "deep nesting": (NESTED + b"\n" + GOOD_LINES, {"invalid JSON": 1}),
    "a key twice": (GOOD_LINES + b'{"text": "a", "text": "b"}\n', {"a key twice": 1}),
    "two objects in a line": (GOOD_LINES + b'{"text": "a"}{"text": "b"}\n', {"invalid JSON": 1}),
    "text null": (GOOD_LINES + b'{"text": null}\n', {"no text or messages": 1}),
    "a table's head": (b"text,label\n" + GOOD_LINES, {"invalid JSON": 1}),
    "a conflict's marks": (GOOD_LINES + b"<<<<<<< ours\n=======\n>>>>>>> theirs\n", {"invalid JSON": 3}),
    "conversation without roles": (
        GOOD_LINES + b'{"messages": [{"from": "human", "value": "x"}]}\n', {"a message without a known role": 1},
    ),
    "conversation cut off": (
        GOOD_LINES + b'{"messages": [{"role": "user", "content": "x"}]}\n', {"no answer": 1},
    ),
    "latin-1": (GOOD_LINES + '{"text": "café"}\n'.encode("latin-1"), {"not UTF-8": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED_LINES)
def test_damaged_lines(write, name):
    """The good documents are all there, whole and alone, and what is not is counted."""
    content, skipped = DAMAGED_LINES[name]
    path = write("a.jsonl", content)
    corpus = load(config(path, held_out=(write("held.txt", "held out"),)), 264)
    documents = corpus.train.gathered()
    texts = [
        bytes(documents.read(at, 1, int(length) - 1).astype(np.uint8)).decode()
        for at, length in enumerate(documents.lengths)
    ]
    assert texts == GOOD
    assert [line for line in corpus.lines() if "skipped" in line] == [
        f"{path}: skipped {count}: {reason} (the first: {first(content, reason)})" for reason, count in skipped.items()
    ]


def first(content: bytes, reason: str) -> str:
    """The first line that is none of the good ones."""
    good = {line.strip() for line in GOOD_LINES.split(b"\n")} - {b""}
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return f"a.jsonl:{next(n for n, line in enumerate(lines, 1) if line.strip() not in good)}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.jsonl", b""),
        ("utf16.jsonl", GOOD_LINES.decode().encode("utf-16")),
        ("utf16le.jsonl", GOOD_LINES.decode().encode("utf-16-le")),
        ("array.jsonl", b'[{"text": "a"},\n {"text": "b"}]\n'),
        ("pretty.jsonl", json.dumps({"text": "a"}, indent=1).encode()),
        ("empty.txt", b""),
        ("marked.txt", b"\xef\xbb\xbf"),
        ("utf16.txt", "text".encode("utf-16")),
        ("binary.txt", bytes(range(256))),
        ("zeros.txt", b"\0" * 1000),
        ("gzip.txt", b"\x1f\x8b\x08\x00abc"),
        ("cut.parquet", b"PAR1\x15\x04\x15\x00\x15"),
        ("text.parquet", b"no parquet at all"),
        ("empty.parquet", b""),
        ("data.json", b"{}"),
        ("meta.json", b"{}"),
        ("archive.tar.gz", b"\x1f\x8b"),
    ],
)
def test_nothing_but_damage(write, name, content):
    """A source without one whole document ends in a line that names the field and the file."""
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = write(name, content)
    with pytest.raises(ConfigError) as caught:
        load(config(path), 264)
    message = str(caught.value)
    assert message.startswith("data.source: ") and path in message and "\n" not in message
    with pytest.raises(ConfigError, match=r"^data.held_out: "):
        load(config(write("good.jsonl", GOOD_LINES), held_out=(path,)), 264)
