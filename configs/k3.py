"""Five sizes of one model, from a laptop to the published K3.

    python -m k3jax.train --config=configs/k3.py:tiny --workdir=runs/tiny

| name            | parameters (active)   | meant for                                                             |
|-----------------|-----------------------|-----------------------------------------------------------------------|
| tiny            | 2.6 M (1.5 M)         | two CPU cores: 1,024,000 bytes of Python source in 5 minutes          |
| colab           | 197 M (59 M)          | one small GPU                                                         |
| proxy_1b        | 1.22 B (0.40 B)       | one node; ablations                                                   |
| kimi_linear_48b | 49.1 B (3.1 B)        | the published Kimi-Linear-48B-A3B                                     |
| k3_2p8t         | 2.78 T (104 B)        | the published Kimi K3, text part                                      |

`tiny` ends at a held-out loss of about 1.38 nats per byte; trigram counts of the same files reach 1.89.
Parameters count everything; active ones leave out the embedding and the experts that a token does not visit.
"""

from ml_collections import ConfigDict

from . import base

SIZES = ("tiny", "colab", "proxy_1b", "kimi_linear_48b", "k3_2p8t")


def get_config(name: str = "tiny") -> ConfigDict:
    """The run config of one size."""
    if name not in SIZES:
        raise ValueError(f"no size {name!r}; there are: {', '.join(SIZES)}")
    config = base.get_config()
    config.name = name
    globals()[f"_{name}"](config)
    return config


def _tiny(config: ConfigDict) -> None:
    """The defaults of base.py: 500 steps of 2,048 bytes with every K3 feature on."""


def _colab(config: ConfigDict) -> None:
    config.model.update(vocab=32_768, embed=512, layers=12, mlp=1_536, mla_layers=(4, 8, 12))
    config.model.kda.update(heads=8, key_dim=64, value_dim=64)
    config.model.mla.update(heads=8, q_lora=192, kv_lora=128, qk_nope=64, qk_shared=32, value_dim=64)
    config.model.moe.update(routed_experts=64, top_k=8, latent=256, expert_mlp=256)
    config.data.update(seq_len=1_024, batch_rows=32)
    config.optim.update(learning_rate=4e-3, warmup_steps=100)
    config.train.update(steps=10_000, dtype="bfloat16")
    config.eval.update(every=500)
    config.checkpoint.every = 1_000
    config.memory.policy = "recompute_all"


def _proxy_1b(config: ConfigDict) -> None:
    config.model.update(vocab=163_840, embed=1_024, layers=16, mlp=4_096, mla_layers=(4, 8, 12, 16))
    config.model.kda.update(heads=16, key_dim=64, value_dim=64)
    config.model.mla.update(heads=16, q_lora=384, kv_lora=256, qk_nope=64, qk_shared=32, value_dim=64)
    config.model.moe.update(routed_experts=64, top_k=8, latent=512, expert_mlp=512)
    config.data.update(seq_len=4_096, batch_rows=128)
    config.optim.update(learning_rate=2e-3, warmup_steps=200)
    config.train.update(steps=20_000, dtype="bfloat16")
    config.eval.update(every=1_000)
    config.checkpoint.every = 1_000
    config.memory.policy = "recompute_all"


def _kimi_linear_48b(config: ConfigDict) -> None:
    config.model.update(vocab=163_840, embed=2_304, layers=27, mlp=9_216, mla_layers=(4, 8, 12, 16, 20, 24, 27))
    config.model.update(attn_res_block=None, activation="swiglu")
    config.model.kda.update(heads=32, key_dim=128, value_dim=128, output_gate="low_rank", lower_bound=None)
    config.model.mla.update(heads=32, q_lora=None, kv_lora=512, qk_nope=128, qk_shared=64, value_dim=128)
    config.model.mla.update(output_gate=False)
    config.model.moe.update(routed_experts=256, top_k=8, latent=None, expert_mlp=1_024, scaling=2.446)
    config.model.moe.update(balancing="sign")
    _published(config)


def _k3_2p8t(config: ConfigDict) -> None:
    mla_layers = (*range(4, 93, 4), 93)
    config.model.update(vocab=163_840, embed=7_168, layers=93, mlp=33_792, mla_layers=mla_layers)
    config.model.attn_res_block = 12
    config.model.kda.update(heads=96, key_dim=128, value_dim=128)
    config.model.mla.update(heads=96, q_lora=1_536, kv_lora=512, qk_nope=128, qk_shared=64, value_dim=128)
    config.model.moe.update(routed_experts=896, top_k=16, shared_experts=2, latent=3_584, expert_mlp=3_072)
    _published(config)


def _published(config: ConfigDict) -> None:
    """What both published models share; their step counts and rates are not published, these are placeholders."""
    config.data.update(seq_len=8_192, batch_rows=2_048)
    config.optim.update(learning_rate=2e-4, warmup_steps=500)
    config.train.update(steps=50_000, dtype="bfloat16")
    config.eval.update(every=1_000)
    config.checkpoint.every = 1_000
    config.memory.policy = "recompute_all"
