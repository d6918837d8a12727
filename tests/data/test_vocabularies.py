"""Hugging Face and tiktoken vocabularies: ids read off tables made by hand, and texts that want to be special."""

import json

import numpy as np
import pytest
from small_vocabularies import IDS, RANKS, hugging_face_json, ranks_text

from k3jax.config import ConfigError
from k3jax.data import BadDocument
from k3jax.data.tokenizers import Part, load


def ids_of(words: str) -> list[int]:
    return [IDS[word] for word in words.split()]


def test_hugging_face_by_hand(tokenizer_json):
    tokenizer = load(str(tokenizer_json), 109)
    assert tokenizer.vocab_size == 109 == len(IDS)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    ids = tokenizer.encode("hello world!\n\n")  # longer than the file's truncation, without its padding or own bos
    assert ids.dtype == np.uint16 and ids.tolist() == ids_of("<s> hello Ġw o r l d ! ĊĊ </s>")
    assert tokenizer.encode(b"he\xc3\xa9", eos=False).tolist() == ids_of("<s> he Ã ©")
    assert tokenizer.encode("").tolist() == [0, 1]
    assert tokenizer.decode(ids) == "hello world!\n\n"
    assert tokenizer.decode([0, *ids_of("he"), 3, 108, 109, 5000, 1]) == "he\n\n"  # ids it does not have are left out
    assert isinstance(tokenizer.encode_batch(["he", b"\xff", "a\ud800"])[1], BadDocument)
    with pytest.raises(BadDocument, match="not UTF-8"):
        tokenizer.encode(b"\xff")


def test_tiktoken_by_hand(tiktoken_model):
    tokenizer = load(str(tiktoken_model), 270)
    assert tokenizer.vocab_size == 270  # 265 ranks and our five
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (265, 266, 267)
    assert tokenizer.encode("hello world").tolist() == [265, 258, 111, 259, 111, 114, 108, 100, 266]
    # Three digits at most; a capital begins a word; a double blank before a word is cut (the second belongs to it).
    assert tokenizer.encode("1234", eos=False).tolist() == [265, 260, 51, 52]
    assert tokenizer.encode("callCall", eos=False).tolist() == [265, 99, 97, 257, 67, 97, 257]
    assert tokenizer.encode("x  w", eos=False).tolist() == [265, 120, 32, 259]
    assert tokenizer.encode("x  ", eos=False).tolist() == [265, 120, 264]
    text = "naïve 漢字 x\t\u3000 he'll \U0001f600\n\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0xC3, 265, 9999]) == "\ufffd"


@pytest.mark.parametrize("file", ["tokenizer_json", "tiktoken_model"])
def test_text_never_gives_special_ids(file, request):
    tokenizer = load(str(request.getfixturevalue(file)))
    rng = np.random.default_rng(0)
    alphabet = [*tokenizer.special_tokens, "<|", "|>", "</", "s>", "hello", " ", "\n", "<", "[BOS", "]"]
    special = set(tokenizer.special_tokens.values())
    assert len(special) == 5
    for _ in range(60):
        text = "".join(rng.choice(alphabet, rng.integers(1, 12)))
        ids = tokenizer.encode(text)
        assert not special & set(ids[1:-1].tolist())
        assert tokenizer.decode(ids) == text
    batch = tokenizer.encode_batch(["he", "<s>", "llo"])
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in ("he", "<s>", "llo")]


@pytest.mark.parametrize("file", ["tokenizer_json", "tiktoken_model"])
def test_parts(file, request):
    """Special ids come from the template's parts; a token is an answer if a character of it is."""
    tokenizer = load(str(request.getfixturevalue(file)))
    named = tokenizer.special_tokens
    start, end = named["<|im_start|>"], named["<|im_end|>"]

    def text(words: str) -> list[int]:
        return tokenizer.encode(words)[1:-1].tolist()

    parts = [Part("<|im_start|>", True, False), Part("he", False, False), Part("llo", False, True)]
    ids, answer = tokenizer.encode_parts([*parts, Part("<|im_end|>", True, True), Part("!", True, False)])
    assert ids.tolist() == [start, *text("hello"), end, *text("!")]
    joined = [True] * len(text("hello"))  # hello is one token of the first, hell + o of the second: both touched
    assert answer.tolist() == [False, *joined, True, False]
    forged = [Part("<|im_start|>", True, False), Part("<|im_end|>é", False, True), Part("<|im_end|>", True, True)]
    ids, answer = tokenizer.encode_parts(forged)
    assert ids.tolist() == [start, *text("<|im_end|>é"), end]
    assert answer.tolist() == [False] + [True] * (len(ids) - 1)


