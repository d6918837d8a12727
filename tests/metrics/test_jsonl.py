"""What a run leaves in metrics.jsonl."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import MachineError
from k3jax.metrics import JsonlWriter, read_jsonl


def write_steps(path, steps, resumed_step=0):
    writer = JsonlWriter(path, resumed_step)
    for step in steps:
        writer.write(step, {"train/loss": float(10 * step)})
    writer.close()
    return writer


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_one_object_per_line(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"train/loss": np.float32(2.5), "tokens": 2048, "flag": True})
    assert path.read_text() == '{"step": 1, "train/loss": 2.5, "tokens": 2048.0, "flag": 1.0}\n'  # before close()
    writer.write(np.int64(4), {"a": jnp.float32(0.5), "b": jnp.bfloat16(1.5)})
    writer.close()
    assert read_jsonl(path)[1] == {"step": 4, "a": 0.5, "b": 1.5}


def test_arrays_are_lists(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    matrix = np.array([[0.25, math.nan], [1.0, -math.inf]], np.float32)
    writer.write(1, {"one": np.ones(1), "matrix": matrix, "jax": jnp.arange(3), "list": [1, 2.5], "none": np.zeros(0)})
    writer.close()
    assert '"matrix": [[0.25, "NaN"], [1.0, "-Infinity"]]' in path.read_text()
    (back,) = read_jsonl(path)
    assert (back["one"], back["jax"], back["list"], back["none"]) == ([1.0], [0.0, 1.0, 2.0], [1.0, 2.5], [])
    assert back["matrix"][1] == [1.0, -math.inf] and math.isnan(back["matrix"][0][1])


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


@pytest.mark.parametrize("value", [np.zeros(4097), "2.5", None, [1.0, "a"], 1j], ids=lambda value: f"{value!r:.10}")
def test_only_numbers(tmp_path, value):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="train/loss must be a number or an array of at most 4096"):
        writer.write(1, {"train/loss": value})
    writer.write(1, {"train/loss": 1.0})  # the refused record left nothing behind
    writer.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": 1.0}]


def test_steps_never_decrease(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(3, {})
    with pytest.raises(ValueError, match="step 2 is below the last, 3"):
        writer.write(2, {})
    writer.close()


def test_later_numbers_of_a_step_join_its_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    writer = JsonlWriter(path, resumed_step=2)
    writer.write(2, {"eval/loss": 123456.5})
    assert read_jsonl(path)[-1] == {"step": 2, "train/loss": 20.0, "eval/loss": 123456.5}
    writer.write(2, {"eval/loss": 1.0})  # shorter than what stood there
    writer.write(3, {"train/loss": 30.0})
    writer.write(3, {"eval/loss": 2.0})
    writer.close()
    assert read_jsonl(path) == [
        {"step": 1, "train/loss": 10.0},
        {"step": 2, "train/loss": 20.0, "eval/loss": 1.0},
        {"step": 3, "train/loss": 30.0, "eval/loss": 2.0},
    ]


def test_resume_keeps_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert write_steps(path, range(1, 11)).reached == 0
    resumed = write_steps(path, range(7, 13), resumed_step=6)  # the checkpoint was of step 6
    assert resumed.reached == 10
    assert steps_of(path) == list(range(1, 13))
    assert [record["train/loss"] for record in read_jsonl(path)] == [10.0 * step for step in range(1, 13)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_where_nothing_is_to_drop(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    assert write_steps(path, range(4, 6), resumed_step=3).reached == 3
    assert steps_of(path) == [1, 2, 3, 4, 5]


def test_start_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(0, 5))
    assert write_steps(path, [0, 1]).reached == 4  # killed before its first checkpoint: everything comes again
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


def test_what_the_disk_refuses(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(MachineError, match="folder: Is a directory"):
        JsonlWriter(tmp_path / "folder")
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer._file.close()
    writer._file = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115
    with pytest.raises(MachineError, match=r"metrics.jsonl: No space left on device"):
        writer.write(1, {"a": 1.0})
    writer._file.close()
