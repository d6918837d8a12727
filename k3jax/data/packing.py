"""Rows and batches as pure functions of (seed, step).

Epoch e holds every document once, in the order perm(seed, e). All epochs end to end are one endless token
stream, and row r reads its tokens rT .. rT + T: T inputs and, one further, T targets. Rows are not taken in
the stream's order, where a batch would be one long document: the R rows that start in an epoch are walked in
strides of about 0.618 R, which puts any few successive ones far apart and needs no memory. Batch s is the
rows of places sB .. sB + B - 1 of that walk.

    place i -> row first + (i - first) stride mod R    first, R: the rows that start in i's epoch
    position p -> epoch p // total -> place in the epoch's token-count index -> (document, offset)

Invariant: nothing is remembered from row to row. Any batch can be asked for at any time, in any order, by
any process, so resuming is starting at a step. An epoch's last row runs on into the next epoch: no token is
lost or padded, every document appears exactly once per epoch, every token is an input once, and every token
but a document's first is a target once (which `answers` of the documents may narrow).

A batch is a dict of numpy arrays, each [B, T]:
    tokens       int32
    targets      int32, the token after each input
    loss_mask    bool, False where the target opens another document, is padding, or is no answer in a conversation
    segment_ids  int32, the row's documents as 1, 2, 3, ...; an id never returns in a row; 0 is padding, which
                 only evaluation has
"""

import functools
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator

import grain
import numpy as np

from k3jax.data.documents import DocumentSet, TokenDocuments

Batch = dict[str, np.ndarray]
Piece = tuple[int, int, int]  # document, first token, token behind the last


