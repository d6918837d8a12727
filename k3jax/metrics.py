"""Writes the numbers a run hands over, and times it.

A writer has `write(step, values)` and `close()`; the loop hands every step's numbers to a list of them:

    meter = Meter(tokens_per_step)
    writers = [JsonlWriter(workdir / "metrics.jsonl", resumed_step), Progress(total_steps, resumed_step)]
    for writer in writers:
        writer.write(step, {"train/loss": loss, "train/learning_rate": rate, **meter.measure(steps)})

`step` counts finished optimizer steps. Invariant: `metrics.jsonl` holds one valid JSON object per step, in
order, each step once, however often the run was stopped and resumed.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
from tqdm import tqdm

logger = logging.getLogger(__name__)

LOSS = "train/loss"
EVAL_LOSS = "eval/loss"
LEARNING_RATE = "train/learning_rate"
STEP_SECONDS = "train/step_seconds"
TOKENS_PER_SECOND = "train/tokens_per_second"


class Writer(Protocol):
    """Takes the numbers of one step; steps increase from call to call."""

    def write(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """One JSON object per step in a text file: `{"step": 3, "train/loss": 2.1, ...}`, flushed at once.

    Values are scalars of Python, NumPy or JAX and are written as floats. JSON has no NaN and no infinity:
    these are the strings "NaN", "Infinity", "-Infinity", which `float()` reads back. With `resumed_step` the
    file is continued: records up to and with that step stay; later ones, whose steps will be taken again, are
    dropped, and so is a line that a killed run left unfinished. `resumed_step=0` starts anew.
    """

    def __init__(self, path: str | os.PathLike, resumed_step: int = 0):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = _keep_records(self._path, resumed_step)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115, closed by close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one record. Raises ValueError if steps do not increase or a value is not one number."""
        if step <= self._last_step:
            raise ValueError(f"{self._path.name}: step {step} must be above the last, {self._last_step}")
        record = {"step": int(step), **{name: _plain(name, value) for name, value in values.items()}}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self._last_step = step

    def close(self) -> None:
        """Closes the file; nothing is pending."""
        self._file.close()


def read_jsonl(path: str | os.PathLike) -> list[dict[str, float]]:
    """The records of a `metrics.jsonl` that JsonlWriter wrote, NaN and infinities as floats again."""
    with open(path, encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [{name: value if name == "step" else float(value) for name, value in r.items()} for r in records]


def _keep_records(path: Path, resumed_step: int) -> int:
    """Leaves the records of steps 0 .. resumed_step (none for 0) in the file; the last one's step, or -1."""
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    kept: dict[int, str] = {}
    for line in before.splitlines():
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue  # cut off in the middle by a kill
        if step <= resumed_step > 0:
            kept[step] = line
    after = "".join(line + "\n" for line in kept.values())
    if after != before:
        logger.info("%s: kept %d records, up to step %d", path, len(kept), resumed_step)
        beside = path.with_name(path.name + ".new")
        beside.write_text(after, encoding="utf-8")
        os.replace(beside, path)  # a kill leaves the old file or the new one, never half of one
    return max(kept, default=-1)


def _plain(name: str, value: Any) -> float | str:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind in "cOSUMm":
        raise ValueError(f"{name} must be one number, got {value!r:.60}")
    number = float(array.reshape(()))
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


class Meter:
    """Step time and tokens per second. `tokens_per_step` counts the tokens of a whole step, on all devices.

    Call it when the step's result has arrived: a dispatched step is not a finished one.
    """

    def __init__(self, tokens_per_step: int, clock: Callable[[], float] = time.perf_counter):
        self._tokens_per_step = tokens_per_step
        self._clock = clock
        self._since = clock()

    def restart(self) -> None:
        """Starts the interval anew: time spent on evaluating or saving is no step's."""
        self._since = self._clock()

    def measure(self, steps: int = 1) -> dict[str, float]:
        """Seconds per step and tokens per second of the `steps` finished since the last call or restart."""
        now = self._clock()
        seconds, self._since = (now - self._since) / steps, now
        return {STEP_SECONDS: seconds, TOKENS_PER_SECOND: self._tokens_per_step / max(seconds, 1e-9)}


class Progress:
    """Shows the run to a person: a bar on a terminal, elsewhere a line every `every_seconds`.

    Both show step, loss, learning rate, tokens per second and the time left. The first step, the last one and
    those with a held-out loss always get their line. `start_step` is where a resumed run begins.
    """

    SHOWN = (
        (LOSS, "loss {:.4f}"),
        (EVAL_LOSS, "held-out {:.4f}"),
        (LEARNING_RATE, "lr {:.1e}"),
        (TOKENS_PER_SECOND, "{:,.0f} tokens/s"),
    )

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        every_seconds: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._total = total_steps
        self._every = every_seconds
        self._stream = stream or sys.stderr
        self._clock = clock
        self._first: tuple[int, float] | None = None  # first record's step and time; compiling lies before it
        self._printed = -math.inf
        self._bar = None
        if self._stream.isatty():
            options = {"unit": "step", "dynamic_ncols": True, "file": self._stream}
            self._bar = tqdm(total=total_steps, initial=start_step, **options)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Moves the bar, or prints a line when it is time for one."""
        now = self._clock()
        self._first = self._first or (step, now)
        parts = [form.format(float(values[name])) for name, form in self.SHOWN if name in values]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts), refresh=False)
            self._bar.update(step - self._bar.n)
            if EVAL_LOSS in values:  # stays above the bar
                self.message("  ".join([f"step {step}/{self._total}", *parts]))
        elif now - self._printed >= self._every or step >= self._total or EVAL_LOSS in values:
            self._printed = now
            self.message("  ".join([f"step {step}/{self._total}", *parts, *self._time_left(step, now)]))

    def message(self, text: str) -> None:
        """Prints a line of its own without tearing the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def _time_left(self, step: int, now: float) -> list[str]:
        first_step, first_time = self._first
        if step <= first_step:
            return []
        seconds = (self._total - step) * (now - first_time) / (step - first_step)
        return [f"ETA {tqdm.format_interval(seconds)}"]
