"""config.json both ways: the goldens' models field by field, the published sizes, and what must be refused by name."""

import copy
import dataclasses
import json

import pytest
import sizes
from golden_files import FOLDER

from k3jax import config
from k3jax.config import ConfigError, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3jax.hf.config import difference, from_hf, prefix, to_hf

K3_TINY = ModelConfig(
    vocab=80, embed=32, layers=5, dense_layers=1, mlp=48, mla_layers=(4, 5), attn_res_block=2,
    activation="situ", situ_beta=4.0, situ_linear_beta=25.0, norm_eps=1e-5, init_std=0.02,
    kda=KDAConfig(heads=2, key_dim=16, value_dim=16, output_gate="full", lower_bound=-5.0),
    mla=MLAConfig(heads=2, q_lora=20, kv_lora=16, qk_nope=16, qk_shared=8, value_dim=16, output_gate=True,
                  norm_eps=1e-6),
    moe=MoEConfig(routed_experts=6, top_k=2, shared_experts=2, latent=32, expert_mlp=32, scaling=1.0, groups=1,
                  top_groups=1, balancing="quantile", balancing_ema=0.0, sign_rate=1e-3),
)  # fmt: skip
LINEAR_TINY = ModelConfig(
    vocab=96, embed=48, layers=5, dense_layers=1, mlp=64, mla_layers=(4,), attn_res_block=None,
    activation="swiglu", situ_beta=4.0, situ_linear_beta=25.0, norm_eps=1e-5, init_std=0.02,
    kda=KDAConfig(heads=2, key_dim=16, value_dim=16, output_gate="low_rank", lower_bound=None),
    mla=MLAConfig(heads=2, q_lora=None, kv_lora=16, qk_nope=16, qk_shared=8, value_dim=16, output_gate=False,
                  norm_eps=1e-6),
    moe=MoEConfig(routed_experts=8, top_k=2, shared_experts=1, latent=None, expert_mlp=24, scaling=2.446, groups=1,
                  top_groups=1, balancing="sign", balancing_ema=0.0, sign_rate=1e-3),
)  # fmt: skip

