"""Damaged and foreign folders: each ends in one line that names the file, the tensor and our path."""

import numpy as np
import pytest
from golden_files import FOLDER

from k3jax import hf
from k3jax.config import ConfigError

Q = "language_model.model.layers.1.self_attn.q_proj.weight"
F_A = "language_model.model.layers.1.self_attn.f_a_proj.weight"
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.3.w1.weight"
A_LOG = "language_model.model.layers.0.self_attn.A_log"


def refused(folder, *parts, **options) -> None:
    """load() raises one line that holds all parts."""
    with pytest.raises(ConfigError) as raised:
        hf.load(folder, **options)
    message = str(raised.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_tensors_that_do_not_fit(copy):
    """Missing, unknown, transposed and mistyped tensors in one message; a shape that only a transpose would fit."""
    k3 = copy("kimi_k3_tiny")
    del k3.tensors[Q]
    k3.tensors[F_A] = np.ascontiguousarray(k3.tensors[F_A].T)
    k3.tensors["language_model.model.layers.9.self_attn.q_proj.weight"] = np.zeros((2, 2), np.float32)
    k3.tensors[EXPERT] = k3.tensors[EXPERT].astype(np.int32)
    refused(
        k3.write(),
        "4 wrong tensors",
        f"{Q} (ours: blocks.0.head.1.attention.q) is missing",
        f"{F_A} is [32, 16], but blocks.0.head.1.attention.f_a [32, 16] needs [16, 32]",
        f"{EXPERT} (ours: blocks.1.head.0.mlp.w1) is I32",
        "language_model.model.layers.9.self_attn.q_proj.weight is not known",
    )


def test_long_lists_are_cut(copy):
    k3 = copy("kimi_k3_tiny")
    k3.tensors = {name: tensor for name, tensor in k3.tensors.items() if ".experts." not in name}
    refused(k3.write(), "72 wrong tensors", "layers.1.block_sparse_moe.experts.0.w1", "; and 67 more")


def test_padding_of_a_log(copy):
    k3 = copy("kimi_k3_tiny")
    k3.tensors[A_LOG] = np.zeros(128, np.float32)
    k3.tensors[A_LOG][100] = 1e-6
    refused(k3.write(), f"{A_LOG} (blocks.0.head.0.attention.a_log): padding after 2 heads is not 0")
    k3.tensors[A_LOG] = np.zeros(64, np.float32)
    refused(k3.write(), f"{A_LOG} is [64], but blocks.0.head.0.attention.a_log [2] needs [2]")


def test_packed(copy):
    """By the config, and by the tensors where a config hides it."""
    refused(
        FOLDER / "kimi_k3_tiny_mxfp4", "config.json: text_config.quantization_config: packed MXFP4", "not supported"
    )
    packed = copy("kimi_k3_tiny_mxfp4")
    del packed.text["quantization_config"]
    refused(packed.write_config(), "model.safetensors", "experts.0.w1.weight_packed: packed MXFP4 is not supported yet")


def test_index(copy):
    k3 = copy("kimi_k3_tiny")
    folder = k3.shard(2)
    right = k3.read_index()
    first, second = sorted(set(right["weight_map"].values()))

    def wrong(weight_map, *parts):
        k3.write_index({"metadata": {}, "weight_map": weight_map})
        refused(folder, "model.safetensors.index.json", *parts)

    moved = right["weight_map"] | {Q: first if right["weight_map"][Q] == second else second}
    wrong(moved, f"{Q} is not in {moved[Q]}", f"{Q} of {right['weight_map'][Q]} is not listed")
    wrong({n: f for n, f in right["weight_map"].items() if n != Q}, f"{Q} of {right['weight_map'][Q]} is not listed")
    wrong(right["weight_map"] | {"extra": first}, f"extra is not in {first}")
    wrong(right["weight_map"] | {"extra": "../other.safetensors"}, "'../other.safetensors', which is no file of")
    wrong({}, "weight_map is missing")
    k3.write_index(right)
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, "holds both model.safetensors and an index")
    (folder / "model.safetensors").unlink()
    (folder / second).unlink()
    refused(folder, second, "not a whole safetensors file")


def test_damaged_files(copy, tmp_path):
    k3 = copy("kimi_k3_tiny")
    weights = k3.path / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-4], whole[:100], b"", b"not a tensor file"):
        weights.write_bytes(damaged)
        refused(k3.path, str(weights), "not a whole safetensors file")
    weights.unlink()
    refused(k3.path, "holds neither model.safetensors nor model.safetensors.index.json")
    (k3.path / "config.json").write_text('{"model_type": ')
    refused(k3.path, str(k3.path / "config.json"), "cannot be read")
    (k3.path / "config.json").write_text("[]")
    refused(k3.path, "must hold keys and values")
    (k3.path / "config.json").unlink()
    refused(k3.path, str(k3.path / "config.json"), "cannot be read")
    refused(tmp_path / "nowhere", "nowhere: no such folder")
    refused(FOLDER / "kimi_k3_tiny", "dtype must be one of float32, bfloat16 or None, got 'float64'", dtype="float64")


def test_unknown_key_of_a_folder(copy):
    k3 = copy("kimi_k3_tiny")
    k3.text["sliding_window"] = 128
    refused(
        k3.write_config(), str(k3.path / "config.json"), "text_config.sliding_window = 128: neither honoured nor known"
    )
