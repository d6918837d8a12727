"""Shows a run to a person: a bar on a terminal, elsewhere a line now and then.

    step 120/500  loss 2.3457  lr 1.0e-03  12,346 tokens/s  MFU 41.2%  ETA 01:29
     24%|██████▍                    | 120/500 [00:28, loss 2.3457, ETA 01:29, 12,346 tokens/s, MFU 41.2%]

Invariant: a bar is one line of the terminal, whatever the numbers are; a non-finite loss always gets its own line.
"""

import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tqdm import tqdm

from k3jax.metrics.names import EVAL_LOSS, FLOPS_PER_SECOND, LEARNING_RATE, LOSS, MFU, TOKENS_PER_SECOND

WINDOW = 1_000  # records the time left is taken from: several evaluations and checkpoints, so it does not jump
BAR = 10  # least width of the bar itself
BAR_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def _loss(value: float) -> str:
    if math.isnan(value):
        return "NaN (NOT FINITE)"
    if math.isinf(value):
        return f"{'' if value > 0 else '-'}Inf (NOT FINITE)"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.2e}"


def _flops(value: float) -> str:
    for unit, size in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value / 1e6:.2f} MFLOP/s"


class Progress:
    """A bar on a terminal, elsewhere a line every `every_seconds`. `start_step` is where a resumed run begins.

    Both show step, loss, learning rate, tokens per second, MFU (FLOP/s where the peak is not known) and the time left.
    The first step, the last one, those with a held-out loss and those with a non-finite loss always get their line.
    """

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
        self._window: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # compiling lies before its first entry
        self._values: Mapping[str, Any] = {}  # of the last step
        self._printed = -math.inf
        self._bar = None
        if self._stream.isatty():
            options = {"dynamic_ncols": True, "bar_format": BAR_FORMAT, "file": self._stream}
            self._bar = tqdm(total=total_steps, initial=start_step, **options)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Moves the bar, or prints a line when it is time for one. Numbers of the same step are shown together."""
        now = self._clock()
        same = bool(self._window) and step == self._window[-1][0]
        self._window.append((step, now))
        news, self._values = values, {**self._values, **values} if same else values
        values = self._values
        bad = LOSS in news and not math.isfinite(float(news[LOSS]))
        line = bad or EVAL_LOSS in news
        if self._bar is None:
            line = line or now - self._printed >= self._every or step >= self._total
        if line:
            self._printed = now
            names = (LOSS, EVAL_LOSS, LEARNING_RATE, TOKENS_PER_SECOND, MFU)
            text = "  ".join([f"step {step}/{self._total}", *self._shown(values, *names), *self._time_left()])
            self.message(f"\x1b[1;31m{text}\x1b[0m" if bad and self._bar is not None else text)
        if self._bar is not None:
            loss, rest = self._shown(values, LOSS), self._shown(values, TOKENS_PER_SECOND, MFU, LEARNING_RATE)
            parts = [*loss, *self._time_left(), *rest]  # the first ones matter most
            self._bar.set_postfix_str(", ".join(self._fitting(parts)), refresh=False)
            self._bar.update(step - self._bar.n)

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

    def _shown(self, values: Mapping[str, Any], *names: str) -> list[str]:
        """The numbers of `names` that there are, in words, in this order."""
        if MFU not in values:
            names = tuple(FLOPS_PER_SECOND if name == MFU else name for name in names)
        forms: dict[str, Callable[[float], str]] = {
            LOSS: lambda value: f"loss {_loss(value)}",
            EVAL_LOSS: lambda value: f"held-out {_loss(value)}",
            LEARNING_RATE: lambda value: f"lr {value:.1e}",
            TOKENS_PER_SECOND: lambda value: f"{value:,.0f} tokens/s",
            FLOPS_PER_SECOND: _flops,
            MFU: lambda value: f"MFU {value:.1%}",
        }
        return [forms[name](float(values[name])) for name in names if name in values]

    def _fitting(self, parts: list[str]) -> list[str]:
        """As many of the first parts as leave room for a bar on one line of the terminal."""
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            width = 0
        width = width or shutil.get_terminal_size().columns
        elapsed = tqdm.format_interval(self._bar.format_dict["elapsed"])
        room = width - len(f"100%|{'':{BAR}}| {self._total}/{self._total} [{elapsed}]")
        while parts and sum(len(part) + len(", ") for part in parts) > room:
            parts = parts[:-1]
        return parts

    def _time_left(self) -> list[str]:
        (first_step, first_time), (step, now) = self._window[0], self._window[-1]
        if step <= first_step:
            return []
        seconds = (self._total - step) * (now - first_time) / (step - first_step)
        return [f"ETA {tqdm.format_interval(seconds)}"]
