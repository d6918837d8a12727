"""Files to documents: every kind by hand, and every reason why a record is none, counted and never merged."""

import json
import tracemalloc
from collections import Counter

import pytest

from k3jax.config import ConfigError, MachineError
from k3jax.data import BadDocument, ByteTokenizer, tokenize
from k3jax.data import records as reading
from k3jax.data.records import FileRecords, open_records
from k3jax.data.sources import Records


def read(spec) -> dict[str, object]:
    """By name: the content, or the reason why it is bad in brackets."""
    records = list(open_records("data.source", str(spec)).records())
    assert len({record.name for record in records}) == len(records)
    return {
        record.name: f"[{record.content.reason}]" if isinstance(record.content, BadDocument) else record.content
        for record in records
    }


def test_text_files(write, tmp_path):
    write("t/a.txt", "one\r\ntwo\n\nthree é")
    write("t/b.md", b"\xef\xbb\xbfmarked")
    write("t/c.txt", b"caf\xe9")
    write("t/d.txt", "")
    write("t/e.txt", "wide".encode("utf-16"))
    write("t/f.txt", "wide".encode("utf-16-le"))
    write("t/g.txt", b"\xef\xbb\xbf")
    write("t/h.png", "")
    assert read(tmp_path / "t") == {
        "a.txt": "one\r\ntwo\n\nthree é", "b.md": "marked", "c.txt": "[not UTF-8]", "d.txt": "[empty]",
        "e.txt": "[not UTF-8]", "f.txt": "[NUL bytes]", "g.txt": "[empty]", "h.png": "[unknown extension]",
    }  # fmt: skip
    documents = tokenize(FileRecords("data.source", str(tmp_path / "t")), ByteTokenizer())
    text = "one\r\ntwo\n\nthree é".encode()
    assert documents.tokens.tolist() == [256, *text, 257, 256, *b"marked", 257]
    assert documents.offsets.tolist() == [0, len(text) + 2, len(text) + 10]
    assert documents.skipped == {"not UTF-8": 2, "empty": 2, "NUL bytes": 1, "unknown extension": 1}
    assert documents.examples["not UTF-8"] == "c.txt" and documents.examples["empty"] == "d.txt"


MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
LINES = [
    (b'{"text": "one"}', "one"),
    (b'{"text": "two\\nlines", "other": [1, {"x": null}]}\r', "two\nlines"),
    (b"", "[empty]"),
    (b"   \t", "[empty]"),
    (b'{"text": ""}', "[empty]"),
    (b'{"text": "caf\xe9"}', "[not UTF-8]"),
    (b'{"text": "half a pair \\ud83d"}', "[not UTF-8]"),
    (b'{"text": "nul \\u0000"}', "[NUL bytes]"),
    (b'{"text": "raw \0"}', "[invalid JSON]"),
    (b'{"text": "cut', "[invalid JSON]"),
    (b'{"text": "a"} {"text": "b"}', "[invalid JSON]"),
    (b"[" * 200_000, "[invalid JSON]"),
    (b'{"text": ' + b"9" * 5_000 + b"}", "[invalid JSON]"),
    (b'{"text": "a", "text": "b"}', "[a key twice]"),
    (b'{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}', "[a key twice]"),
    (b'["text"]', "[not a JSON object]"),
    (b'"text"', "[not a JSON object]"),
    (b"NaN", "[not a JSON object]"),
    (b'{"txt": "x"}', "[no text or messages]"),
    (b'{"text": null}', "[no text or messages]"),
    (b'{"text": 3}', "[text is not a string]"),
    (b'{"text": ["a", "b"]}', "[text is not a string]"),
    (b'{"messages": "hello"}', "[messages is not a list]"),
    (b'{"text": "a", "messages": []}', "[both text and messages]"),
    (json.dumps({"messages": MESSAGES, "text": None}).encode(), MESSAGES),
    (b'{"text": "last line, without its end"}', "last line, without its end"),
]


@pytest.mark.parametrize("place", range(len(LINES)))
def test_one_line(write, place):
    """Each kind alone between two good lines: they stay whole, and it is counted under its own reason."""
    line, expected = LINES[place]
    found = read(write("a.jsonl", b'{"text": "before"}\n' + line + b'\n{"text": "after"}'))
    assert found == {"a.jsonl:1": "before", "a.jsonl:2": expected, "a.jsonl:3": "after"}


def test_all_lines_at_once(write, monkeypatch):
    path = write("all.jsonl", b"\xef\xbb\xbf" + b"\n".join(line for line, _ in LINES))
    expected = {f"all.jsonl:{number}": content for number, (_, content) in enumerate(LINES, 1)}
    assert read(path) == expected
    for block in (1, 7, 4096):  # wherever the blocks of the file end
        monkeypatch.setattr(reading, "BLOCK_BYTES", block)
        with open(path, "rb") as file:
            lines = list(reading._lines(file))
            assert sum(size for _, size in lines) == file.tell()
        assert [line for line, _ in lines][1:] == [line for line, _ in LINES][1:]
    documents = tokenize(open_records("data.source", path), ByteTokenizer())
    assert len(documents) == 4
    texts = [content for content in expected.values() if isinstance(content, str)]
    assert documents.skipped == Counter(text.strip("[]") for text in texts if text.startswith("["))


