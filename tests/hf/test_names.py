"""The name table: every kind of tensor at explicit indices, places of stacked layers, K3's published counts, O18."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import sizes
from flax import nnx
from golden_files import FOLDER
from safetensors.numpy import load_file

from k3jax import config, hf
from k3jax.hf import names
from k3jax.model.common import gated
from k3jax.model.decoder import Decoder

# Our path and index; published name (behind model.layers. if it begins with a number) and index. Heads have width 16
# in both files; every index pair is asymmetric.
K3 = [
    ("embed", (5, 3), "model.embed_tokens.weight", (5, 3)),
    ("lm_head", (5, 3), "lm_head.weight", (3, 5)),
    ("final.norm.weight", (7,), "model.norm.weight", (7,)),
    ("final.res.norm.weight", (7,), "model.output_attn_res_norm.weight", (7,)),
    ("final.res.query", (7,), "model.output_attn_res_proj.weight", (0, 7)),
    ("blocks.0.head.0.attention_norm.weight", (3,), "0.input_layernorm.weight", (3,)),
    ("blocks.0.head.0.mlp_norm.weight", (3,), "0.post_attention_layernorm.weight", (3,)),
    ("blocks.0.head.1.attention_res.norm.weight", (3,), "1.self_attention_res_norm.weight", (3,)),
    ("blocks.0.head.1.attention_res.query", (3,), "1.self_attention_res_proj.weight", (0, 3)),
    ("blocks.0.head.1.mlp_res.norm.weight", (3,), "1.mlp_res_norm.weight", (3,)),
    ("blocks.0.head.1.mlp_res.query", (3,), "1.mlp_res_proj.weight", (0, 3)),
    ("blocks.0.head.0.mlp.w1", (3, 40), "0.mlp.gate_proj.weight", (40, 3)),
    ("blocks.0.head.0.mlp.w3", (3, 40), "0.mlp.up_proj.weight", (40, 3)),
    ("blocks.0.head.0.mlp.w2", (40, 3), "0.mlp.down_proj.weight", (3, 40)),
    ("blocks.0.head.1.attention.q", (3, 1, 4), "1.self_attn.q_proj.weight", (20, 3)),
    ("blocks.0.head.1.attention.k", (3, 1, 4), "1.self_attn.k_proj.weight", (20, 3)),
    ("blocks.0.head.1.attention.v", (3, 1, 4), "1.self_attn.v_proj.weight", (20, 3)),
    ("blocks.0.head.1.attention.g", (3, 1, 4), "1.self_attn.g_proj.weight", (20, 3)),
    ("blocks.0.head.1.attention.q_conv", (2, 1, 4), "1.self_attn.q_conv1d.weight", (20, 0, 2)),
    ("blocks.0.head.1.attention.k_conv", (2, 1, 4), "1.self_attn.k_conv1d.weight", (20, 0, 2)),
    ("blocks.0.head.1.attention.v_conv", (2, 1, 4), "1.self_attn.v_conv1d.weight", (20, 0, 2)),
    ("blocks.0.head.1.attention.f_a", (3, 9), "1.self_attn.f_a_proj.weight", (9, 3)),
    ("blocks.0.head.1.attention.f_b", (9, 1, 4), "1.self_attn.f_b_proj.weight", (20, 9)),
    ("blocks.0.head.1.attention.b", (3, 1), "1.self_attn.b_proj.weight", (1, 3)),
    ("blocks.0.head.1.attention.a_log", (1,), "1.self_attn.A_log", (1,)),
    ("blocks.0.head.1.attention.dt_bias", (1, 4), "1.self_attn.dt_bias", (20,)),
    ("blocks.0.head.1.attention.o_norm.weight", (4,), "1.self_attn.o_norm.weight", (4,)),
    ("blocks.0.head.1.attention.o", (1, 4, 3), "1.self_attn.o_proj.weight", (3, 20)),
    ("blocks.1.head.1.attention.q_a", (3, 9), "3.self_attn.q_a_proj.weight", (9, 3)),
    ("blocks.1.head.1.attention.q_norm.weight", (9,), "3.self_attn.q_a_layernorm.weight", (9,)),
    ("blocks.1.head.1.attention.q_b", (9, 1, 5), "3.self_attn.q_b_proj.weight", (29, 9)),
    ("blocks.1.head.1.attention.kv_a", (3, 20), "3.self_attn.kv_a_proj_with_mqa.weight", (20, 3)),
    ("blocks.1.head.1.attention.kv_norm.weight", (9,), "3.self_attn.kv_a_layernorm.weight", (9,)),
    ("blocks.1.head.1.attention.k_b", (9, 1, 5), "3.self_attn.kv_b_proj.weight", (32 + 5, 9)),
    ("blocks.1.head.1.attention.v_b", (9, 1, 5), "3.self_attn.kv_b_proj.weight", (32 + 16 + 5, 9)),
    ("blocks.1.head.1.attention.v_b", (9, 0, 5), "3.self_attn.kv_b_proj.weight", (16 + 5, 9)),
    ("blocks.1.head.1.attention.g", (3, 1, 4), "3.self_attn.g_proj.weight", (20, 3)),
    ("blocks.1.head.1.attention.o", (1, 4, 3), "3.self_attn.o_proj.weight", (3, 20)),
    ("blocks.2.head.0.mlp.router.weight", (3, 5), "4.block_sparse_moe.gate.weight", (5, 3)),
    ("blocks.2.head.0.mlp.router.bias", (5,), "4.block_sparse_moe.gate.e_score_correction_bias", (5,)),
    ("blocks.2.head.0.mlp.latent_down", (3, 9), "4.block_sparse_moe.routed_expert_down_proj.weight", (9, 3)),
    ("blocks.2.head.0.mlp.latent_norm.weight", (9,), "4.block_sparse_moe.routed_expert_norm.weight", (9,)),
    ("blocks.2.head.0.mlp.latent_up", (9, 3), "4.block_sparse_moe.routed_expert_up_proj.weight", (3, 9)),
    ("blocks.2.head.0.mlp.w1", (5, 3, 9), "4.block_sparse_moe.experts.5.w1.weight", (9, 3)),
    ("blocks.2.head.0.mlp.w3", (5, 3, 9), "4.block_sparse_moe.experts.5.w3.weight", (9, 3)),
    ("blocks.2.head.0.mlp.w2", (5, 9, 3), "4.block_sparse_moe.experts.5.w2.weight", (3, 9)),
    ("blocks.2.head.0.mlp.shared.w1", (3, 9), "4.block_sparse_moe.shared_experts.gate_proj.weight", (9, 3)),
    ("blocks.2.head.0.mlp.shared.w3", (3, 9), "4.block_sparse_moe.shared_experts.up_proj.weight", (9, 3)),
    ("blocks.2.head.0.mlp.shared.w2", (9, 3), "4.block_sparse_moe.shared_experts.down_proj.weight", (3, 9)),
]  # fmt: skip
LINEAR = [  # what K3 has not: the low-rank output gate, a full query projection, A_log of rank 4
    ("blocks.0.head.1.attention.g_a", (3, 9), "1.self_attn.g_a_proj.weight", (9, 3)),
    ("blocks.0.head.1.attention.g_b", (9, 1, 4), "1.self_attn.g_b_proj.weight", (20, 9)),
    ("blocks.0.head.1.attention.a_log", (1,), "1.self_attn.A_log", (0, 0, 1, 0)),
    ("blocks.0.head.3.attention.q", (3, 1, 5), "3.self_attn.q_proj.weight", (29, 3)),
    ("blocks.0.head.4.mlp.w1", (7, 3, 9), "4.block_sparse_moe.experts.7.w1.weight", (9, 3)),
]


@pytest.mark.parametrize("folder, prefix, probes", [
    ("kimi_k3_tiny", "language_model.", K3), ("kimi_linear_tiny", "", LINEAR),
], ids=["k3", "linear"])  # fmt: skip
def test_probes(folder, prefix, probes):
    """One element of every kind of tensor, found where the layout says and not at the transposed place."""
    stored = load_file(FOLDER / folder / "model.safetensors")
    arrays = names.values(hf.load(FOLDER / folder))
    for path, index, name, published in probes:
        matrix = stored[prefix + ("model.layers." if name[0].isdigit() else "") + name]
        value = matrix[published]
        assert np.asarray(arrays[path])[index] == value, (path, name)
        others = np.count_nonzero(matrix == value)
        assert others == 1 or matrix.ndim == 1 or "conv" in path, (name, others)  # only norms of 1 repeat values
    if folder == "kimi_k3_tiny":  # the probes leave out no row of the table that this model uses
        stripped = {path.split(".head.")[-1].split(".", 1)[-1] for path, *_ in probes}
        assert stripped == {path.split(".head.")[-1].split(".", 1)[-1] for path in arrays}


def test_square_experts(copy):
    """O18: all matrices of an expert are 32 x 32; HF is [out, in]. The input e_1 reaches output 5 with SiTU(1, 1)."""
    k3, stem = copy("kimi_k3_tiny"), "language_model.model.layers.1.block_sparse_moe.experts."
    for name, tensor in k3.tensors.items():
        if name.startswith(stem):
            assert tensor.shape == (32, 32)
            k3.tensors[name] = np.zeros_like(tensor)
    for name, at in (("0.w1", (0, 1)), ("0.w3", (0, 1)), ("0.w2", (5, 0))):
        k3.tensors[f"{stem}{name}.weight"][at] = 1.0
    folder = k3.write()
    decoder = hf.load(folder)
    moe, latent = decoder.blocks[0].head[1].mlp, jnp.zeros((1, 32)).at[0, 1].set(1.0)
    out = gated(decoder.config, latent @ moe.w1[...][0], latent @ moe.w3[...][0]) @ moe.w2[...][0]
    expected = np.zeros((1, 32), np.float32)
    expected[0, 5] = 0.71581783
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=0)
    assert math.isclose(4 * math.tanh(0.25) / (1 + math.exp(-1)) * 25 * math.tanh(1 / 25), 0.71581783, rel_tol=1e-8)
    hf.save(decoder, folder.parent / "out", like=folder)
    exported = load_file(folder.parent / "out" / "model.safetensors")
    assert exported.keys() == k3.tensors.keys()
    for name, tensor in k3.tensors.items():
        assert exported[name].dtype == tensor.dtype and exported[name].tobytes() == tensor.tobytes(), name


def abstract(model: config.ModelConfig) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))


def test_places_in_the_stack():
    """17 layers in blocks of 8: block 0 unrolls layers 1 to 4 (the first is dense), block 1 is two groups."""
    table = names.tensors(abstract(sizes.MESH), "language_model.")

    def place(name):
        tensor = table[f"language_model.model.layers.{name}"]
        return tensor.paths[0], tensor.index

    assert place("3.self_attn.o_proj.weight") == ("blocks.0.head.3.attention.o", ())
    assert place("4.self_attn.q_proj.weight") == ("blocks.0.groups.kda.attention.q", (0,))
    assert place("7.self_attn.kv_b_proj.weight") == ("blocks.0.groups.mla.attention.k_b", (0,))
    assert place("8.self_attn.A_log") == ("blocks.1.groups.kda.attention.a_log", (0,))
    assert place("11.input_layernorm.weight") == ("blocks.1.groups.mla.attention_norm.weight", (0,))
    assert place("13.block_sparse_moe.experts.9.w2.weight") == ("blocks.1.groups.kda.mlp.w2", (4, 9))
    assert place("15.block_sparse_moe.gate.weight") == ("blocks.1.groups.mla.mlp.router.weight", (1,))
    assert place("16.self_attn.q_a_proj.weight") == ("blocks.2.head.0.attention.q_a", ())
    # Key and value widths differ here: 8 heads of 16 and of 32 channels.
    assert table["language_model.model.layers.13.self_attn.k_conv1d.weight"].shapes == ((128, 1, 4),)
    assert table["language_model.model.layers.13.self_attn.v_conv1d.weight"].shapes == ((256, 1, 4),)
    assert table["language_model.model.layers.13.self_attn.o_proj.weight"].shapes == ((64, 256),)
    assert table["language_model.model.layers.13.self_attn.A_log"].shapes == ((8,), (1, 1, 8, 1), (128,))


def parameters(table) -> int:
    return sum(math.prod(tensor.shapes[0]) for tensor in table.values())


def test_published_counts():
    """Kimi Linear 48B: 26 layers of 256 experts, and its parameters by the formula of k3.md 1.1."""
    table = names.tensors(abstract(config.load("configs/k3.py:kimi_linear_48b").model))
    assert sum(".experts." in name for name in table) == 26 * 256 * 3
    assert parameters(table) == 49_122_681_728
    assert table["model.layers.26.self_attn.kv_b_proj.weight"].shapes == ((8_192, 512),)
    assert table["model.layers.25.self_attn.f_b_proj.weight"].shapes == ((4_096, 128),)
    assert table["model.layers.25.self_attn.A_log"].shapes[0] == (1, 1, 32, 1)
    assert table["model.layers.1.block_sparse_moe.experts.255.w2.weight"].shapes == ((2_304, 1_024),)


@pytest.mark.slow
def test_published_counts_k3():
    """K3's 2.78 T parameters, and the 497,220 keys of its index (k3.md 1.1): experts are packed in two tensors each."""
    table = names.tensors(abstract(config.load("configs/k3.py:k3_2p8t").model), "language_model.")
    experts = sum(".experts." in name for name in table)
    vision = 27 * 6 + 3 + 3  # six per layer; patch projection, positions, last norm; the projector's three
    assert (experts, len(table) + experts + vision) == (247_296, 497_220)
    assert parameters(table) == 2_779_484_476_000
    assert table["language_model.model.layers.90.self_attn.A_log"].shapes == ((96,), (1, 1, 96, 1), (128,))
