"""Hugging Face's config.json <-> ModelConfig.

Two styles are read: Moonshot's (`linear_attn_config` with layer lists from 1, `first_k_dense_replace`) and that of
transformers 5 (`layer_types`, `mlp_layer_types`, `linear_*`), alone or as the `text_config` of the K3 wrapper.
Moonshot's is written. Invariant: every key of a config is honoured, or fixed to the one value this model has, or named
in HARMLESS with the reason; anything else is a ConfigError with key and value, because a key that is skipped in
silence is another model under the same name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from k3jax.config import ConfigError, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3jax.model.kda import CONV_WIDTH

WRAPPER, TEXT = "kimi_k3", "kimi_linear"
LOW_RANK_EPS = 1e-6  # of the q_a and kv_a norms: a class default in the published code, no key sets it (k3.md 1)
ACTIVATIONS = {"situ": "situ", "silu": "swiglu"}
SITU = {"beta": 4.0, "linear_beta": 25.0}  # where the config has another activation and nothing reads them

# Key -> (the only value this model has, what another one would mean).
FIXED = {
    "model_type": (TEXT, "only Kimi K3 and Kimi Linear are read"),
    "attention_bias": (False, "no linear layer has a bias"),
    "attention_dropout": (0.0, "there is no dropout"),
    "tie_word_embeddings": (False, "embedding and head are two matrices"),
    "mla_use_nope": (True, "nothing is rotated"),
    "rope_scaling": (None, "nothing is rotated"),
    "rope_parameters": (None, "nothing is rotated"),
    "moe_layer_freq": (1, "every layer after the dense ones has experts"),
    "moe_renormalize": (True, "mixing weights are normalised"),
    "moe_router_activation_func": ("sigmoid", "router scores are sigmoids"),
    "topk_method": ("noaux_tc", "experts are chosen by score plus bias"),
    "num_nextn_predict_layers": (0, "there are no multi-token prediction layers"),
    "pretraining_tp": (1, "matrices are not cut"),
}
_IDS = "of the tokenizer, no weight depends on it"
_LENGTH = "a promise about use: without position encoding no weight depends on a length"
_NOISE = "written into every config by transformers, not a property of this model"
HARMLESS = {
    "architectures": "model_type decides",
    "auto_map": "names of Python classes beside the weights",
    "_name_or_path": "where a copy came from",
    "transformers_version": "who wrote the file",
    "dtype": "the tensors carry their types",
    "torch_dtype": "the tensors carry their types",
    "use_cache": "generation only",
    "output_router_logits": "what a forward pass returns, not what it computes",
    "head_dim": "MLA has a key for each of its widths; this one is read by nothing",
    "rope_theta": "base of a rotation that mla_use_nope turns off",
    "max_position_embeddings": _LENGTH,
    "model_max_length": _LENGTH,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"), _IDS),
    **dict.fromkeys(("id2label", "label2id", "problem_type", "return_dict", "output_hidden_states"), _NOISE),
    **dict.fromkeys(("output_attentions", "chunk_size_feed_forward", "is_encoder_decoder"), _NOISE),
}
HARMLESS_IN_WRAPPER = {
    **HARMLESS,
    "vision_config": "the vision tower is carried along unread",
    "ignore_index": "the label that the loss leaves out",
}
_REQUIRED = object()


class _Keys:
    """A config's keys as they are read; `close` refuses those that nobody asked for."""

    def __init__(self, values: Any, file: str, prefix: str = ""):
        self.file, self.prefix = file, prefix
        if not isinstance(values, Mapping):
            raise ConfigError(f"{file}: {prefix.removesuffix('.') or 'the config'} must hold keys, got {values!r}")
        self.values, self.unread = values, set(values)

    def refuse(self, key: str, why: str) -> ConfigError:
        shown = f" = {self.values[key]!r}" if key in self.values else ""
        return ConfigError(f"{self.file}: {self.prefix}{key}{shown}: {why}")

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of a key as `kind`; an int serves as a float, null only where the default is None."""
        if key not in self.values:
            if default is _REQUIRED:
                raise self.refuse(key, "is missing")
            return default
        self.unread.discard(key)
        value = self.values[key]
        if value is None and default is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refuse(key, f"must be of type {kind.__name__}")
        return value

    def equal(self, key: str, wanted: Any, why: str) -> None:
        """Refuses a present key that has another value."""
        if key in self.values:
            self.unread.discard(key)
            value = self.values[key]
            if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
                raise self.refuse(key, f"not supported, must be {wanted!r}: {why}")

    def close(self, harmless: Mapping[str, str] = {}) -> None:
        unknown = sorted(self.unread - harmless.keys())
        if unknown:
            raise self.refuse(unknown[0], "neither honoured nor known to be harmless")


def _not_quantized(keys: _Keys) -> None:
    if keys.get("quantization_config", dict, None) is not None:
        raise ConfigError(
            f"{keys.file}: {keys.prefix}quantization_config: packed MXFP4 (weight_packed, weight_scale) and other"
            " quantized weights are not supported yet"
        )


def prefix(values: Mapping[str, Any]) -> str:
    """What the tensor names of this config's text model begin with."""
    return "language_model." if values.get("model_type") == WRAPPER else ""


