"""metrics.jsonl: one JSON object per step.

    {"step": 3, "train/loss": 2.1, ..., "attn_res/weights": [[1.0, 0.0], [0.4, 0.6]]}

Invariant: one valid JSON object per step, in order, each step once, however often the run was stopped and resumed.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.metrics.names import written

logger = logging.getLogger(__name__)

LARGEST = 4096  # numbers in one value; larger arrays belong into pictures


class JsonlWriter:
    """One JSON object per step in a text file: `{"step": 3, "train/loss": 2.1, ...}`, there when `write` returns.

    Values are numbers of Python, NumPy or JAX, written as floats, or arrays of up to LARGEST of them, written as nested
    lists. JSON has no NaN and no infinity: these are the strings "NaN", "Infinity", "-Infinity", which `float()` reads
    back. With `resumed_step` the file is continued: records up to and with that step stay; later ones, whose steps will
    be taken again, are dropped, and so is a line that a killed run left unfinished. `resumed_step=0` starts anew.

    `last` is the last record, {"step": -1} before there is one. `reached` is the last step that the file knew before:
    above `resumed_step` if a run was killed after its last checkpoint. What the disk refuses is a MachineError.
    """

    def __init__(self, path: str | os.PathLike, resumed_step: int = 0):
        self._path = Path(path)
        with written(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept, self.reached = _keep_records(self._path, resumed_step)
            self._file = open(self._path, "r+b")  # noqa: SIM115, closed by close()
            end = self._file.seek(0, os.SEEK_END)
        self.last = json.loads(kept) if kept else {"step": -1}
        self._at = end - len(f"{kept}\n".encode()) if kept else end  # where the last record begins

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a record, or adds to the last one if that is of the same step.

        Raises ValueError if the step is below the last, or a value is no number and no small array.
        """
        last = self.last["step"]
        if step < last:
            raise ValueError(f"{self._path.name}: step {step} is below the last, {last}")
        plain = {name: _plain(name, value) for name, value in values.items()}
        record = {**(self.last if step == last else {"step": int(step)}), **plain}
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with written(self._path):
            at = self._file.seek(self._at) if step == last else self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.truncate()
            self._file.flush()
        self.last, self._at = record, at

    def close(self) -> None:
        """Closes the file; nothing is pending."""
        with written(self._path):  # what a full disk refused before is tried once more
            self._file.close()


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`: floats and nested lists of them, NaN and infinities as floats again."""
    with open(path, encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [{name: value if name == "step" else _floats(value) for name, value in r.items()} for r in records]


def _floats(value: Any) -> Any:
    return [_floats(entry) for entry in value] if isinstance(value, list) else float(value)


def _keep_records(path: Path, resumed_step: int) -> tuple[str, int]:
    """Leaves the records of steps 0 .. resumed_step (none for 0) in the file: (last line or "", last step found)."""
    path.touch()
    before = path.read_text(encoding="utf-8", errors="replace")
    kept: dict[int, str] = {}
    reached = 0
    for line in before.splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # cut off in the middle by a kill
        if type(step) is not int:
            continue
        reached = max(reached, step)
        if step <= resumed_step > 0:
            kept[step] = line
    after = "".join(line + "\n" for line in kept.values())
    if after != before:
        logger.info("%s: kept %d records, up to step %d", path, len(kept), resumed_step)
        beside = path.with_name(path.name + ".new")
        beside.write_text(after, encoding="utf-8")
        os.replace(beside, path)  # a kill leaves the old file or the new one, never half of one
    return next(reversed(kept.values()), ""), reached


def _plain(name: str, value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.kind in "cOSUMm" or array.size > LARGEST:
        raise ValueError(f"{name} must be a number or an array of at most {LARGEST}, got {value!r:.60}")
    return _json(array.astype(np.float64).tolist())


def _json(value: Any) -> Any:
    if isinstance(value, list):
        return [_json(entry) for entry in value]
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
