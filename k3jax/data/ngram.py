"""Unigram, bigram and trigram losses: what counting alone reaches on the same targets as the model.

Interpolated Witten-Bell (Chen and Goodman 1998, section 2.5). With N(h c) how often c followed the history h
in the training part, N(h) the sum of that over c, and D(h) the number of different c,

    P_n(c | h) = (N(h c) + D(h) P_{n-1}(c | h')) / (N(h) + D(h)),    P_0(c) = 1 / symbols,

where h is the last n - 1 tokens and h' is h without its oldest. A history that was never seen hands P_{n-1}
on. The targets are all tokens of a document but its first (bytes and eos, given at least bos); of a
conversation, the answers' alone. Histories stop at the document's start, where bos stands in for what would
lie before it. Invariant: each P_n( . | h) sums to 1 over the symbols and is learnt from the training part alone.
"""

from dataclasses import dataclass

import numpy as np

from k3jax.data.documents import TokenDocuments
from k3jax.data.tokenizers import Tokenizer

NAMES = ("unigram", "bigram", "trigram")


@dataclass(frozen=True)
class _Counts:
    """One order's N(h c) by sorted key (history, target), and N(h) and D(h) by sorted history."""

    keys: np.ndarray
    counts: np.ndarray
    histories: np.ndarray
    totals: np.ndarray
    kinds: np.ndarray


def ngram_losses(train: TokenDocuments, held_out: TokenDocuments, tokenizer: Tokenizer) -> dict[str, float]:
    """Mean negative log-likelihood of the held-out targets in nats per target: unigram, bigram, trigram.

    Of `tokenizer` only the number of ids is used: symbols = vocab_size - 2, since bos and pad are never
    targets (257 for bytes). A byte corpus has one eos per document beside its bytes; both are targets, as in
    the model's loss, and "nats per byte" means nats per such target. nan if no held-out document has a
    target.
    """
    radix = tokenizer.vocab_size
    if radix ** len(NAMES) >= 2**63:
        raise ValueError(f"{radix:,} ids are too many: three of them must fit one 64-bit key")
    seen, asked = _contexts(train, len(NAMES)), _contexts(held_out, len(NAMES))
    probability = np.full(asked[0].shape, 1.0 / (radix - 2))
    losses = {}
    for order, name in enumerate(NAMES, 1):
        counts = _count(_keys(seen[:order], radix), radix)
        probability = _interpolate(counts, _keys(asked[:order], radix), radix, probability)
        losses[name] = float(-np.log(probability).mean()) if probability.size else float("nan")
    return losses


def _contexts(documents: TokenDocuments, orders: int) -> list[np.ndarray]:
    """`orders` arrays [targets]: number 0 holds the targets, number d the token d places before each."""
    tokens, begins, ends = documents.tokens, documents.offsets[:-1], documents.offsets[1:]
    is_target = np.ones(len(tokens), bool) if documents.answer is None else np.array(documents.answer, bool)
    is_target[begins] = False
    contexts = [tokens[is_target]]
    for back in range(1, orders):
        earlier = np.empty_like(tokens)
        earlier[back:] = tokens[:-back]
        for place in range(back):  # so near the start that the document's first token stands in
            inside = begins + place < ends
            earlier[begins[inside] + place] = tokens[begins[inside]]
        contexts.append(earlier[is_target])
    return contexts


def _keys(contexts: list[np.ndarray], radix: int) -> np.ndarray:
    """(history, target) of each position as one int64, the oldest token in front."""
    keys = np.zeros(contexts[0].shape, np.int64)
    for tokens in reversed(contexts):
        keys = keys * radix + tokens
    return keys


def _count(keys: np.ndarray, radix: int) -> _Counts:
    keys, counts = np.unique(keys, return_counts=True)
    histories, first = np.unique(keys // radix, return_index=True)
    totals = np.add.reduceat(counts, first) if len(first) else counts
    return _Counts(keys, counts, histories, totals, np.diff([*first, len(keys)]))


def _interpolate(counts: _Counts, keys: np.ndarray, radix: int, lower: np.ndarray) -> np.ndarray:
    """P_n of each position's target, given its P_{n-1} `lower`."""
    seen = _look_up(counts.keys, counts.counts, keys)
    total = _look_up(counts.histories, counts.totals, keys // radix)
    kinds = _look_up(counts.histories, counts.kinds, keys // radix)
    return np.where(total > 0, (seen + kinds * lower) / np.maximum(total + kinds, 1), lower)


def _look_up(table: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """`values` of the entries of the sorted `table` that equal `keys`, 0 where there is none."""
    if not len(table):
        return np.zeros(keys.shape, np.int64)
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[at] == keys, values[at], 0)
