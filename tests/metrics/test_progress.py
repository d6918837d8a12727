"""What a person sees of a run."""

import fcntl
import io
import math
import os
import pty
import re
import select
import struct
import termios

import pytest
from clock import Clock

from k3jax.metrics import Progress

NUMBERS = {"train/loss": 2.34567, "train/learning_rate": 1e-3, "train/tokens_per_second": 12345.6}
LONG = {
    "train/loss": 2.1,
    "train/learning_rate": 1e-3,
    "train/tokens_per_second": 123456789.0,
    "train/mfu": 0.4123,
    "train/flops_per_second": 1e15,
}


def test_lines():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(100, every_seconds=10, stream=stream, clock=clock)
    for step in range(1, 101):
        progress.write(step, NUMBERS)
        if step == 33:
            progress.write(step, {"eval/loss": 3.0})  # comes later, is shown with what is known
        clock.now += 1
    progress.message("saved")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1/100  loss 2.3457  lr 1.0e-03  12,346 tokens/s"
    assert lines[1] == "step 11/100  loss 2.3457  lr 1.0e-03  12,346 tokens/s  ETA 01:29"
    assert lines[4] == "step 33/100  loss 2.3457  held-out 3.0000  lr 1.0e-03  12,346 tokens/s  ETA 01:07"
    assert [line.split()[1] for line in lines[:-1]] == [
        *(f"{step}/100" for step in (1, 11, 21, 31, 33, 43, 53, 63, 73, 83, 93, 100))
    ]
    assert lines[-2].endswith("ETA 00:00") and lines[-1] == "saved"


def test_time_left_is_steady():
    """An evaluation of a minute every 100 steps of a second: the time left stays within 5 % of the truth."""
    clock, stream = Clock(), io.StringIO()
    progress = Progress(10_000, every_seconds=0, stream=stream, clock=clock)
    for step in range(1, 3001):
        clock.now += 61 if step % 100 == 0 else 1
        progress.write(step, NUMBERS)
    shown = [line.split("ETA ")[1] for line in stream.getvalue().splitlines() if "ETA" in line]
    seconds = [sum(int(p) * 60**i for i, p in enumerate(reversed(eta.split(":")))) for eta in shown]
    assert len(seconds) == 2999
    for step, left in list(enumerate(seconds, 2))[1000:]:
        assert left == pytest.approx(1.6 * (10_000 - step), rel=0.05)


def test_time_left_forgets_a_slow_start():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(4_000, every_seconds=0, stream=stream, clock=clock)
    for step in range(1, 2001):
        clock.now += 10 if step <= 500 else 1
        progress.write(step, NUMBERS)
    assert stream.getvalue().splitlines()[-1].endswith("ETA 33:20")


@pytest.mark.parametrize(("loss", "shown"), [(math.nan, "loss NaN (NOT FINITE)"), (math.inf, "loss Inf (NOT FINITE)")])
def test_non_finite_loss_is_loud(loss, shown):
    stream = io.StringIO()
    progress = Progress(100, every_seconds=1e9, stream=stream, clock=Clock())
    for step in range(1, 50):
        progress.write(step, {**NUMBERS, "train/loss": loss if step == 20 else 2.0})
    assert [line for line in stream.getvalue().splitlines() if line.startswith("step 20/100  " + shown)]
    assert len(stream.getvalue().splitlines()) == 2  # step 1 and step 20


@pytest.mark.parametrize(
    ("flops", "shown"), [(2.5e9, "2.50 GFLOP/s"), (3.1e13, "31.00 TFLOP/s"), (4e15, "4.00 PFLOP/s"), (5e5, "0.50 MFL")]
)
def test_flops_where_the_peak_is_unknown(flops, shown):
    stream = io.StringIO()
    Progress(9, stream=stream).write(1, {**NUMBERS, "train/flops_per_second": flops})
    assert shown in stream.getvalue() and "MFU" not in stream.getvalue()
    Progress(9, stream=stream).write(1, {**NUMBERS, "train/flops_per_second": flops, "train/mfu": 0.4123})
    assert stream.getvalue().splitlines()[1].count("FLOP/s") == 0 and "MFU 41.2%" in stream.getvalue()


@pytest.mark.parametrize("columns", [60, 90, 140])
def test_bar_on_a_terminal(columns):
    """Numbers as long as they come: the bar stays on its line, and what matters most stays in it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        progress = Progress(1_000_000, 120_000, stream=stream)
        for step in range(120_001, 120_021):
            progress.write(step, LONG if step != 120_010 else {**LONG, "train/loss": math.nan})
        progress.write(120_020, {"eval/loss": 1.5})
        progress.message("saved")
        progress.close()
        stream.flush()
        shown = b""
        while select.select([master], [], [], 0.5)[0]:  # a terminal passes on in pieces
            shown += os.read(master, 1 << 16)
        shown = shown.decode()
    os.close(master)
    parts = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", shown))
    bars = [part for part in parts if "|" in part]
    assert max(map(len, bars)) <= columns
    assert bars[-1].startswith(" 12%|█") and "| 120020/1000000 [" in bars[-1] and ", loss 2.1000" in bars[-1]
    assert ("MFU 41.2%" in bars[-1]) == (columns == 140) and ("123,456,789 tokens/s" in bars[-1]) == (columns > 60)
    lines = [part for part in parts if part.startswith("step")]
    assert lines[0].startswith("step 120010/1000000  loss NaN (NOT FINITE)  lr 1.0e-03")
    assert lines[1].startswith("step 120020/1000000  loss 2.1000  held-out 1.5000  lr") and "saved" in parts
    assert "\x1b[1;31mstep 120010" in shown
