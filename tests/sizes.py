"""Model sizes of the tests. MESH is for scans, meshes and conversions: no two dimensions are equal by chance."""

import dataclasses

from k3jax import config


def model(**changes) -> config.ModelConfig:
    """The `tiny` model with changed fields; `kda`, `mla`, `moe` take dicts of changes."""
    tiny = config.load("configs/k3.py:tiny").model
    for group in ("kda", "mla", "moe"):
        if group in changes:
            changes[group] = dataclasses.replace(getattr(tiny, group), **changes[group])
    return dataclasses.replace(tiny, **changes)


MESH = model(
    layers=17, attn_res_block=8, mla_layers=(4, 8, 12, 16, 17), embed=64, mlp=96,
    kda={"heads": 8, "key_dim": 16, "value_dim": 32},
    mla={"heads": 8, "q_lora": 40, "kv_lora": 24, "qk_nope": 16, "qk_shared": 8, "value_dim": 16},
    moe={"routed_experts": 16, "top_k": 4, "latent": 48, "expert_mlp": 32},
)  # fmt: skip

# The smallest with every kind of layer: dense KDA, KDA and MLA with experts, two blocks.
SMALL = model(
    layers=3, attn_res_block=2, mla_layers=(3,), embed=24, mlp=40, vocab=264,
    kda={"heads": 2, "key_dim": 8, "value_dim": 12},
    mla={"heads": 2, "q_lora": 20, "kv_lora": 16, "qk_nope": 8, "qk_shared": 4, "value_dim": 10},
    moe={"routed_experts": 6, "top_k": 2, "latent": 18, "expert_mlp": 14},
)  # fmt: skip

# Divides over 8 devices, has a scanned group and another layer behind it, and is quick to compile.
SPLIT = model(
    layers=6, attn_res_block=5, mla_layers=(5, 6), embed=48, mlp=40,
    kda={"heads": 2, "key_dim": 8, "value_dim": 12},
    mla={"heads": 2, "q_lora": 32, "kv_lora": 24, "qk_nope": 8, "qk_shared": 4, "value_dim": 10},
    moe={"routed_experts": 6, "top_k": 2, "latent": 18, "expert_mlp": 16},
)  # fmt: skip

# SPLIT with heads and experts for eight devices.
APART = dataclasses.replace(
    SPLIT,
    kda=dataclasses.replace(SPLIT.kda, heads=8),
    mla=dataclasses.replace(SPLIT.mla, heads=8),
    moe=dataclasses.replace(SPLIT.moe, routed_experts=8, top_k=3),
)

# SMALL for meshes of up to eight devices in all: no scan, so quicker to compile than APART.
UNSCANNED = dataclasses.replace(
    SMALL,
    kda=dataclasses.replace(SMALL.kda, heads=4),
    mla=dataclasses.replace(SMALL.mla, heads=4, q_lora=24),
    moe=dataclasses.replace(SMALL.moe, routed_experts=8, top_k=3, expert_mlp=16),
)
