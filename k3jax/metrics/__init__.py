"""Writes the numbers a run hands over, and times it.

A writer has `write(step, values)` and `close()`; the loop hands every step's numbers to a list of them:

    meter = Meter(tokens_per_step, flops_per_step, peak_flops)
    with meter.aside("compilation"): ...
    jsonl = JsonlWriter(workdir / "metrics.jsonl", resumed_step)
    writers = [jsonl, TensorBoardWriter(workdir / "tensorboard", resumed_step), Progress(total_steps, resumed_step)]
    meter.start(resumed_step, jsonl.reached)
    for writer in writers:
        writer.write(step, {LOSS: loss, LEARNING_RATE: rate, **meter.measure(), **health_report(...)})

`step` counts finished optimizer steps. Invariant: whatever the writer, each step is there once, in order, however often
the run was stopped and resumed.
"""

from k3jax.metrics.health import health_report
from k3jax.metrics.jsonl import JsonlWriter, read_jsonl
from k3jax.metrics.meter import Meter
from k3jax.metrics.names import (
    ATTN_RES,
    EVAL_LOSS,
    EVAL_LOSS_ALL,
    FLOPS_PER_SECOND,
    GOODPUT,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    MAX_VIOLATION,
    MFU,
    STEP_SECONDS,
    TOKENS_PER_SECOND,
    Writer,
)
from k3jax.metrics.picture import heat_map
from k3jax.metrics.profiler import Profiler
from k3jax.metrics.progress import Progress
from k3jax.metrics.wandb import WandbWriter

# tensorboardX imports torch where there is one, which takes seconds: only when it is asked for.
_LAZY = {"TensorBoardWriter", "read_events"}

__all__ = [
    "ATTN_RES",
    "EVAL_LOSS",
    "EVAL_LOSS_ALL",
    "FLOPS_PER_SECOND",
    "GOODPUT",
    "GRAD_NORM",
    "LEARNING_RATE",
    "LOSS",
    "MAX_VIOLATION",
    "MFU",
    "STEP_SECONDS",
    "TOKENS_PER_SECOND",
    "JsonlWriter",
    "Meter",
    "Profiler",
    "Progress",
    "TensorBoardWriter",
    "WandbWriter",
    "Writer",
    "health_report",
    "heat_map",
    "read_events",
    "read_jsonl",
]


def __getattr__(name: str):
    if name in _LAZY:
        from k3jax.metrics import events

        return getattr(events, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
