"""Tokenised documents: end to end in memory, and any choice of them seen as one corpus.

    records --encoded--> (ids, answer) of each --tokenize--> TokenDocuments --chosen--> DocumentSet

Invariant: documents come in their source's order, each whole and once; a record that is no document is counted under
its reason, with the first example's name, and leaves nothing behind.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from k3jax.config import ConfigError
from k3jax.data.chat import Chat
from k3jax.data.sources import BadDocument, Record, Records, Source, draw_lot
from k3jax.data.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

GROUP_BYTES, GROUP_RECORDS = 2**20, 1024  # tokenised in one call, which lets a tokenizer use all cores


@dataclass(frozen=True)
class TokenDocuments:
    """Tokenised documents, end to end in one array; document i is `tokens[offsets[i] : offsets[i + 1]]`.

    tokens [total] unsigned; offsets int64 [documents + 1], increasing, so no document is without tokens.
    `answer` bool [total] tells the tokens that are learnt as targets (None: all). `lots` uint64 [documents] is what
    decides who is held out (sources.draw_lot; None where nobody asks). `skipped` counts by reason the records that are
    no documents, `examples` names the first of each. Raises ConfigError for a corpus without documents.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    skipped: dict[str, int]
    answer: np.ndarray | None = None
    lots: np.ndarray | None = None
    examples: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        if len(self) < 1:
            raise nothing("data.source", self.name, self.skipped)
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

    def answers(self, document: int, begin: int, end: int) -> np.ndarray | None:
        """Which of the tokens begin .. end - 1 of one document are learnt as targets, bool; None: all."""
        if self.answer is None:
            return None
        start = self.offsets[document]
        return np.asarray(self.answer[start + begin : start + end], bool)

    def report(self) -> str:
        """One line: documents, tokens, and what was skipped."""
        skipped = f", skipped: {_listed(self.skipped)}" if self.skipped else ""
        return f"{self.name}: {len(self):,} documents, {len(self.tokens):,} tokens{skipped}"


class DocumentSet:
    """Some documents of several TokenDocuments, end to end, with their interface and no copy of their tokens.

    `chosen` pairs each part with a bool array [its documents]; parts and documents keep their order. Offsets are
    int64 [documents + 1] as in TokenDocuments.
    """

    def __init__(self, name: str, chosen: Sequence[tuple[TokenDocuments, np.ndarray]]):
        self.name = name
        self.chosen = list(chosen)
        self._at = np.concatenate([np.flatnonzero(which) for _, which in chosen])
        counts = [int(which.sum()) for _, which in chosen]
        self._part = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self.lengths = np.concatenate([part.lengths[which] for part, which in chosen])
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])

    def __len__(self) -> int:
        return len(self._at)

    def read(self, document: int, begin: int, end: int) -> np.ndarray:
        """Tokens begin .. end - 1 of one document."""
        return self.chosen[self._part[document]][0].read(self._at[document], begin, end)

    def answers(self, document: int, begin: int, end: int) -> np.ndarray | None:
        """Which of them are learnt as targets, bool; None: all."""
        return self.chosen[self._part[document]][0].answers(self._at[document], begin, end)

    def gathered(self) -> TokenDocuments:
        """The same documents copied into one array."""
        tokens, answers = [], []
        for part, which in self.chosen:
            here = np.repeat(which, part.lengths)
            tokens.append(part.tokens[:][here])
            given = np.ones(len(here), bool) if part.answer is None else np.asarray(part.answer[:], bool)
            answers.append(given[here])
        answer = None if all(part.answer is None for part, _ in self.chosen) else np.concatenate(answers)
        return TokenDocuments(self.name, np.concatenate(tokens), self.offsets, {}, answer)


class Encoded(NamedTuple):
    """One record tokenised: ids with bos and eos and the answer mask (None: all), or `bad`."""

    record: Record
    ids: np.ndarray | None
    answer: np.ndarray | None
    bad: BadDocument | None


