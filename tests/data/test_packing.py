"""The batch contract: nothing lost, nothing twice, no memory of earlier batches, boundaries marked."""

import itertools

import grain
import numpy as np
import pytest

from k3jax.config import ConfigError
from k3jax.data import Batches, EvaluationRows, TokenDocuments, TrainRows, stream_hash
from k3jax.data.packing import epoch_order

PAD = 60_000


def documents_of(*lengths: int) -> TokenDocuments:
    """Documents whose tokens tell where they are from: 1000 * document + place."""
    tokens = [1000 * index + place for index, length in enumerate(lengths) for place in range(length)]
    return TokenDocuments("made", np.array(tokens, np.uint16), np.cumsum([0, *lengths]), {})


def philox_words(seed: int, epoch: int, count: int) -> list[int]:
    """Philox4x64-10 (Salmon et al. 2011) in plain integers, counters 1, 2, ..."""
    mask, words = 2**64 - 1, []
    for block in range(1, -(-count // 4) + 1):
        c0, c1, c2, c3 = block, 0, 0, 0
        k0, k1 = seed, epoch
        for _ in range(10):
            p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
            c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & mask, (p0 >> 64) ^ c3 ^ k1, p0 & mask
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
        words += [c0, c1, c2, c3]
    return words[:count]


@pytest.mark.parametrize("documents, seed, epoch", [(1, 0, 0), (6, 0, 1), (37, 2**64 - 1, 3), (10, 7, 2**40)])
def test_epoch_order_is_philox(documents, seed, epoch):
    words = philox_words(seed, epoch, documents)
    assert epoch_order(documents, seed, epoch).tolist() == sorted(range(documents), key=words.__getitem__)


# One document; documents of one token; documents far longer than a row; rows far longer than an epoch.
CORPORA = [(5,), (1,), (1, 1, 1, 1), (2, 1, 30, 3, 1, 7, 4), (100, 3), (9, 8, 7, 6, 5, 4)]


@pytest.mark.parametrize("lengths", CORPORA, ids=str)
@pytest.mark.parametrize("seq_len", [1, 3, 16, 64])
def test_rows_are_the_stream(lengths, seq_len):
    """Three epochs of rows against a stream laid out by hand, with everything a row says about it."""
    total = sum(lengths)
    stream, owner = [], []  # token; which appearance of which document
    for epoch in range(4 + seq_len // total):
        for document in epoch_order(len(lengths), 5, epoch):
            stream += [1000 * int(document) + place for place in range(lengths[document])]
            owner += [(epoch, int(document))] * lengths[document]
    rows = TrainRows(documents_of(*lengths), seq_len, seed=5)
    count = -(-3 * total // seq_len)
    places = {rows.row(place): place for place in range(count)}
    assert sorted(places) == list(range(count))  # the walk takes every row of an epoch before the next epoch's
    inputs = []
    for row in range(count):
        here = slice(row * seq_len, (row + 1) * seq_len)
        after = slice(row * seq_len + 1, (row + 1) * seq_len + 1)
        got = rows[places[row]]
        inputs += got["tokens"].tolist()
        assert got["tokens"].tolist() == stream[here]
        assert got["targets"].tolist() == stream[after]
        assert got["loss_mask"].tolist() == [a == b for a, b in zip(owner[here], owner[after], strict=True)]
        numbers = {}  # an appearance's number is its rank in the row
        assert got["segment_ids"].tolist() == [numbers.setdefault(o, len(numbers) + 1) for o in owner[here]]
        dtypes = {name: array.dtype for name, array in got.items()}
        assert dtypes == {"tokens": np.int32, "targets": np.int32, "loss_mask": bool, "segment_ids": np.int32}
    whole = sorted(1000 * index + place for index, length in enumerate(lengths) for place in range(length))
    for epoch in range(3):  # every document exactly once per epoch, no token lost
        assert sorted(inputs[epoch * total : (epoch + 1) * total]) == whole


def test_row_by_hand():
    """Tokens bos, text, eos of three documents; the eos predicts nothing, the next bos is no target."""
    tokens = [256, 65, 257, 256, 66, 67, 257, 256, 257]
    documents = TokenDocuments("abc", np.array(tokens, np.uint16), np.array([0, 3, 7, 9]), {})
    order = epoch_order(3, 0, 0).tolist()
    row = TrainRows(documents, seq_len=8, seed=0)[0]
    parts = [tokens[0:3], tokens[3:7], tokens[7:9]]
    assert row["tokens"].tolist() == [t for document in order for t in parts[document]][:8]
    is_eos = row["tokens"] == 257
    assert is_eos.sum() == 2 and (row["loss_mask"] == ~is_eos).all()
    assert (row["targets"][is_eos] == 256).all()
    starts = np.flatnonzero(row["tokens"] == 256)
    assert (np.diff(row["segment_ids"], prepend=0) > 0).nonzero()[0].tolist() == starts.tolist()


def test_successive_rows_are_far_apart():
    """Any 8 successive places: no two rows nearer than a twentieth of the epoch, border rows aside."""
    documents = documents_of(*[50] * 40)
    rows = TrainRows(documents, seq_len=4, seed=0)  # 500 rows an epoch
    assert sorted(rows.row(place) for place in range(500, 1000)) == list(range(500, 1000))
    for place in range(490):
        taken = sorted(rows.row(at) for at in range(place, place + 8))
        assert min(b - a for a, b in itertools.pairwise(taken)) >= 500 / 20


def test_epochs_and_seeds_differ():
    orders = [tuple(epoch_order(40, seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


@pytest.fixture
def batches() -> Batches:
    documents = documents_of(*np.random.default_rng(0).integers(1, 90, 30).tolist())
    return Batches(TrainRows(documents, seq_len=32, seed=1), batch_rows=4)


def test_batch_is_a_function_of_the_step(batches):
    steps = list(range(40))  # some four epochs
    in_order = [stream_hash([batches.batch(step)]) for step in steps]
    assert len(set(in_order)) == len(steps)
    shuffled = np.random.default_rng(3).permutation(steps)
    assert all(stream_hash([batches.batch(int(step))]) == in_order[step] for step in shuffled)
    rows = batches.batch(3)
    assert {name: array.shape for name, array in rows.items()} == dict.fromkeys(rows, (4, 32))
    documents = documents_of(*np.random.default_rng(0).integers(1, 90, 30).tolist())
    narrow = Batches(TrainRows(documents, seq_len=32, seed=1), batch_rows=2)  # half the rows, twice the steps
    for name, array in rows.items():
        halves = [narrow.batch(6)[name], narrow.batch(7)[name]]
        np.testing.assert_array_equal(array, np.concatenate(halves))


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_restart_at_any_step(batches, prefetch):
    """The next batches after a stop anywhere, an epoch's end included, are those of an unbroken run."""
    expected = [stream_hash([batches.batch(step)]) for step in range(60)]
    for start in (0, 1, 7, 10, 11, 29):  # an epoch is a little over ten steps
        iterator = batches.iterate(start, prefetch=prefetch)
        assert [stream_hash([next(iterator)]) for _ in range(30)] == expected[start : start + 30]
        iterator.close()


def test_far_step_is_as_near_as_any(batches):
    rows = TrainRows(documents_of(3, 4), seq_len=8, seed=0)
    far = 10**15
    epoch, at = divmod(rows.row(far) * 8, 7)
    assert rows[far]["tokens"][0] == np.concatenate([1000 * d + np.arange(3 + d) for d in epoch_order(2, 0, epoch)])[at]
    assert len(batches) > 10**15


def test_evaluation_covers_everything_once():
    lengths = (5, 1, 30, 2, 7)
    documents = documents_of(*lengths)
    evaluation = Batches(EvaluationRows(documents, seq_len=8, pad_id=PAD, batch_rows=4), batch_rows=4)
    assert len(evaluation) == 2  # 45 tokens in 6 rows, and 2 rows of padding
    rows = [evaluation.batch(step) for step in range(len(evaluation))]
    flat = {name: np.concatenate([row[name].ravel() for row in rows]) for name in rows[0]}
    real = flat["segment_ids"] > 0
    assert flat["tokens"][real].tolist() == documents.tokens.tolist() and real[:45].all()
    assert (flat["tokens"][~real] == PAD).all() and (flat["segment_ids"][~real] == 0).all()
    targets = [1000 * index + place for index, length in enumerate(lengths) for place in range(1, length)]
    assert flat["targets"][flat["loss_mask"]].tolist() == targets  # each token but a document's first, once
    assert not flat["loss_mask"][~real].any()
    assert rows[0]["segment_ids"][0].tolist() == [1, 1, 1, 1, 1, 2, 3, 3]
    assert stream_hash(evaluation.iterate()) == stream_hash(rows)
    with pytest.raises(IndexError, match=r"step 2 is not in 0 \.\. 1"):
        evaluation.batch(2)


def test_short_evaluation_is_spread():
    documents = documents_of(*[8] * 40)
    rows = EvaluationRows(documents, seq_len=8, pad_id=PAD, batch_rows=4, count=5)
    assert len(rows) == 8
    assert [int(rows[index]["tokens"][0]) for index in range(5)] == [0, 8000, 16000, 24000, 32000]
    assert not rows[5]["segment_ids"].any()
    assert len(EvaluationRows(documents, seq_len=8, pad_id=PAD, batch_rows=4, count=1000)) == 40


def test_last_targets_exactly_at_the_end():
    rows = EvaluationRows(documents_of(8), seq_len=4, pad_id=PAD, batch_rows=1)
    assert len(rows) == 2
    assert rows[1]["tokens"].tolist() == [4, 5, 6, 7] and rows[1]["targets"].tolist() == [5, 6, 7, PAD]
    assert rows[1]["loss_mask"].tolist() == [True, True, True, False]


def test_rows_are_grain_sources():
    documents = documents_of(3, 4)
    for rows in (TrainRows(documents, 4, 0), EvaluationRows(documents, 4, PAD, 1)):
        assert isinstance(rows, grain.sources.RandomAccessDataSource)


def test_stream_hash_sees_everything():
    batch = {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3)}
    others = [
        {"tokens": batch["tokens"] + (np.arange(6).reshape(2, 3) == 5).astype(np.int32)},
        {"tokens": batch["tokens"].reshape(3, 2)},
        {"tokens": batch["tokens"].astype(np.int64)},
        {"targets": batch["tokens"]},
    ]
    assert len({stream_hash([b]) for b in [batch, *others]} | {stream_hash([batch, batch])}) == 6
    assert stream_hash([{"tokens": np.asfortranarray(batch["tokens"])}]) == stream_hash([batch])


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match=r"^data.source: nothing holds no documents$"):
        TokenDocuments("nothing", np.zeros(0, np.uint16), np.zeros(1, np.int64), {})
    with pytest.raises(ValueError, match="seq_len must be 1 or more, got 0"):
        TrainRows(documents_of(3), 0, 0)
    with pytest.raises(ValueError, match="seed must be in"):
        TrainRows(documents_of(3), 4, 2**64)
    with pytest.raises(ValueError, match="batch_rows must be 1 or more"):
        Batches(TrainRows(documents_of(3), 4, 0), 0)
