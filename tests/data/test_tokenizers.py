"""Bytes to ids and back; documents end to end in one array."""

import numpy as np
import pytest

from k3jax.data import BadDocument, ByteTokenizer, TokenDocuments, tokenize

TOKENIZER = ByteTokenizer()


def test_bytes_to_ids():
    ids = TOKENIZER.encode(b"a\x00\xff")
    assert ids.dtype == np.uint16 and ids.tolist() == [256, 97, 0, 255, 257]
    assert TOKENIZER.encode("é", eos=False).tolist() == [256, 0xC3, 0xA9]
    assert TOKENIZER.encode(b"").tolist() == [256, 257]
    ids_of_all = {TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id, *range(256)}
    assert ids_of_all == set(range(TOKENIZER.vocab_size))


def test_ids_to_text():
    assert TOKENIZER.decode(TOKENIZER.encode("def f():\n    return 'é'")) == "def f():\n    return 'é'"
    assert TOKENIZER.decode([256, 0xC3, 0x28, 257, 258]) == "\ufffd("
    assert TOKENIZER.decode([]) == ""


class Texts:
    """A source of texts; None stands for a record that cannot be read."""

    name = "texts"

    def __init__(self, *texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        if self.texts[index] is None:
            raise BadDocument("broken", f"line {index}")
        return self.texts[index]


def test_tokenize():
    documents = tokenize(Texts("ab", None, b"c", None), TOKENIZER)
    assert documents.tokens.dtype == np.uint16
    assert documents.tokens.tolist() == [256, 97, 98, 257, 256, 99, 257]
    assert documents.offsets.dtype == np.int64 and documents.offsets.tolist() == [0, 4, 7]
    assert len(documents) == 2 and documents.lengths.tolist() == [4, 3]
    assert documents.read(1, 1, 3).tolist() == [99, 257]
    assert documents.skipped == {"broken": 2}
    assert documents.report() == "texts: 2 documents, 7 tokens, skipped: 2 broken"


def test_wide_vocabulary():
    class Wide(ByteTokenizer):
        vocab_size = 163_840

        def encode(self, document, *, eos=True):
            return np.array([163_839, 70_000])

    documents = tokenize(Texts("x"), Wide())
    assert documents.tokens.dtype == np.uint32 and documents.tokens.tolist() == [163_839, 70_000]


@pytest.mark.parametrize("offsets", [[0, 2, 2, 4], [0, 3], [1, 4], [0, 3, 2, 4]])
def test_offsets_are_checked(offsets):
    with pytest.raises(ValueError, match="offsets must increase from 0 to the number of tokens, 4"):
        TokenDocuments("x", np.zeros(4, np.uint16), np.array(offsets), {})
