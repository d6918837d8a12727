"""Tokenizers read from files: Hugging Face's `tokenizer.json`, and tiktoken's lines of base64 and rank.

    tokenizer.json           one object, of the package tokenizers
    X.model, X.tiktoken      a line is `<base64 of the token's bytes> <rank>`, ranks 0 .. n - 1, all 256 bytes in them
    tokenizer_config.json    beside either: names bos_token, eos_token, pad_token, and ids (`added_tokens_decoder`)

bos, eos and pad are those that tokenizer_config.json names, else the first of the usual names in the vocabulary; a
missing pad is eos, for padding is never looked at. A tiktoken vocabulary holds no special tokens. Where a
tokenizer_config.json names some it has 256 reserved ids behind its ranks, those and <|reserved_token_ID|>, as Kimi's
do; otherwise five of our own.

Invariant: text gives ordinary ids alone. A special token's name in a text is a text like any other; where the
vocabulary itself (Unigram, WordLevel) would give the special id for it, the document is refused. In a conversation
special ids come from the template's parts alone.
"""

import base64
import json
import os
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from k3jax.config import ConfigError
from k3jax.data import files
from k3jax.data.sources import BadDocument
from k3jax.data.tokenizers import Part

USUAL = {
    "bos": ("[BOS]", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|bos|>", "[CLS]", "<|endoftext|>"),
    "eos": ("[EOS]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|eos|>", "[SEP]"),
    "pad": ("[PAD]", "<pad>", "<|pad|>", "<|padding|>"),
}
RESERVED = 256  # ids behind the ranks of a tiktoken vocabulary with a tokenizer_config.json
OURS = ("[BOS]", "[EOS]", "[PAD]", "<|im_start|>", "<|im_end|>")  # behind the ranks of one without
# How Kimi cuts a text before it looks for tokens (tokenization_kimi.py of Kimi-K2 and K3): runs of Han; words with the
# sign before and the English ending behind them, split where capitals begin; up to three digits; signs; white space.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _BEHIND = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_BEHIND}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_BEHIND}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# The library's recursion overflows on longer texts and runs, so Kimi cuts there first, and so do we.
PIECE, RUN = 400_000, 25_000
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{RUN + 1}}}|(?<!\s)\s{{{RUN + 1}}}")


class _Vocabulary:
    """What both kinds share: the special ids, documents, and the parts of a conversation."""

    def __init__(self, where: str, file: str, size: int, special_tokens: dict[str, int], config: dict[str, Any]):
        self.vocab_size = size
        self.special_tokens = dict(special_tokens)
        self.bos, self.eos = (self._find(where, file, role, config) for role in ("bos", "eos"))
        pad = self._find(where, file, "pad", config)
        self.special_tokens |= {name: self._id(name) for name in (self.bos, self.eos, pad)}
        self.bos_id, self.eos_id, self.pad_id = (self.special_tokens[name] for name in (self.bos, self.eos, pad))
        self._dtype = np.uint16 if size <= 2**16 else np.uint32
        self._is_special = np.zeros(size, bool)
        self._is_special[list(self.special_tokens.values())] = True
        names = sorted(self.special_tokens, key=len, reverse=True)  # of two that begin alike the longer one
        self._names = re.compile("(" + "|".join(map(re.escape, names)) + ")")

    def encode(self, document: bytes | str, *, eos: bool = True) -> np.ndarray:
        """bos, the text's ids, and eos unless it is to be continued: uint16 or uint32 [n]. Raises BadDocument."""
        (ids,) = self.encode_batch([document])
        if isinstance(ids, BadDocument):
            raise ids
        return ids if eos else ids[:-1]

    def encode_batch(self, documents: Sequence[bytes | str]) -> list[np.ndarray | BadDocument]:
        """`encode` of each, on all cores; a document's own error in its place."""
        found: list[Any] = [_decoded(document) for document in documents]
        places = [place for place, text in enumerate(found) if isinstance(text, str)]
        for place, ids in zip(places, self._ordinary([found[place] for place in places]), strict=True):
            found[place] = ids if isinstance(ids, BadDocument) else self._document(ids)
        return found

    def encode_parts(self, parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, answer mask) of a conversation: its text is cut at the template's special tokens.

        What lies between two of them is tokenised as one text, so that words may join across parts; a token is an
        answer if any character of it is. Raises BadDocument.
        """
        ids: list[np.ndarray] = []
        answers: list[np.ndarray] = []
        text, flags = "", []

        def flush() -> None:
            nonlocal text, flags
            if text:
                found, spans = self._spanned(text)
                if self._is_special[found].any():
                    raise BadDocument("a special token as text", "")
                ids.append(found)
                answers.append(_touched(spans, np.concatenate(flags)))
            text, flags = "", []

        for part in parts:
            pieces = self._names.split(part.text) if part.template else [part.text]
            for place, piece in enumerate(pieces):
                if place % 2:  # what the pattern's group matched
                    flush()
                    ids.append(np.array([self.special_tokens[piece]]))
                    answers.append(np.array([part.answer]))
                else:
                    text += piece
                    flags.append(np.full(len(piece), part.answer))
        flush()
        return np.concatenate([np.zeros(0, np.int64), *ids]), np.concatenate([np.zeros(0, bool), *answers])

    def _document(self, ids: np.ndarray) -> np.ndarray | BadDocument:
        if self._is_special[ids].any():
            return BadDocument("a special token as text", "")
        return np.concatenate([[self.bos_id], ids, [self.eos_id]]).astype(self._dtype)

    def _find(self, where: str, file: str, role: str, config: dict[str, Any]) -> str:
        """The text of bos, eos or pad."""
        named = config.get(f"{role}_token")
        named = named.get("content") if isinstance(named, dict) else named
        if isinstance(named, str):
            if self._id(named) is None:
                raise ConfigError(f"{where}: {file} has no token {named!r}, its tokenizer_config.json's {role}_token")
            return named
        for name in USUAL[role]:
            if self._id(name) is not None:
                return name
        if role == "pad":
            return self.eos
        tried = ", ".join(USUAL[role])
        raise ConfigError(f"{where}: {file} has none of {tried}; name {role}_token in tokenizer_config.json beside it")

    def _id(self, name: str) -> int | None:
        return self.special_tokens.get(name)

    def _ordinary(self, texts: list[str]) -> list[np.ndarray | BadDocument]:
        raise NotImplementedError

    def _spanned(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids [n], first character and the one behind the last [n, 2]) of a text without special tokens."""
        raise NotImplementedError


