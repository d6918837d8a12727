"""Token shards: equal to tokenising in memory, whole or not there at all, never silently another corpus."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data_config import config
from etils import epath

from k3jax.config import ConfigError
from k3jax.data import load, stream_hash, tokenize
from k3jax.data import prepare as preparing
from k3jax.data.chat import Chat
from k3jax.data.records import open_records
from k3jax.data.shards import open_shards, read_meta
from k3jax.data.sources import draw_lot
from k3jax.data.tokenizers import load as load_tokenizer

TALK = [{"role": "user", "content": "he?"}, {"role": "assistant", "content": "hello"}]


def run(*flags: str) -> int:
    return preparing.main(["prepare", *flags])


@pytest.fixture
def texts(write, tmp_path):
    """Text first, then conversations, then text: 12 documents, 3 bad records."""
    for number in range(5):
        write(f"src/a{number}.txt", f"hello {number} " * (number + 1))
    lines = [{"messages": TALK}, {"text": "he"}, {"messages": TALK[:1]}, {"text": ""}] + [{"text": "ll"}] * 5
    write("src/b.jsonl", lines)
    write("src/c.txt", b"\xff")
    return tmp_path / "src"


@pytest.mark.parametrize("tokenizer", ["bytes", "tokenizer_json", "tiktoken_model"])
def test_equal_to_memory(texts, tmp_path, tokenizer, request, capsys):
    file = tokenizer if tokenizer == "bytes" else str(request.getfixturevalue(tokenizer))
    out = tmp_path / "deep" / "shards"
    assert run(f"--source={texts}", f"--tokenizer={file}", f"--out={out}") == 0
    printed = capsys.readouterr().out
    assert f"{texts}: 12 documents" in printed and "skipped 1: no answer (the first: b.jsonl:3)" in printed
    tokens = load_tokenizer(file)
    memory = tokenize(open_records("data.source", str(texts)), tokens, Chat(tokens, None, file))
    (shard,) = open_shards("data.source", str(out), tokens).shards
    assert isinstance(shard.tokens, np.memmap) and shard.tokens.dtype == memory.tokens.dtype
    assert shard.tokens.tolist() == memory.tokens.tolist() and shard.offsets.tolist() == memory.offsets.tolist()
    assert shard.answer.astype(bool).tolist() == memory.answer.tolist()
    assert 0 < memory.answer.sum() < len(memory.answer)
    meta = json.loads((out / "meta.json").read_text())
    assert meta["documents"] == 12 and meta["tokens"] == len(memory.tokens)
    assert meta["skipped"] == {"empty": 1, "no answer": 1, "not UTF-8": 1}
    assert meta["tokenizer"] == {"name": file, "sha256": tokens.hash, "vocab_size": tokens.vocab_size}
    # By hand: little-endian ids end to end, offsets as an int64 .npy, a byte for each token's mask.
    ids = np.frombuffer((out / "00000.bin").read_bytes(), "<u2")
    assert ids.tolist() == memory.tokens.tolist()
    assert np.load(out / "00000.idx.npy").dtype == np.int64
    assert list((out / "00000.answer.bin").read_bytes()) == memory.answer.astype(int).tolist()
    assert sorted(path.name for path in out.iterdir()) == [
        "00000.answer.bin", "00000.bin", "00000.idx.npy", "meta.json",
    ]  # fmt: skip
    assert [path.name for path in out.parent.iterdir()] == ["shards"]  # nothing of the work is left


def made(tokenizer, chat) -> dict:
    named = {"name": "bytes", "sha256": tokenizer.hash, "vocab_size": tokenizer.vocab_size}
    return {
        "format": preparing.FORMAT,
        "dtype": "uint16",
        "tokenizer": named,
        "chat_template": chat.hash,
        "sources": [],
    }


def test_many_shards(texts, tmp_path):
    """However it is cut, the documents and masks are the same; a shard of text alone has no mask file."""
    tokenizer = load_tokenizer("bytes")
    chat = Chat(tokenizer)
    memory = tokenize(open_records("data.source", str(texts)), tokenizer, chat)
    for limit in (1, 150, 400):
        out = epath.Path(tmp_path / f"shards{limit}")
        preparing.prepare([str(texts)], tokenizer, chat, out, made(tokenizer, chat), limit)
        folder = open_shards("data.source", str(out), tokenizer)
        assert len(folder.shards) == 12 if limit == 1 else 1 < len(folder.shards) < 12
        assert np.concatenate([shard.tokens for shard in folder.shards]).tolist() == memory.tokens.tolist()
        masks = [
            np.ones(length, bool) if shard.answer is None else shard.answers(index, 0, length)
            for shard in folder.shards
            for index, length in enumerate(shard.lengths)
        ]
        assert np.concatenate(masks).tolist() == memory.answer.tolist()
        assert folder.shards[0].answer is None and any(shard.answer is not None for shard in folder.shards)
        lots = [
            [draw_lot(f"{at:05d}:{index}") for index in range(len(shard))] for at, shard in enumerate(folder.shards)
        ]
        assert [one.tolist() for one in folder.lots()] == lots


def test_training_from_shards(texts, tmp_path):
    """The same batches as from the texts where the split is given, and the same fingerprint each time."""
    out, held_out = tmp_path / "shards", tmp_path / "held"
    (tmp_path / "held.txt").write_text("held out")
    assert run(f"--source={texts}", "--tokenizer=bytes", f"--out={out}") == 0
    assert run(f"--source={tmp_path}/held.txt", "--tokenizer=bytes", f"--out={held_out}") == 0
    corpus = load(config(out, held_out=(str(held_out),)), 264)
    memory = load(config(texts, held_out=(f"{tmp_path}/held.txt",)), 264)
    mine, theirs = corpus.train_batches(), memory.train_batches()
    assert stream_hash(mine.batch(step) for step in range(50)) == stream_hash(theirs.batch(step) for step in range(50))
    assert stream_hash(corpus.evaluation_batches().iterate()) == stream_hash(memory.evaluation_batches().iterate())
    assert corpus.ngrams() == memory.ngrams()
    assert corpus.lines()[0] == f"{out}: 12 documents, {len(corpus.train.gathered().tokens):,} tokens"
    assert corpus.lines()[1] == f"{out}: skipped 1: empty (the first: b.jsonl:4)"
    assert corpus.fingerprint == load(config(out, held_out=(str(held_out),)), 264).fingerprint != memory.fingerprint
    with pytest.raises(ConfigError, match=r"^data.held_out: \S*/shards is among data.source too"):
        load(config(out, held_out=(f"{out}/",)), 264)
    split = load(config(out), 264)  # by `00000:<document>`
    names = [f"00000:{index}" for index in range(12)]
    away = [at for at, name in enumerate(names) if draw_lot(name) >> 58 == 0]
    away = away or [min(range(12), key=lambda at: draw_lot(names[at]))]
    lengths = open_shards("data.source", str(out), split.tokenizer).shards[0].lengths
    assert split.held_out.lengths.tolist() == lengths[away].tolist()


def test_another_tokenizer_is_refused(texts, tmp_path, tokenizer_json):
    out = tmp_path / "shards"
    assert run(f"--source={texts}", f"--tokenizer={tokenizer_json}", f"--out={out}") == 0
    with pytest.raises(
        ConfigError, match=rf"^data.tokenizer is not the one that {out} was made with, {tokenizer_json}$"
    ):
        load(config(out), 264)
    with pytest.raises(ConfigError, match=r"^model.vocab"):
        load(config(out, tokenizer=str(tokenizer_json)), 100)
    load(config(out, tokenizer=str(tokenizer_json)), 109)
    (tokenizer_json.parent / "tokenizer_config.json").write_text('{"eos_token": "<pad>"}')
    with pytest.raises(ConfigError, match=r"^data.tokenizer is not the one"):
        load(config(out, tokenizer=str(tokenizer_json)), 264)


def test_finished_folder_is_kept(texts, tmp_path, capsys, write):
    out = tmp_path / "shards"
    flags = (f"--source={texts}", "--tokenizer=bytes", f"--out={out}")
    assert run(*flags) == 0
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()}
    assert run(*flags) == 0 and f"{out} has them already" in capsys.readouterr().out
    assert run(flags[0] + "/*", *flags[1:]) == 2
    assert "made with another sources" in capsys.readouterr().err
    write("src/a0.txt", "hallo 0 ")  # the same length
    assert run(*flags) == 2
    assert f"{out} holds token shards of other content" in capsys.readouterr().err
    assert before == {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()}
    (out / "meta.json").unlink()
    assert run(*flags) == 2
    assert "is not empty" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir() if "unfinished" in path.name) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--source is missing"),
        (["--source={src}"], "--tokenizer is missing"),
        (["--source={src}", "--tokenizer=bytes"], "--out is missing"),
        (["--source={src}", "--source={src}", "--tokenizer=bytes", "--out={out}"], "--source is given twice"),
        (["--source={src}/none.txt", "--tokenizer=bytes", "--out={out}"], "--source: no file or folder {src}/none.txt"),
        (
            ["--source={src}/c.txt", "--tokenizer=bytes", "--out={out}"],
            "--source: {src}/c.txt holds no documents (1 not",
        ),
        (["--source={src}", "--tokenizer=none.json", "--out={out}"], "--tokenizer: no file none.json"),
        (["--source={src}", "--tokenizer=words", "--out={out}"], "--tokenizer must be bytes, a tokenizer.json, or"),
        (["--source={src}", "--tokenizer=bytes", "--out={src}/c.txt"], "--out: {src}/c.txt is a file"),
        (["--source={src}", "--tokenizer=bytes", "--out={src}"], "--out: {src} is not empty"),
        (
            ["--source={src}", "--tokenizer=bytes", "--out={out}", "--chat_template=none"],
            "--chat_template: no file none",
        ),
        (["--source={src}", "--tokenizer=bytes", "--out={out}", "--seed=1"], "seed"),
        (["--source={src}", "--tokenizer=bytes", "--out={out}", "stray"], "stray"),
    ],
)
def test_mistakes(texts, tmp_path, capsys, flags, message):
    names = {"src": texts, "out": tmp_path / "out"}
    assert run(*(flag.format(**names) for flag in flags)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message.format(**names) in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_shards_of_shards(texts, tmp_path, capsys):
    assert run(f"--source={texts}", "--tokenizer=bytes", f"--out={tmp_path}/one") == 0
    assert run(f"--source={tmp_path}/one", "--tokenizer=bytes", f"--out={tmp_path}/two") == 2
    assert "one is a folder of token shards already" in capsys.readouterr().err


def test_full_disk(texts, tmp_path, capsys, monkeypatch):
    """The third write finds no space: one line, exit code 3, and nothing is left."""
    from k3jax.data import shards

    write, done = shards._HashedFile.write, []

    def full(self, data):
        done.append(1)
        if len(done) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(shards._HashedFile, "write", full)
    out = tmp_path / "out" / "shards"
    assert run(f"--source={texts}", "--tokenizer=bytes", f"--out={out}") == 3
    assert capsys.readouterr().err == f"error: --out: {out} cannot be written: No space left on device\n"
    assert list(out.parent.iterdir()) == []


def test_interrupted(texts, tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(preparing.ShardWriter, "add", interrupt)
    assert run(f"--source={texts}", "--tokenizer=bytes", f"--out={tmp_path}/out") == 130
    assert "interrupted" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".out*"))


SLOWLY = """
import sys, time
from k3jax.data import prepare, shards
add = shards.ShardWriter.add
def slow(self, ids, answer):
    add(self, ids, answer)
    for file in self._files.values():
        file._file.flush()
    if self.documents == 6:
        print("half", flush=True)
        time.sleep(60)
