"""Folders of token shards: documents tokenised once (prepare.py), read where they lie.

    00000.bin           token ids, little-endian uint16 or uint32, one document behind the other; 00001.bin, ...
    00000.idx.npy       int64 [documents + 1]: where each begins, in tokens, from 0; the last is their number
    00000.answer.bin    a byte for each token, 1 where it is learnt as a target; only where conversations are in it
    meta.json           written last: `format`, `dtype`, `tokenizer` (name, sha256, vocab_size), `chat_template` (its
                        sha256), `sources`, `documents`, `tokens`, `skipped` and `examples` (by reason), and `shards`,
                        for each its `documents`, `tokens` and the `sha256` of each of its files

A document's name, for the held-out rule, is `00000:12`: shard and document, both from 0. Invariant: a folder without a
whole meta.json is none; sizes, offsets and the tokenizer must agree with it, ids are held against the vocabulary
whenever they are read, and the hashes too while the files are small enough to read them all at the start.
"""

import contextlib
import io
import json
from array import array
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from etils import epath

from k3jax.config import ConfigError
from k3jax.data import files
from k3jax.data.documents import TokenDocuments
from k3jax.data.sources import draw_lot
from k3jax.data.tokenizers import Tokenizer

FORMAT = "k3jax token shards 1"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SHARD_BYTES = 2**28  # of one .bin; a document is never cut
VERIFIED_BYTES = 2**28  # folders up to here are hashed when they are opened: under a second
COPIED_TOKENS = 2**22  # at once, of an answer mask that begins late


@dataclass(frozen=True)
class ShardDocuments(TokenDocuments):
    """One shard as TokenDocuments. Reading raises ConfigError for an id that is not below `vocab_size`."""

    vocab_size: int = 0

    def read(self, document: int, begin: int, end: int) -> np.ndarray:
        """Tokens begin .. end - 1 of one document."""
        ids = np.asarray(super().read(document, begin, end))
        if ids.size and int(ids.max()) >= self.vocab_size:
            raise ConfigError(f"data.source: {self.name} holds the id {ids.max()}, beyond its tokenizer's ids")
        return ids


@dataclass(frozen=True)
class ShardFolder:
    """What `open_shards` finds. `hashes` are those of all files, as meta.json gives them."""

    name: str
    shards: list[ShardDocuments]
    skipped: dict[str, int]
    examples: dict[str, str]
    hashes: list[str]
    files: frozenset[str]

    def lots(self) -> list[np.ndarray]:
        """Of each shard, uint64 [documents] (sources.draw_lot)."""
        return [
            np.fromiter((draw_lot(f"{number:05d}:{i}") for i in range(len(shard))), np.uint64, len(shard))
            for number, shard in enumerate(self.shards)
        ]


def is_shard_folder(field: str, spec: str) -> bool:
    """Whether `spec` is a folder with a meta.json."""
    if spec == "stdlib" or any(sign in spec for sign in "*?["):
        return False
    meta = files.as_path(field, spec) / files.META
    return bool(files.ask(field, meta, meta.exists))


def open_shards(field: str, spec: str, tokenizer: Tokenizer) -> ShardFolder:
    """The token shards in folder `spec`: mapped into memory, read range by range from gs://.

    Raises ConfigError that names `field` and the file for anything that does not agree, data.tokenizer if the folder
    was made with another one.
    """
    folder = files.as_path(field, spec)
    meta = read_meta(field, folder)
    made_with = meta["tokenizer"]
    if made_with["sha256"] != tokenizer.hash:
        raise ConfigError(f"data.tokenizer is not the one that {spec} was made with, {made_with['name']}")
    dtype = DTYPES[meta["dtype"]]
    verify = meta["tokens"] * dtype.itemsize <= VERIFIED_BYTES
    shards = [
        _open(field, folder, number, entry, dtype, tokenizer.vocab_size, verify)
        for number, entry in enumerate(meta["shards"])
    ]
    if sum(map(len, shards)) != meta["documents"] or sum(len(shard.tokens) for shard in shards) != meta["tokens"]:
        raise ConfigError(f"{field}: {folder / files.META}: its shards do not add up to its documents and tokens")
    hashes = [value for entry in meta["shards"] for _, value in sorted(entry["sha256"].items())]
    return ShardFolder(spec, shards, meta["skipped"], meta["examples"], hashes, frozenset({files.identity(folder)}))


def read_meta(field: str, folder: epath.Path) -> dict[str, Any]:
    """The meta.json of `folder`, with everything that is read from it there and of its type. Raises ConfigError."""
    path = folder / files.META
    try:
        meta = json.loads(files.read(field, path).decode())
    except (ValueError, RecursionError) as error:
        raise (
            error if isinstance(error, ConfigError) else ConfigError(f"{field}: {path} is no JSON: {error}")
        ) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ConfigError(f"{field}: {path} is not of token shards (its format is not {FORMAT!r})")
    strings = {"name": str, "sha256": str, "vocab_size": int}
    fits = meta.get("dtype") in tuple(DTYPES) and _has(meta.get("tokenizer"), strings) and _has(meta, _META)
    fits = fits and all(type(count) is int for count in meta["skipped"].values())
    fits = fits and all(type(name) is str for name in meta["examples"].values())
    fits = fits and len(meta["shards"]) > 0 and all(_has(entry, _ENTRY) for entry in meta["shards"])
    kinds = ({"bin", "idx.npy"}, {"bin", "idx.npy", "answer.bin"})
    fits = fits and all(set(entry["sha256"]) in kinds for entry in meta["shards"])
    if not fits or not all(type(value) is str for entry in meta["shards"] for value in entry["sha256"].values()):
        raise ConfigError(f"{field}: {path} is damaged: a field is missing or of another type")
    return meta


