"""The command line from end to end on a very small model: log, checkpoint, resume, meshes, and mistakes."""

import json
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from runs import exact, run, write_corpus

from k3jax import checkpoint, data, metrics, train
from k3jax.config import MachineError
from k3jax.data import prepare


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus):
    workdir = tmp_path_factory.mktemp("whole")
    assert run(workdir, corpus) == 0
    return workdir


def stopped_after(steps):
    """A stand-in for the signals: asks to stop once so many steps have begun."""

    @contextmanager
    def stops():
        stop, asked = threading.Event(), []

        def is_set():
            asked.append(True)
            return len(asked) > steps

        stop.is_set = is_set
        yield stop

    return stops


def test_run(finished):
    records = metrics.read_jsonl(finished / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[0]["train/loss"] == pytest.approx(np.log(264), abs=0.1)
    every_step = {"train/loss", "train/grad_norm", "train/learning_rate", "train/step_seconds", "train/goodput"}
    assert all(every_step <= record.keys() for record in records)
    assert "eval/loss" in records[2] and "eval/loss" in records[3] and "eval/loss" not in records[1]
    assert "eval/loss_all" in records[3] and "eval/loss_all" not in records[2]
    health = {"moe/max_violation/2", "moe/dropped_tokens/2", "moe/bias_range/2", "mla/max_logit/2"}
    assert health | {"kda/gate_saturation/1", "attn_res/weights"} <= records[1].keys()
    assert records[1]["moe/dropped_tokens/2"] == 0 and not health & records[0].keys()
    np.testing.assert_allclose(np.sum(records[1]["attn_res/weights"], axis=1), 1, atol=1e-5)
    assert (finished / "checkpoints" / "4").is_dir()
    assert json.loads((finished / "config.json").read_text())["train"]["steps"] == 4
    events = metrics.read_events(finished / "tensorboard")
    for record in records:
        np.testing.assert_allclose(events["train/loss"][record["step"]], record["train/loss"], rtol=1e-6)


def test_stopped_and_resumed_is_the_same_run(finished, corpus, tmp_path, monkeypatch, capsys):
    """Stopped after two steps, then continued by the same command: the same numbers bit for bit."""
    with monkeypatch.context() as patch:
        patch.setattr(train, "_stop_on_signals", stopped_after(2))
        assert run(tmp_path, corpus) == 0
    assert "stopped at step 2" in capsys.readouterr().err
    assert checkpoint.complete_steps(tmp_path / "checkpoints") == [2]
    assert run(tmp_path, corpus) == 0
    assert "resumed at step 2" in capsys.readouterr().err
    assert exact(tmp_path) == exact(finished)


def test_stopped_in_an_evaluation(finished, corpus, tmp_path, monkeypatch):
    """The held-out loss of step 3, which a stop cut off, is there after the run went on."""
    with monkeypatch.context() as patch:
        patch.setattr(train, "_stop_on_signals", stopped_after(3))
        assert run(tmp_path, corpus) == 0
    assert "eval/loss" not in exact(tmp_path)[3]
    assert run(tmp_path, corpus) == 0
    assert exact(tmp_path) == exact(finished)


def test_looking_changes_nothing(finished, corpus, tmp_path, capsys):
    """O10 (a): evaluations and samples at every step, a trace of two: losses and router bias are bit-equal."""
    flags = ("eval.every=1", "sample.every=1", "profile.steps=2:4", "eval.rows=2")
    assert run(tmp_path, corpus, *flags) == 0
    assert any((tmp_path / "profile").rglob("*.xplane.pb"))
    assert capsys.readouterr().out.count("def ") == 4
    names = ("train/loss", "train/grad_norm")
    ours, theirs = ([{n: r[n] for n in names} for r in exact(w).values()] for w in (tmp_path, finished))
    assert ours == theirs
    bias = {"router_bias": jax.ShapeDtypeStruct((1, 4), np.float32)}
    one, other = (checkpoint.read_parameters(workdir, bias)["router_bias"] for workdir in (tmp_path, finished))
    np.testing.assert_array_equal(one, other)


def test_a_failure_in_the_loop_loses_no_step(corpus, tmp_path, monkeypatch, capsys):
    """Data that fail at step 3: steps 1 and 2 are saved, one line tells why, and the run goes on."""

    class Failing:
        def __init__(self, stream):
            self.stream, self.left, self.close = stream, 2, stream.close

        def __next__(self):
            self.left -= 1
            if self.left < 0:
                raise MachineError("gs://bucket/00000.bin: the storage is away")
            return next(self.stream)

    iterate = data.Batches.iterate
    with monkeypatch.context() as patch:
        patch.setattr(data.Batches, "iterate", lambda s, *a: Failing(iterate(s, *a)) if a else iterate(s))
        assert run(tmp_path, corpus, "checkpoint.every=1") == 3
    assert "error: gs://bucket" in capsys.readouterr().err.splitlines()[-1]
    assert checkpoint.complete_steps(tmp_path / "checkpoints") == [1, 2]
    assert run(tmp_path, corpus, "checkpoint.every=1") == 0


def test_mixture_of_conversations_and_shards(corpus, tmp_path, capsys):
    """Prepared shards and chats by weight: they train, and only answers of the chats are targets."""
    source = f"--source={corpus / 'train'}"
    assert prepare.main(["prepare", source, "--tokenizer=bytes", f"--out={tmp_path / 'shards'}"]) == 0
    chats = [[{"role": "user", "content": "a question"}, {"role": "assistant", "content": f"no {i}"}] for i in range(9)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    flags = (f"data.source={tmp_path / 'shards'},{tmp_path / 'chats.jsonl'}", "data.weights=1,3", "train.steps=4")
    assert run(tmp_path / "run", corpus, *flags) == 0
    assert "9 documents" in capsys.readouterr().err and len(exact(tmp_path / "run")) == 4


def test_another_mesh_is_the_same_run(finished, corpus, tmp_path, monkeypatch):
    """Two steps on data 2 x fsdp 4, then on fsdp 2 in two micro-batches, and nothing to see but rounding."""
    with monkeypatch.context() as patch:
        patch.setattr(train, "_stop_on_signals", stopped_after(2))
        assert run(tmp_path, corpus, "mesh.fsdp=4", devices=8) == 0
    assert run(tmp_path, corpus, "mesh.fsdp=2", "train.accumulate=2", devices=2) == 0
    whole, ours = exact(finished), exact(tmp_path)
    assert whole.keys() == ours.keys()
    for step, numbers in whole.items():
        assert numbers.keys() == ours[step].keys()
        for name, value in numbers.items():
            assert ours[step][name] == pytest.approx(value, rel=1e-4 if name == "train/grad_norm" else 1e-5)


def test_changed_config_or_data_is_refused(finished, corpus, tmp_path, capsys):
    before = (finished / "metrics.jsonl").read_text()
    assert run(finished, corpus, "optim.learning_rate=0.5") == 2
    error = capsys.readouterr().err
    assert "optim.learning_rate: 0.01 -> 0.5" in error and error.count("\n") == 1
    shutil.copytree(corpus, tmp_path / "corpus")
    shutil.copytree(finished, tmp_path / "run")
    assert run(tmp_path / "run", tmp_path / "corpus") == 0  # the same texts elsewhere
    (tmp_path / "corpus" / "train" / "3.txt").write_text("something else")
    capsys.readouterr()
    assert run(tmp_path / "run", tmp_path / "corpus") == 2
    assert "data.source[0] has changed" in capsys.readouterr().err.splitlines()[-1]
    assert (finished / "metrics.jsonl").read_text() == before


def test_finished_run_prints_its_end_again(finished, corpus, capsys):
    """Nothing left to train: evaluation and sample only, and the log stays as it is."""
    before = (finished / "metrics.jsonl").read_text()
    assert run(finished, corpus) == 0
    assert "held-out loss" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "\x00"])
