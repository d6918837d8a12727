"""KDA, MLA and whole decoder layers against the published modules: outputs and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
import torch_layout
from flax import nnx
from golden_files import assert_close, golden, manifest

from k3jax.model.attn_res import source
from k3jax.model.decoder import Layer
from k3jax.model.kda import KDA
from k3jax.model.mla import MLA


def gradients(module, call, arrays, *inputs):
    """(d_state, d_inputs), outputs of L = sum(call(module, *inputs) * do)."""
    graphdef, state = nnx.split(module)

    @jax.jit
    def run(state, inputs, do):
        def loss(state, inputs):
            out = call(nnx.merge(graphdef, state), *inputs)
            return jnp.sum(out * do), out

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(state, inputs)

    return run(state, inputs, arrays["do"])


@pytest.mark.parametrize("name", ["kda_layer_k3", "kda_layer_linear48b", "kda_layer_mask"])
def test_kda(name):
    arrays, told = golden(name), manifest()[name]["conventions"]
    gate = "full" if told["full_rank_gate"] else "low_rank"
    heads, dim = told["heads"], told["head_dim"]
    kda = {
        "heads": heads,
        "key_dim": dim,
        "value_dim": dim,
        "output_gate": gate,
        "lower_bound": told["gate_lower_bound"],
    }
    layer = torch_layout.load(KDA(sizes.model(embed=32, kda=kda), nnx.Rngs(0)), torch_layout.KDA, arrays)
    # The mask marks padding on the left: segment 0.
    segments = jnp.asarray(arrays["attention_mask"], jnp.int32) if "attention_mask" in arrays else None
    (d_state, (d_x,)), out = gradients(layer, lambda layer, x: layer(x, segments)[0], arrays, arrays["x"])
    assert_close(out, arrays["out"], 1e-5, "out")
    assert_close(d_x, arrays["d_x"], 5e-5, "d_x")
    torch_layout.check_gradients(d_state, torch_layout.KDA, arrays, 5e-5)


@pytest.mark.parametrize("name", ["mla_gated", "mla_plain_noqlora"])
def test_mla(name):
    arrays, told = golden(name), manifest()[name]["conventions"]
    mla = {
        "heads": told["heads"],
        "q_lora": told["q_lora_rank"],
        "kv_lora": told["kv_lora_rank"],
        "qk_nope": told["qk_nope_head_dim"],
        "qk_shared": told["qk_rope_head_dim"],
        "value_dim": told["v_head_dim"],
        "output_gate": "w.g_proj.weight" in arrays,
    }
    layer = torch_layout.load(MLA(sizes.model(embed=32, mla=mla), nnx.Rngs(0)), torch_layout.MLA, arrays)
    (d_state, (d_x,)), out = gradients(layer, lambda layer, x: layer(x, None)[0], arrays, arrays["x"])
    assert_close(out, arrays["out"], 1e-5, "out")
    assert_close(d_x, arrays["d_x"], 5e-5, "d_x")
    torch_layout.check_gradients(d_state, torch_layout.MLA, arrays, 5e-5)


@pytest.mark.parametrize("name", ["layer_kda_block_start", "layer_mla_moe_mid"])
def test_layer(name):
    """A whole decoder layer, at the start of a block (the incoming sum becomes a block sum) and inside one."""
    arrays, mla = golden(name), name == "layer_mla_moe_mid"
    config = sizes.model(
        embed=32,
        kda={"heads": 2, "key_dim": 16, "value_dim": 16},
        mla={"heads": 2, "q_lora": 24, "kv_lora": 16, "qk_nope": 16, "qk_shared": 8, "value_dim": 16},
        moe={"routed_experts": 8, "top_k": 3, "shared_experts": 1, "latent": 16, "expert_mlp": 24, "scaling": 2.5},
    )
    table = torch_layout.layer(torch_layout.MLA if mla else torch_layout.KDA, torch_layout.MOE, "block_sparse_moe")
    layer = torch_layout.load(Layer(config, mla=mla, dense=False, rngs=nnx.Rngs(0)), table, arrays)
    bias = layer.mlp.router.bias[...]

    def call(layer, x, bank):
        sums = tuple(source(bank[:, i].reshape(x.shape), config.norm_eps) for i in range(bank.shape[1]))
        partial = x
        if not mla:
            sums, partial = (*sums, source(x, config.norm_eps)), jnp.zeros_like(x)
        partial, _ = layer.attention_part(sums, partial, not mla, None)
        return layer.mlp_part(sums, partial, bias, None)[0]

    (d_state, (d_x, d_bank)), out = gradients(layer, call, arrays, arrays["x"], arrays["block_residual"])
    np.testing.assert_array_equal(arrays["block_residual_out"][:, : d_bank.shape[1]], arrays["block_residual"])
    assert_close(out, arrays["out"], 1e-5, "out")
    assert_close(d_x, arrays["d_x"], 5e-5, "d_x")
    assert_close(d_bank, arrays["d_block_residual"], 5e-5, "d_block_residual")
    torch_layout.check_gradients(d_state, table, arrays, 5e-5)