# Kimi K3 as published, apart from its quantisation, tokens and vision tower (k3.md section 1).
PUBLISHED_K3 = {
    "model_type": "kimi_k3", "tie_word_embeddings": False, "vision_config": {"patch_size": 14},
    "media_placeholder_token_id": 163605, "architectures": ["KimiK3ForConditionalGeneration"],
    "text_config": {
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 33792,
        "num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96, "hidden_act": "situ",
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_intermediate_size": 3072, "num_experts": 896,
        "num_experts_per_token": 16, "num_shared_experts": 2, "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True, "routed_scaling_factor": 1.0, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True,
        "topk_method": "noaux_tc", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True,
        "attn_res_block_size": 12, "num_nextn_predict_layers": 0, "max_position_embeddings": 1048576,
        "tie_word_embeddings": False, "eos_token_id": [163586],
        "linear_attn_config": {
            "kda_layers": [n for n in range(1, 92) if n % 4], "full_attn_layers": [*range(4, 93, 4), 93],
            "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
    },
}  # fmt: skip


def read(folder: str, file: str = "config.json") -> dict:
    return json.loads((FOLDER / folder / file).read_text())


def test_golden_models():
    """Every field, from the wrapper and from both styles of the text model."""
    assert from_hf(read("kimi_k3_tiny")) == K3_TINY
    assert from_hf(read("kimi_linear_tiny")) == LINEAR_TINY
    assert from_hf(read("kimi_linear_tiny", "config_moonshot.json")) == LINEAR_TINY
    assert prefix(read("kimi_k3_tiny")) == "language_model." and prefix(read("kimi_linear_tiny")) == ""


def test_published_k3():
    assert from_hf(PUBLISHED_K3) == config.load("configs/k3.py:k3_2p8t").model


@pytest.mark.parametrize("size", ["tiny", "colab", "proxy_1b", "kimi_linear_48b", "k3_2p8t"])
def test_written_and_read_again(size):
    model = config.load(f"configs/k3.py:{size}").model
    written = json.loads(json.dumps(to_hf(model, "bfloat16")))
    assert from_hf(written) == model
    assert written["dtype"] == "bfloat16" and written["num_hidden_layers"] == model.layers
    for key in ("attn_res_block_size", "routed_expert_hidden_size", "activation_situ_beta", "mla_use_output_gate"):
        assert (key in written) == (size != "kimi_linear_48b"), key


def test_grouped_routing():
    """Groups are honoured, and quantile balancing is not chosen where it does not apply."""
    values = read("kimi_k3_tiny")
    values["text_config"] |= {"num_expert_group": 3, "topk_group": 2}
    model = from_hf(values).moe
    assert (model.groups, model.top_groups, model.balancing) == (3, 2, "sign")
    values["text_config"]["use_grouped_topk"] = False
    with pytest.raises(ConfigError, match=r"text_config\.use_grouped_topk = False: contradicts num_expert_group = 3"):
        from_hf(values)


REFUSED = [
    ("attention_bias", True), ("attention_dropout", 0.1), ("tie_word_embeddings", True), ("moe_layer_freq", 2),
    ("mla_use_nope", False), ("rope_scaling", {"type": "yarn", "factor": 4.0}), ("num_nextn_predict_layers", 1),
    ("hidden_act", "gelu"), ("moe_renormalize", False), ("moe_router_activation_func", "softmax"),
    ("topk_method", "greedy"), ("num_key_value_heads", 1), ("latent_moe_use_norm", False), ("model_type", "llama"),
    ("qk_head_dim", 32), ("num_experts", "6"), ("num_experts", True), ("rms_norm_eps", None),
    ("first_k_dense_replace", 1.0), ("activation_situ_beta", None), ("router_aux_loss_coef", 0.01),
]  # fmt: skip


@pytest.mark.parametrize("key, value", REFUSED, ids=lambda v: str(v)[:20])
def test_refused_by_name(key, value):
    values = read("kimi_k3_tiny")
    values["text_config"][key] = value
    with pytest.raises(ConfigError) as raised:
        from_hf(values, "some/config.json")
    message = str(raised.value)
    assert message.startswith(f"some/config.json: text_config.{key} = {value!r}: ") and "\n" not in message


@pytest.mark.parametrize("key", ["kv_lora_rank", "rms_norm_eps", "mla_use_nope", "num_experts", "linear_attn_config"])
def test_missing_key(key):
    values = read("kimi_k3_tiny")
    del values["text_config"][key]
    with pytest.raises(ConfigError, match=rf"text_config\.{key}: is missing"):
        from_hf(values)


def test_refused_elsewhere():
    """Inside the lists, at the wrapper, in transformers' style; and a value that only the whole model contradicts."""

    def refused(values, message):
        with pytest.raises(ConfigError, match=message):
            from_hf(values)

    def k3(where, **changes):
        values = copy.deepcopy(read("kimi_k3_tiny"))
        ({"": values} | {"text": values["text_config"], "kda": values["text_config"]["linear_attn_config"]})[
            where
        ].update(changes)
        return values

    refused(k3("kda", short_conv_kernel_size=3), r"linear_attn_config\.short_conv_kernel_size = 3: not supported")
    refused(k3("kda", full_attn_layers=[4]), r"linear_attn_config\.full_attn_layers = \[4\]: .* each layer of 1 \.\. 5")
    refused(k3("kda", kda_layers=[1, 2, 3, 4]), "each layer of 1 .. 5 once")
    refused(k3("kda", use_bias=False), r"linear_attn_config\.use_bias = False: neither honoured nor known")
    refused(k3("", tie_word_embeddings=True), "tie_word_embeddings = True: not supported")
    refused(k3("", use_mtp=1), "config.json: use_mtp = 1: neither honoured")
    refused(k3("", quantization_config={"bits": 4}), "quantization_config: packed MXFP4 .* not supported yet")
    refused(k3("", model_type="kimi_k4"), "model_type = 'kimi_k4'")
    refused(k3("text", num_experts_per_token=7), r"config.json: model\.moe\.top_k must be at most routed_experts = 6")
    refused(k3("kda", gate_lower_bound=5), r"config.json: model\.kda\.lower_bound must be .* got 5")
    refused(read("kimi_k3_tiny_mxfp4"), r"text_config\.quantization_config: packed MXFP4 .* not supported yet")

    def linear(**changes):
        return read("kimi_linear_tiny") | changes

    refused(linear(layer_types=["linear_attention"] * 4), "layer_types = .*for 5 layers")
    refused(linear(layer_types=["linear_attention"] * 4 + ["sliding_attention"]), "layer_types = ")
    refused(linear(mlp_layer_types=["sparse", "dense", "sparse", "sparse", "sparse"]), "mlp_layer_types = ")
    refused(linear(first_k_dense_replace=2), "first_k_dense_replace = 2: .* mlp_layer_types")
    refused(linear(linear_attn_config={}), "linear_attn_config = {}: neither honoured")
    refused(linear(qk_head_dim=16), "qk_head_dim = 16")


def test_what_the_format_cannot_say():
    for changes, message in (
        ({"kda": {"value_dim": 64}}, "model.kda.value_dim = 64"),
        ({"mla": {"norm_eps": 1e-5}}, "model.mla.norm_eps = 1e-05"),
    ):
        with pytest.raises(ConfigError, match=message):
            to_hf(sizes.model(**changes), "float32")


def test_difference():
    """What computes something else is named; what only training reads is not a difference."""
    moe = dataclasses.replace(K3_TINY.moe, balancing="none", sign_rate=1.0)
    assert difference(K3_TINY, dataclasses.replace(K3_TINY, moe=moe, init_std=1.0)) is None
    assert difference(LINEAR_TINY, dataclasses.replace(LINEAR_TINY, situ_beta=1.0)) is None
    assert difference(K3_TINY, dataclasses.replace(K3_TINY, situ_beta=1.0)) == "model.situ_beta is 4.0, there 1.0"
    kda = dataclasses.replace(K3_TINY.kda, lower_bound=None)
    assert difference(K3_TINY, dataclasses.replace(K3_TINY, kda=kda)) == "model.kda.lower_bound is -5.0, there None"