_META = {"documents": int, "tokens": int, "shards": list, "skipped": dict, "examples": dict, "sources": list}
_ENTRY = {"documents": int, "tokens": int, "sha256": dict}


def _has(values: Any, fields: dict[str, type]) -> bool:
    return isinstance(values, dict) and all(type(values.get(name)) is kind for name, kind in fields.items())


def _open(
    field: str, folder: epath.Path, number: int, entry: dict, dtype: np.dtype, vocab_size: int, verify: bool
) -> ShardDocuments:
    base, tokens = f"{number:05d}", entry["tokens"]
    index = folder / f"{base}.idx.npy"
    data = files.read(field, index)
    _verify(field, index, data, entry["sha256"]["idx.npy"])
    try:
        offsets = np.load(io.BytesIO(data), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{field}: {index} is no array: {error}") from error
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int64 or offsets.shape != (entry["documents"] + 1,):
        raise ConfigError(f"{field}: {index} is not int64 [{entry['documents'] + 1}], as meta.json says")
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) < 1).any():
        raise ConfigError(f"{field}: {index} does not increase from 0 to the shard's tokens, {tokens}")
    arrays: dict[str, Any] = {}
    for kind, of in (("bin", dtype), ("answer.bin", np.dtype(np.uint8))):
        if kind not in entry["sha256"]:
            continue
        path = folder / f"{base}.{kind}"
        arrays[kind] = _array(field, path, tokens, of)
        if verify:
            _verify(field, path, arrays[kind][:], entry["sha256"][kind])
    return ShardDocuments(
        f"{folder}/{base}", arrays["bin"], offsets, {}, arrays.get("answer.bin"), vocab_size=vocab_size
    )


def _array(field: str, path: epath.Path, tokens: int, dtype: np.dtype):
    """The file as an array [tokens]. Raises ConfigError if it is not of that size."""
    if not files.ask(field, path, path.exists):
        raise ConfigError(f"{field}: no file {path}")
    size, expected = files.ask(field, path, path.stat).length, tokens * dtype.itemsize
    if size != expected:
        raise ConfigError(f"{field}: {path} has {size:,} bytes; {tokens:,} tokens of {dtype.name} are {expected:,}")
    if files.is_remote(path):
        return _RemoteArray(field, path, tokens, dtype)
    return files.ask(field, path, lambda: np.memmap(path, dtype, "r", shape=(tokens,)))


def _verify(field: str, path: epath.Path, data: Any, expected: str) -> None:
    if sha256(data).hexdigest() != expected:
        raise ConfigError(f"{field}: {path} is damaged: it is not what meta.json has the hash of")


class _RemoteArray:
    """An array [n] on gs:// whose slices are read when they are asked for."""

    def __init__(self, field: str, path: epath.Path, length: int, dtype: np.dtype):
        self._field, self._path, self._length, self._dtype = field, path, length, dtype

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        begin, end, _ = part.indices(self._length)

        def read() -> bytes:
            with self._path.open("rb") as file:
                file.seek(begin * self._dtype.itemsize)
                return file.read((end - begin) * self._dtype.itemsize)

        return np.frombuffer(files.ask(self._field, self._path, read), self._dtype)


class ShardWriter:
    """Writes documents into the files of `folder`, a new one whenever `limit` bytes of ids are full.

    ids are stored as `dtype`. Memory: the offsets of one shard. meta.json is not its business.
    """

    def __init__(self, folder: epath.Path, dtype: np.dtype, limit: int = SHARD_BYTES):
        self._folder, self._dtype, self._limit = folder, dtype, limit
        self._files: dict[str, _HashedFile] = {}
        self._offsets = array("q", [0])
        self.shards: list[dict[str, Any]] = []
        self.documents = self.tokens = 0

    def add(self, ids: np.ndarray, answer: np.ndarray | None) -> None:
        """One document's ids [n] and which of them are learnt, bool [n] (None: all)."""
        if self._offsets[-1] and (self._offsets[-1] + len(ids)) * self._dtype.itemsize > self._limit:
            self.finish()
        if answer is not None and "answer.bin" not in self._files:
            before = self._offsets[-1]
            for start in range(0, before, COPIED_TOKENS):
                self._write("answer.bin", b"\1" * min(COPIED_TOKENS, before - start))
        self._write("bin", np.ascontiguousarray(ids, self._dtype).tobytes())
        if answer is not None or "answer.bin" in self._files:
            self._write("answer.bin", (np.ones(len(ids), bool) if answer is None else answer).tobytes())
        self._offsets.append(self._offsets[-1] + len(ids))
        self.documents += 1
        self.tokens += len(ids)

    def finish(self) -> None:
        """Closes the shard in work, if there is one; its entry joins `shards`."""
        documents, tokens = len(self._offsets) - 1, self._offsets[-1]
        if not documents:
            return
        index = io.BytesIO()
        np.save(index, np.array(self._offsets, np.int64))
        self._write("idx.npy", index.getvalue())
        hashes = {kind: file.close() for kind, file in self._files.items()}
        self.shards.append({"documents": documents, "tokens": tokens, "sha256": hashes})
        self._files, self._offsets = {}, array("q", [0])

    def close(self) -> None:
        """Lets go of a shard that will not be finished."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # on a full disk what is still buffered fails again
                file.close()
        self._files = {}

    def _write(self, kind: str, data: bytes) -> None:
        if kind not in self._files:
            self._files[kind] = _HashedFile(self._folder / f"{len(self.shards):05d}.{kind}")
        self._files[kind].write(data)


class _HashedFile:
    def __init__(self, path: epath.Path):
        self._file, self._digest = path.open("wb"), sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)

    def close(self) -> str:
        self._file.close()
        return self._digest.hexdigest()
