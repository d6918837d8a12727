"""Files to records: one document each, or the reason why it is none.

    text       the whole file, UTF-8 (a byte order mark at its start is dropped); line ends stay as they are
    .jsonl     a line is an object with `text` (a string) or `messages` (a conversation, chat.py); named FILE:LINE
    .parquet   a row of the column `text` or `messages`; named FILE:ROW
Lines and rows count from 1. Other fields and columns are ignored.

No document: what is not UTF-8, empty, longer than 32 MiB, holds NUL bytes (a binary file, UTF-16), is no JSON object
with each key once, has neither `text` nor `messages`, both, or one of another type; a file that cannot be read counts
once. Invariant: every file, line and row gives one Record, in order, and the memory in use stays below a few times
32 MiB however long a line is.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from k3jax.config import ConfigError, MachineError
from k3jax.data import files
from k3jax.data.files import Found, need
from k3jax.data.sources import BadDocument, Record, Records, StandardLibrary

MAX_DOCUMENT_BYTES = 32 * 2**20
BLOCK_BYTES = 2**20
ROWS_AT_ONCE = 256  # of a Parquet file
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_records(field: str, spec: str) -> Records:
    """The records that one entry of data.source means: `stdlib`, or files (files.py).

    Raises ConfigError that names `field` and the path where there is nothing to read.
    """
    return StandardLibrary("all") if spec == "stdlib" else FileRecords(field, spec)


class FileRecords:
    """The records of all files that `spec` means. Raises ConfigError that names `field` where there is none."""

    def __init__(self, field: str, spec: str):
        self.name = spec
        self._field = field
        self._found = files.find(field, spec)
        if all(found.bad for found in self._found):
            first = self._found[0]
            raise ConfigError(f"{field}: {spec} holds no file that can be read ({first.name}: {first.bad.reason})")
        if any(files.kind(found.name) == ".parquet" for found in self._found):
            need("pyarrow.parquet", "parquet")
        self.size = sum(found.size for found in self._found)
        self.files = frozenset(files.identity(found.path) for found in self._found)

    def records(self) -> Iterator[Record]:
        """All records of all files in order; what cannot be read is a BadDocument in its place.

        Raises MachineError where a remote storage fails: what it would have given is not known to be bad.
        """
        for found in self._found:
            if found.bad:
                yield Record(found.name, found.bad, 0)
                continue
            read = 0.0
            try:
                for record in _READERS[files.kind(found.name)](found):
                    read += record.size
                    yield record
            except OSError as error:  # in the middle of it: what came before stays
                if files.is_remote(found.path):
                    raise MachineError(f"{self._field}: {found.path}: {error}") from error
                yield Record(found.name, BadDocument("unreadable", found.name), found.size - read)


def as_text(value: Any, where: str) -> str:
    """`value` (UTF-8, or a string) as a document's text. Raises BadDocument."""
    if not isinstance(value, bytes | str):
        raise BadDocument("text is not a string", where)
    try:
        data = value if isinstance(value, bytes) else value.encode()
        text = value if isinstance(value, str) else value.decode()
    except UnicodeError as error:
        raise BadDocument("not UTF-8", where) from error
    if not data:
        raise BadDocument("empty", where)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise BadDocument("too long", where)
    if b"\0" in data:
        raise BadDocument("NUL bytes", where)
    return text


def _text(found: Found) -> Iterator[Record]:
    try:
        if found.size > MAX_DOCUMENT_BYTES:
            raise BadDocument("too long", found.name)
        content = as_text(found.path.read_bytes().removeprefix(BYTE_ORDER_MARK), found.name)
    except BadDocument as error:
        content = error
    yield Record(found.name, content, found.size)


def _jsonl(found: Found) -> Iterator[Record]:
    if not found.size:
        yield Record(found.name, BadDocument("empty", found.name), 0)
        return
    with found.path.open("rb") as file:
        for number, (line, size) in enumerate(_lines(file), 1):
            name = f"{found.name}:{number}"
            try:
                content = _parsed(line if number > 1 or not line else line.removeprefix(BYTE_ORDER_MARK), name)
            except BadDocument as error:
                content = error
            yield Record(name, content, size)


def _lines(file) -> Iterator[tuple[bytes | None, int]]:
    """Each line without its end, None for one that is too long, and its bytes with the end."""
    kept, size = bytearray(), 0
    while block := file.read(BLOCK_BYTES):
        start = 0
        while start < len(block):
            end = block.find(b"\n", start)
            behind = len(block) if end < 0 else end
            size += behind - start
            if size <= MAX_DOCUMENT_BYTES:
                kept += block[start:behind]
            else:
                kept.clear()
            start = behind + 1
            if end >= 0:
                yield (bytes(kept) if size <= MAX_DOCUMENT_BYTES else None), size + 1
                kept.clear()
                size = 0
    if size:
        yield (bytes(kept) if size <= MAX_DOCUMENT_BYTES else None), size


def _parsed(line: bytes | None, where: str) -> str | list[Any]:
    if line is None:
        raise BadDocument("too long", where)
    if not line.strip():
        raise BadDocument("empty", where)
    try:
        fields = json.loads(line.decode(), object_pairs_hook=_once)
    except UnicodeError as error:
        raise BadDocument("not UTF-8", where) from error
    except _DuplicateKey as error:
        raise BadDocument("a key twice", where) from error
    except (ValueError, RecursionError) as error:
        raise BadDocument("invalid JSON", where) from error
    if not isinstance(fields, dict):
        raise BadDocument("not a JSON object", where)
    return _content(fields, where)


class _DuplicateKey(Exception):
    """JSON that says two things at once."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _DuplicateKey
    return fields


def _content(fields: Mapping[str, Any], where: str) -> str | list[Any]:
    text, messages = fields.get("text"), fields.get("messages")
    if text is None and messages is None:
        raise BadDocument("no text or messages", where)
    if text is not None and messages is not None:
        raise BadDocument("both text and messages", where)
    if messages is None:
        return as_text(text, where)
    if not isinstance(messages, list):
        raise BadDocument("messages is not a list", where)
    return messages


def _parquet(found: Found) -> Iterator[Record]:
    pyarrow, parquet = need("pyarrow", "parquet"), need("pyarrow.parquet", "parquet")
    try:
        with found.path.open("rb") as file:
            table = parquet.ParquetFile(file)
            columns = [name for name in ("text", "messages") if name in table.schema_arrow.names]
            if len(columns) != 1 or not table.metadata.num_rows:
                reason = "both text and messages" if columns else "no text or messages"
                reason = reason if table.metadata.num_rows else "empty"
                yield Record(found.name, BadDocument(reason, found.name), found.size)
                return
            share, number = found.size / table.metadata.num_rows, 0
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=columns):
                for value in batch.column(0):
                    number += 1
                    name = f"{found.name}:{number}"
                    yield Record(name, _cell(columns[0], value, name), share)
    except pyarrow.ArrowException as error:
        raise OSError(f"{found.path}: {error}") from error


def _cell(column: str, value: Any, where: str) -> str | list[Any] | BadDocument:
    try:
        return _content({column: value.as_py()}, where)
    except UnicodeError:
        return BadDocument("not UTF-8", where)
    except BadDocument as error:
        return error


_READERS = {".txt": _text, ".jsonl": _jsonl, ".parquet": _parquet}
