"""Conversations to tokens: a Jinja template writes them out, and only what the assistant says is learnt.

`messages` is a list of {role, content}; a role is one of ROLES, a content a string. The template is the file of
data.chat_template, else the tokenizer's own (chat_template.jinja or tokenizer_config.json beside it), else ChatML:

    <|im_start|>ROLE\\nCONTENT<|im_end|>\\n        for each message

Which characters are whose is found by rendering twice, which works with any template: once with a word that occurs
nowhere in place of each content, which gives the template's own text around the places of the contents; once as it is,
which must be the same text around the contents, as they are or as the template trims or cuts them. A conversation where
that is not so, or where it could be so in two ways, is refused. So a content that looks like the template's marks stays
text (tokenizers.Part), and an answer that is empty still has its place.

Answers are the contents of the role assistant and the mark behind each: the template's text up to its first special
token, or else its first line break, or else all of it. A template that says itself what is learnt, by {% generation %}
... {% endgeneration %}, is followed instead. bos and eos are added where the template has not written them; eos is
learnt where no special token ends the last answer before it.

Invariant: rendering depends on the messages alone (no clock, no network), and every learnt token has a character of an
answer or of its mark.
"""

import functools
import json
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from k3jax.config import ConfigError
from k3jax.data import files
from k3jax.data.sources import BadDocument
from k3jax.data.tokenizers import Part, Tokenizer
from k3jax.data.vocabularies import read_config

ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields that mean something a {role, content} reading would drop; others (a name, a date) say nothing to the model.
NOT_READ = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ '\\n' }}{{ message.content }}<|im_end|>{{ '\\n' }}"
    "{% endfor %}"
)
REFUSES, CHANGES = "refused by the chat template", "changed by the chat template"


class Chat:
    """Turns `messages` into ids and an answer mask.

    `template` is a Jinja file (local or gs://) or None; `tokenizer_file` is where the tokenizer was read from. Raises
    ConfigError that names `where` for a file that is none. Jinja itself is asked for when the first conversation comes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        tokenizer_file: str | None = None,
        *,
        where: str = "data.chat_template",
    ):
        self._tokenizer = tokenizer
        self._where = where
        self.template = _find(where, template, tokenizer_file)
        self.hash = sha256(self.template.encode()).hexdigest()
        if template is not None:
            _ = self._compiled  # a mistake in it is the user's, and shows now

    def encode(self, messages: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, answer mask bool) [n] with bos and eos. Raises BadDocument."""
        tokenizer = self._tokenizer
        ids, answer = tokenizer.encode_parts(self.parts(messages))
        if not answer.any():
            raise BadDocument("no answer", "")
        special = np.fromiter(tokenizer.special_tokens.values(), np.int64)
        learnt = bool(answer[-1]) and ids[-1] not in special
        begin = ids[:0] if ids[0] == tokenizer.bos_id else [tokenizer.bos_id]
        end = ids[:0] if ids[-1] == tokenizer.eos_id else [tokenizer.eos_id]
        ids = np.concatenate([begin, ids, end]).astype(np.uint32)
        return ids, np.concatenate([np.zeros(len(begin), bool), answer, np.full(len(end), learnt)])

    def parts(self, messages: list[Any]) -> list[Part]:
        """The conversation written out, in order, each stretch with whose it is. Raises BadDocument."""
        contents = _contents(messages)
        word = _unused(contents)
        for spared in (set(), {place for place, content in enumerate(contents) if not content}):
            words = ["" if place in spared else f"{word}{place}x" for place in range(len(contents))]
            marks = (f"{word}openx", f"{word}closex")
            pieces = re.split(f"{word}(\\d+|open|close)x", self._render(messages, words, marks))
            texts = _fit(pieces, contents, self._render(messages, contents, ("", "")))
            if texts is not None:
                return self._learnt(pieces, texts, messages)
        raise BadDocument(CHANGES, "")

    def _learnt(self, pieces: list[str], texts: list[str], messages: list[Any]) -> list[Part]:
        """`pieces`: the template's texts, and between them a content's number, open or close; `texts`: the contents."""
        told, inside, behind_answer = "open" in pieces[1::2], False, False
        parts, rest = [], iter(texts)
        for place, piece in enumerate(pieces):
            if place % 2 == 0:
                end = self._mark_end(piece) if behind_answer and not told else 0
                parts += [Part(piece[:end], True, True), Part(piece[end:], True, inside)]
            elif piece.isdigit():
                behind_answer = messages[int(piece)]["role"] == "assistant"
                parts.append(Part(next(rest), False, inside if told else behind_answer))
            else:
                inside = piece == "open"
        return [part for part in parts if part.text]

    def _mark_end(self, text: str) -> int:
        """How much of the template's text behind an answer is the answer's end."""
        special = self._tokenizer.special_tokens
        found = re.search("|".join(map(re.escape, sorted(special, key=len, reverse=True))), text) if special else None
        if found:
            return found.end()
        return text.find("\n") + 1 or len(text)

    def _render(self, messages: list[Any], contents: Sequence[str], marks: tuple[str, str]) -> str:
        filled = [{**message, "content": text} for message, text in zip(messages, contents, strict=True)]
        names = {"bos_token": self._tokenizer.bos, "eos_token": self._tokenizer.eos, "add_generation_prompt": False}
        compiled = self._compiled
        try:
            return compiled.render(messages=filled, tools=None, documents=None, generation_marks=marks, **names)
        except Exception as error:  # a template is a program: whatever it raises is its no
            raise BadDocument(REFUSES, "") from error

    @functools.cached_property
    def _compiled(self):
        jinja2 = files.need("jinja2", "hf")
        try:
            return _environment().from_string(self.template)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{self._where}: the chat template is no Jinja: {error}") from error


