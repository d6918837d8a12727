"""The one entry to data: from DataConfig to batches.

    config --tokenizer, sources--> documents --held-out rule--> training and evaluation documents --packing--> batches

Held out: with data.held_out, all documents of those sources, and all of data.source train. Without it, each source's
documents with the held-out lot (sources.draw_lot), about one in twenty. Where that would leave a source without a
training document it keeps all but the one with the smallest lot; where nothing at all is held out, the document with
the smallest lot is, of the sources that have more than one. With data.weights sources are mixed (mixture.py), without
they are one corpus. Invariant: no document is in both parts, whatever the split, and the same config over the same
files gives the same batches.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from k3jax.config import ConfigError, DataConfig
from k3jax.data.chat import Chat
from k3jax.data.documents import DocumentSet, TokenDocuments, skipped_lines, tokenize
from k3jax.data.mixture import mixed_rows
from k3jax.data.ngram import NAMES, ngram_losses
from k3jax.data.packing import Batches, EvaluationRows, TrainRows
from k3jax.data.progress import progress
from k3jax.data.records import open_records
from k3jax.data.shards import is_shard_folder, open_shards
from k3jax.data.sources import LOT_BITS, Records
from k3jax.data.tokenizers import Tokenizer
from k3jax.data.tokenizers import load as load_tokenizer

COUNTED_TOKENS = 64_000_000  # n-grams of more take minutes and gigabytes


@dataclass(frozen=True)
class _Loaded:
    """One source with its documents; `lots` are asked for where the held-out rule needs them."""

    name: str
    parts: list[TokenDocuments]
    lots: Callable[[], list[np.ndarray]]
    hashes: Callable[[], list[str]]
    skipped: dict[str, int]
    examples: dict[str, str]

    def chosen(self, which: np.ndarray) -> list[tuple[TokenDocuments, np.ndarray]]:
        """Each part with its piece of `which`, bool [documents of all parts]."""
        return list(zip(self.parts, np.split(which, np.cumsum([len(part) for part in self.parts])[:-1]), strict=True))


class Corpus:
    """What a run trains and evaluates on. `train` and `held_out` are the documents of all sources, end to end."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, sources: list[_Loaded], held_out: list[_Loaded] | None
    ):
        self.tokenizer = tokenizer
        self._config = config
        self._sources, self._evaluated = sources, held_out
        sizes = [sum(map(len, source.parts)) for source in sources]
        held = _split(sources) if held_out is None else [np.zeros(size, bool) for size in sizes]
        self._held = held
        training = [source.chosen(~away) for source, away in zip(sources, held, strict=True)]
        self._train = [DocumentSet(source.name, one) for source, one in zip(sources, training, strict=True)]
        self.train = DocumentSet("train", [pair for one in training for pair in one])
        if held_out is None:
            evaluation = [source.chosen(away) for source, away in zip(sources, held, strict=True)]
        else:
            evaluation = [source.chosen(np.ones(sum(map(len, source.parts)), bool)) for source in held_out]
        self.held_out = DocumentSet("held_out", [pair for one in evaluation for pair in one])

    def train_batches(self) -> Batches:
        """The endless training stream in batches [data.batch_rows, data.seq_len]."""
        width, rows, seed = self._config.seq_len, self._config.batch_rows, self._config.seed
        if self._config.weights and len(self._train) > 1:
            return Batches(mixed_rows(self._train, self._config.weights, width, seed), rows)
        return Batches(TrainRows(self.train, width, seed), rows)

    def evaluation_batches(self, rows: int | None = None) -> Batches:
        """The held-out documents once; with `rows` only that many rows, spread over them."""
        width, batch = self._config.seq_len, self._config.batch_rows
        return Batches(EvaluationRows(self.held_out, width, self.tokenizer.pad_id, batch, rows), batch)

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read as many tokens as all training documents hold; in a mixture epochs are each source's own."""
        return int(self.train.offsets[-1]) / (self._config.seq_len * self._config.batch_rows)

    def lines(self) -> list[str]:
        """What to tell the user: for each source its documents, tokens, how many are held out, what was skipped."""
        lines = []
        for source, held in zip(self._sources, self._held, strict=True):
            aside = f", {int(held.sum()):,} of the documents held out" if self._evaluated is None else ""
            lines += _described(source, aside)
        for source in self._evaluated or ():
            lines += _described(source, ", for evaluation")
        return lines

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """sha256 by name over the data: tokenizer, weights, and each source's tokens, boundaries, answers and split.

        They do not know where files lie. Of token shards their stored hashes stand for the files. 100 MB of tokens take
        0.1 s.
        """
        facts: dict[str, Any] = {"data.tokenizer": self.tokenizer.hash, "data.weights": list(self._config.weights)}
        for place, (source, held) in enumerate(zip(self._sources, self._held, strict=True)):
            facts[f"data.source[{place}]"] = source.hashes(), sha256(np.packbits(held)).hexdigest()
        facts |= {f"data.held_out[{place}]": source.hashes() for place, source in enumerate(self._evaluated or ())}
        return {name: sha256(json.dumps(fact).encode()).hexdigest() for name, fact in facts.items()}

    @property
    def fingerprint(self) -> str:
        """One sha256 for all `fingerprints`: the same for the same data."""
        return sha256(json.dumps(self.fingerprints).encode()).hexdigest()

    def ngrams(self) -> dict[str, float] | None:
        """Held-out losses of n-gram counts (ngram.py), or None where counting takes too long: COUNTED_TOKENS."""
        tokens = int(self.train.offsets[-1]) + int(self.held_out.offsets[-1])
        if tokens > COUNTED_TOKENS or self.tokenizer.vocab_size ** len(NAMES) >= 2**63:
            return None
        return ngram_losses(self.train.gathered(), self.held_out.gathered(), self.tokenizer)


