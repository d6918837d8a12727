"""Block Attention Residuals (k3.md 2.3, arXiv 2603.15031): the residual stream as attention over depth.

    score_i = w . (gamma * s_i / sqrt(mean s_i^2 + eps));   pi = softmax_i(score);   h = sum_i pi_i s_i

The sources s are the block sums (the embedding, then the sum of every closed block of layers) and the partial sum of
the block at work. w is a learned pseudo-query, zero at the start, so mixing starts uniform. A block's first sub-layer
sees the block sums only: what was the partial sum has just become the newest of them.

Invariant: values are mixed un-normalised, scores and softmax are fp32; a source counts once. With one source h is that
source, and w and gamma get a gradient of exactly 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax.config import ModelConfig
from k3jax.model.common import RMSNorm, param, zeros


class Source(NamedTuple):
    """One source [B,T,D] and the fp32 [B,T] factor that normalises it as a key, computed once per source."""

    value: Array
    inverse_rms: Array


def source(value: Array, eps: float) -> Source:
    """A source from its value [B,T,D]."""
    wide = value.astype(jnp.float32)
    return Source(value, jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1) + eps))


class AttnRes(nnx.Module):
    """The mixing in front of one sub-layer: norm.weight (gamma) and query (w), both [embed]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.embed, "embed", config.norm_eps, rngs)
        self.query = param(rngs, (config.embed,), ("embed",), zeros, weight_decay=False)

    def __call__(self, block_sums: tuple[Source, ...], partial_sum: Array, empty: bool | Array) -> tuple[Array, Array]:
        """Mixes the sources: block sums and the partial sum [B,T,D]; `empty` says that there is none yet.

        Returns (h [B,T,D], weights [len(block_sums) + 1, B, T] fp32, the partial sum's last and without gradient).
        """
        probe = self.norm.weight[...].astype(jnp.float32) * self.query[...].astype(jnp.float32)
        sources = (*block_sums, source(partial_sum, self.norm.eps))
        scores = [jnp.einsum("btd,d->bt", s.value.astype(jnp.float32), probe) * s.inverse_rms for s in sources]
        scores[-1] = jnp.where(empty, -jnp.inf, scores[-1])
        weights = jax.nn.softmax(jnp.stack(scores), axis=0)
        mixed = sum(weights[i][..., None] * s.value.astype(jnp.float32) for i, s in enumerate(sources))
        return mixed.astype(partial_sum.dtype), jax.lax.stop_gradient(weights)