def test_long_runs_and_texts(tiktoken_model):
    """Cut where Kimi cuts: texts every 400,000 characters, runs of (no) white space every 25,000."""
    tokenizer = load(str(tiktoken_model))
    for text in (" " * 1_000_000 + "a", "a" * 60_001, "\n" * 50_000, "ab " * 140_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # 25,001 blanks: without the cut they are 12,500 double ones and the last; with it 12,500 and one alone.
    ids = tokenizer.encode(" " * 25_003, eos=False).tolist()
    assert ids == [265] + [264] * 12_500 + [264, 32]
    ids = tokenizer.encode("h" * 24_999 + "he" * 2, eos=False).tolist()  # the cut is behind the h of the first he
    assert ids == [265] + [104] * 25_000 + [101, 256]
    ids = tokenizer.encode("x" + " \n" * 199_999 + " " + "he", eos=False).tolist()  # the text's cut is before the he
    assert ids[-1] == 256 and ids[-2] == 32
    ids = tokenizer.encode("x " * 199_999 + "xhe", eos=False).tolist()
    assert ids[-2:] == [104, 101]


def test_kimi_like_config(tiktoken_model):
    """256 reserved ids behind the ranks, with the names that tokenizer_config.json gives."""
    names = {265: "[BOS]", 266: "[EOS]", 267: "<|im_end|>", 520: "[PAD]"}
    config = {
        "added_tokens_decoder": {str(at): {"content": name, "special": True} for at, name in names.items()},
        "bos_token": "[BOS]",
        "eos_token": {"content": "<|im_end|>"},
    }
    (tiktoken_model.parent / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(str(tiktoken_model))
    assert tokenizer.vocab_size == 265 + 256
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (265, 267, 520)
    assert tokenizer.special_tokens["<|reserved_token_300|>"] == 300 and len(tokenizer.special_tokens) == 256


def changed(**values) -> dict:
    return hugging_face_json() | values


def without(*names: str) -> dict:
    """The tokenizer with some of its special tokens named otherwise."""
    text = json.dumps(hugging_face_json())
    for place, name in enumerate(names):
        text = text.replace(json.dumps(name)[1:-1], f"<other{place}>")
    return json.loads(text)


def test_found_by_usual_names(tokenizer_json):
    tokenizer_json.write_text(json.dumps(without("<pad>")))
    tokenizer = load(str(tokenizer_json))
    assert tokenizer.pad_id == tokenizer.eos_id == 1  # nothing looks at padding
    tokenizer_json.write_text(json.dumps(without("<s>")))
    with pytest.raises(ConfigError, match=r"^data.tokenizer: \S*/tokenizer.json has none of \[BOS\], <s>, .*bos_token"):
        load(str(tokenizer_json))
    (tokenizer_json.parent / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<other0>"}))
    assert load(str(tokenizer_json)).bos_id == 0
    (tokenizer_json.parent / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<absent>"}))
    with pytest.raises(ConfigError, match="has no token '<absent>'"):
        load(str(tokenizer_json))


def test_word_vocabulary_refuses_its_special_words(tmp_path):
    """A vocabulary that gives a special id for a word of the text: that document is refused, unknown words are not."""
    vocab = {"[UNK]": 0, "[BOS]": 1, "[EOS]": 2, "cat": 3}
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    made = changed(
        added_tokens=[entry | {"id": at, "content": name} for name, at in vocab.items() if at < 3],
        pre_tokenizer={"type": "WhitespaceSplit"}, truncation=None, padding=None, post_processor=None, decoder=None,
        model={"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    )  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    tokenizer = load(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("cat dog").tolist() == [1, 3, 0, 2]
    found = tokenizer.encode_batch(["cat", "cat [EOS] cat"])
    assert found[0].tolist() == [1, 3, 2]
    assert isinstance(found[1], BadDocument) and found[1].reason == "a special token as text"
    with pytest.raises(BadDocument, match="a special token as text"):
        tokenizer.encode_parts([Part("[BOS] ", True, False), Part("cat [EOS]", False, True)])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "", "is no tokenizer.json"),
        ("tokenizer.json", "{}", "is no tokenizer.json"),
        ("tokenizer.json", b"\xff\xfe{\0}\0", "is no tokenizer.json"),
        ("tokenizer.json", json.dumps(hugging_face_json())[:900], "is no tokenizer.json"),
        ("tokenizer.json", json.dumps(changed(model={"type": "New"})), "is no tokenizer.json"),
        ("tokenizer.model", b"\x0a\x0e\x0a\x05<unk>\x15\x00\xff", "SentencePiece"),
        ("tokenizer.model", "", "no token for the byte 0"),
        ("a.tiktoken", ranks_text()[:-8] + "\n", "line 265 is not base64 and a rank"),
        ("a.tiktoken", ranks_text() + "!!! 265\n", "line 266 is not base64"),
        ("a.tiktoken", ranks_text() + "YWE= 264\n", "ranks 0, 1, 2"),
        ("a.tiktoken", ranks_text([*RANKS, b"he"]), "each token once"),
        ("a.tiktoken", ranks_text(RANKS[:97] + RANKS[98:]), "no token for the byte 97"),
        ("tokenizer.txt", "", "must be bytes, a tokenizer.json, or"),
    ],
)
def test_damaged_vocabularies(write, name, content, message):
    path = write(name, content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith("data.tokenizer") and path in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens_decoder": {"7": {"content": "[BOS]"}}}', "\xff"])
def test_damaged_tokenizer_config(tiktoken_model, content):
    (tiktoken_model.parent / "tokenizer_config.json").write_text(content, "latin-1")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load(str(tiktoken_model))


def test_vocabulary_of_the_model(tokenizer_json, tmp_path):
    with pytest.raises(ConfigError, match=r"^model.vocab must be at least the tokenizer's 109, got 108$"):
        load(str(tokenizer_json), 108)
    with pytest.raises(ConfigError, match=r"^data.tokenizer: no file \S*/none.json$"):
        load(str(tmp_path / "none.json"))


def test_hash_is_of_all_that_decides(tokenizer_json, tiktoken_model):
    found = [load("bytes").hash, load(str(tokenizer_json)).hash, load(str(tiktoken_model)).hash]
    (tokenizer_json.parent / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tiktoken_model.parent / "tokenizer_config.json").write_text('{"bos_token": "[EOS]"}')
    found += [load(str(tokenizer_json)).hash, load(str(tiktoken_model)).hash]
    assert len(set(found)) == 5 and found[0] == load("bytes").hash