def from_hf(values: Mapping[str, Any], file: str = "config.json") -> ModelConfig:
    """The ModelConfig of a read config.json; `file` names it in errors.

    What only training needs is not in such a file: the balancing rule is `quantile` for SiTU models where it applies,
    else `sign`, with this repository's defaults. Raises ConfigError naming key and value.
    """
    outer = _Keys(values, file)
    if values.get("model_type") != WRAPPER:
        return _text(outer)
    outer.unread.discard("model_type")
    _not_quantized(outer)
    outer.equal("tie_word_embeddings", *FIXED["tie_word_embeddings"])
    text = outer.get("text_config", dict)
    outer.close(HARMLESS_IN_WRAPPER)
    return _text(_Keys(text, file, "text_config."))


def _text(keys: _Keys) -> ModelConfig:
    keys.get("model_type", str)
    for key, (wanted, why) in FIXED.items():
        keys.equal(key, wanted, why)
    _not_quantized(keys)
    layers = keys.get("num_hidden_layers", int)
    heads = keys.get("num_attention_heads", int)
    act = keys.get("hidden_act", str)
    if act not in ACTIVATIONS:
        raise keys.refuse("hidden_act", f"not known, there are: {', '.join(ACTIVATIONS)}")
    situ = act == "situ"
    beta = keys.get("activation_situ_beta", float, _REQUIRED if situ else None)
    linear_beta = keys.get("activation_situ_linear_beta", float, None)
    if situ and "activation_situ_linear_beta" not in keys.values:
        raise keys.refuse("activation_situ_linear_beta", "is missing")
    kda, mla_layers = _linear_attention(keys, layers)
    dense_layers = _dense_layers(keys, layers)
    keys.equal("num_key_value_heads", heads, "every head has its own key and value")
    nope, shared = keys.get("qk_nope_head_dim", int), keys.get("qk_rope_head_dim", int)
    keys.equal("qk_head_dim", nope + shared, "qk_nope_head_dim + qk_rope_head_dim")
    moe = _experts(keys, situ)
    try:
        config = ModelConfig(
            vocab=keys.get("vocab_size", int),
            embed=keys.get("hidden_size", int),
            layers=layers,
            dense_layers=dense_layers,
            mlp=keys.get("intermediate_size", int),
            mla_layers=mla_layers,
            attn_res_block=keys.get("attn_res_block_size", int, None),
            activation=ACTIVATIONS[act],
            situ_beta=beta if situ else SITU["beta"],
            situ_linear_beta=linear_beta if situ else SITU["linear_beta"],
            norm_eps=keys.get("rms_norm_eps", float),
            init_std=keys.get("initializer_range", float, 0.02),
            kda=KDAConfig(**kda),
            mla=MLAConfig(
                heads=heads,
                q_lora=keys.get("q_lora_rank", int, None),
                kv_lora=keys.get("kv_lora_rank", int),
                qk_nope=nope,
                qk_shared=shared,
                value_dim=keys.get("v_head_dim", int),
                output_gate=keys.get("mla_use_output_gate", bool, False),
                norm_eps=LOW_RANK_EPS,
            ),
            moe=MoEConfig(**moe),
        )
    except ConfigError as error:
        raise error if str(error).startswith(keys.file) else ConfigError(f"{keys.file}: {error}") from None
    keys.close(HARMLESS)
    return config


