"""Mixtures: shares, no memory, and within each source the rows it would have alone."""

import numpy as np
import pytest

from k3jax.data import Batches, DocumentSet, TokenDocuments, TrainRows, stream_hash
from k3jax.data.mixture import mixed_rows


def documents_of(source: int, *lengths: int) -> TokenDocuments:
    """Tokens tell source, document and place: 10,000 source + 100 document + place."""
    tokens = [10_000 * source + 100 * index + place for index, length in enumerate(lengths) for place in range(length)]
    return TokenDocuments(f"source {source}", np.array(tokens, np.uint16), np.cumsum([0, *lengths]), {})


SOURCES = [documents_of(1, 9, 30, 4), documents_of(2, 50, 2), documents_of(3, 7)]


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.7, 0.2, 0.1), (5.0, 90.0, 5.0), (1e-3, 2.0, 0.5)])
def test_shares(weights):
    rows = mixed_rows(SOURCES, weights, seq_len=8, seed=4)
    origins = np.array([rows[place]["tokens"][0] // 10_000 - 1 for place in range(3_000)])
    shares = np.array(weights) / sum(weights)
    for count in (10, 100, 1_000, 3_000):  # every beginning has its share, not only the whole
        given = np.bincount(origins[:count], minlength=3)
        assert (np.abs(given - shares * count) <= 2 + 0.01 * shares * count).all()


def test_each_source_is_as_alone():
    """The rows of one source, in order, are those of TrainRows: its epochs, each document once in each of them."""
    rows = mixed_rows(SOURCES, (2.0, 1.0, 1.0), seq_len=8, seed=4)
    taken = [rows[place] for place in range(400)]
    for place, source in enumerate(SOURCES):
        mine = [row for row in taken if row["tokens"][0] // 10_000 == place + 1]
        assert all((row["tokens"] // 10_000 == place + 1).all() for row in mine)  # a row is of one source
        alone = TrainRows(source, 8, 4 + place * 2**32)
        assert stream_hash(mine) == stream_hash(alone[index] for index in range(len(mine)))
        per_epoch = len(source.tokens)
        epochs = len(mine) * 8 // per_epoch
        assert epochs >= 5
        stream = np.empty(len(mine) * 8, np.int64)
        for index, row in enumerate(mine):
            at = alone.row(index) * 8
            if at < len(stream) - 8:
                stream[at : at + 8] = row["tokens"]
        for epoch in range(epochs - 2):
            assert sorted(stream[epoch * per_epoch : (epoch + 1) * per_epoch]) == source.tokens.tolist()
    orders = [TrainRows(SOURCES[0], 8, 4 + place * 2**32)._epoch(0)[0].tolist() for place in range(6)]
    assert len(set(map(tuple, orders))) > 1  # sources have orders of their own


@pytest.mark.parametrize("prefetch", [0, 3])
def test_restart_anywhere(prefetch):
    batches = Batches(mixed_rows(SOURCES, (0.5, 0.3, 0.2), seq_len=16, seed=1), batch_rows=4)
    expected = [stream_hash([batches.batch(step)]) for step in range(40)]
    assert len(set(expected)) > 30
    for start in (0, 1, 13, 29):
        iterator = batches.iterate(start, prefetch=prefetch)
        assert [stream_hash([next(iterator)]) for _ in range(10)] == expected[start : start + 10]
        iterator.close()
    again = Batches(mixed_rows(SOURCES, (0.5, 0.3, 0.2), seq_len=16, seed=1), batch_rows=2)  # half the rows
    halves = [again.batch(step) for step in (6, 7)]
    whole = {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}
    assert stream_hash([whole]) == expected[3]


def test_endless():
    batches = Batches(mixed_rows(SOURCES, (3.0, 1.0, 1.0), seq_len=8, seed=0), batch_rows=2)
    assert len(batches) > 10**15
    assert batches.batch(10**15)["tokens"].shape == (2, 8)


def test_document_set():
    """A choice of documents of several parts, as one corpus."""
    chosen = DocumentSet("few", [(SOURCES[0], np.array([True, False, True])), (SOURCES[2], np.array([True]))])
    assert len(chosen) == 3 and chosen.lengths.tolist() == [9, 4, 7] and chosen.offsets.tolist() == [0, 9, 13, 20]
    assert chosen.read(1, 1, 3).tolist() == [10_201, 10_202] and chosen.read(2, 0, 2).tolist() == [30_000, 30_001]
    gathered = chosen.gathered()
    whole = [*range(10_000, 10_009), *range(10_200, 10_204), *range(30_000, 30_007)]
    assert gathered.tokens.tolist() == whole and gathered.offsets.tolist() == [0, 9, 13, 20]
    assert gathered.answer is None and chosen.answers(0, 0, 9) is None
    rows, same = TrainRows(chosen, 5, 0), TrainRows(gathered, 5, 0)
    assert stream_hash(rows[place] for place in range(20)) == stream_hash(same[place] for place in range(20))


def test_answers_narrow_the_loss():
    """Text beside a conversation: of the text all targets count, of the other those that are answers."""
    mask = np.array([False, False, True, True, False])
    talk = TokenDocuments("talk", np.arange(500, 505, dtype=np.uint16), np.array([0, 5]), {}, mask)
    both = DocumentSet("both", [(talk, np.array([True])), (SOURCES[2], np.array([True]))])
    assert both.gathered().answer.tolist() == [*mask, *[True] * 7]
    row = TrainRows(both, 12, 0)[0]  # 12 tokens: both documents, and the first of the next epoch as last target
    learnt = dict(zip(row["targets"].tolist()[:11], row["loss_mask"].tolist()[:11], strict=True))
    begin = {500, 30_000} & learnt.keys()  # a document's first token is no target
    assert {token for token, counts in learnt.items() if not counts} == {501, 504} | begin
    assert learnt.keys() - begin == {501, 502, 503, 504, *range(30_001, 30_007)}
