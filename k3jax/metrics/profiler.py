"""A jax.profiler trace of some steps: `--config.profile.steps=10:13` traces steps 10, 11 and 12.

Open the folder with TensorBoard (xprof plugin) or perfetto. Invariant: a run does not fail for the span's place: a
resume inside it traces what is left, a stop inside it keeps what there is, a span out of reach is one line.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from k3jax.config import MachineError


class Profiler:
    """Call `before` and `after` around every step, counted from 1. `say` takes the lines for the user.

    span: config.profile.span, (first step, step behind the last) or None. The run takes steps resumed_step + 1 ..
    total_steps. Raises MachineError if no trace can be started or written.
    """

    def __init__(
        self,
        folder: Path,
        span: tuple[int, int] | None,
        resumed_step: int,
        total_steps: int,
        say: Callable[[str], None],
    ):
        self._folder, self._say = folder, say
        self._running, self._annotation = False, None
        self._first, self._behind = span or (0, 0)
        if span and (self._first > total_steps or self._behind <= resumed_step + 1):
            steps = f"this run takes steps {resumed_step + 1} to {total_steps}"
            say(f"profile.steps={self._first}:{self._behind} is traced nowhere: {steps}")
            self._first = self._behind = 0

    def before(self, step: int) -> None:
        """Step `step` is about to be dispatched."""
        if not self._first <= step < self._behind:
            return
        if not self._running:
            self._guarded(jax.profiler.start_trace, str(self._folder))
            self._running = True
        self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self._annotation.__enter__()

    def after(self, step: int, result: Any) -> None:
        """Step `step` was dispatched; `result`, any of its arrays, is waited for behind the last traced step."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._running and step >= self._behind - 1:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Writes the trace if one runs."""
        if self._running:
            self._running = False
            self._guarded(jax.profiler.stop_trace)
            self._say(f"profile: {self._folder}")

    def _guarded(self, call: Callable, *args) -> None:
        try:
            call(*args)
        except (OSError, RuntimeError) as error:
            raise MachineError(f"profile.steps: {self._folder}: {' '.join(str(error).split())}") from error
