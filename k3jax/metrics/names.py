"""Names that more than one file needs, and what a writer is. `train/` comes every step, other groups now and then."""

import contextlib
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, Protocol

from k3jax.config import MachineError

LOSS = "train/loss"  # nats per target token, before the step's update
LEARNING_RATE = "train/learning_rate"
GRAD_NORM = "train/grad_norm"  # before clipping
MAX_VIOLATION = "train/max_violation"  # largest load / mean - 1 of any expert of any layer
STEP_SECONDS = "train/step_seconds"
TOKENS_PER_SECOND = "train/tokens_per_second"  # of all devices
FLOPS_PER_SECOND = "train/flops_per_second"  # model FLOPs (k3jax/flops.py), of all devices
MFU = "train/mfu"  # model FLOP/s as a part of the devices' peak, 0 .. 1
GOODPUT = "train/goodput"  # part of this process's life spent in steps that count, 0 .. 1
EVAL_LOSS = "eval/loss"  # of eval.rows rows, the same each time
EVAL_LOSS_ALL = "eval/loss_all"  # of all held-out rows, after the last step
ATTN_RES = "attn_res/weights"  # [sublayers, sources], mean over tokens


@contextlib.contextmanager
def written(path: str | PathLike) -> Iterator[None]:
    """What the disk refuses inside is a MachineError that names `path`."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror or error}") from error


class Writer(Protocol):
    """Takes numbers of a step. Steps never decrease; what comes for a step again is added. Full disks: MachineError."""

    def write(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...
