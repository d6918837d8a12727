"""Text to ids and back, and a whole source as one array of ids.

A document becomes bos + its tokens + eos. Invariant: no special id ever comes out of a document's own text,
so a text cannot forge a boundary; decoding what was encoded gives the text back.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from k3jax.config import ConfigError
from k3jax.data.sources import BadDocument, Source

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer. Ids are in 0 .. vocab_size - 1."""

    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int

    def encode(self, document: bytes | str, *, eos: bool = True) -> np.ndarray: ...

    def decode(self, ids) -> str: ...


class ByteTokenizer:
    """Ids 0 .. 255 are bytes, 256 bos, 257 eos, 258 pad (design.md section 3)."""

    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 259

    def encode(self, document: bytes | str, *, eos: bool = True) -> np.ndarray:
        """uint16[n + 2] of a document of n bytes (str: of its UTF-8): bos, the bytes, eos.

        `eos=False` leaves the end open, for a prompt that is to be continued: uint16[n + 1].
        """
        text = document.encode() if isinstance(document, str) else document
        ids = np.empty(len(text) + 2, np.uint16)
        ids[0], ids[-1] = self.bos_id, self.eos_id
        ids[1:-1] = np.frombuffer(text, np.uint8)
        return ids if eos else ids[:-1]

    def decode(self, ids) -> str:
        """The text of `ids` [n], for reading: special ids are left out, broken UTF-8 shows as U+FFFD."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True)
class TokenDocuments:
    """Tokenised documents, end to end in one array; document i is `tokens[offsets[i] : offsets[i + 1]]`.

    tokens [total] unsigned; offsets int64 [documents + 1], increasing, so no document is without tokens.
    `skipped` counts by reason the records that are no documents. Raises ConfigError for a corpus without
    documents.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    skipped: dict[str, int]

    def __post_init__(self):
        if len(self) < 1:
            why = f" ({self._skipped_text()})" if self.skipped else ""
            raise ConfigError(f"data.source: {self.name} holds no documents{why}")
        total = len(self.tokens)
        if self.offsets[0] != 0 or self.offsets[-1] != total or (self.lengths < 1).any():
            raise ValueError(f"{self.name}: offsets must increase from 0 to the number of tokens, {total}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    def read(self, document: int, begin: int, end: int) -> np.ndarray:
        """Tokens begin .. end - 1 of one document."""
        start = self.offsets[document]
        return self.tokens[start + begin : start + end]

    def report(self) -> str:
        """One line: documents, tokens, and what was skipped."""
        skipped = f", skipped: {self._skipped_text()}" if self.skipped else ""
        return f"{self.name}: {len(self):,} documents, {len(self.tokens):,} tokens{skipped}"

    def _skipped_text(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.skipped.items()))


def tokenize(source: Source, tokenizer: Tokenizer) -> TokenDocuments:
    """All documents of `source`, in its order, tokenised into memory (uint16, or uint32 above 65,536 ids).

    A record that cannot be read is counted in `skipped` and logged with its name. Raises ConfigError when
    nothing is left.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    documents: list[np.ndarray] = []
    skipped: Counter[str] = Counter()
    for index in range(len(source)):
        try:
            documents.append(tokenizer.encode(source[index]).astype(dtype, copy=False))
        except BadDocument as error:
            skipped[error.reason] += 1
            logger.info("%s: skipped %s", source.name, error)
    tokens = np.concatenate(documents) if documents else np.zeros(0, dtype)
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return TokenDocuments(source.name, tokens, offsets, dict(skipped))
