"""TensorBoard event files: written step by step, and read back.

    record = length (uint64) | checksum of it | event | checksum of it       little-endian; the event a protocol buffer

Every process of a run writes a file of its own, named so that the names sort in the order of writing. A resumed one
begins with the mark that TensorBoard knows (`purge_step`): what earlier files hold of that step and later ones is void.
The library's own writer hands events to a thread: after a kill the last two minutes are missing, and on a full disk it
waits for ever. Here each step is one event, in the file when `write` returns.

Invariant: read in order of their names, the files give each step once, whatever was killed and resumed.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboardX.proto.types_pb2 import DT_FLOAT
from tensorboardX.record_writer import masked_crc32c

from k3jax.config import ConfigError
from k3jax.metrics.names import written
from k3jax.metrics.picture import heat_map_png

PREFIX = "events.out.tfevents."
NUMBERS = "/numbers"  # a matrix goes into the file as a picture and, under this name, as numbers


class TensorBoardWriter:
    """Scalars as curves, matrices [rows, columns] as heat maps (their numbers beside them), in `folder`.

    After a resume, steps above `resumed_step` that a killed run left behind are void. Raises MachineError for what the
    disk refuses.
    """

    def __init__(self, folder: str | os.PathLike, resumed_step: int = 0):
        self._folder = Path(folder)
        with written(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._folder / _next_name(self._folder), "ab")  # noqa: SIM115, closed by close()
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        mark = SessionLog(status=SessionLog.START)
        self._append(Event(wall_time=time.time(), step=resumed_step + 1, session_log=mark))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one event of all values: numbers or matrices. Raises ValueError for other shapes."""
        summary = Summary()
        for name, value in values.items():
            array = np.asarray(value, np.float64)
            if array.ndim == 0:
                summary.value.add(tag=name, simple_value=float(array))
            elif array.ndim == 2:
                summary.value.extend(_matrix(name, array, step))
            else:
                raise ValueError(f"{name} must be a number or a matrix, got shape {array.shape}")
        self._append(Event(wall_time=time.time(), step=int(step), summary=summary))

    def close(self) -> None:
        """Closes the file; nothing is pending."""
        self._file.close()

    def _append(self, event: Event) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
        with written(self._folder):
            self._file.write(b"".join((length, next(checksums), data, next(checksums))))
            self._file.flush()


def _next_name(folder: Path) -> str:
    """A file name that sorts behind all that are there, even if another machine's clock was ahead."""
    stamps = [name.removeprefix(PREFIX).split(".")[0] for name in os.listdir(folder) if name.startswith(PREFIX)]
    latest = max([int(time.time()), *(int(stamp) for stamp in stamps if stamp.isdecimal())])
    return f"{PREFIX}{latest:010d}.{len(stamps):04d}.{socket.gethostname()}"


def _matrix(name: str, array: np.ndarray, step: int) -> list[Summary.Value]:
    png = heat_map_png(array, f"{name}, step {step}")
    size = dict(zip(("width", "height"), struct.unpack(">II", png[16:24]), strict=True))  # of the PNG's first chunk
    image = Summary.Image(**size, colorspace=4, encoded_image_string=png)
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in array.shape])
    tensor = TensorProto(dtype=DT_FLOAT, tensor_shape=shape, float_val=array.reshape(-1).tolist())
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="k3jax"))
    return [
        Summary.Value(tag=name, image=image),
        Summary.Value(tag=name + NUMBERS, tensor=tensor, metadata=metadata),
    ]


def read_events(folder: str | os.PathLike) -> dict[str, dict[int, Any]]:
    """What a TensorBoardWriter wrote: name -> step -> number, or float32 matrix.

    Half a record at the end of a file, as a kill leaves it, ends that file. Raises ConfigError, one line, for a folder
    without event files and for a damaged one.
    """
    folder = Path(folder)
    files = sorted(path for path in folder.glob(PREFIX + "*") if path.is_file())
    if not files:
        raise ConfigError(f"{folder} holds no TensorBoard event file")
    found: dict[str, dict[int, Any]] = {}
    for path in files:
        for event in _events(path):
            if event.session_log.status == SessionLog.START:
                found = {name: {s: v for s, v in steps.items() if s < event.step} for name, steps in found.items()}
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
                elif value.tag.endswith(NUMBERS):
                    shape = [dim.size for dim in value.tensor.tensor_shape.dim]
                    array = np.array(value.tensor.float_val, np.float32).reshape(shape)
                    found.setdefault(value.tag.removesuffix(NUMBERS), {})[event.step] = array
    return {name: dict(sorted(steps.items())) for name, steps in found.items() if steps}


def _events(path: Path) -> Iterator[Event]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    at = 0
    while at + 12 <= len(data):
        length, checksum = struct.unpack_from("<QI", data, at)
        if checksum != masked_crc32c(data[at : at + 8]):
            raise ConfigError(f"{path} is damaged at byte {at}")
        if at + 16 + length > len(data):
            return
        try:
            yield Event.FromString(data[at + 12 : at + 12 + length])
        except DecodeError as error:
            raise ConfigError(f"{path} is damaged at byte {at}") from error
        at += 16 + length
