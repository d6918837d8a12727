"""Times a run: step time, tokens and FLOPs per second, MFU, and goodput with where the rest of the time went.

    MFU     = model FLOPs of a step / (step time * peak of all devices)
    goodput = seconds spent in steps that count / seconds since the process started

A step counts when it changed the parameters and is not a repetition. Imports, compiling, restoring, evaluating, saving
do not count, nor does a skipped (non-finite) step. A run that is killed loses the steps after its last checkpoint; the
process that takes them again counts those as repeated, up to the last step that metrics.jsonl knew. So over all
processes of a run, the seconds that count are those of every step once.

Invariant: every second since the process started is in exactly one part; step time holds none of the asides.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from k3jax.metrics.names import FLOPS_PER_SECOND, GOODPUT, MFU, STEP_SECONDS, TOKENS_PER_SECOND

_IMPORTED = time.perf_counter()
STEPS, SKIPPED, REPEATED = "steps", "skipped steps", "repeated steps"


def process_age() -> float:
    """Seconds since this process started; where the system does not tell, since this module was imported."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.perf_counter() - _IMPORTED


class Meter:
    """The times of one process. Of a whole step on all devices: tokens, model FLOPs and the peak in FLOP/s (or None).

    Call `measure` when a step's result has arrived: a dispatched step is not a finished one. What lies between two
    calls is step time, but for what is wrapped into `aside`.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        age: float | None = None,
    ):
        self._tokens, self._flops, self._peak = tokens_per_step, flops_per_step, peak_flops
        self._clock = clock
        self._since = clock()
        self._born = self._since - (process_age() if age is None else age)
        self._aside = 0.0  # seconds of the present interval that are no step's
        self._step = self._reached = 0
        self._parts: dict[str, float] = {}

    def start(self, step: int = 0, reached: int = 0) -> None:
        """The loop begins behind `step` finished steps. Steps up to `reached` were taken before and are repeated."""
        self._step, self._reached = step, reached
        self._since, self._aside = self._clock(), 0.0

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Time inside is booked under `name`, "evaluation" say, and is no step's. Not to be nested."""
        begin = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - begin
            self._aside += seconds
            self._add(name, seconds)

    def measure(self, productive: bool = True) -> dict[str, float]:
        """The numbers of the step finished since the last call or `start`. productive: it changed the parameters."""
        now = self._clock()
        seconds = max(now - self._since - self._aside, 1e-9)
        self._since, self._aside = now, 0.0
        self._step += 1
        self._add(REPEATED if self._step <= self._reached else STEPS if productive else SKIPPED, seconds)
        values = {STEP_SECONDS: seconds, TOKENS_PER_SECOND: self._tokens / seconds}
        if self._flops is not None:
            values[FLOPS_PER_SECOND] = self._flops / seconds
            if self._peak is not None:
                values[MFU] = self._flops / seconds / self._peak
        return values | {GOODPUT: self.goodput()}

    def goodput(self) -> float:
        """Part of the seconds since the process started that was spent in steps that count."""
        return self._parts.get(STEPS, 0.0) / max(self._clock() - self._born, 1e-9)

    def summary(self) -> str:
        """One line: goodput and where the time went, largest part first."""
        whole = self._clock() - self._born
        other = max(whole - sum(self._parts.values()), 0.0)
        parts = sorted({**self._parts, "other": other}.items(), key=lambda part: -part[1])
        listed = ", ".join(f"{name} {tqdm.format_interval(seconds)}" for name, seconds in parts)
        return f"goodput {self.goodput():.0%} of {tqdm.format_interval(whole)} ({listed})"

    def _add(self, name: str, seconds: float) -> None:
        self._parts[name] = self._parts.get(name, 0.0) + seconds
