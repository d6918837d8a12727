"""Folders written and read again: byte for byte with `like`, bit for bit without; types, shards, stacked layers."""

import dataclasses
import json
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import sizes
from flax import nnx
from golden_files import FOLDER
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from k3jax import hf
from k3jax.config import ConfigError
from k3jax.hf import names, write
from k3jax.model import router
from k3jax.model.decoder import Decoder

PREFIX = "language_model.model.layers."
BIAS = PREFIX + "2.block_sparse_moe.gate.e_score_correction_bias"
ROUTER = PREFIX + "2.block_sparse_moe.gate.weight"


def assert_same_files(one, two):
    """Both folders hold the same files with the same bytes."""
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file())
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file


def assert_same_arrays(one: Decoder, two: Decoder):
    """Both decoders hold the same bits in the same types."""
    assert one.config == two.config
    ours, theirs = names.values(one), names.values(two)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        assert value.dtype == theirs[path].dtype, path
        np.testing.assert_array_equal(np.asarray(value), np.asarray(theirs[path]), path)


@pytest.mark.parametrize("name", ["kimi_k3_tiny", "kimi_linear_tiny"])
def test_golden_folders(name, tmp_path):
    decoder = hf.load(FOLDER / name)
    assert all(value.dtype == jnp.float32 for value in names.values(decoder).values())
    hf.save(decoder, tmp_path / "out", like=FOLDER / name)
    assert_same_files(FOLDER / name, tmp_path / "out")
    hf.save(decoder, tmp_path / "plain")
    assert_same_arrays(hf.load(tmp_path / "plain"), decoder)
    plain, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "plain", FOLDER / name))
    ours = {key.removeprefix("language_model."): value for key, value in source.items() if "vision_tower" not in key}
    ours = {key: value for key, value in ours.items() if "mm_projector" not in key}
    assert plain.keys() == ours.keys()  # published names, text only
    for key, value in plain.items():
        assert value.shape == ours[key].shape and value.tobytes() == ours[key].tobytes(), key
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["model_type"] == "kimi_linear" and config["dtype"] == "float32"


def test_moonshot_style(copy):
    """The same weights under Moonshot's config are the same model."""
    linear = copy("kimi_linear_tiny")
    linear.values = json.loads((linear.path / "config_moonshot.json").read_text())
    assert_same_arrays(hf.load(linear.write_config()), hf.load(FOLDER / "kimi_linear_tiny"))


def test_sharded_folder(copy):
    """Three files and an index, a tokenizer and a subfolder; old weights in another format are not carried along."""
    k3 = copy("kimi_k3_tiny")
    source, out = k3.shard(3), k3.path.parent / "out"
    (source / "tokenizer.json").write_text("{}")
    (source / "assets").mkdir()
    (source / "assets" / "logo.svg").write_text("<svg/>")
    decoder = hf.load(source)
    assert_same_arrays(decoder, hf.load(FOLDER / "kimi_k3_tiny"))
    (source / ".cache").mkdir()
    (source / "pytorch_model.bin").write_bytes(b"old")
    hf.save(decoder, out, like=source)
    assert not (out / ".cache").exists() and not (out / "pytorch_model.bin").exists()
    (source / ".cache").rmdir()
    (source / "pytorch_model.bin").unlink()
    assert_same_files(source, out)


def test_metadata_of_a_file(copy):
    """Whatever a weight file's header says beside its tensors stays, in any order."""
    k3 = copy("kimi_k3_tiny")
    metadata = {"format": "pt", "made_by": "a test"}
    save_file(k3.tensors, k3.path / "model.safetensors", metadata)
    hf.save(hf.load(k3.path), k3.path.parent / "out", like=k3.path)
    with safe_open(k3.path.parent / "out" / "model.safetensors", "np") as file:
        assert file.metadata() == metadata


def test_trained_numbers_are_written(copy):
    """save(like) writes the decoder's values, not the source's: one changed kernel changes its one tensor."""
    k3 = copy("kimi_k3_tiny")
    decoder = hf.load(k3.path)
    kernel = decoder.blocks[1].head[1].attention.v_b
    kernel.set_value(kernel[...].at[9, 1, 5].set(7.0))
    hf.save(decoder, k3.path.parent / "out", like=k3.path)
    written = load_file(k3.path.parent / "out" / "model.safetensors")
    changed = [name for name, tensor in written.items() if not np.array_equal(tensor, k3.tensors[name])]
    assert changed == [PREFIX + "3.self_attn.kv_b_proj.weight"]
    assert np.argwhere(written[changed[0]] != k3.tensors[changed[0]]).tolist() == [[32 + 16 + 5, 9]]


