"""Model FLOPs of a decoder, from its config alone: what the mathematics needs, however a program computes it.

A product [M,K] x [K,N] is 2 M K N. Forward, per token, rows of T tokens:

    projection         2 * its weights; every linear map of a layer, the router and the head; the embedding is a lookup
    KDA recurrence     heads * (6 K V + C (2 K + V) + C^2),   C = 64: the count that Kimi Linear (arXiv 2510.26692)
                       publishes, 6 d^2 + 3 C d + C^2 with d = K = V. S^T k, k v^T and S^T q are 2 K V each; the rest
                       is the work inside a chunk. It does not grow with T.
    MLA attention      heads * 2 (nope + shared + V) T / 2: a token sees half the row on average (causal, one document)
    experts            top_k routed ones at the latent width, latent projections, router, shared ones
    Attention Residuals  4 d per source: its score and its share of the mix

A training step is 3 times the forward pass: the backward pass makes two products of each. Never counted: what a memory
policy computes again, Newton-Schulz, norms, activations, the 4-tap convolutions, softmax, sorting. Invariant: integers,
equal on every mesh and for every kernel, so that MFU compares runs.
"""

from k3jax.config import ModelConfig

PUBLISHED_CHUNK = 64


def kda_projections(config: ModelConfig) -> int:
    """FLOPs per token of the linear maps of one KDA layer."""
    c, d = config.kda, config.embed
    keys, values = c.heads * c.key_dim, c.heads * c.value_dim
    decay = d * c.key_dim + c.key_dim * keys
    gate = d * values if c.output_gate == "full" else d * c.value_dim + c.value_dim * values
    return 2 * (d * (2 * keys + values) + decay + d * c.heads + gate + values * d)


def kda_recurrence(config: ModelConfig) -> int:
    """FLOPs per token of the recurrence of one KDA layer."""
    c, chunk = config.kda, PUBLISHED_CHUNK
    return c.heads * (6 * c.key_dim * c.value_dim + chunk * (2 * c.key_dim + c.value_dim) + chunk**2)


def mla_projections(config: ModelConfig) -> int:
    """FLOPs per token of the linear maps of one MLA layer."""
    c, d = config.mla, config.embed
    query, values = c.heads * (c.qk_nope + c.qk_shared), c.heads * c.value_dim
    queries = d * query if c.q_lora is None else d * c.q_lora + c.q_lora * query
    keys_and_values = d * (c.kv_lora + c.qk_shared) + c.kv_lora * (c.heads * c.qk_nope + values)
    gate = d * values if c.output_gate else 0
    return 2 * (queries + keys_and_values + gate + values * d)


def mla_attention(config: ModelConfig, seq_len: int) -> int:
    """FLOPs per token of scores and their product with the values in one MLA layer, rows of seq_len tokens."""
    c = config.mla
    return c.heads * (c.qk_nope + c.qk_shared + c.value_dim) * seq_len


def dense_mlp(config: ModelConfig) -> int:
    """FLOPs per token of one dense gated MLP."""
    return 2 * 3 * config.embed * config.mlp


def moe(config: ModelConfig) -> int:
    """FLOPs per token of one layer of experts."""
    c, d = config.moe, config.embed
    latent = c.latent or d
    around = 2 * d * latent if c.latent else 0
    routed = c.top_k * 3 * latent * c.expert_mlp
    shared = 3 * d * c.shared_experts * c.expert_mlp
    return 2 * (d * c.routed_experts + around + routed + shared)


def attn_res(config: ModelConfig) -> int:
    """FLOPs per token of all mixes over depth: two per layer and the last one."""
    if not config.attn_res_block:
        return 0
    # The first sub-layer of a block sees the block sums only, all others the partial sum too.
    blocks = [layer // config.attn_res_block + 1 for layer in range(config.layers)]
    starts = sum(layer % config.attn_res_block == 0 for layer in range(config.layers))
    last = (blocks[-1] if blocks else 0) + 1
    sources = sum(2 * (sums + 1) for sums in blocks) - starts + last
    return 4 * config.embed * sources


def head(config: ModelConfig) -> int:
    """FLOPs per token of the logits."""
    return 2 * config.embed * config.vocab


def forward(config: ModelConfig, seq_len: int) -> dict[str, int]:
    """FLOPs per token of a forward pass over rows of seq_len tokens, by kind of layer, all layers of a kind together.

    Kinds: `kda`, `mla`, `mlp` (dense), `moe`, `attn_res`, `head`.
    """
    kda, mla = len(config.kda_layers), len(config.mla_layers)
    return {
        "kda": kda * (kda_projections(config) + kda_recurrence(config)),
        "mla": mla * (mla_projections(config) + mla_attention(config, seq_len)),
        "mlp": config.dense_layers * dense_mlp(config),
        "moe": config.moe_layers * moe(config),
        "attn_res": attn_res(config),
        "head": head(config),
    }


def train_step(config: ModelConfig, seq_len: int, rows: int) -> int:
    """Model FLOPs of one optimizer step over `rows` rows of seq_len tokens, on all devices together."""
    return 3 * sum(forward(config, seq_len).values()) * rows * seq_len