def test_damaged_config_json(tmp_path, corpus, capsys, text):
    (tmp_path / "config.json").write_text(text)
    assert run(tmp_path, corpus) == 2
    assert "config.json" in capsys.readouterr().err


def test_damaged_checkpoint(finished, corpus, tmp_path, capsys):
    """Files cut short end in one line that names the checkpoint."""
    shutil.copytree(finished, tmp_path / "copy")
    for path in (tmp_path / "copy" / "checkpoints" / "4").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run(tmp_path / "copy", corpus) == 2
    assert "checkpoints/4" in capsys.readouterr().err.splitlines()[-1]


def test_renamed_checkpoint_is_refused(finished, corpus, tmp_path, capsys):
    """A state of step 4 under the name 3 would take another step's batch."""
    shutil.copytree(finished, tmp_path / "copy")
    (tmp_path / "copy" / "checkpoints" / "4").rename(tmp_path / "copy" / "checkpoints" / "3")
    assert run(tmp_path / "copy", corpus) == 2
    assert "checkpoints/3 is of step 4" in capsys.readouterr().err.splitlines()[-1]


def test_all_layers_dense_for_an_epoch(corpus, tmp_path, capsys):
    """A model without experts has an empty router bias, which a checkpoint cannot hold; it trains and resumes."""
    flags = ("model.dense_layers=2", "train.epochs=1", "data.seq_len=64", "data.batch_rows=4")
    assert run(tmp_path, corpus, *flags) == 0
    size = sum(path.stat().st_size + 2 for path in (corpus / "train").iterdir())
    assert len(exact(tmp_path)) == -(-size // (64 * 4)) > 2  # steps that hold every token once
    assert run(tmp_path, corpus, *flags) == 0


def test_too_little_space_and_failing_saves(corpus, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        assert run(tmp_path / "a", corpus) == 3
    error = capsys.readouterr().err.splitlines()
    assert "GiB" in error[-1] and error[-1].startswith("error: ") and not (tmp_path / "a" / "config.json").exists()

    def full(*_, **__):
        raise MachineError("checkpoints/2 could not be written: no space left on device")

    monkeypatch.setattr(checkpoint.Checkpoints, "save", full)
    assert run(tmp_path / "b", corpus, "checkpoint.every=2") == 3
    assert "no space left" in capsys.readouterr().err.splitlines()[-1]
    assert len(exact(tmp_path / "b")) == 2  # the log holds every step that was taken


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "--config"),
        (["--config=configs/k3.py:tiny"], "--workdir"),
        (["--config=configs/none.py", "--workdir=w"], "configs/none.py"),
        (["--config=configs/k3.py:none", "--workdir=w"], "none"),
        (["--config=configs/k3.py:tiny", "--workdir=w", "--config.no.key=1"], "no"),
        (["--config=configs/k3.py:tiny", "--workdir=w", "--unknown=1"], "unknown"),
        (["--config=configs/k3.py:tiny", "--workdir=w", "stray"], "stray"),
        (["--config=configs/k3.py:tiny", "--workdir=/dev/null/w"], "/dev/null/w"),
        (["--config=configs/k3.py:tiny", "--workdir={tmp}", "--config.model.vocab=100"], "model.vocab"),
        (["--config=configs/k3.py:tiny", "--workdir={tmp}", "--config.mesh.data=3"], "mesh.data"),
        (["--config=configs/k3.py:tiny", "--workdir={tmp}", "--config.train.accumulate=8"], "mesh.data"),
        (["--config=configs/k3.py:tiny", "--workdir={tmp}", "--config.init_from={tmp}/none"], "none"),
        (["--config=configs/fine_tune.py:{tmp}", "--workdir={tmp}"], "config.json"),
        (["--config=configs/k3.py:tiny", "--workdir={tmp}", "--config.optim.frozen=no.such"], "optim.frozen"),
    ],
)
def test_mistakes(argv, named, tmp_path, capsys):
    assert train.main(["train", *(argument.format(tmp=tmp_path) for argument in argv)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert named in error[-1] and error[-1].startswith("error: ")


def test_module_runs_and_helps():
    found = subprocess.run([sys.executable, "-m", "k3jax.train", "--help"], capture_output=True, text=True, check=False)
    assert found.returncode == 0 and "--workdir" in found.stdout and "configs/base.py" in found.stdout
    assert "flagfile" not in found.stdout
