"""Tokenises sources once, into a folder of token shards (shards.py) that data.source takes.

    python -m k3jax.data.prepare --source=books/**/*.txt,chats.jsonl --tokenizer=tokenizer.json --out=shards/books

Local or gs:// paths. Nothing is shuffled: documents lie in the order of their sources, training orders them by its own
seed. A local folder is written under another name beside it and renamed when it is whole; on gs:// its meta.json comes
last, and without it the folder is none. A finished folder stays as it is: the same content again is fine, another is
refused. Memory does not grow with the sources. Exit code 0: written, or already there; 2: a mistake in flags or input;
3: the machine (disk full, a library missing); 130: interrupted. An error is one line.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator

from absl import logging
from etils import epath

from k3jax import command
from k3jax.config import ConfigError, MachineError
from k3jax.data import files
from k3jax.data.chat import Chat
from k3jax.data.documents import Skipped, encoded, nothing, token_dtype
from k3jax.data.progress import progress
from k3jax.data.records import open_records
from k3jax.data.shards import FORMAT, SHARD_BYTES, ShardWriter, is_shard_folder, read_meta
from k3jax.data.sources import Records
from k3jax.data.tokenizers import Tokenizer
from k3jax.data.tokenizers import load as load_tokenizer

FLAGS = {
    "source": "as data.source; several with commas between them",
    "tokenizer": "as data.tokenizer: bytes, a tokenizer.json, a .model or .tiktoken vocabulary",
    "out": "folder to write",
    "chat_template": "as data.chat_template, for conversations (default: the tokenizer's own, or ChatML)",
}


def main(argv: list[str]) -> int:
    """Runs the command line `argv` (its first entry is the program) and returns the exit code."""
    return command.guarded(_main, argv)


def _main(argv: list[str]) -> int:
    given = command.parse(argv, __doc__, FLAGS, {"chat_template": None})
    if given is None:
        return 0
    if sum(entry.lstrip("-").partition("=")[0] == "source" for entry in argv[1:]) > 1:
        raise ConfigError("--source is given twice; name several sources in one, with commas")
    sources = [spec.strip() for spec in given["source"].split(",") if spec.strip()]
    if not sources or len(set(sources)) < len(sources):
        raise ConfigError(f"--source must name sources, each once, got {given['source']!r}")
    tokenizer = load_tokenizer(given["tokenizer"], where="--tokenizer")
    chat = Chat(tokenizer, given["chat_template"], given["tokenizer"], where="--chat_template")
    made = {
        "format": FORMAT,
        "dtype": token_dtype(tokenizer).name,
        "tokenizer": {"name": given["tokenizer"], "sha256": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
        "chat_template": chat.hash,
        "sources": sources,
    }
    for line in prepare(sources, tokenizer, chat, files.as_path("--out", given["out"]), made):
        print(line)
    return 0


def prepare(
    sources: list[str], tokenizer: Tokenizer, chat: Chat, out: epath.Path, made: dict, limit: int = SHARD_BYTES
) -> list[str]:
    """Writes `out` from `sources`; `made` is what its meta.json begins with, `limit` the bytes of one shard's ids.

    Returns what to tell the user. Raises ConfigError and MachineError as the module says.
    """
    for spec in sources:
        if is_shard_folder("--source", spec):
            raise ConfigError(f"--source: {spec} is a folder of token shards already")
    opened = [open_records("--source", spec) for spec in sources]
    there = _existing(out, made)
    with _folder(out) as folder, contextlib.closing(ShardWriter(folder, token_dtype(tokenizer), limit)) as writer:
        lines, counts, examples = [], Counter(), {}
        with progress("tokenising", sum(source.size for source in opened), lines=True) as advance:
            for source in opened:
                before = writer.documents, writer.tokens
                skipped = _write_source(out, writer, source, tokenizer, chat, advance)
                documents, tokens = writer.documents - before[0], writer.tokens - before[1]
                if not documents:
                    raise nothing("--source", source.name, skipped.counts)
                lines.append(f"{source.name}: {documents:,} documents, {tokens:,} tokens")
                lines += skipped.lines()
                counts += skipped.counts
                examples = skipped.examples | examples
        _written(out, writer.finish)
        found = {"documents": writer.documents, "tokens": writer.tokens, "skipped": dict(counts), "examples": examples}
        meta = made | found | {"shards": writer.shards}
        if there is not None:
            if there != meta:
                raise ConfigError(f"--out: {out} holds token shards of other content; name another folder")
            return [*lines, f"{out} has them already"]
        _written(out, (folder / files.META).write_text, json.dumps(meta, indent=1) + "\n")
    return [*lines, f"wrote {writer.documents:,} documents, {writer.tokens:,} tokens to {out}"]


def _write_source(
    out: epath.Path, writer: ShardWriter, source: Records, tokenizer: Tokenizer, chat: Chat, advance
) -> Skipped:
    skipped = Skipped(source.name)
    for record, ids, answer, bad in encoded(source, tokenizer, chat):
        if bad:
            skipped.add(record, bad)
        else:
            _written(out, writer.add, ids, answer)
        advance(record.size)
    return skipped


def _existing(out: epath.Path, made: dict) -> dict | None:
    """The meta.json of a finished `out` that may be the same; None if `out` is still to be written."""
    if not files.ask("--out", out, out.exists):
        return None
    if not files.ask("--out", out, out.is_dir):
        raise ConfigError(f"--out: {out} is a file")
    if not files.ask("--out", out, lambda: any(out.iterdir())):
        return None
    if files.is_remote(out) or not (out / files.META).exists():
        raise ConfigError(f"--out: {out} is not empty; name another folder")
    meta = read_meta("--out", out)
    changed = [name for name, value in made.items() if meta.get(name) != value]
    if changed:
        raise ConfigError(f"--out: {out} holds token shards made with another {changed[0]}; name another folder")
    return meta


@contextlib.contextmanager
def _folder(out: epath.Path) -> Iterator[epath.Path]:
    """Where to write: a name of its own beside a local `out`, which it gets at the end if meta.json is in it."""
    if files.is_remote(out):
        yield out
        return
    prefix = f".{out.name}.unfinished-"
    work = None
    try:
        _written(out, out.parent.mkdir, parents=True, exist_ok=True)
        for left in sorted(out.parent.glob(f"{prefix}*")):
            print(f"left by a run that was killed, or of one that still writes: {left}", file=sys.stderr)
        work = epath.Path(_written(out, tempfile.mkdtemp, prefix=prefix, dir=out.parent))
        os.chmod(work, 0o755)  # mkdtemp's own is for us alone
        yield work
        if (work / files.META).exists():
            _written(out, work.rename, out)
    finally:
        if work is not None and work.exists():
            shutil.rmtree(work, ignore_errors=True)


def _written(out: epath.Path, write, *values, **named):
    """What `write` returns. Raises MachineError where the disk or the storage refuses."""
    try:
        return write(*values, **named)
    except OSError as error:
        raise MachineError(f"--out: {out} cannot be written: {error.strerror or error}") from error
    except ImportError as error:
        raise MachineError(f"{out} needs the package gcsfs: pip install 'k3jax[gcs]'") from error


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)
    sys.exit(main(sys.argv))