def epoch_order(documents: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the documents in one epoch: int64 [documents], a permutation.

    Documents are sorted by 64-bit words of Philox4x64-10 under the key (seed, epoch). NumPy promises never to
    change that raw stream, which it does not of `Generator.permutation`: the order outlives upgrades.
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(documents)
    return np.argsort(words, kind="stable")


class TrainRows:
    """Rows of the endless training stream, a `grain.sources.RandomAccessDataSource`.

    `rows[i]` is a batch's dict with arrays [T], for place i of the walk. `seq_len` is T, in tokens; `seed` in
    0 .. 2^64 - 1 orders the documents.
    """

    def __init__(self, documents: TokenDocuments | DocumentSet, seq_len: int, seed: int):
        _check_row(seq_len)
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in 0 .. 2^64 - 1, got {seed}")
        self.documents = documents
        self.seq_len = seq_len
        self.seed = seed
        self.tokens_per_epoch = int(documents.offsets[-1])
        self._lengths = documents.lengths
        # The instance's own cache; more than one entry, because a row may lie in two epochs.
        self._epoch = functools.lru_cache(maxsize=4)(self._index)

    def __len__(self) -> int:
        """Endless for every purpose: as many rows as int64 positions can address."""
        return sys.maxsize // (self.seq_len + 1)

    def __getitem__(self, place: int) -> Batch:
        start = self.row(place) * self.seq_len
        return _pack(self.documents, self.pieces(start, start + self.seq_len + 1), self.seq_len)

    def row(self, place: int) -> int:
        """The stream's row at a place of the walk; both count from 0 and stay inside one epoch."""
        epoch = place * self.seq_len // self.tokens_per_epoch
        first, behind = (-(-e * self.tokens_per_epoch // self.seq_len) for e in (epoch, epoch + 1))
        return first + (place - first) * _stride(behind - first) % (behind - first)

    def __repr__(self) -> str:  # grain keys checkpoints by it
        return f"TrainRows({self.documents.name}, seq_len={self.seq_len}, seed={self.seed})"

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The documents' parts that fill stream positions start .. stop - 1, in order."""
        while start < stop:
            epoch, at = divmod(start, self.tokens_per_epoch)
            order, starts = self._epoch(epoch)
            place = int(np.searchsorted(starts, at, side="right")) - 1
            begin = at - int(starts[place])
            end = min(int(starts[place + 1] - starts[place]), begin + stop - start)
            yield int(order[place]), begin, end
            start += end - begin

    def _index(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(order [documents], position in the epoch of each document's first token [documents + 1])."""
        order = epoch_order(len(self.documents), self.seed, epoch)
        return order, np.concatenate([[0], np.cumsum(self._lengths[order])])


class EvaluationRows:
    """Rows that cover all documents once, in their own order; a grain source like TrainRows.

    Every token is an input exactly once. The last row is filled up with `pad_id`, and rows of nothing but
    padding follow until their number is a multiple of `batch_rows`. With `count`, only that many rows,
    spread evenly over the documents (all, if there are fewer): a quick look that is the same each time.
    """

    def __init__(
        self,
        documents: TokenDocuments | DocumentSet,
        seq_len: int,
        pad_id: int,
        batch_rows: int,
        count: int | None = None,
    ):
        _check_row(seq_len)
        self.documents = documents
        self.seq_len = seq_len
        self.pad_id = pad_id
        self._total = int(documents.offsets[-1])
        rows = -(-self._total // seq_len)
        chosen = rows if count is None else min(count, rows)
        self._rows = [index * rows // chosen for index in range(chosen)]
        self._length = -(-chosen // batch_rows) * batch_rows

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        pieces: Iterable[Piece] = ()
        if index < len(self._rows):
            start = self._rows[index] * self.seq_len
            pieces = self._pieces(start, min(start + self.seq_len + 1, self._total))
        return _pack(self.documents, pieces, self.seq_len, self.pad_id)

    def __repr__(self) -> str:
        return f"EvaluationRows({self.documents.name}, seq_len={self.seq_len}, rows={len(self)})"

    def _pieces(self, start: int, stop: int) -> Iterator[Piece]:
        offsets = self.documents.offsets
        document = int(np.searchsorted(offsets, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(offsets[document + 1]))
            yield document, start - int(offsets[document]), end - int(offsets[document])
            start, document = end, document + 1


class Batches:
    """Rows in batches of `batch_rows`: at random by `batch(step)`, or in order and read ahead by `iterate`.

    `rows` are those of one corpus or a mixture (mixture.py). Both go through one `grain.MapDataset`, so they cannot
    differ.
    """

    def __init__(self, rows: TrainRows | EvaluationRows | grain.MapDataset, batch_rows: int):
        if batch_rows < 1:
            raise ValueError(f"batch_rows must be 1 or more, got {batch_rows}")
        dataset = rows if isinstance(rows, grain.MapDataset) else grain.MapDataset.source(rows)
        self.dataset = dataset.batch(batch_rows, drop_remainder=True)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, step: int) -> Batch:
        """The batch of one step, arrays [B, T]. Raises IndexError out of range."""
        if not 0 <= step < len(self):  # grain would start again from 0
            raise IndexError(f"step {step} is not in 0 .. {len(self) - 1}")
        return self.dataset[step]

    def iterate(self, start_step: int = 0, prefetch: int = 4) -> grain.DatasetIterator[Batch]:
        """The batches of start_step, start_step + 1, ... in order.

        A thread keeps `prefetch` of them ready (0: no thread) until the iterator's `close()`.
        """
        # One thread: rows are slices of memory, more of them would only pass the interpreter lock around.
        options = grain.ReadOptions(num_threads=min(1, prefetch), prefetch_buffer_size=prefetch)
        iterator = iter(self.dataset.to_iter_dataset(options))
        iterator.set_state({"next_index": start_step})
        return iterator


@functools.lru_cache(maxsize=4)
def _stride(rows: int) -> int:
    """The step of a walk through `rows` rows: the number nearest to rows / golden ratio without a common factor."""
    middle = round(rows * (5**0.5 - 1) / 2)
    near = (middle + sign * distance for distance in range(rows + 1) for sign in (1, -1))
    return next(step for step in near if step >= 1 and math.gcd(step, rows) == 1)


def stream_hash(batches: Iterable[Batch]) -> str:
    """sha256 (hexadecimal) over names, types, shapes and contents of batches: equal when the data are."""
    digest = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            array = np.ascontiguousarray(batch[name])
            digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _check_row(seq_len: int) -> None:
    if seq_len < 1:
        raise ValueError(f"seq_len must be 1 or more, got {seq_len}")


def _pack(documents: TokenDocuments | DocumentSet, pieces: Iterable[Piece], seq_len: int, pad_id: int = 0) -> Batch:
    """One row [T] from the pieces of its T + 1 tokens; what they leave open is padding."""
    window = np.full(seq_len + 1, pad_id, np.int32)
    segments = np.zeros(seq_len + 1, np.int32)
    answers = np.ones(seq_len + 1, bool)
    at = 0
    for segment, (document, begin, end) in enumerate(pieces, 1):
        behind = at + end - begin
        window[at:behind] = documents.read(document, begin, end)
        segments[at:behind] = segment
        given = documents.answers(document, begin, end)
        if given is not None:
            answers[at:behind] = given
        at = behind
    return {
        "tokens": window[:-1],
        "targets": window[1:],
        "loss_mask": (segments[1:] == segments[:-1]) & (segments[1:] > 0) & answers[1:],
        "segment_ids": segments[:-1],
    }