def _linear_attention(keys: _Keys, layers: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Fields of KDAConfig and the MLA layers, from either style."""
    if "layer_types" in keys.values:
        keys.equal("linear_conv_kernel_dim", CONV_WIDTH, "width of the short convolution")
        types = keys.get("layer_types", list)
        if len(types) != layers or not set(types) <= {"linear_attention", "full_attention"}:
            raise keys.refuse("layer_types", f"must name linear_attention or full_attention for {layers} layers")
        mla = tuple(at + 1 for at, kind in enumerate(types) if kind == "full_attention")
        heads, dim, full_rank, bound = keys.get("linear_num_heads", int), keys.get("linear_head_dim", int), False, None
    else:
        if "mla_use_nope" not in keys.values:  # Moonshot's class rotates unless this key says otherwise
            raise keys.refuse("mla_use_nope", "is missing")
        inner = _Keys(keys.get("linear_attn_config", dict), keys.file, f"{keys.prefix}linear_attn_config.")
        inner.equal("short_conv_kernel_size", CONV_WIDTH, "width of the short convolution")
        mla, kda = tuple(inner.get("full_attn_layers", list)), inner.get("kda_layers", list)
        if sorted((*mla, *kda)) != list(range(1, layers + 1)):
            why = f"kda_layers and full_attn_layers must name each layer of 1 .. {layers} once"
            raise inner.refuse("full_attn_layers", why)
        heads, dim = inner.get("num_heads", int), inner.get("head_dim", int)
        full_rank, bound = inner.get("use_full_rank_gate", bool, False), inner.get("gate_lower_bound", float, None)
        inner.close()
    gate = "full" if full_rank else "low_rank"
    return {"heads": heads, "key_dim": dim, "value_dim": dim, "output_gate": gate, "lower_bound": bound}, mla


def _dense_layers(keys: _Keys, layers: int) -> int:
    if "mlp_layer_types" not in keys.values:
        return keys.get("first_k_dense_replace", int)
    types = keys.get("mlp_layer_types", list)
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise keys.refuse("mlp_layer_types", f"must be some dense layers, then sparse ones, {layers} in all")
    keys.equal("first_k_dense_replace", dense, "what mlp_layer_types says")
    return dense


def _experts(keys: _Keys, situ: bool) -> dict[str, Any]:
    experts, top_k = keys.get("num_experts", int), keys.get("num_experts_per_token", int)
    groups, top_groups = keys.get("num_expert_group", int, 1), keys.get("topk_group", int, 1)
    if not keys.get("use_grouped_topk", bool, True) and groups > 1:
        raise keys.refuse("use_grouped_topk", f"contradicts num_expert_group = {groups}")
    latent = keys.get("routed_expert_hidden_size", int, None)
    if not keys.get("latent_moe_use_norm", bool, latent is None) and latent is not None:
        raise keys.refuse("latent_moe_use_norm", "latent experts have a norm: must be true")
    return {
        "routed_experts": experts,
        "top_k": top_k,
        "shared_experts": keys.get("num_shared_experts", int, 0),
        "latent": latent,
        "expert_mlp": keys.get("moe_intermediate_size", int),
        "scaling": keys.get("routed_scaling_factor", float, 1.0),
        "groups": groups,
        "top_groups": top_groups,
        "balancing": "quantile" if situ and groups == 1 and top_k < experts else "sign",
        "balancing_ema": 0.0,
        "sign_rate": 1e-3,
    }


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """A text-only config.json in Moonshot's style; K3's keys only where the model uses them. dtype as torch spells it.

    Raises ConfigError for what the format has no key for.
    """
    c, kda, mla, moe = config, config.kda, config.mla, config.moe
    if kda.key_dim != kda.value_dim:
        raise ConfigError(f"model.kda.value_dim = {kda.value_dim}: a config.json has one KDA width, {kda.key_dim}")
    if mla.norm_eps != LOW_RANK_EPS:
        raise ConfigError(
            f"model.mla.norm_eps = {mla.norm_eps}: a config.json has no key for it, {LOW_RANK_EPS} is meant"
        )
    linear = {
        "kda_layers": list(c.kda_layers),
        "full_attn_layers": list(c.mla_layers),
        "num_heads": kda.heads,
        "head_dim": kda.key_dim,
        "short_conv_kernel_size": CONV_WIDTH,
    }
    if kda.output_gate == "full":
        linear["use_full_rank_gate"] = True
    if kda.lower_bound is not None:
        linear["gate_lower_bound"] = kda.lower_bound
    used = {}
    if mla.output_gate:
        used["mla_use_output_gate"] = True
    if c.attn_res_block:
        used["attn_res_block_size"] = c.attn_res_block
    if moe.latent:
        used |= {"routed_expert_hidden_size": moe.latent, "latent_moe_use_norm": True}
    if c.activation == "situ":
        used |= {"activation_situ_beta": c.situ_beta, "activation_situ_linear_beta": c.situ_linear_beta}
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": TEXT,
        "dtype": dtype,
        "vocab_size": c.vocab,
        "hidden_size": c.embed,
        "intermediate_size": c.mlp,
        "num_hidden_layers": c.layers,
        "num_attention_heads": mla.heads,
        "num_key_value_heads": mla.heads,
        "hidden_act": next(act for act, ours in ACTIVATIONS.items() if ours == c.activation),
        "rms_norm_eps": c.norm_eps,
        "initializer_range": c.init_std,
        "tie_word_embeddings": False,
        # Else transformers takes its own defaults, which may lie outside this vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "linear_attn_config": linear,
        "q_lora_rank": mla.q_lora,
        "kv_lora_rank": mla.kv_lora,
        "qk_nope_head_dim": mla.qk_nope,
        "qk_rope_head_dim": mla.qk_shared,
        "v_head_dim": mla.value_dim,
        "mla_use_nope": True,
        "first_k_dense_replace": c.dense_layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": moe.expert_mlp,
        "num_experts": moe.routed_experts,
        "num_experts_per_token": moe.top_k,
        "num_shared_experts": moe.shared_experts,
        "routed_scaling_factor": moe.scaling,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": moe.groups,
        "topk_group": moe.top_groups,
        "use_grouped_topk": True,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        **used,
    }


def difference(ours: ModelConfig, published: ModelConfig) -> str | None:
    """The first field, with both values, in which two models compute something else, or None.

    Fields that only training reads are not compared.
    """
    training = {"balancing", "balancing_ema", "sign_rate", "init_std"}
    unread = training if ours.activation == "situ" else training | {"situ_beta", "situ_linear_beta"}

    def flat(config: Any, prefix: str) -> dict[str, Any]:
        fields = {}
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            nested = dataclasses.is_dataclass(value)
            fields |= flat(value, f"{prefix}{field.name}.") if nested else {prefix + field.name: value}
        return fields

    theirs = flat(published, "model.")
    for name, value in flat(ours, "model.").items():
        if name.split(".")[-1] not in unread and value != theirs[name]:
            return f"{name} is {value!r}, there {theirs[name]!r}"
    return None