class HuggingFaceTokenizer(_Vocabulary):
    """A `tokenizer.json`. Its own truncation, padding and post-processor (which adds bos or eos) are put aside.

    `spec` is a local or gs:// path. Raises ConfigError that names `where` and the file.
    """

    def __init__(self, where: str, spec: str):
        library = files.need("tokenizers", "hf")
        data = files.read(where, files.as_path(where, spec))
        config = read_config(where, spec)
        try:
            self._model = library.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(f"{where}: {spec} is no tokenizer.json: {error}") from error
        self._model.no_truncation()
        self._model.no_padding()
        self._model.post_processor = None
        self._model.encode_special_tokens = True  # a special token's name in a text is text
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(f"{where}: {spec} holds no tokens")
        added = self._model.get_added_tokens_decoder()
        unknown = getattr(self._model.model, "unk_token", None)
        special = {token.content: at for at, token in added.items() if token.special and token.content != unknown}
        super().__init__(where, spec, max(vocabulary.values()) + 1, special, config)
        self.hash = sha256(data + repr((self.bos_id, self.eos_id, self.pad_id)).encode()).hexdigest()

    def encode_parts(self, parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, answer mask), by the library's own cutting at special tokens unless a text in it holds one."""
        whole = "".join(part.text for part in parts)
        self._model.encode_special_tokens = False
        try:
            ids, spans = self._spanned(whole)
        finally:
            self._model.encode_special_tokens = True
        lengths = [len(part.text) for part in parts]
        written = np.repeat([not part.template for part in parts], lengths)
        if self._is_special[ids[_touched(spans, written)]].any():
            return super().encode_parts(parts)
        return ids, _touched(spans, np.repeat([part.answer for part in parts], lengths))

    def decode(self, ids) -> str:
        """The text of `ids` [n], without the special ones."""
        return self._model.decode([int(at) for at in ids if at < self.vocab_size], skip_special_tokens=True)

    def _id(self, name: str) -> int | None:
        return self._model.token_to_id(name)

    def _ordinary(self, texts: list[str]) -> list[np.ndarray | BadDocument]:
        try:
            encodings = self._model.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # one of them; which, shows when each goes alone
            return [_refused() if len(texts) == 1 else self._ordinary([text])[0] for text in texts]
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def _spanned(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        try:
            encoding = self._model.encode(text, add_special_tokens=False)
        except Exception as error:
            raise _refused() from error
        return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)


