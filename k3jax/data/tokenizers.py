"""Text to ids and back: what a tokenizer is, the byte tokenizer, and `load` for all kinds.

A document becomes bos + its tokens + eos. Invariant: no special id ever comes out of a document's own text,
so a text cannot forge a boundary; decoding what was encoded gives the text back.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple, Protocol

import numpy as np

from k3jax.config import ConfigError
from k3jax.data.sources import BadDocument


class Part(NamedTuple):
    """A stretch of a conversation: written by the template (its special tokens count) or by somebody in it."""

    text: str
    template: bool
    answer: bool  # learnt as targets


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer. Ids are in 0 .. vocab_size - 1.

    `hash` is a sha256 over all that decides the ids; `special_tokens` are the texts of special ids, which a
    template may write; `bos` and `eos` are two of them ("" where there is none).
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int
    bos: str
    eos: str
    hash: str
    special_tokens: dict[str, int]

    def encode(self, document: bytes | str, *, eos: bool = True) -> np.ndarray:
        """bos, the document's ids, and eos unless it is to be continued. Raises BadDocument."""

    def encode_batch(self, documents: Sequence[bytes | str]) -> list[np.ndarray | BadDocument]:
        """`encode` of each, on all cores where the library can; a document's own error in its place."""

    def encode_parts(self, parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray]:
        """(ids [n], answer bool [n]) of a conversation, without bos and eos. Raises BadDocument."""

    def decode(self, ids) -> str:
        """The text of `ids` [n], without the special ones."""


class ByteTokenizer:
    """Ids 0 .. 255 are bytes, 256 bos, 257 eos, 258 pad (design.md section 3)."""

    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 259
    bos = eos = ""
    hash = sha256(b"bytes: 256 bos, 257 eos, 258 pad").hexdigest()
    special_tokens: dict[str, int] = {}  # noqa: RUF012  (never written to)

    def encode(self, document: bytes | str, *, eos: bool = True) -> np.ndarray:
        """uint16[n + 2] of a document of n bytes (str: of its UTF-8): bos, the bytes, eos.

        `eos=False` leaves the end open, for a prompt that is to be continued: uint16[n + 1].
        """
        text = document.encode() if isinstance(document, str) else document
        ids = np.empty(len(text) + 2, np.uint16)
        ids[0], ids[-1] = self.bos_id, self.eos_id
        ids[1:-1] = np.frombuffer(text, np.uint8)
        return ids if eos else ids[:-1]

    def encode_batch(self, documents: Sequence[bytes | str]) -> list[np.ndarray | BadDocument]:
        """`encode` of each."""
        return [self.encode(document) for document in documents]

    def encode_parts(self, parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of all parts. A template's marks are text like any other: bytes have no names for them."""
        data = [part.text.encode() for part in parts]
        ids = np.frombuffer(b"".join(data), np.uint8).astype(np.uint16)
        return ids, np.repeat([part.answer for part in parts], [len(text) for text in data])

    def decode(self, ids) -> str:
        """The text of `ids` [n], for reading: special ids are left out, broken UTF-8 shows as U+FFFD."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def load(spec: str, vocab: int | None = None, *, where: str = "data.tokenizer") -> Tokenizer:
    """The tokenizer `bytes`, of a Hugging Face `tokenizer.json`, or of a tiktoken vocabulary (.model, .tiktoken).

    Raises ConfigError that names `where` and the file, or model.vocab if the model's `vocab` ids are too few, and
    MachineError where the library is not installed.
    """
    from k3jax.data import vocabularies  # reads `Part` from here

    if spec == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    elif spec.endswith(".json"):
        tokenizer = vocabularies.HuggingFaceTokenizer(where, spec)
    elif spec.endswith((".model", ".tiktoken")):
        tokenizer = vocabularies.TiktokenTokenizer(where, spec)
    else:
        raise ConfigError(f"{where} must be bytes, a tokenizer.json, or a .model or .tiktoken vocabulary, got {spec!r}")
    if vocab is not None and vocab < tokenizer.vocab_size:
        raise ConfigError(f"model.vocab must be at least the tokenizer's {tokenizer.vocab_size}, got {vocab}")
    return tokenizer
