"""Damaged configs and data through the command line: one line that names the mistake, exit code 2, nothing trained."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from runs import command, exact, on_devices, run, write_corpus

from k3jax import data, train
from k3jax.config import from_dict, load


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


FLAGS = [
    ("no_such_key=1", "no_such_key"),
    ("model.kda.no_such_key=1", "model.kda.no_such_key"),
    ("train=1", "train"),
    ("train.steps", "train.steps"),
    ("train.steps=1e3", "train.steps"),
    ("train.steps=-1", "train.steps"),
    ("train.steps=99999999999999999999x", "train.steps"),
    ("train.epochs=0", "train.epochs"),
    ("train.epochs=many", "train.epochs"),
    ("train.accumulate=3", "train.accumulate"),
    ("train.accumulate=0", "train.accumulate"),
    ("train.max_skipped=0", "train.max_skipped"),
    ("train.dtype=float16", "train.dtype"),
    ("optim.learning_rate=None", "optim.learning_rate"),
    ("optim.learning_rate=-1e-3", "optim.learning_rate"),
    ("optim.clip_norm=-0.1", "optim.clip_norm"),
    ("optim.qk_clip=0", "optim.qk_clip"),
    ("optim.frozen=no_such_parameter", "no_such_parameter"),
    ("optim.frozen=*", "optim.frozen"),
    ("optim.rate_scale=embed", "optim.rate_scale"),
    ("optim.rate_scale=embed=-1", "optim.rate_scale"),
    ("optim.rate_scale=no_such_parameter=1", "no_such_parameter"),
    ("optim.momentum=1", "optim.momentum"),
    ("model.moe.top_k=9", "model.moe.top_k"),
    ("model.kda.lower_bound=5", "model.kda.lower_bound"),
    ("model.kda.heads=0", "model.kda.heads"),
    ("model.mla_layers=(2,2)", "model.mla_layers"),
    ("model.vocab=258", "model.vocab"),
    ("mesh.data=2", "mesh.data"),
    ("mesh.fsdp=0", "mesh.fsdp"),
    ("mesh.expert=2", "mesh.expert"),
    ("checkpoint.every=0", "checkpoint.every"),
    ("checkpoint.keep=0", "checkpoint.keep"),
    ("eval.every=0", "eval.every"),
    ("sample.every=0", "sample.every"),
    ("log.health_every=0", "log.health_every"),
    ("log.tensorboard=2", "log.tensorboard"),
    ("profile.steps=5", "profile.steps"),
    ("profile.steps=5:5", "profile.steps"),
    ("profile.steps=0:3", "profile.steps"),
    ("debug.nans=maybe", "debug.nans"),
    ("data.source=", "data.source"),
    ("data.source=no/such/file.txt", "no/such/file.txt"),
    ("data.source=no/such/*.jsonl", "no/such"),
    ("data.source=s3://bucket/a.txt", "s3://bucket/a.txt"),
    ("data.held_out=no/such/folder", "data.held_out"),
    ("data.weights=(1,2)", "data.weights"),
    ("data.weights=(0,)", "data.weights"),
    ("data.batch_rows=99999999999", "data.batch_rows"),
    ("train.steps=3000000000", "train.steps"),
    ("optim.rate_scale=*=1e999", "optim.rate_scale"),
    ("sample.prompt=\udcff", "sample.prompt"),
    ("data.tokenizer=gpt9", "data.tokenizer"),
    ("data.tokenizer=no/such/tokenizer.json", "tokenizer.json"),
    ("data.chat_template=no/such.jinja", "no/such.jinja"),
    ("data.seq_len=0", "data.seq_len"),
    ("init_from=no/such/folder", "no/such/folder"),
]


def assert_refused(code, captured, named, workdir):
    lines = captured.err.splitlines()
    assert code == 2 and lines[-1].startswith("error: ") and named in lines[-1], captured.err
    assert sum(line.startswith("error") for line in lines) == 1 and "Traceback" not in captured.err + captured.out
    assert not (workdir / "metrics.jsonl").exists() and not (workdir / "config.json").exists()


@pytest.mark.parametrize(("flag", "named"), FLAGS, ids=[flag for flag, _ in FLAGS])
def test_damaged_config(flag, named, corpus, tmp_path, capsys):
    assert_refused(run(tmp_path, corpus, flag), capsys.readouterr(), named, tmp_path)


def shards(folder, **changes):
    """A folder of token shards, made by hand and then spoilt."""
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps({"format": "k3jax token shards 1", **changes}))


SPOILT = {
    "empty.txt": lambda path: path.write_bytes(b""),
    "latin.txt": lambda path: path.write_bytes("für immer".encode("latin-1")),
    "utf16.txt": lambda path: path.write_bytes("wide".encode("utf-16")),
    "zeros.txt": lambda path: path.write_bytes(bytes(1000)),
    "picture.png": lambda path: path.write_bytes(b"\x89PNG\r\n"),
    "folder": lambda path: path.mkdir(),
    "pipe.txt": os.mkfifo,
    "cut.jsonl": lambda path: path.write_text('{"text": "a'),
    "list.jsonl": lambda path: path.write_text('["text"]\n'),
    "number.jsonl": lambda path: path.write_text('{"text": 3}\n'),
    "other.jsonl": lambda path: path.write_text('{"content": "a"}\n'),
    "blank.jsonl": lambda path: path.write_text("\n\n\n"),
    "twice.jsonl": lambda path: path.write_text('{"text": "a", "text": "b"}\n'),
    "deep.jsonl": lambda path: path.write_text('{"text": ' + "[" * 200_000 + "]" * 200_000 + "}\n"),
    "roles.jsonl": lambda path: path.write_text('{"messages": [{"role": "wizard", "content": "a"}]}\n'),
    "silent.jsonl": lambda path: path.write_text('{"messages": [{"role": "user", "content": "only a question"}]}\n'),
    "cut.parquet": lambda path: path.write_bytes(b"PAR1" + bytes(100)),
    "meta": lambda path: shards(path),
    "dtype": lambda path: shards(path, dtype="int8", tokenizer={"name": "bytes", "sha256": "0", "vocab_size": 259}),
}


@pytest.mark.parametrize("name", SPOILT)
def test_damaged_data(name, corpus, tmp_path, capsys):
    """Nothing in it can be learnt, so nothing is trained; the line names data.source and the file."""
    SPOILT[name](tmp_path / name)
    workdir = tmp_path / "run"
    code = run(workdir, corpus, f"data.source={tmp_path / name}")
    assert_refused(code, capsys.readouterr(), "data.source", workdir)


def test_bad_records_beside_good_ones_are_counted(tmp_path):
    """Ten records, three of them documents: seven are counted by reason and none is merged into another."""
    lines = [b'{"text": "one"}', b'{"text": "\xff"}', b"", b'{"text": ""}', b"{", b'{"text": "two"}', b'{"text": 1}']
    lines += [b'{"text": "' + b"a" * (33 * 2**20) + b'"}', b'{"txt": "a"}', b'{"text": "three"}']
    (tmp_path / "mixed.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "held.txt").write_text("held out")
    config = load("configs/k3.py:tiny", [
        f"--config.data.source={tmp_path / 'mixed.jsonl'}", f"--config.data.held_out={tmp_path / 'held.txt'}",
        "--config.data.seq_len=17", "--config.data.batch_rows=1",
    ])  # fmt: skip
    corpus = data.load(config.data, config.model.vocab)
    text = "\n".join(corpus.lines())
    assert "3 documents" in text and "too long" in text and "not UTF-8" in text and "invalid JSON" in text
    batch = corpus.train_batches().batch(0)
    whole = np.append(batch["tokens"][0], batch["targets"][0, -1])
    epoch = whole[: len("onetwothree") + 6]
    found = sorted(
        bytes(part[part < 256].astype(np.uint8)) for part in np.split(epoch, np.flatnonzero(epoch == 257) + 1)
    )
    assert [text for text in found if text] == [b"one", b"three", b"two"]


@pytest.mark.parametrize("flag", ["optim.clip_norm=x", "data.source=no/such.txt", "mesh.fsdp=16"])
def test_real_process(flag, corpus, tmp_path):
    argv = command(tmp_path, corpus, flag)[1:]
    found = subprocess.run([sys.executable, "-m", "k3jax.train", *argv], capture_output=True, text=True, check=False)
    assert found.returncode == 2 and "Traceback" not in found.stderr
    assert found.stderr.splitlines()[-1].startswith("error: ")


def test_saved_config_runs_again(corpus, tmp_path):
    """O20: what config.json holds is the config that ran: read back, it is equal, and its first loss is bit-equal."""
    assert run(tmp_path / "a", corpus, "optim.clip_norm=0.1", "log.wandb=None") == 0
    saved = from_dict(json.loads((tmp_path / "a" / "config.json").read_text()))
    assert saved.optim.clip_norm == 0.1 and saved.log.wandb is None
    file = tmp_path / "saved.py"
    file.write_text(f"import json\ndef get_config(): return json.loads({json.dumps(saved.to_dict())!r})\n")
    real = command(tmp_path / "b", corpus)
    with on_devices(1):
        assert train.main([real[0], f"--config={file}", real[2]]) == 0
    assert exact(tmp_path / "b") == exact(tmp_path / "a")


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?b"])
def test_workdir_that_checkpoints_could_not_be_read_from(name, corpus, tmp_path, capsys):
    workdir = tmp_path / name
    assert_refused(run(workdir, corpus), capsys.readouterr(), "--workdir", workdir)
