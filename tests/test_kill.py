"""Runs that are killed go on as if they had not been: real processes, killed from outside.

Each run trains a two-layer model on a corpus of a few hundred bytes, whose epochs end every few steps. It is killed
three or four times, within steps, inside saves and at the ends of epochs, and started again by the same command each
time. In the end its log, its whole last state and the batches it took are those of a run that nobody touched, bit for
bit.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from runs import SMALL

from k3jax import config, data, metrics
from k3jax.metrics.names import FLOPS_PER_SECOND, GOODPUT, MFU, STEP_SECONDS, TOKENS_PER_SECOND

FIELDS = ["data.batch_rows=2", "eval.every=4", "eval.rows=2", "checkpoint.every=3", "model.moe.balancing_ema=0.5"]
FIELDS += ["log.tensorboard=False", "sample.tokens=0"]
STEPS = 12
CORPUS = (57, 3, 71, 40, 29, 10)  # bytes of the files
TOKENS = sum(CORPUS) + 2 * len(CORPUS)  # of an epoch: 222, and a step takes 64
EPOCH_ENDS = [
    epoch * TOKENS // 64 + 1 for epoch in range(1, STEPS * 64 // TOKENS + 1)
]  # steps that hold the last token


@dataclass(frozen=True)
class Kill:
    """A process is killed `delay` seconds after it takes the batch of `step`, or `inside` the first save after that."""

    number: signal.Signals
    step: int
    delay: float = 0.0
    inside: bool = False


@dataclass
class Run:
    """What the processes of one run told: batch hashes by step, and for each process how it ended."""

    folder: Path
    hashes: dict[int, set[str]] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    killed_at: list[int | None] = field(default_factory=list)
    inside: list[bool] = field(default_factory=list)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Six short texts, and one held out."""
    folder, letters = tmp_path_factory.mktemp("corpus"), random.Random(1)
    (folder / "train").mkdir()
    for index, length in enumerate(CORPUS):
        (folder / "train" / f"{index}.txt").write_text("".join(letters.choices("abcde ", k=length)))
    (folder / "held_out.txt").write_text("bad cab " * 9)
    return folder


def flags(corpus, dtype):
    wanted = [*SMALL, *FIELDS, f"train.steps={STEPS}", f"train.dtype={dtype}"]
    wanted += [f"data.source={corpus / 'train'}", f"data.held_out={corpus / 'held_out.txt'}"]
    return [f"--config.{flag}" for flag in wanted]


def train(folder: Path, arguments: list[str], kills: list[Kill], devices: int = 1) -> Run:
    """The same command again and again: one process for each kill, and one that comes to the end."""
    run = Run(folder)
    for kill in (*kills, None):
        _process(run, arguments, kill, devices)
    return run


def train_all(folder: Path, arguments: list[str], kills: dict[str, list[Kill]], devices: int = 1) -> dict[str, Run]:
    """The run that nobody touches, "whole", which fills the compilation cache; then the others, two at a time."""
    whole = train(folder / "whole", arguments, [], devices)
    with ThreadPoolExecutor(2) as two:
        found = {name: two.submit(train, folder / name, arguments, k, devices) for name, k in kills.items()}
    return {"whole": whole} | {name: future.result() for name, future in found.items()}


def _process(run: Run, arguments: list[str], kill: Kill | None, devices: int) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, str(Path(__file__).with_name("told_train.py")), "--config=configs/k3.py:tiny"]
    with open(f"{run.folder}.err", "w+") as err:
        process = subprocess.Popen(
            [*command, f"--workdir={run.folder}", *arguments],
            env={**os.environ, "TOLD_PIPE": str(writing), "JAX_NUM_CPU_DEVICES": str(devices)},
            pass_fds=[writing],
            stdout=subprocess.DEVNULL,
            stderr=err,
        )
        os.close(writing)
        killed_at, inside = None, False
        with os.fdopen(reading) as lines, process:
            for line in lines:
                step, digest = line.split()
                run.hashes.setdefault(int(step), set()).add(digest)
                if kill is not None and killed_at is None and int(step) >= kill.step:
                    inside = kill.inside and _wait_for_save(run.folder / "checkpoints", process)
                    time.sleep(kill.delay)
                    killed_at = int(step) if process.poll() is None else None
                    process.send_signal(kill.number)
        err.seek(0)
        run.errors.append(err.read())
    run.codes.append(process.returncode)
    run.killed_at.append(killed_at)
    # What SIGKILL left is there to see; after SIGTERM the save came to its end.
    run.inside.append(inside and (kill.number == signal.SIGTERM or bool(_unfinished(run.folder / "checkpoints"))))


def _unfinished(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if "orbax-checkpoint-tmp" in path.name] if folder.is_dir() else []


def _wait_for_save(folder: Path, process: subprocess.Popen) -> bool:
    while process.poll() is None:
        if _unfinished(folder):
            return True
        time.sleep(0.0005)
    return False


def state(folder: Path) -> dict[str, np.ndarray]:
    """Every array of the last checkpoint by name, read without our code."""
    last = folder / "checkpoints" / str(STEPS)
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(last).item_metadata.tree
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return reader.restore(last, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


def records(folder: Path) -> list[dict[str, object]]:
    """metrics.jsonl without what a clock measured."""
    clocked = {STEP_SECONDS, TOKENS_PER_SECOND, FLOPS_PER_SECOND, MFU, GOODPUT}
    found = metrics.read_jsonl(folder / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name not in clocked} for record in found]