prepare.ShardWriter.add = slow
sys.exit(prepare.main(["prepare", *sys.argv[1:]]))
"""


def test_killed_in_the_middle(texts, tmp_path, capsys):
    """SIGKILL after half of the documents: no folder that loads; the next run does it all and says what is left."""
    out = tmp_path / "work" / "shards"
    flags = [f"--source={texts}", "--tokenizer=bytes", f"--out={out}"]
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, *flags], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = out.parent.iterdir()
    assert left.name.startswith(".shards.unfinished-") and (left / "00000.bin").stat().st_size > 0
    for folder in (out, left):
        with pytest.raises(ConfigError, match=r"^data.source: \S* matches no file|no file or folder|holds no file"):
            load(config(folder), 264)
    assert run(*flags) == 0
    assert f"left by a run that was killed, or of one that still writes: {left}" in capsys.readouterr().err
    assert read_meta("data.source", epath.Path(out))["documents"] == 12


def test_progress_lines(texts, tmp_path, capsys, monkeypatch):
    """Elsewhere than on a terminal a line now and then; the last ones are near 100 %."""
    monkeypatch.setattr("k3jax.data.progress.LINE_SECONDS", 0.0)
    assert run(f"--source={texts}", "--tokenizer=bytes", f"--out={tmp_path}/out") == 0
    shares = [int(share) for share in re.findall(r"tokenising: \d+ MiB \((\d+)%\)\n", capsys.readouterr().err)]
    assert shares == sorted(shares) and shares[-1] == 100


def test_bucket(texts, bucket, capsys):
    """The same shards on gs://, read range by range; a folder that is there is never written into."""
    bucket("x", b"")
    flags = (f"--source={texts}", "--tokenizer=bytes", "--out=gs://bucket/shards")
    assert run(*flags) == 0
    remote = open_shards("data.source", "gs://bucket/shards", load_tokenizer("bytes"))
    tokenizer = load_tokenizer("bytes")
    local = tokenize(open_records("data.source", str(texts)), tokenizer, Chat(tokenizer))
    (shard,) = remote.shards
    for document in range(12):
        length = int(shard.lengths[document])
        assert shard.read(document, 1, length).tolist() == local.read(document, 1, length).tolist()
        assert shard.answers(document, 0, length).tolist() == local.answers(document, 0, length).tolist()
    assert load(config("gs://bucket/shards"), 264).ngrams() is not None
    assert run(*flags) == 2 and "is not empty" in capsys.readouterr().err


def test_command_line():
    help_text = subprocess.run(
        [sys.executable, "-m", "k3jax.data.prepare", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(f"--{name}" in help_text for name in ("source", "tokenizer", "out", "chat_template"))


@pytest.mark.slow
def test_killed_at_random(tmp_path):
    """20 runs over the standard library, each killed somewhere: what is there loads as a whole corpus, or is not."""
    whole = None
    rng = np.random.default_rng(0)
    out = tmp_path / "shards"
    flags = [sys.executable, "-m", "k3jax.data.prepare", "--source=stdlib", "--tokenizer=bytes", f"--out={out}"]
    started = time.monotonic()
    subprocess.run(flags, check=True)
    took = time.monotonic() - started
    whole = load(config(out), 264).fingerprint
    for path in out.iterdir():
        path.unlink()
    out.rmdir()
    for _ in range(20):
        process = subprocess.Popen(flags)
        time.sleep(rng.uniform(0.3, 1.1) * took)
        process.kill()
        process.wait()
        if out.exists():
            assert load(config(out), 264).fingerprint == whole
            for path in Path(out).iterdir():
                path.unlink()
            out.rmdir()
