"""What a run leaves in metrics.jsonl, on the terminal, and in numbers per second."""

import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.metrics import JsonlWriter, Meter, Progress, read_jsonl


def write_steps(path, steps, resumed_step=0):
    writer = JsonlWriter(path, resumed_step)
    for step in steps:
        writer.write(step, {"train/loss": float(10 * step)})
    writer.close()


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_one_object_per_line(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"train/loss": np.float32(2.5), "tokens": 2048, "flag": True})
    assert path.read_text() == '{"step": 1, "train/loss": 2.5, "tokens": 2048.0, "flag": 1.0}\n'  # before close()
    writer.write(np.int64(4), {"a": jnp.float32(0.5), "b": jnp.bfloat16(1.5), "c": np.ones((1,))})
    writer.close()
    assert read_jsonl(path)[1] == {"step": 4, "a": 0.5, "b": 1.5, "c": 1.0}


def test_not_a_number_stays_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"a": math.nan, "b": math.inf, "c": jnp.float32(-math.inf)})
    writer.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (back,) = read_jsonl(path)
    assert math.isnan(back["a"]) and back["b"] == math.inf and back["c"] == -math.inf


@pytest.mark.parametrize("value", [np.zeros(2), "2.5", None, [1.0, 2.0], 1j], ids=repr)
def test_only_numbers(tmp_path, value):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="train/loss must be one number"):
        writer.write(1, {"train/loss": value})
    writer.write(1, {"train/loss": 1.0})  # the refused record left nothing behind
    writer.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": 1.0}]


def test_steps_increase(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(3, {})
    for step in (3, 2):
        with pytest.raises(ValueError, match=f"step {step} must be above the last, 3"):
            writer.write(step, {})
    writer.close()


def test_resume_keeps_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 11))
    write_steps(path, range(7, 13), resumed_step=6)  # the checkpoint was of step 6
    assert steps_of(path) == list(range(1, 13))
    assert [record["train/loss"] for record in read_jsonl(path)] == [10.0 * step for step in range(1, 13)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_where_nothing_is_to_drop(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    write_steps(path, range(4, 6), resumed_step=3)
    assert steps_of(path) == [1, 2, 3, 4, 5]
    writer = JsonlWriter(path, resumed_step=5)
    with pytest.raises(ValueError, match="step 5 must be above the last, 5"):
        writer.write(5, {})
    writer.close()


def test_start_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(0, 5))
    write_steps(path, [0, 1])  # killed before its first checkpoint: everything comes again
    assert steps_of(path) == [0, 1]


@pytest.mark.parametrize("torn", ['{"step": 4, "train/l', '{"step": 3, "train/loss": 30.0}', "\x00\x00", '["x"]'])
def test_torn_last_line(tmp_path, torn):
    """A kill inside a write leaves half a line, or one without its end; the next record gets its own."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    whole = path.read_text()
    path.write_text((whole if "30.0" not in torn else whole[: whole.index('{"step": 3')]) + torn)
    write_steps(path, [4, 5], resumed_step=3)
    assert steps_of(path) == [1, 2, 3, 4, 5]


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_meter():
    clock = Clock()
    meter = Meter(tokens_per_step=2048, clock=clock)
    clock.now += 0.5
    assert meter.measure() == {"train/step_seconds": 0.5, "train/tokens_per_second": 4096.0}
    clock.now += 60.0  # an evaluation
    meter.restart()
    clock.now += 4.0
    assert meter.measure(steps=2) == {"train/step_seconds": 2.0, "train/tokens_per_second": 1024.0}


NUMBERS = {"train/loss": 2.34567, "train/learning_rate": 1e-3, "train/tokens_per_second": 12345.6}


def test_progress_lines():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(100, every_seconds=10, stream=stream, clock=clock)
    for step in range(1, 101):
        progress.write(step, NUMBERS if step != 33 else {**NUMBERS, "eval/loss": 3.0})
        clock.now += 1
    progress.message("saved")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1/100  loss 2.3457  lr 1.0e-03  12,346 tokens/s"
    assert lines[1] == "step 11/100  loss 2.3457  lr 1.0e-03  12,346 tokens/s  ETA 01:29"
    assert [line.split()[1] for line in lines[:-1]] == [
        *(f"{step}/100" for step in (1, 11, 21, 31, 33, 43, 53, 63, 73, 83, 93, 100))
    ]
    assert "held-out 3.0000" in lines[4] and lines[-2].endswith("ETA 00:00") and lines[-1] == "saved"


def test_progress_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    progress = Progress(10, start_step=4, stream=stream)
    progress.write(5, NUMBERS)
    progress.write(10, {**NUMBERS, "eval/loss": 3.0})
    progress.message("saved")
    progress.close()
    shown = stream.getvalue()
    assert "40%" in shown and "4/10" in shown and "100%" in shown and "10/10" in shown
    assert "loss 2.3457, held-out 3.0000, lr 1.0e-03, 12,346 tokens/s" in shown
    assert "step 10/10  loss 2.3457  held-out 3.0000" in shown and "saved\n" in shown
