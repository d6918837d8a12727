"""TensorBoard's own reader finds what was written, once, after any kill."""

import math
import signal
import socket
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from k3jax.config import ConfigError, MachineError
from k3jax.metrics import ATTN_RES, TensorBoardWriter, read_events


def write_steps(folder, steps, resumed_step=0, factor=10.0):
    writer = TensorBoardWriter(folder, resumed_step)
    for step in steps:
        writer.write(step, {"train/loss": factor * step})
    writer.close()


def tensorboard(folder):
    """The folder as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


def scalars(folder, tag="train/loss"):
    return [(event.step, event.value) for event in tensorboard(folder).Scalars(tag)]


def test_tensorboard_reads_what_was_written(tmp_path):
    rng = np.random.default_rng(1)
    losses, matrix = rng.normal(size=5).astype(np.float32), rng.random((23, 4))
    writer = TensorBoardWriter(tmp_path)
    for step, loss in enumerate(losses, 1):
        writer.write(step, {"train/loss": loss, "moe/max_violation/02": 2 * loss})
    writer.write(5, {"eval/loss": math.nan})  # later numbers of the same step
    writer.write(6, {ATTN_RES: matrix})
    read = tensorboard(tmp_path)  # before close()
    writer.close()
    assert [(e.step, np.float32(e.value)) for e in read.Scalars("train/loss")] == [*enumerate(losses, 1)]
    assert [np.float32(e.value) for e in read.Scalars("moe/max_violation/02")] == [*(2 * losses)]
    (held_out,) = read.Scalars("eval/loss")
    assert held_out.step == 5 and math.isnan(held_out.value)
    (image,) = read.Images(ATTN_RES)
    assert image.step == 6 and image.encoded_image_string.startswith(b"\x89PNG")
    assert (image.width, image.height) == (384, 512)
    ours = read_events(tmp_path)
    assert ours["train/loss"] == {step: float(loss) for step, loss in enumerate(losses, 1)}
    np.testing.assert_array_equal(ours[ATTN_RES][6], matrix.astype(np.float32))


def test_the_picture_is_the_matrix(tmp_path):
    """A matrix with one large entry: the brightest pixels lie in its cell."""
    import io

    from PIL import Image

    from k3jax.metrics.picture import heat_map_png

    matrix = np.zeros((9, 3))
    matrix[6, 1] = 1.0
    pixels = np.asarray(Image.open(io.BytesIO(heat_map_png(matrix, "t"))).convert("RGB")).astype(int)
    yellow = (abs(pixels - [253, 231, 37]).sum(axis=2) < 12) & (np.arange(384) < 250)[None]  # the colour bar is right
    purple = abs(pixels - [68, 1, 84]).sum(axis=2) < 12
    rows, columns = np.nonzero(yellow)
    top, left = (np.nonzero((yellow | purple)[:, :250].any(axis=axis))[0].min() for axis in (1, 0))
    bottom, right = (np.nonzero((yellow | purple)[:, :300].any(axis=axis))[0].max() for axis in (1, 0))
    assert (rows.mean() - top) / (bottom - top) == pytest.approx(6.5 / 9, abs=0.02)
    assert (columns.mean() - left) / (right - left) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("resumed", [6, 9, 10, 0])
def test_a_resumed_curve_does_not_run_double(tmp_path, resumed):
    write_steps(tmp_path, range(1, 11))
    write_steps(tmp_path, range(resumed + 1, 14), resumed, factor=20.0)
    expected = [(step, (10.0 if step <= resumed else 20.0) * step) for step in range(1, 14)]
    assert scalars(tmp_path) == expected
    assert read_events(tmp_path) == {"train/loss": dict(expected)}


def test_steps_that_do_not_come_again_are_void(tmp_path):
    write_steps(tmp_path, range(1, 11))
    writer = TensorBoardWriter(tmp_path, 4)
    writer.write(5, {"train/loss": 0.0})
    writer.close()
    expected = [*((step, 10.0 * step) for step in range(1, 5)), (5, 0.0)]
    assert scalars(tmp_path) == expected and read_events(tmp_path)["train/loss"] == dict(expected)


def test_files_are_read_in_the_order_of_writing(tmp_path, monkeypatch):
    """Two resumes within a second, and a machine whose clock is an hour behind."""
    write_steps(tmp_path, range(1, 6))
    write_steps(tmp_path, range(4, 6), 3, factor=20.0)
    write_steps(tmp_path, range(4, 8), 3, factor=30.0)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    write_steps(tmp_path, range(5, 9), 4, factor=40.0)
    expected = [(1, 10.0), (2, 20.0), (3, 30.0), (4, 120.0), *((step, 40.0 * step) for step in range(5, 9))]
    assert scalars(tmp_path) == expected and read_events(tmp_path)["train/loss"] == dict(expected)


def test_a_killed_writer_loses_nothing(tmp_path):
    """SIGKILL right behind the last write; the file then ends in half a record."""
    code = (
        "import os, signal, sys; from k3jax.metrics import TensorBoardWriter\n"
        "writer = TensorBoardWriter(sys.argv[1])\n"
        "for step in range(1, 8): writer.write(step, {'train/loss': 10.0 * step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert scalars(tmp_path) == [(step, 10.0 * step) for step in range(1, 8)]
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    write_steps(tmp_path, range(6, 9), 5)
    assert scalars(tmp_path) == [(step, 10.0 * step) for step in range(1, 9)]
    assert list(read_events(tmp_path)["train/loss"]) == list(range(1, 9))


def test_shapes(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    with pytest.raises(ValueError, match=r"a must be a number or a matrix, got shape \(3,\)"):
        writer.write(1, {"a": np.zeros(3)})
    writer.close()


def test_what_the_disk_refuses(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="file: File exists"):
        TensorBoardWriter(tmp_path / "file")
    writer = TensorBoardWriter(tmp_path / "tensorboard")
    writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(MachineError, match="tensorboard: No space left on device"):
        writer.write(1, {"a": 1.0})
    writer._file.close()


def test_damaged_files(tmp_path):
    with pytest.raises(ConfigError, match="holds no TensorBoard event file"):
        read_events(tmp_path)
    write_steps(tmp_path, range(1, 4))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for at in (0, len(whole) // 2):
        file.write_bytes(whole[:at] + b"\xff" * 40 + whole[at + 40 :])
        with pytest.raises(ConfigError, match=r"is damaged at byte \d+"):
            read_events(tmp_path)
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", 9)  # a sound frame around nonsense
    file.write_bytes(length + struct.pack("<I", masked_crc32c(length)) + b"\xff" * 13)
    with pytest.raises(ConfigError, match="is damaged at byte 0"):
        read_events(tmp_path)
