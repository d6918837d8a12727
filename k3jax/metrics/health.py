"""From the arrays of a step to numbers with a name for every layer.

    moe/max_violation/02    largest load / mean load - 1        moe/load_min, moe/load_max: load / mean load
    moe/dropped_tokens/02   tokens * top_k - sum of the loads   0 by construction; computed, so that a loss would show
    moe/bias_range/02       largest - smallest router bias
    kda/gate_saturation/01  share of decay channels near an end of their range, mean over tokens
    mla/max_logit/04        largest scaled logit of any head
    attn_res/weights        [sublayers, sources]: share of each source in the input of each sub-layer, mean over tokens

Invariant: layers are counted from 1 and written with as many digits as the last one has, so that names sort.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from k3jax.config import ModelConfig
from k3jax.metrics.names import ATTN_RES


def health_report(
    config: ModelConfig,
    *,
    tokens: ArrayLike,
    expert_load: ArrayLike,
    router_bias: ArrayLike,
    gate_saturation: ArrayLike,
    max_logit: ArrayLike,
    attnres_weights: ArrayLike,
) -> dict[str, Any]:
    """Named numbers of one step: floats per layer and the array ATTN_RES (float64; absent with plain residuals).

    The arguments are those of `model.stats.Stats` over the whole step, and the bias it was routed with: tokens [],
    expert_load and router_bias [moe_layers, experts], gate_saturation [kda_layers] and attnres_weights
    [sublayers, sources] as sums over the tokens, max_logit [mla_layers, heads]. A step without tokens gives zeros.
    """
    tokens = int(np.asarray(tokens))
    load, bias = np.asarray(expert_load, np.float64), np.asarray(router_bias, np.float64)
    report: dict[str, Any] = {}

    def add(name: str, layers: Sequence[int], values: np.ndarray) -> None:
        digits = len(str(config.layers))
        report.update({f"{name}/{at:0{digits}d}": float(value) for at, value in zip(layers, values, strict=True)})

    moe_layers = range(config.dense_layers + 1, config.layers + 1)
    if moe_layers:
        mean = np.maximum(load.mean(axis=1), 1e-9)
        add("moe/max_violation", moe_layers, load.max(axis=1) / mean - 1 if tokens else np.zeros(len(load)))
        add("moe/load_min", moe_layers, load.min(axis=1) / mean)
        add("moe/load_max", moe_layers, load.max(axis=1) / mean)
        add("moe/dropped_tokens", moe_layers, tokens * config.moe.top_k - load.sum(axis=1))
        add("moe/bias_range", moe_layers, bias.max(axis=1) - bias.min(axis=1))
    add("kda/gate_saturation", config.kda_layers, np.asarray(gate_saturation, np.float64) / max(tokens, 1))
    if config.mla_layers:
        add("mla/max_logit", config.mla_layers, np.asarray(max_logit, np.float64).max(axis=1))
    if config.attn_res_block:
        report[ATTN_RES] = np.asarray(attnres_weights, np.float64) / max(tokens, 1)
    return report