def _find(where: str, template: str | None, tokenizer_file: str | None) -> str:
    if template is not None:
        try:
            return files.read(where, files.as_path(where, template)).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where}: {template} is not UTF-8") from error
    if tokenizer_file is None or tokenizer_file == "bytes":
        return CHATML
    beside = files.as_path(where, tokenizer_file).parent / "chat_template.jinja"
    if files.ask(where, beside, beside.exists):
        return _find(where, str(beside), None)
    found = read_config(where, tokenizer_file).get("chat_template") or CHATML
    if isinstance(found, list):  # several, by name
        named = [entry.get("template") for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[0] if named else None
    if not isinstance(found, str):
        raise ConfigError(f"{where}: tokenizer_config.json beside {tokenizer_file} holds no chat_template we can read")
    return found


def _contents(messages: list[Any]) -> list[str]:
    """The contents of a well-formed conversation. Raises BadDocument."""
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadDocument("a message without a known role", "")
        if not isinstance(message.get("content"), str):
            raise BadDocument("a message whose content is not a string", "")
        if any(message.get(name) for name in NOT_READ):
            raise BadDocument("a message with tool calls or reasoning", "")
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            raise BadDocument("not UTF-8", "") from error
        if "\0" in message["content"]:
            raise BadDocument("NUL bytes", "")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadDocument("no answer", "")
    return [message["content"] for message in messages]


def _unused(contents: Sequence[str]) -> str:
    """A word of plain letters that no content holds, the same for the same contents."""
    digest = sha256("\0".join(contents).encode())
    while any((word := f"k{digest.hexdigest()[:16]}q") in content for content in contents):
        digest.update(b"again")
    return word


def _fit(pieces: list[str], contents: Sequence[str], rendered: str) -> list[str] | None:
    """What stands in `rendered` for each content's number; None if the template's text differs or is ambiguous."""
    numbers, literals = [], [pieces[0]]
    for name, literal in zip(pieces[1::2], pieces[2::2], strict=True):
        if name.isdigit():
            numbers.append(int(name))
            literals.append(literal)
        else:  # a mark, which `rendered` does not have
            literals[-1] += literal
    for change in (str, str.strip, str.rstrip, str.lstrip):
        texts = [change(contents[number]) for number in numbers]
        if literals[0] + "".join(map(str.__add__, texts, literals[1:])) == rendered:
            return texts
    return _only_match(literals, rendered) if numbers else None


def _only_match(literals: list[str], rendered: str) -> list[str] | None:
    """The texts between the literals if `rendered` is made of them in one way alone, else None."""
    first, middle, last = literals[0], literals[1:-1], literals[-1]
    begin, end = len(first), len(rendered) - len(last)
    if not rendered.startswith(first) or not rendered.endswith(last) or end < begin or "" in middle:
        return None
    early, at = [], begin
    for literal in middle:
        at = rendered.find(literal, at, end)
        if at < 0:
            return None
        early.append(at)
        at += len(literal)
    late, at = [], end
    for literal in reversed(middle):  # found before, so found again
        at = rendered.rfind(literal, begin, at)
        late.append(at)
    if early != late[::-1]:
        return None
    begins = [begin, *(at + len(literal) for at, literal in zip(early, middle, strict=True))]
    return [rendered[a:b] for a, b in zip(begins, [*early, end], strict=True)]


@functools.cache
def _environment():
    """Jinja as Hugging Face sets it up, in its sandbox, without a clock."""
    files.need("jinja2", "hf")
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """{% generation %} ... {% endgeneration %}: what is in between stands between `generation_marks`."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_between", [nodes.Name("generation_marks", "load")])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _between(self, marks, caller):
            return marks[0] + caller() + marks[1]

    def refuse(text):
        raise ValueError(text)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    return environment