def random_decoder(model) -> Decoder:
    """Every variable random, the router biases too."""
    decoder = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(7)
    values = names.values(decoder)
    return names.filled(decoder, {p: jnp.asarray(rng.normal(size=v.shape), v.dtype) for p, v in values.items()})


def test_scanned_model_in_shards(tmp_path, monkeypatch):
    """17 layers, most of them stacked, written as files of at most 300 kB with an index."""
    decoder = random_decoder(dataclasses.replace(sizes.MESH, kda=dataclasses.replace(sizes.MESH.kda, value_dim=16)))
    monkeypatch.setattr(write, "SHARD_BYTES", 300_000)
    hf.save(decoder, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 3 and files == [f"model-{at + 1:05d}-of-{count:05d}.safetensors" for at in range(count)]
    tensors = {}
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert sum(tensor.nbytes for tensor in held.values()) <= 300_000
        assert all(index["weight_map"][name] == file for name in held)
        tensors |= held
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    # Layer 14 of 17 (13 from 0) is the second KDA layer of block 1's second group.
    group = decoder.blocks[1].groups
    q, w2 = np.asarray(group.kda.attention.q[...][4]), np.asarray(group.kda.mlp.w2[...][4, 9])
    np.testing.assert_array_equal(tensors["model.layers.13.self_attn.q_proj.weight"], q.reshape(64, -1).T)
    np.testing.assert_array_equal(tensors["model.layers.13.block_sparse_moe.experts.9.w2.weight"], w2.T)
    bias = np.asarray(decoder.router_bias())  # layer 1 is dense: row 14 is layer 16, the second group's MLA layer
    np.testing.assert_array_equal(tensors["model.layers.15.block_sparse_moe.gate.e_score_correction_bias"], bias[14])
    back = hf.load(tmp_path / "out")
    assert_same_arrays(back, decoder)
    hf.save(back, tmp_path / "again", like=tmp_path / "out")
    assert_same_files(tmp_path / "out", tmp_path / "again")


def cast(tensors: dict, dtype) -> dict:
    return {name: tensor.astype(dtype) for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
def test_narrow_files(copy, dtype):
    """dtype None keeps the file's types but for what decides; widening those leaves the round trip byte-equal."""
    k3 = copy("kimi_k3_tiny")
    k3.tensors = cast(k3.tensors, dtype)
    source, out = k3.shard(2), k3.path.parent / "out"
    decoder = hf.load(source)
    wide = {path for path, value in names.values(decoder).items() if value.dtype == jnp.float32}
    assert wide == {
        p for p in names.values(decoder) if p.endswith(("router.weight", "router.bias", "a_log", "dt_bias"))
    }
    assert {value.dtype for path, value in names.values(decoder).items() if path not in wide} == {np.dtype(dtype)}
    hf.save(decoder, out, like=source)
    assert_same_files(source, out)
    router_kernel = decoder.blocks[1].head[0].mlp.router.weight
    router_kernel.set_value(router_kernel[...] + 2.0**-20)  # bits that no 16-bit type has
    hf.save(decoder, out.parent / "trained", like=source)
    held = {}
    for file in (out.parent / "trained").glob("*.safetensors"):
        held |= load_file(file)
    assert {name for name, tensor in held.items() if tensor.dtype == np.float32} == {ROUTER}
    np.testing.assert_array_equal(held[ROUTER], np.asarray(router_kernel[...]).T)
    total = sum(tensor.nbytes for tensor in held.values())
    index = json.loads((out.parent / "trained" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total == k3.read_index()["metadata"]["total_size"] + 2 * 6 * 32


def test_values_out_of_range(copy):
    """A kernel of 1e6 does not become infinite in an fp16 folder."""
    k3 = copy("kimi_k3_tiny")
    k3.tensors = cast(k3.tensors, np.float16)
    source = k3.write()
    decoder = hf.load(source, dtype="float32")
    decoder.lm_head.set_value(decoder.lm_head[...].at[0, 0].set(1e6))
    with pytest.raises(ConfigError, match=r"lm_head\.weight \(lm_head\): values up to 1e\+06 do not fit .*float16"):
        hf.save(decoder, source.parent / "out", like=source)
    assert not (source.parent / "out").exists() and not (source.parent / ".out.partial").exists()


def test_bias_bits(copy):
    """O08: biases near 7 that bf16 cannot tell apart survive load in bf16, save, and loading again."""
    k3 = copy("kimi_k3_tiny")
    k3.text |= {"num_experts": 4}
    for name in [name for name in k3.tensors if ".experts.4." in name or ".experts.5." in name]:
        del k3.tensors[name]
    for name in [name for name in k3.tensors if ".gate." in name]:
        k3.tensors[name] = np.ascontiguousarray(k3.tensors[name][:4])
    bias = np.array([7.00, 7.01, 7.02, 7.03], np.float32)
    k3.tensors[BIAS] = bias
    source = k3.write()
    decoder = hf.load(source, dtype="bfloat16")
    values = names.values(decoder)
    assert values["embed"].dtype == values["blocks.0.head.1.mlp.w1"].dtype == jnp.bfloat16
    assert values["blocks.0.head.1.attention.q_conv"].dtype == jnp.bfloat16
    for path in ("attention_norm.weight", "attention_res.query", "attention.a_log", "mlp.router.weight"):
        assert values[f"blocks.0.head.1.{path}"].dtype == jnp.float32, path
    hf.save(decoder, source.parent / "plain")
    hf.save(decoder, source.parent / "like", like=source)
    for folder, name in (("plain", BIAS.removeprefix("language_model.")), ("like", BIAS)):
        stored = load_file(source.parent / folder / "model.safetensors")[name]
        assert stored.dtype == np.float32 and stored.tobytes() == bias.tobytes(), folder
    again = hf.load(source.parent / "plain", dtype="bfloat16")
    assert_same_arrays(again, decoder)
    assert again.router_bias()[1].tobytes() == bias.tobytes()  # layer 3, the second of four with experts
    scores = jnp.array([[0.500, 0.495, 0.470, 0.465]])
    routing = router.route(scores, again.router_bias()[1], again.config.moe)
    assert routing.experts.tolist() == [[1, 0]]
    np.testing.assert_allclose(routing.weights, [[0.49748744, 0.50251256]], rtol=1e-6)
    rounded = router.route(scores, jnp.asarray(bias).astype(jnp.bfloat16).astype(jnp.float32), again.config.moe)
    assert set(rounded.experts[0].tolist()) == {0, 2}  # what the fault would have chosen


@pytest.mark.parametrize("shape", [(1, 1, 2, 1), (128,)], ids=["rank 4", "padded"])
def test_forms_of_a_log(copy, shape):
    """A_log as Kimi Linear and as K3 store it is the same vector, and goes back into the same form."""
    k3 = copy("kimi_k3_tiny")
    plain = {name: tensor for name, tensor in k3.tensors.items() if name.endswith("A_log")}
    for name, tensor in plain.items():
        k3.tensors[name] = np.pad(tensor, (0, math.prod(shape) - 2)).reshape(shape)
    source, out = k3.write(), k3.path.parent / "out"
    decoder = hf.load(source)
    assert_same_arrays(decoder, hf.load(FOLDER / "kimi_k3_tiny"))
    hf.save(decoder, out, like=source)
    assert_same_files(source, out)


def test_where_it_writes(copy, tmp_path):
    """An empty folder is filled; a folder that holds anything is not touched; a killed run's rest is cleared."""
    k3 = copy("kimi_k3_tiny")
    decoder = hf.load(k3.path)
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        hf.save(decoder, k3.path, like=k3.path)
    assert_same_files(k3.path, FOLDER / "kimi_k3_tiny")
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "rest").write_text("")
    hf.save(decoder, str(tmp_path / "out"), like=str(k3.path))
    assert_same_files(tmp_path / "out", k3.path)
    k3.text["rms_norm_eps"] = 1e-6
    with pytest.raises(ConfigError, match=r"of the same model: model\.norm_eps is 1e-05, there 1e-06"):
        hf.save(decoder, tmp_path / "other", like=k3.write_config())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kimi_k3_tiny", "out"]
    unequal = random_decoder(sizes.SMALL)
    with pytest.raises(ConfigError, match=r"model\.kda\.value_dim = 12"):
        hf.save(unequal, tmp_path / "unequal")
    assert not (tmp_path / "unequal").exists()
