"""Stable LatentMoE, and the plain MoE of Kimi-Linear (k3.md 2.4).

    z = W_down x;   u = sum_{j in T} p_j W2_j act(W1_j z, W3_j z);   y = Shared(x) + W_up RMSNorm(u)
    plain: z = x and y = Shared(x) + u

The router sees the full-width x. Invariant: dropless: every chosen (token, expert) pair is computed, in expert order,
and work follows the number of such pairs; padding visits no expert. Between forward and backward the experts keep z and
the routing, nothing per choice.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax.config import ModelConfig
from k3jax.model import router
from k3jax.model.common import MLP, RMSNorm, gated, matrix, project
from k3jax.parallel import expert, tensor


class MoE(nnx.Module):
    """Routed and shared experts. w1, w3 [experts, latent, expert_mlp], w2 [experts, expert_mlp, latent]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, d = config.moe, config.embed
        self.config = config
        latent = c.latent or d
        axes = ("experts", "latent", "expert_mlp")  # latent: the width experts work at, even where it is embed
        self.router = router.Router(config, rngs)
        self.w1 = matrix(rngs, config, (c.routed_experts, latent, c.expert_mlp), axes, batch=(0,))
        self.w3 = matrix(rngs, config, (c.routed_experts, latent, c.expert_mlp), axes, batch=(0,))
        back = (axes[0], axes[2], axes[1])
        self.w2 = matrix(rngs, config, (c.routed_experts, c.expert_mlp, latent), back, batch=(0,))
        if c.latent:
            self.latent_down = matrix(rngs, config, (d, latent), ("embed", "latent"))
            self.latent_norm = RMSNorm(latent, "latent", config.norm_eps, rngs)
            self.latent_up = matrix(rngs, config, (latent, d), ("latent", "embed"))
        if c.shared_experts:
            self.shared = MLP(config, c.shared_experts * c.expert_mlp, rngs)

    def __call__(self, x: Array, bias: Array, active: Array | None) -> tuple[Array, tuple[Array, Array]]:
        """x [B,T,embed], bias [experts] fp32, active [B,T] bool or None (all).

        Returns (y [B,T,embed], (expert_load [E] int32, histogram [E,bins] int32; no bins unless quantile balancing)).
        """
        c = self.config.moe
        tokens = x.reshape(-1, x.shape[-1])
        active = None if active is None else active.reshape(-1)
        scores = self.router.scores(tokens)
        routing = router.route(scores, bias, c, active)
        latent = project(tokens, self.latent_down[...]) if c.latent else tokens
        mixed = expert.routed(
            tensor.enter(latent),
            routing.experts,
            tensor.enter(routing.weights),
            *(kernel[...] for kernel in (self.w1, self.w3, self.w2)),
            activation=functools.partial(gated, self.config),
        )
        mixed = tensor.leave(mixed)
        if c.latent:
            mixed = project(self.latent_norm(mixed), self.latent_up[...])
        if c.shared_experts:
            mixed = mixed + self.shared(tokens)
        counts = jnp.zeros((c.routed_experts, 0), jnp.int32)
        if c.balancing == "quantile":
            held = jax.lax.stop_gradient(scores)
            counts = router.histogram(held, jax.lax.stop_gradient(routing.cutoff), bias, active)
        return mixed.reshape(x.shape), (router.load(routing.experts, c.routed_experts), counts)
