"""Counting losses against fractions worked out on paper."""

import math

import numpy as np
import pytest

from k3jax.data import ByteTokenizer, TokenDocuments, ngram_losses

A, B, EOS, BOS = 0, 1, 2, 3


class Letters:
    """Five ids: a, b, eos, bos, pad. Three of them can be targets."""

    vocab_size = 5


def documents_of(*documents) -> TokenDocuments:
    tokens = np.array([token for document in documents for token in document], np.uint16)
    return TokenDocuments("made", tokens, np.cumsum([0, *map(len, documents)]), {})


def mean_loss(*probabilities: float) -> float:
    return -sum(map(math.log, probabilities)) / len(probabilities)


def test_by_hand():
    """Training text: bos a b a eos. N(a) = 2, N(b) = N(eos) = 1 of 4, D = 3, so P1 = 3/7, 2/7, 2/7.

    P2(b | bos) = (0 + 2/7) / 2    P2(a | b) = (1 + 3/7) / 2    P2(eos | a) = (1 + 2 * 2/7) / 4
    P3(b | bos bos) = (0 + 1/7) / 2    P3(a | bos b) = P2    P3(eos | b a) = (1 + 11/28) / 2
    The second held-out document starts from bos again: P2(eos | bos) = 1/7, P3(eos | bos bos) = 1/14.
    """
    losses = ngram_losses(documents_of([BOS, A, B, A, EOS]), documents_of([BOS, B, A, EOS], [BOS, EOS]), Letters())
    expected = {
        "unigram": mean_loss(2 / 7, 3 / 7, 2 / 7, 2 / 7),
        "bigram": mean_loss(1 / 7, 5 / 7, 11 / 28, 1 / 7),
        "trigram": mean_loss(1 / 14, 5 / 7, 39 / 56, 1 / 14),
    }
    assert losses == pytest.approx(expected, rel=1e-12)


def test_probabilities_sum_to_one():
    """P(c | bos x) from the losses of documents bos x and bos x c, summed over all c."""
    rng = np.random.default_rng(0)
    train = documents_of(*([BOS, *rng.integers(0, 2, rng.integers(0, 9)), EOS] for _ in range(6)))
    for x in (A, B):
        first = ngram_losses(train, documents_of([BOS, x]), Letters())
        both = [ngram_losses(train, documents_of([BOS, x, c]), Letters()) for c in (A, B, EOS)]
        for name in ("unigram", "bigram", "trigram"):
            assert sum(math.exp(first[name] - 2 * loss[name]) for loss in both) == pytest.approx(1, rel=1e-12)


def test_periodic_text():
    """Each letter follows from the one before: the bigram knows, the unigram cannot."""
    period = ByteTokenizer().encode(b"abcd" * 5000)
    losses = ngram_losses(documents_of(period), documents_of(period), ByteTokenizer())
    assert losses["unigram"] == pytest.approx(math.log(4), abs=2e-3)
    assert losses["bigram"] < 2e-3 and losses["trigram"] < 2e-3


def test_edges():
    nothing = documents_of([BOS])  # a document without targets
    text = documents_of([BOS, A, EOS])
    assert all(math.isnan(loss) for loss in ngram_losses(text, nothing, Letters()).values())
    uniform = pytest.approx({"unigram": math.log(3), "bigram": math.log(3), "trigram": math.log(3)})
    assert ngram_losses(nothing, text, Letters()) == uniform


def test_vocabulary_too_large():
    class Words:
        vocab_size = 2**22

    text = documents_of([BOS, A, EOS])
    with pytest.raises(ValueError, match="4,194,304 ids are too many"):
        ngram_losses(text, text, Words())