def test_lines_that_are_too_long(write):
    """50 MB in a line and 40 MB in a file are refused without being held: memory stays near the limit."""
    long = b'{"text": "' + b"x" * 50_000_000 + b'"}'
    path = write("a.jsonl", b'{"text": "before"}\n' + long + b'\n{"text": "after"}\n' + long)
    text = write("b.txt", b"x" * 40_000_000)
    del long
    tracemalloc.start()
    assert read(path) == {
        "a.jsonl:1": "before", "a.jsonl:2": "[too long]", "a.jsonl:3": "after", "a.jsonl:4": "[too long]",
    }  # fmt: skip
    assert read(text) == {"b.txt": "[too long]"}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 45_000_000
    just = "é" * (reading.MAX_DOCUMENT_BYTES // 2)
    assert reading.as_text(just, "") == just
    with pytest.raises(BadDocument, match="too long"):
        reading.as_text(just + "x", "")


def test_sizes_add_up(write, tmp_path):
    """A progress bar ends at 100 %."""
    write("s/a.jsonl", b'{"text": "x"}\n\n{"text": "y"}')
    write("s/b.txt", "text")
    write("s/c.txt", b"\xff")
    records = open_records("data.source", str(tmp_path / "s"))
    assert isinstance(records, Records)
    total = sum(record.size for record in records.records())
    assert total == records.size == 28 + 4 + 1


def test_parquet(write, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "p").mkdir()

    def store(name, **columns):
        parquet.write_table(arrow.table(columns), tmp_path / "p" / name, row_group_size=300)

    store("a.parquet", text=["one", "", None, "four"] * 200, id=list(range(800)))
    store("b.parquet", messages=[MESSAGES, None, []])
    store("c.parquet", text=[1, 2])
    store("d.parquet", txt=["x"])
    store("e.parquet", text=["x"], messages=["y"])
    store("f.parquet", text=arrow.array([], arrow.string()))
    store("g.parquet", text=arrow.array([b"bytes", b"\xff"], arrow.binary()))
    whole = (tmp_path / "p/a.parquet").read_bytes()
    write("p/h.parquet", whole[: len(whole) // 2])
    write("p/i.parquet", "")
    invalid = arrow.StringArray.from_buffers(
        2, arrow.array([0, 2, 3], arrow.int32()).buffers()[1], arrow.py_buffer(b"ok\xff")
    )
    store("j.parquet", text=invalid)
    store("k.parquet", text=arrow.array(["d", "d"]).dictionary_encode())
    found = read(tmp_path / "p")
    assert [found[f"a.parquet:{n}"] for n in (1, 2, 3, 4, 797, 800)] == [
        "one", "[empty]", "[no text or messages]", "four", "one", "four",
    ]  # fmt: skip
    assert sum(name.startswith("a.") for name in found) == 800
    assert {name: content for name, content in found.items() if not name.startswith("a.")} == {
        "b.parquet:1": MESSAGES, "b.parquet:2": "[no text or messages]", "b.parquet:3": [],
        "c.parquet:1": "[text is not a string]", "c.parquet:2": "[text is not a string]",
        "d.parquet": "[no text or messages]", "e.parquet": "[both text and messages]", "f.parquet": "[empty]",
        "g.parquet:1": "bytes", "g.parquet:2": "[not UTF-8]", "h.parquet": "[unreadable]", "i.parquet": "[unreadable]",
        "j.parquet:1": "ok", "j.parquet:2": "[not UTF-8]", "k.parquet:1": "d", "k.parquet:2": "d",
    }  # fmt: skip


def test_parquet_needs_its_library(write, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(MachineError, match=r"needs the package pyarrow: pip install 'k3jax\[parquet\]'"):
        open_records("data.source", write("a.parquet", b"PAR1"))


def test_file_that_vanishes(write, tmp_path):
    write("v/a.txt", "a")
    gone = write("v/b.jsonl", ['{"text": "x"}'])
    records = open_records("data.source", str(tmp_path / "v"))
    (tmp_path / "v/b.jsonl").unlink()
    assert gone and [getattr(record.content, "reason", record.content) for record in records.records()] == [
        "a", "unreadable",
    ]  # fmt: skip


def test_bucket(bucket):
    bucket("r/a.txt", "é".encode())
    bucket("r/b.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    assert read("gs://bucket/r") == {"a.txt": "é", "b.jsonl:1": "one", "b.jsonl:2": "two"}


def test_bucket_that_fails_is_no_bad_record(bucket, monkeypatch):
    path = bucket("r/b.jsonl", b'{"text": "one"}\n')
    records = open_records("data.source", path)

    def fail(file):
        raise OSError("connection reset")
        yield

    monkeypatch.setattr(reading, "_lines", fail)
    with pytest.raises(MachineError, match=r"gs://bucket/r/b\.jsonl: connection reset"):
        list(records.records())


@pytest.mark.parametrize(
    ("content", "message"),
    [("", r"holds no documents \(1 empty\)"), ("{", r"holds no documents \(1 invalid JSON\)")],
)
def test_nothing_left(write, content, message):
    path = write("a.jsonl", content)
    with pytest.raises(ConfigError, match=rf"^data.held_out: {path} {message}$"):
        tokenize(open_records("data.held_out", path), ByteTokenizer(), where="data.held_out")
    with pytest.raises(ConfigError, match=r"^data.source: \S* holds no file that can be read \(a.png: unknown ext"):
        open_records("data.source", write("only/a.png", "").removesuffix("/a.png"))