class TiktokenTokenizer(_Vocabulary):
    """A vocabulary of the package tiktoken, cut by PATTERN as Kimi's is.

    `spec` is a local or gs:// path. Raises ConfigError that names `where`, the file and the line.
    """

    def __init__(self, where: str, spec: str):
        library = files.need("tiktoken", "hf")
        data = files.read(where, files.as_path(where, spec))
        config = read_config(where, spec)
        ranks = _ranks(where, spec, data)
        special = _reserved(where, spec, len(ranks), config) if config else {}
        special = special or {name: len(ranks) + place for place, name in enumerate(OURS)}
        self._model = library.Encoding(spec, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
        super().__init__(where, spec, max(special.values()) + 1, special, config)
        decides = (PATTERN, PIECE, RUN, sorted(special.items()), self.bos_id, self.eos_id, self.pad_id)
        self.hash = sha256(data + repr(decides).encode()).hexdigest()

    def decode(self, ids) -> str:
        """The text of `ids` [n], without the special ones; broken UTF-8 shows as U+FFFD."""
        return self._model.decode([int(at) for at in ids if at < self.vocab_size and not self._is_special[at]])

    def _ordinary(self, texts: list[str]) -> list[np.ndarray | BadDocument]:
        pieces = [_pieces(text) for text in texts]
        flat = [piece for of_one in pieces for piece in of_one]
        found = iter(self._model.encode_ordinary_batch(flat, num_threads=os.cpu_count() or 1))
        return [np.concatenate([np.zeros(0, np.int64)] + [np.array(next(found), np.int64) for _ in p]) for p in pieces]

    def _spanned(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        (ids,) = self._ordinary([text])
        lengths = [len(token) for token in self._model.decode_tokens_bytes(ids.tolist())]
        behind = np.cumsum(lengths, dtype=np.int64)
        data = np.frombuffer(text.encode(), np.uint8)
        character = np.cumsum((data & 0xC0) != 0x80) - 1  # of each byte
        return ids, np.stack([character[behind - lengths], character[behind - 1] + 1], axis=1)


def read_config(where: str, spec: str) -> dict[str, Any]:
    """The tokenizer_config.json beside the file `spec`, {} where there is none. Raises ConfigError."""
    path = files.as_path(where, spec).parent / "tokenizer_config.json"
    if not files.ask(where, path, path.exists):
        return {}
    try:
        config = json.loads(files.read(where, path).decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: {path} holds no object")
    return config


def _ranks(where: str, spec: str, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
        except ValueError as error:
            hint = "" if data[:200].isascii() else " (a SentencePiece model? give its tokenizer.json)"
            raise ConfigError(f"{where}: {spec}, line {number} is not base64 and a rank{hint}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(f"{where}: {spec} must give each token once, with ranks 0, 1, 2, ...")
    missing = next((value for value in range(256) if bytes([value]) not in ranks), None)
    if missing is not None:
        raise ConfigError(f"{where}: {spec} has no token for the byte {missing}")
    return ranks


def _reserved(where: str, spec: str, first: int, config: dict[str, Any]) -> dict[str, int]:
    """Names of the ids behind the ranks, as tokenizer_config.json gives them; {} if it gives none."""
    named = config.get("added_tokens_decoder")
    if not named:
        return {}
    try:
        names = {int(at): token["content"] for at, token in named.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: added_tokens_decoder in tokenizer_config.json beside {spec} is broken") from error
    behind = first + RESERVED
    outside = [at for at in names if not first <= at < behind]
    if outside or not all(isinstance(name, str) and name for name in names.values()):
        raise ConfigError(f"{where}: tokenizer_config.json names ids outside {first} .. {behind - 1} of {spec}")
    special = {names.get(at, f"<|reserved_token_{at}|>"): at for at in range(first, behind)}
    if len(special) < RESERVED:
        raise ConfigError(f"{where}: tokenizer_config.json beside {spec} gives a name twice")
    return special


def _pieces(text: str) -> list[str]:
    """`text` cut every PIECE characters, and inside where more than RUN are, or are not, white space."""
    pieces = []
    for start in range(0, len(text), PIECE):
        part, begin = text[start : start + PIECE], 0
        if _LONG_RUN.search(part):
            for run in re.finditer(r"\s+|\S+", part):
                for cut in range(run.start() + RUN, run.end(), RUN):
                    pieces.append(part[begin:cut])
                    begin = cut
        pieces.append(part[begin:])
    return pieces


def _touched(spans: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Which spans [n, 2] of characters hold a flagged one; an empty span is like the character behind it."""
    if not len(flags):
        return np.zeros(len(spans), bool)
    before = np.concatenate([[0], np.cumsum(flags)])
    begin = np.minimum(spans[:, 0], len(flags) - 1)
    return before[np.maximum(spans[:, 1], begin + 1)] > before[begin]


def _decoded(document: bytes | str) -> str | BadDocument:
    if isinstance(document, str):
        return document
    try:
        return document.decode()
    except UnicodeDecodeError:
        return BadDocument("not UTF-8", "")


def _refused() -> BadDocument:
    return BadDocument("refused by the tokenizer", "")
