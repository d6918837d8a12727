"""The command line from end to end on a very small model: log, checkpoint, resume, and mistakes."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from k3jax import metrics, train

SMALL = [
    "model.layers=2", "model.mla_layers=(2,)", "model.attn_res_block=1", "model.embed=16", "model.mlp=16",
    "model.kda.heads=1", "model.kda.key_dim=8", "model.kda.value_dim=8", "model.mla.heads=1", "model.mla.q_lora=8",
    "model.mla.kv_lora=8", "model.mla.qk_nope=8", "model.mla.qk_shared=4", "model.mla.value_dim=8",
    "model.moe.routed_experts=4", "model.moe.top_k=2", "model.moe.latent=8", "model.moe.expert_mlp=8",
    "data.seq_len=32", "data.batch_rows=2", "train.steps=4", "optim.warmup_steps=1", "eval.every=3", "eval.rows=4",
    "sample.tokens=5",
]  # fmt: skip


def command(workdir, *more):
    flags = [f"--config.{flag}" for flag in (*SMALL, *more)]
    return ["train", "--config=configs/k3.py:tiny", f"--workdir={workdir}", *flags]


@pytest.fixture(scope="module")
def few_held_out():
    """A last evaluation of two documents instead of half a million bytes."""
    patch, real = pytest.MonkeyPatch(), train.data.EvaluationRows
    patch.setattr(train.data, "EvaluationRows", lambda *a: real(*a[:-1], 4))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, few_held_out):
    workdir = tmp_path_factory.mktemp("whole")
    assert train.main(command(workdir)) == 0
    return workdir


def losses(workdir):
    records = metrics.read_jsonl(workdir / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    return [record["train/loss"] for record in records]


def test_run(finished):
    records = metrics.read_jsonl(finished / "metrics.jsonl")
    assert losses(finished)[0] == pytest.approx(np.log(264), abs=0.1)
    assert {"eval/loss", "train/grad_norm", "train/max_violation", "train/max_logit"} <= records[-1].keys()
    assert "eval/loss" in records[2] and "eval/loss" not in records[1]
    assert (finished / "checkpoints" / "4").is_dir()
    assert json.loads((finished / "config.json").read_text())["train"]["steps"] == 4


def test_stopped_and_resumed_is_the_same_run(finished, tmp_path, monkeypatch, capsys):
    """Stopped after two steps, then continued by the same command: the same losses bit for bit."""

    class AfterTwo:
        asked = 0

        def is_set(self):
            self.asked += 1
            return self.asked > 2

    with monkeypatch.context() as patch:
        patch.setattr(train, "_stop_on_signals", AfterTwo)
        assert train.main(command(tmp_path)) == 0
    assert "stopped at step 2" in capsys.readouterr().err
    assert (tmp_path / "checkpoints" / "2").is_dir()
    assert train.main(command(tmp_path)) == 0
    assert "resumed at step 2" in capsys.readouterr().err
    assert losses(tmp_path) == losses(finished)


def test_another_config_is_refused(finished, capsys):
    assert train.main(command(finished, "optim.learning_rate=0.5")) == 2
    error = capsys.readouterr().err
    assert "optim.learning_rate: 0.01 -> 0.5" in error and error.count("\n") == 1


def test_finished_run_prints_its_end_again(finished, capsys):
    """Nothing left to train: evaluation and sample only, and the log stays as it is."""
    before = (finished / "metrics.jsonl").read_text()
    assert train.main(command(finished)) == 0
    assert "held-out loss" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "\x00"])
def test_damaged_config_json(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    assert train.main(command(tmp_path)) == 2
    assert "config.json" in capsys.readouterr().err


def test_damaged_checkpoint(finished, tmp_path, capsys):
    """Files cut short end in one line that names the checkpoint."""
    shutil.copytree(finished, tmp_path / "copy")
    for path in (tmp_path / "copy" / "checkpoints" / "4" / "default").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert train.main(command(tmp_path / "copy")) == 2
    assert "checkpoints/4" in capsys.readouterr().err.splitlines()[-1]


def test_all_layers_dense(few_held_out, tmp_path):
    """A model without experts has an empty router bias, which a checkpoint cannot hold; it trains and resumes."""
    flags = ("model.dense_layers=2", "train.steps=2")
    assert train.main(command(tmp_path, *flags)) == 0
    assert train.main(command(tmp_path, *flags)) == 0


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
    ],
)
def test_mistakes(argv, named, tmp_path, capsys):
    assert train.main(["train", *(argument.format(tmp=tmp_path) for argument in argv)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert named in error[-1] and error[-1].startswith("error: ")


def test_module_runs_and_helps():
    found = subprocess.run([sys.executable, "-m", "k3jax.train", "--help"], capture_output=True, text=True, check=False)
    assert found.returncode == 0 and "--workdir" in found.stdout and "configs/base.py" in found.stdout
