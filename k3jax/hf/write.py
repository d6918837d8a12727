"""Decoder -> a Hugging Face folder.

`save(like=source)` takes everything but the numbers from a source folder: names, shapes, types, files, index, config
and the tensors that are not ours; without `like` the folder is text-only, in the decoder's types. Invariant: loading
and saving with `like` gives the source's tensors byte for byte (its files too, where safetensors wrote them with one
entry of metadata at most: the library orders tensors by its own rule and more entries by none); and a folder that
exists under its name is whole: it is written beside, as `.<name>.partial`, and renamed at the end.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from k3jax.config import ConfigError
from k3jax.hf import config as hf_config
from k3jax.hf import names
from k3jax.hf.read import DTYPES, INDEX, SINGLE, Folder, opened, progress
from k3jax.model.decoder import Decoder

SHARD_BYTES = 5 * 10**9
METADATA = {"format": "pt"}  # what transformers asks of a file's header
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # of the source: written anew or, as old numbers, left out


def save(decoder: Decoder, folder: str | Path, *, like: str | Path | None = None) -> None:
    """Writes the decoder as a folder that `load` and transformers read.

    like: a folder of the same model. Its tensor names, shapes, types and files are kept, its other files and tensors
    (tokenizer, vision tower, projector) are copied. A router's weight or bias, an a_log or dt_bias that would lose
    bits in the source's type is written as fp32; other tensors are rounded to it. Without `like`: Moonshot's names and
    config, cut into files of SHARD_BYTES.

    `folder` must not exist or be empty: two models are never mixed. Raises ConfigError naming what is wrong.
    """
    target = Path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: exists and is not an empty folder; save writes a new one")
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    try:
        if like is None:
            _write_plain(decoder, partial)
        else:
            _write_like(decoder, partial, Folder(like))
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _published(tensor: names.Tensor, arrays: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    pieces = (np.asarray(arrays[path])[tensor.index] for path in tensor.paths)
    return tensor.layout.published(shape, *pieces)


def _cast(name: str, path: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The value in the source's type, contiguous as safetensors needs it."""
    with np.errstate(over="ignore"):  # said below, by name
        cast = value.astype(dtype, order="C")
    if value.dtype == dtype:
        return cast
    back = cast.astype(value.dtype)
    if path.endswith(names.FP32) and not np.array_equal(back, value, equal_nan=True):
        return value.astype(np.float32, order="C")
    if not np.array_equal(np.isfinite(back), np.isfinite(value)):
        raise ConfigError(f"{name} ({path}): values up to {np.abs(value).max():g} do not fit the source's {dtype}")
    return cast


def _write_like(decoder: Decoder, out: Path, source: Folder) -> None:
    if different := hf_config.difference(decoder.config, source.config):
        raise ConfigError(f"{source.path}: like= must be a folder of the same model: {different}")
    table = names.tensors(decoder, source.prefix)
    source.check(table)
    arrays, grown = names.values(decoder), 0
    for file_name in progress(list(source.files), source.size()):
        tensors = {}
        with opened(source.path / file_name) as file:
            for name in source.files[file_name]:
                dtype, shape = source.headers[name]
                if name in table:
                    value = _published(table[name], arrays, shape)
                    tensors[name] = _cast(name, table[name].paths[0], value, DTYPES[dtype])
                    grown += tensors[name].nbytes - value.size * DTYPES[dtype].itemsize
                else:
                    tensors[name] = _unread(file, name, source.path / file_name)
            metadata = file.metadata()
        save_file(tensors, out / file_name, metadata)
    for item in sorted(source.path.iterdir()):
        if item.name.startswith(".") or item.suffix in WEIGHTS:
            continue
        (shutil.copytree if item.is_dir() else shutil.copyfile)(item, out / item.name)
    if source.index is not None and grown:
        index = dict(source.index)
        if "total_size" in index.get("metadata", {}):
            index["metadata"] = index["metadata"] | {"total_size": index["metadata"]["total_size"] + grown}
        _write_json(out / INDEX, index)


def _unread(file: Any, name: str, path: Path) -> np.ndarray:
    try:
        return file.get_tensor(name)
    except AttributeError as error:  # safetensors' answer to a type that numpy has not
        raise ConfigError(f"{path}: {name}: of a type that cannot be copied: {error}") from error


def _write_plain(decoder: Decoder, out: Path) -> None:
    arrays, table = names.values(decoder), names.tensors(decoder)
    for path, value in arrays.items():
        if value.dtype not in DTYPES.values():
            raise ConfigError(f"{path} is {value.dtype}; a folder holds {', '.join(map(str, DTYPES.values()))}")
    config = hf_config.to_hf(decoder.config, str(arrays["embed"].dtype))
    shards, total, filled = [[]], 0, 0
    for name, tensor in table.items():
        size = int(np.prod(tensor.shapes[0])) * _type(tensor, arrays).itemsize
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + size, total + size
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]
    for file_name, shard in progress(list(zip(files, shards, strict=True)), total):
        tensors = {}
        for name in shard:
            value = _published(table[name], arrays, table[name].shapes[0])
            tensors[name] = value.astype(_type(table[name], arrays), order="C")
        save_file(tensors, out / file_name, METADATA)
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    _write_json(out / "config.json", config)


def _type(tensor: names.Tensor, arrays: dict[str, Any]) -> np.dtype:
    path = tensor.paths[0]
    return DTYPES["F32"] if path.endswith(names.FP32) else np.dtype(arrays[path].dtype)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