def load(config: DataConfig, vocab: int) -> Corpus:
    """The corpus of `config` for a model of `vocab` ids; a large source shows its progress on a terminal.

    Raises ConfigError that names the field and the path for whatever cannot be trained on, MachineError for a library
    or a storage that is not there.
    """
    tokenizer = load_tokenizer(config.tokenizer, vocab)
    chat = Chat(tokenizer, config.chat_template, config.tokenizer)
    opened = {
        field: [_opened(field, spec, tokenizer) for spec in getattr(config, field.removeprefix("data."))]
        for field in ("data.source", "data.held_out")
    }
    training: set[str] = set()
    evaluated: set[str] = set()
    for source in opened["data.source"]:
        if twice := sorted(training & source.files):
            raise ConfigError(f"data.source: {twice[0]} is in two of its entries; a document comes once per epoch")
        training |= source.files
    for source in opened["data.held_out"]:
        if both := sorted(training & source.files):
            raise ConfigError(f"data.held_out: {both[0]} is among data.source too, so it would be trained on")
        if twice := sorted(evaluated & source.files):
            raise ConfigError(f"data.held_out: {twice[0]} is in two of its entries")
        evaluated |= source.files
    texts = [one for sources in opened.values() for one in sources if isinstance(one, Records)]
    with progress("tokenising", sum(one.size for one in texts), lines=False) as advance:
        sources, held_out = (
            [_loaded(field, one, tokenizer, chat, advance) for one in of_field] for field, of_field in opened.items()
        )
    return Corpus(config, tokenizer, sources, held_out or None)


def _opened(field: str, spec: str, tokenizer: Tokenizer):
    return open_shards(field, spec, tokenizer) if is_shard_folder(field, spec) else open_records(field, spec)


def _loaded(field: str, source, tokenizer: Tokenizer, chat: Chat, advance: Callable[[float], None]) -> _Loaded:
    if not isinstance(source, Records):
        shards = source
        return _Loaded(shards.name, shards.shards, shards.lots, lambda: shards.hashes, shards.skipped, shards.examples)
    documents = tokenize(source, tokenizer, chat, where=field, advance=advance)

    def hashes() -> list[str]:
        arrays = (documents.tokens, documents.offsets, documents.answer)
        return ["" if array is None else sha256(array).hexdigest() for array in arrays]

    return _Loaded(source.name, [documents], lambda: [documents.lots], hashes, documents.skipped, documents.examples)


def _split(sources: list[_Loaded]) -> list[np.ndarray]:
    """Which documents of each source are held out, bool [documents]. Raises ConfigError where none can be."""
    lots = [np.concatenate(source.lots()) for source in sources]
    held = [lot >> np.uint64(LOT_BITS) == 0 for lot in lots]
    for lot, away in zip(lots, held, strict=True):
        if away.all():
            away[:] = False
            away[np.argmin(lot)] = len(lot) > 1
    if not any(away.any() for away in held):
        smallest = {place: lot.min() for place, lot in enumerate(lots) if len(lot) > 1}
        if not smallest:
            raise ConfigError("data.held_out must name sources: data.source has no second document to hold out")
        place = min(smallest, key=smallest.__getitem__)
        held[place][np.argmin(lots[place])] = True
    return held


def _described(source: _Loaded, more: str) -> list[str]:
    documents = sum(map(len, source.parts))
    tokens = sum(len(part.tokens) for part in source.parts)
    told = f"{source.name}: {documents:,} documents, {tokens:,} tokens{more}"
    return [told, *skipped_lines(source.name, source.skipped, source.examples)]