def encoded(source: Records, tokenizer: Tokenizer, chat: Chat) -> Iterator[Encoded]:
    """The records of `source` in order, tokenised in groups. What a tokenizer or template refuses is bad too."""
    group: list[Record] = []
    size = 0.0
    for record in source.records():
        group.append(record)
        size += record.size
        if size >= GROUP_BYTES or len(group) >= GROUP_RECORDS:
            yield from _encode(group, tokenizer, chat)
            group, size = [], 0.0
    yield from _encode(group, tokenizer, chat)


def _encode(group: list[Record], tokenizer: Tokenizer, chat: Chat) -> Iterator[Encoded]:
    texts = [record.content for record in group if isinstance(record.content, bytes | str)]
    ids = iter(tokenizer.encode_batch(texts))
    for record in group:
        if isinstance(record.content, BadDocument):
            yield Encoded(record, None, None, record.content)
        elif isinstance(record.content, list):
            try:
                yield Encoded(record, *chat.encode(record.content), None)
            except BadDocument as error:
                yield Encoded(record, None, None, error)
        else:
            found = next(ids)
            bad = found if isinstance(found, BadDocument) else None
            yield Encoded(record, None if bad else found, None, bad)


class Skipped:
    """Counts by reason, the first example of each, and a log line for every one."""

    def __init__(self, name: str):
        self.name = name
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, record: Record, bad: BadDocument) -> None:
        """Takes note of one record that is no document."""
        self.counts[bad.reason] += 1
        self.examples.setdefault(bad.reason, record.name)
        logger.info("%s: skipped %s: %s", self.name, record.name, bad.reason)

    def lines(self) -> list[str]:
        """What to tell the user, a line for each reason."""
        return skipped_lines(self.name, self.counts, self.examples)


def skipped_lines(name: str, counts: dict[str, int], examples: dict[str, str]) -> list[str]:
    """A line for each reason why records of the source `name` are no documents."""
    ordered = sorted(counts.items())
    return [f"{name}: skipped {n:,}: {reason} (the first: {examples.get(reason, '?')})" for reason, n in ordered]


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """uint16, or uint32 above 65,536 ids; little-endian."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def tokenize(
    source: Source | Records,
    tokenizer: Tokenizer,
    chat: Chat | None = None,
    *,
    where: str = "data.source",
    advance: Callable[[float], None] = lambda size: None,
) -> TokenDocuments:
    """All documents of `source`, in its order, tokenised into memory (uint16, or uint32 above 65,536 ids).

    `chat` turns conversations into text (None: the tokenizer's own template); `advance` is told the bytes behind.
    Raises ConfigError that names `where` when there is no document.
    """
    records = source if isinstance(source, Records) else _InOrder(source)
    chat, dtype = chat or Chat(tokenizer), token_dtype(tokenizer)
    skipped, lengths, lots = Skipped(source.name), array("q"), array("Q")
    tokens, answer = bytearray(), None
    for record, ids, marked, bad in encoded(records, tokenizer, chat):
        advance(record.size)
        if bad:
            skipped.add(record, bad)
            continue
        if marked is not None and answer is None:
            answer = bytearray(b"\1") * (len(tokens) // dtype.itemsize)
        if answer is not None:
            answer += (np.ones(len(ids), bool) if marked is None else marked).tobytes()
        tokens += ids.astype(dtype, copy=False).tobytes()
        lengths.append(len(ids))
        lots.append(draw_lot(record.name))
    if not lengths:
        raise nothing(where, source.name, skipped.counts)
    return TokenDocuments(
        source.name,
        np.frombuffer(tokens, dtype),
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        dict(skipped.counts),
        None if answer is None else np.frombuffer(answer, bool),
        np.array(lots, np.uint64),
        skipped.examples,
    )


class _InOrder:
    """A random-access source as records, named by their number."""

    files = frozenset()
    size = 0

    def __init__(self, source: Source):
        self.name = source.name
        self._source = source

    def records(self) -> Iterator[Record]:
        for index in range(len(self._source)):
            try:
                yield Record(str(index), self._source[index], 0)
            except BadDocument as error:
                yield Record(error.where, error, 0)


def nothing(where: str, name: str, skipped: dict[str, int]) -> ConfigError:
    """The error for a source that holds no document."""
    return ConfigError(f"{where}: {name} holds no documents" + (f" ({_listed(skipped)})" if skipped else ""))


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
