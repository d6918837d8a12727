"""Which experts a token visits, and how the router bias keeps their load equal (k3.md 2.4, 2.5).

    s = sigmoid(W_r x);   T = top-k of s + bias;   p_j = scaling * s_j / sum_T s          all fp32
    Quantile Balancing: alpha = the (k+1)-th largest s + bias of a token; r_j = alpha - s_j is the bias that would just
    bring expert j into the choice. The next bias of j is the (k/E)-quantile of r_j over a step's tokens, centred.
    Sign rule: bias_j += rate * sign(mean load - load_j), centred.

r is counted in BINS bins over [min bias - 1, max bias + 1], so a step's quantile needs integer sums only, whatever the
micro-batches and devices. Invariant: the bias chooses but never weighs; padding visits no expert and is never counted;
all of this is data returned by the forward pass, so evaluation and recomputation cannot touch the bias.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax.config import ModelConfig, MoEConfig
from k3jax.model.common import RouterBias, matrix

BINS = 1_000


class Routing(NamedTuple):
    """Choice of every token: experts [N,k] int32 (`routed_experts` for padding: nowhere), weights [N,k] fp32."""

    experts: Array
    weights: Array
    cutoff: Array  # [N] fp32, the largest biased score that was not chosen; -inf if all were


def select(scores: Array, bias: Array, top_k: int, groups: int = 1, top_groups: int = 1) -> tuple[Array, Array]:
    """Top-k of scores + bias: scores [N,E], bias [E] -> (experts [N,k] by falling score, cutoff [N]).

    With groups, only the `top_groups` groups with the largest sum of their two best biased scores take part.
    """
    biased = scores + bias[None]
    if groups > 1:
        grouped = biased.reshape(scores.shape[0], groups, -1)
        best_two = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        kept = jax.lax.top_k(best_two, top_groups)[1]
        inside = jnp.any(kept[:, :, None] == jnp.arange(groups)[None, None], axis=1)
        biased = jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    wanted = min(top_k + 1, scores.shape[-1])
    best, experts = jax.lax.top_k(biased, wanted)
    cutoff = best[:, top_k] if wanted > top_k else jnp.full(scores.shape[:1], -jnp.inf)
    return experts[:, :top_k], cutoff


def route(scores: Array, bias: Array, config: MoEConfig, active: Array | None = None) -> Routing:
    """Experts and mixing weights of N tokens. scores [N,E] fp32 unbiased, bias [E] fp32, active [N] bool or None."""
    experts, cutoff = select(jax.lax.stop_gradient(scores), bias, config.top_k, config.groups, config.top_groups)
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    weights = config.scaling * chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20)
    if active is not None:
        experts = jnp.where(active[:, None], experts, config.routed_experts)
    return Routing(experts.astype(jnp.int32), weights, cutoff)


def load(experts: Array, routed_experts: int) -> Array:
    """Tokens sent to each expert: [N,k] -> [E] int32; tokens routed nowhere are left out."""
    return jnp.zeros(routed_experts, jnp.int32).at[experts.reshape(-1)].add(1, mode="drop")


def _range(bias: Array) -> tuple[Array, Array]:
    """Lowest edge and width of the bins for a bias [..., E]."""
    low, high = jnp.min(bias, axis=-1) - 1.0, jnp.max(bias, axis=-1) + 1.0
    return low, (high - low) / BINS


def histogram(scores: Array, cutoff: Array, bias: Array, active: Array | None = None) -> Array:
    """Counts of the required biases cutoff - score: [N,E], [N], [E] -> [E,BINS] int32, active tokens once each."""
    low, width = _range(bias)
    bins = jnp.clip(jnp.floor((cutoff[:, None] - scores - low) / width), 0, BINS - 1).astype(jnp.int32)
    if active is not None:
        bins = jnp.where(active[:, None], bins, BINS)
    experts = jnp.arange(scores.shape[1])[None]
    return jnp.zeros((scores.shape[1], BINS), jnp.int32).at[experts, bins].add(1, mode="drop")


def quantile_estimate(counts: Array, bias: Array, tokens: Array, top_k: int) -> Array:
    """The (k/E)-quantile of the required biases, linear inside its bin (K3 report, appendix C).

    counts [layers,E,BINS] int32 of a whole step, bias [layers,E] it was taken under, tokens [] int32 -> [layers,E].
    A step without tokens keeps the bias.
    """
    low, width = _range(bias)
    target = tokens.astype(jnp.float32) * top_k / bias.shape[-1]
    cumulative = jnp.cumsum(counts, axis=-1)
    bin_index = jnp.argmax(cumulative >= jnp.ceil(target).astype(jnp.int32), axis=-1)
    inside = jnp.take_along_axis(counts, bin_index[..., None], axis=-1)[..., 0]
    before = jnp.take_along_axis(cumulative, bin_index[..., None], axis=-1)[..., 0] - inside
    part = jnp.clip((target - before) / jnp.maximum(inside, 1), 0.0, 1.0)
    estimate = low[:, None] + (bin_index + part) * width[:, None]
    return jnp.where(tokens > 0, estimate, bias)


def exact_estimate(scores: Array, cutoff: Array, top_k: int) -> Array:
    """The quantile without bins: minus the (q+1)-th largest of score - cutoff, q = N k / E. [N,E], [N] -> [E]."""
    rank = scores.shape[0] * top_k // scores.shape[1]
    return -jnp.sort(scores - cutoff[:, None], axis=0)[scores.shape[0] - 1 - rank]


def centred(bias: Array) -> Array:
    """A bias [..., E] with mean 0 over the experts."""
    return bias - jnp.mean(bias, axis=-1, keepdims=True)


def sign_update(bias: Array, expert_load: Array, rate: float) -> Array:
    """The sign rule's next bias: [layers,E] and load [layers,E] int32 -> [layers,E], mean 0."""
    gap = jnp.mean(expert_load.astype(jnp.float32), axis=-1, keepdims=True) - expert_load
    return centred(bias + rate * jnp.sign(gap))


class Router(nnx.Module):
    """weight [embed, experts] and the balancing bias [experts], fp32 whatever the model computes in."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        experts = config.moe.routed_experts
        self.weight = matrix(rngs, config, (config.embed, experts), ("embed", "experts"))
        self.bias = RouterBias(jnp.zeros(experts, jnp.float32), logical_axes=("experts",))

    def scores(self, x: Array) -> Array:
        """Sigmoid scores: x [N,embed] -> [N,experts] fp32."""
        logits = jnp.dot(
            x.astype(jnp.float32), self.weight[...].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        return jax.nn.sigmoid(logits)
