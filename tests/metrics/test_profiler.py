"""Which steps are traced, wherever a run begins and ends."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from k3jax.config import MachineError
from k3jax.metrics import Profiler


@pytest.fixture
def trace(monkeypatch):
    """The profiler's calls, in order."""
    calls = []

    @contextlib.contextmanager
    def annotation(name, step_num):
        calls.append(step_num)
        yield

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    monkeypatch.setattr(jax.profiler, "StepTraceAnnotation", annotation)
    return calls


def run(folder, span, first=0, last=20, stopped=None, calls=None):
    lines = []
    profiler = Profiler(folder, span, first, last, lines.append)
    for step in range(first + 1, (stopped or last) + 1):
        profiler.before(step)
        profiler.after(step, jnp.ones(()))
    if calls:
        calls.append("end")
    profiler.close()
    return lines


@pytest.mark.parametrize(
    ("span", "first", "last", "stopped", "expected"),
    [
        ((10, 13), 0, 20, None, ["start", 10, 11, 12, "stop", "end"]),
        ((1, 2), 0, 20, None, ["start", 1, "stop", "end"]),
        ((10, 13), 10, 20, None, ["start", 11, 12, "stop", "end"]),  # resumed inside
        ((10, 13), 11, 20, None, ["start", 12, "stop", "end"]),
        ((19, 40), 0, 20, None, ["start", 19, 20, "end", "stop"]),  # the run ends inside
        ((10, 13), 0, 20, 10, ["start", 10, "end", "stop"]),  # stopped inside
        ((10, 13), 0, 20, 9, []),  # stopped before
        ((10, 13), 12, 20, None, []),  # resumed behind
        ((30, 33), 0, 20, None, []),
        (None, 0, 20, None, []),
    ],
)
def test_steps(trace, tmp_path, span, first, last, stopped, expected):
    lines = run(tmp_path / "profile", span, first, last, stopped, trace)
    assert trace == expected
    if expected:
        assert lines == [f"profile: {tmp_path / 'profile'}"]
    elif span == (30, 33):
        assert lines == ["profile.steps=30:33 is traced nowhere: this run takes steps 1 to 20"]
    elif first == 12:
        assert lines == ["profile.steps=10:13 is traced nowhere: this run takes steps 13 to 20"]
    else:
        assert lines == []


def test_a_profiler_at_work(trace, tmp_path, monkeypatch):
    def refuse(folder):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(jax.profiler, "start_trace", refuse)
    with pytest.raises(MachineError, match=r"profile.steps: .*Only one profile"):
        run(tmp_path, (1, 2))


def test_a_real_trace(tmp_path):
    run(tmp_path / "profile", (2, 3), last=3)
    files = [path for path in (tmp_path / "profile").rglob("*.xplane.pb") if path.stat().st_size]
    assert len(files) == 1
