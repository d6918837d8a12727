"""Step time, MFU and goodput under a clock that passes when told to."""

import subprocess
import sys
import time

import pytest
from clock import Clock

from k3jax.metrics import Meter
from k3jax.metrics.meter import process_age


def test_speed_and_mfu():
    clock = Clock()
    meter = Meter(2048, flops_per_step=6e12, peak_flops=4e13, clock=clock, age=0.0)
    clock.now += 0.5
    assert meter.measure() == {
        "train/step_seconds": 0.5,
        "train/tokens_per_second": 4096.0,
        "train/flops_per_second": 1.2e13,
        "train/mfu": pytest.approx(0.3),
        "train/goodput": 1.0,
    }


def test_unknown_device_and_unknown_flops():
    clock = Clock()
    meter = Meter(2048, 6e12, None, clock, age=0.0)
    clock.now += 2
    values = meter.measure()
    assert values["train/flops_per_second"] == 3e12 and "train/mfu" not in values
    assert "train/flops_per_second" not in Meter(2048, clock=clock, age=0.0).measure()


def test_asides_are_no_step_time():
    clock = Clock()
    meter = Meter(1000, clock=clock, age=10.0)  # imports took 10 s
    clock.now += 20  # compiling
    meter.start()
    clock.now += 1
    assert meter.measure()["train/step_seconds"] == 1.0
    clock.now += 1
    with meter.aside("evaluation"):
        clock.now += 7
    clock.now += 2  # the evaluation lay inside this interval
    values = meter.measure()
    assert values["train/step_seconds"] == 3.0 and values["train/tokens_per_second"] == pytest.approx(1000 / 3)
    assert values["train/goodput"] == pytest.approx(4 / 41)
    with pytest.raises(KeyError), meter.aside("saving"):
        clock.now += 5
        raise KeyError  # booked all the same
    assert meter.summary() == "goodput 9% of 00:46 (other 00:30, evaluation 00:07, saving 00:05, steps 00:04)"


def test_goodput_counts_each_step_once():
    """A run is killed at step 8 with a checkpoint of step 5; the second process repeats 6, 7 and 8."""
    clock = Clock()
    first = Meter(1, clock=clock, age=0.0)
    first.start()
    for _ in range(8):
        clock.now += 1
        values = first.measure()
    assert values["train/goodput"] == 1.0
    second = Meter(1, clock=clock, age=2.0)
    second.start(5, reached=8)
    seen = []
    for _ in range(6, 13):
        clock.now += 1
        seen.append(second.measure()["train/goodput"])
    assert seen[:3] == [0.0, 0.0, 0.0]
    assert seen[-1] == pytest.approx(4 / 9)  # 9, 10, 11 and 12 of 2 + 7 seconds
    assert "repeated steps 00:03" in second.summary()


def test_skipped_steps_do_not_count():
    clock = Clock()
    meter = Meter(1, clock=clock, age=0.0)
    for productive in (True, False, True, False):
        clock.now += 3
        values = meter.measure(productive)
    assert values["train/goodput"] == 0.5
    assert "skipped steps 00:06" in meter.summary()


def test_age_begins_with_the_process():
    code = "import time; time.sleep(0.4); from k3jax.metrics.meter import process_age; print(process_age())"
    begin = time.perf_counter()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert 0.4 <= age <= time.perf_counter() - begin + 0.05  # the system counts in hundredths of a second
    assert process_age() > age