def expected_hashes(corpus, dtype) -> dict[int, set[str]]:
    """Of the batches as this process computes them from the config."""
    run = config.load("configs/k3.py:tiny", flags(corpus, dtype))
    batches = data.load(run.data, run.model.vocab).train_batches()
    return {step: {data.stream_hash([batches.batch(step - 1)])} for step in range(1, STEPS + 1)}


def assert_went_on(run: Run, kills: list[Kill], whole: Run) -> None:
    """Killed as it was meant to be, and yet the run that nobody touched."""
    for kill, code, error, killed_at, inside in zip(
        kills, run.codes, run.errors, run.killed_at, run.inside, strict=False
    ):
        if killed_at is not None:  # else it came to its end before the signal did
            assert code == (-9 if kill.number == signal.SIGKILL else 0), error
        if code == 0 and killed_at is not None:
            assert re.search(r"^stopped (at step|behind) ", error, re.MULTILINE) or killed_at >= STEPS - 1, error
        assert "Traceback" not in error
        assert inside or not kill.inside or killed_at is None
    assert run.codes[-1] == 0, run.errors[-1]
    assert run.hashes == whole.hashes
    old, new = records(whole.folder), records(run.folder)
    assert [record["step"] for record in new] == list(range(1, STEPS + 1))
    assert new == old
    assert_same_state(state(whole.folder), state(run.folder))


def assert_same_state(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> None:
    assert old.keys() == new.keys() and {"router_bias", "bias_ema", "step"} <= old.keys()
    for name in old:
        assert old[name].dtype == new[name].dtype and old[name].tobytes() == new[name].tobytes(), name


TERM, KILL = signal.SIGTERM, signal.SIGKILL
# Two runs, each killed three times. EPOCH_ENDS are 4, 7, 11; checkpoints come at 3, 6, 9, 12.
SUITE = {
    "A": [Kill(TERM, 1, 0.03), Kill(KILL, 5, inside=True), Kill(KILL, EPOCH_ENDS[2])],
    "B": [Kill(KILL, 2, 0.02), Kill(TERM, EPOCH_ENDS[1]), Kill(TERM, 9, 0.01, inside=True)],
}


@pytest.fixture(scope="module")
def suite(corpus, tmp_path_factory):
    """bfloat16 computation (O17): the master weights and all that a checkpoint holds are float32 all the same."""
    folder, arguments = tmp_path_factory.mktemp("suite"), flags(corpus, "bfloat16")
    return train_all(folder, arguments, SUITE)


def test_untouched_run(suite, corpus):
    """The yardstick itself: it learns, its epochs end where they should, and its batches are those of the config."""
    whole = suite["whole"]
    assert whole.codes == [0], whole.errors
    assert EPOCH_ENDS == [4, 7, 11]
    assert whole.hashes == expected_hashes(corpus, "bfloat16")
    losses = [record[metrics.LOSS] for record in records(whole.folder)]
    assert len(set(losses)) == STEPS and losses[-1] < losses[0]
    arrays = state(whole.folder)
    assert arrays["step"] == STEPS and np.any(arrays["router_bias"]) and np.any(arrays["bias_ema"])
    assert {array.dtype.name for array in arrays.values()} == {"float32", "int32"}


@pytest.mark.parametrize("name", SUITE)
def test_killed_runs_go_on(suite, name):
    run, kills = suite[name], SUITE[name]
    assert None not in run.killed_at[:-1], run.errors
    assert run.inside[:-1] == [kill.inside for kill in kills]
    assert_went_on(run, kills, suite["whole"])


def random_kills(seed: int) -> list[Kill]:
    """Four kills of one run: within steps, inside a save and at an epoch's end, in any order, by either signal."""
    rng = random.Random(seed)
    kinds = ["step", "step", "save", "epoch"]
    rng.shuffle(kinds)
    found = []
    for index, kind in enumerate(kinds):
        step = rng.randrange(1 + 3 * index, 4 + 3 * index)  # each has a quarter of the steps
        if kind == "epoch":
            step = min(EPOCH_ENDS, key=lambda end: abs(end - step))
        found.append(Kill(rng.choice([TERM, KILL]), step, rng.uniform(0, 0.04), inside=kind == "save"))
    return sorted(found, key=lambda kill: kill.step)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "fsdp", "first_seed"), [("float32", 1, 0), ("bfloat16", 2, 5)])
def test_forty_random_kills(corpus, tmp_path, dtype, fsdp, first_seed):
    """Ten runs, each killed four times: five computing in float32 on one device, five in bfloat16 on a mesh of two."""
    arguments = [*flags(corpus, dtype), f"--config.mesh.fsdp={fsdp}"]
    kills = {f"{seed}": random_kills(seed) for seed in range(first_seed, first_seed + 5)}
    runs = train_all(tmp_path, arguments, kills, fsdp)
    whole = runs.pop("whole")
    assert whole.hashes == expected_hashes(corpus, dtype)
    for name, run in runs.items():
        assert_went_on(run, kills[name], whole)
    landed = [at for run in runs.values() for at in run.killed_at if at is not None]
    inside = sum(sum(run.inside) for run in runs.values())
    print(f"{len(landed)} kills, at steps {sorted(landed)}, {inside} of them inside saves")
    assert len(landed) >= 18 and inside >= 4  # one or the other may come after the end of its process
