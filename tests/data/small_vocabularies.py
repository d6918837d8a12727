"""Tiny vocabularies made by hand, so that every expected id can be read off them."""

import base64

# Five special tokens, then printable ASCII as itself, then merges; `Ġ` and `Ċ` are how byte-level BPE writes blank and
# line feed.
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "Ã", "©"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ċ", "Ċ")]
WORDS = SPECIAL + LETTERS + [a + b for a, b in MERGES]
IDS = {word: at for at, word in enumerate(WORDS)}


def hugging_face_json() -> dict:
    """A byte-level BPE `tokenizer.json` over WORDS, with what a real one may bring: truncation, padding, own bos."""
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2,
            "pad_type_id": 0, "pad_token": "<pad>",
        },
        "added_tokens": [
            {"id": at, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for at, name in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": IDS, "merges": [f"{a} {b}" for a, b in MERGES],
        },
    }  # fmt: skip


# All bytes by their value, then merges.
RANKS = [bytes([value]) for value in range(256)] + [b"he", b"ll", b"hell", b" w", b"12", b"34", b"1234", b"lC", b"  "]


def ranks_text(ranks=RANKS) -> str:
    """The lines of a tiktoken vocabulary."""
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
