"""A Hugging Face folder -> Decoder.

The headers of all weight files are read and compared with the index, the config and the names of names.py first; only
then is a tensor read, each once, file by file. Invariant: no tensor is left out, made up or reshaped to fit; what does
not fit is one ConfigError with the published name and our path.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from k3jax.config import ConfigError
from k3jax.hf import config as hf_config
from k3jax.hf import names
from k3jax.model.decoder import Decoder
from k3jax.model.parameters import KEPT_FP32

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}
CASTS = ("float32", "bfloat16")  # what `load` can turn weights into
PACKED = (".weight_packed", ".weight_scale")
SHOWN = 5  # problems listed in an error
LARGE = 2**30  # bytes from which progress is shown


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file; a damaged or missing one is a ConfigError."""
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a whole safetensors file: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold keys and values")
    return found


def raise_problems(where: Path, problems: list[str]) -> None:
    """One error for a list of problems, if there are any."""
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ConfigError(f"{where}: {len(problems)} wrong tensors: {'; '.join(problems[:SHOWN])}{more}")


class Folder:
    """config.json and the headers of the weight files of a folder.

    files: file name -> tensor names; headers: tensor name -> (dtype as safetensors spells it, shape). Raises
    ConfigError if something is missing, damaged, packed, or differs from the index.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise ConfigError(f"{self.path}: no such folder")
        self.values = _json(self.path / "config.json")
        self.prefix = hf_config.prefix(self.values)
        self.config = hf_config.from_hf(self.values, str(self.path / "config.json"))
        self.index = _json(self.path / INDEX) if (self.path / INDEX).exists() else None
        self.files: dict[str, list[str]] = {}
        self.headers: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name in self._file_names():
            with opened(self.path / name) as file:
                self.files[name] = list(file.keys())
                for tensor in self.files[name]:
                    if tensor.endswith(PACKED):
                        raise ConfigError(f"{self.path / name}: {tensor}: packed MXFP4 is not supported yet")
                    view = file.get_slice(tensor)
                    self.headers[tensor] = view.get_dtype(), tuple(view.get_shape())
        if self.index is not None:
            self._check_index()

    def _file_names(self) -> list[str]:
        single = (self.path / SINGLE).exists()
        if self.index is None:
            if not single:
                raise ConfigError(f"{self.path}: holds neither {SINGLE} nor {INDEX}")
            return [SINGLE]
        weight_map = self.index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{self.path / INDEX}: weight_map is missing")
        files = sorted(set(map(str, weight_map.values())))
        for file in files:
            if Path(file).name != file:
                raise ConfigError(f"{self.path / INDEX}: weight_map names {file!r}, which is no file of the folder")
        if single and SINGLE not in files:
            raise ConfigError(f"{self.path}: holds both {SINGLE} and an index without it")
        return files

    def _check_index(self) -> None:
        listed = self.index["weight_map"]
        held = {file: set(tensors) for file, tensors in self.files.items()}
        problems = [f"{name} is not in {file}" for name, file in listed.items() if name not in held[file]]
        for file, tensors in self.files.items():
            problems += [f"{name} of {file} is not listed" for name in tensors if listed.get(name) != file]
        raise_problems(self.path / INDEX, problems)

    def size(self) -> int:
        """Bytes of all weight files."""
        return sum((self.path / name).stat().st_size for name in self.files)

    def check(self, table: dict[str, names.Tensor]) -> None:
        """Raises ConfigError unless the folder holds exactly the tensors of the table, and others that are skipped."""
        problems = []
        for name, tensor in table.items():
            if name not in self.headers:
                problems.append(f"{name} (ours: {' and '.join(tensor.paths)}) is missing")
                continue
            dtype, shape = self.headers[name]
            if shape not in tensor.shapes:
                ours = " and ".join(f"{path} {list(s)}" for path, s in zip(tensor.paths, tensor.ours, strict=True))
                problems.append(f"{name} is {list(shape)}, but {ours} needs {list(tensor.shapes[0])}")
            elif dtype not in DTYPES:
                problems.append(f"{name} (ours: {' and '.join(tensor.paths)}) is {dtype}, not {', '.join(DTYPES)}")
        for name in self.headers:
            if name not in table and not name.startswith(names.SKIPPED):
                problems.append(f"{name} is not known (ours: no path)")
        raise_problems(self.path, problems)


def _wanted_types(folder: Folder, table: dict[str, names.Tensor], dtype: str | None) -> dict[str, np.dtype]:
    """The type of each of our arrays. Files may mix types in a stack: the wider one holds all."""
    types: dict[str, np.dtype] = {}
    for name, tensor in table.items():
        stored = DTYPES[folder.headers[name][0]]
        for path in tensor.paths:
            if path.endswith(names.FP32) or (dtype and path.endswith(KEPT_FP32)):
                types[path] = DTYPES["F32"]
            elif dtype:
                types[path] = np.dtype(jnp.dtype(dtype))
            else:
                types[path] = stored if path not in types else np.dtype(jnp.promote_types(types[path], stored))
    return types


def progress(files: Sequence[Any], size: int) -> Iterator[Any]:
    """Iterates over files; on a terminal it shows how far it is if they hold many bytes."""
    return tqdm(files, unit="file", leave=False, disable=None if size >= LARGE else True)


def _arrays(
    folder: Folder, table: dict[str, names.Tensor], shapes: dict[str, names.Shape], dtype: str | None
) -> dict[str, Any]:
    types = _wanted_types(folder, table, dtype)
    parts = Counter(path for tensor in table.values() for path in tensor.paths)
    buffers: dict[str, np.ndarray] = {}
    arrays = {}
    for file_name in progress(list(folder.files), folder.size()):
        with opened(folder.path / file_name) as file:
            for name in folder.files[file_name]:
                if name not in table:
                    continue
                tensor = table[name]
                try:
                    pieces = tensor.layout.ours(file.get_tensor(name), *tensor.ours)
                except ConfigError as error:
                    raise ConfigError(f"{folder.path / file_name}: {name} ({tensor.paths[0]}): {error}") from None
                for path, piece in zip(tensor.paths, pieces, strict=True):
                    if path not in buffers:
                        buffers[path] = np.empty(shapes[path], types[path])
                    buffers[path][tensor.index] = piece
                    parts[path] -= 1
                    if not parts[path]:  # complete: hand it over, so that host memory holds what is unfinished only
                        arrays[path] = jnp.asarray(buffers.pop(path))
    return arrays


def load(folder: str | Path, *, dtype: str | None = None) -> Decoder:
    """The text model of a Hugging Face folder.

    dtype None keeps the files' types (fp32, bf16, fp16), except that router weight and bias, a_log and dt_bias are
    always fp32. "float32" or "bfloat16" casts matrices, convolutions, embedding and head; norms and pseudo-queries are
    fp32 then too, as in model.parameters.bind. Vision tower and projector are skipped. Raises ConfigError naming key,
    or tensor and path.
    """
    if dtype is not None and dtype not in CASTS:
        raise ConfigError(f"dtype must be one of {', '.join(CASTS)} or None, got {dtype!r}")
    source = Folder(folder)
    decoder = nnx.eval_shape(lambda: Decoder(source.config, rngs=nnx.Rngs(0)))
    table = names.tensors(decoder, source.prefix)
    source.check(table)
    shapes = {path: value.shape for path, value in names.values(decoder).items()}
    return names.filled(decoder, _arrays(source, table, shapes, dtype))
