"""TrainState and the one train_step.

    train_step(state, batch) -> (state, metrics)
    loss = sum over target tokens / their number;   g <- g * min(1, clip / |g|);   Muon and AdamW;   next router bias

Invariant: a pure function. A step whose loss, gradient or update is not finite changes no parameter, momentum or bias;
it is counted, and step and data go on. The router bias that a step computes acts from the next step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from k3jax.config import MoEConfig, RunConfig
from k3jax.model import parameters, router
from k3jax.model.decoder import Decoder
from k3jax.model.loss import cross_entropy
from k3jax.model.stats import Stats

Batch = dict[str, Array]
Metrics = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step, and all that a checkpoint holds."""

    step: Array  # [] int32, finished steps
    params: dict[str, Array]  # path -> fp32
    opt_state: Any
    router_bias: Array  # [moe_layers, experts] fp32
    bias_ema: Array  # [moe_layers, experts] fp32, running mean of the quantile estimates
    counters: dict[str, Array]  # "skipped_steps" [] int32

    def to_decoder(self, decoder: Decoder, dtype=None) -> Decoder:
        """A decoder of the structure of `decoder` (abstract or not) with this state's parameters and router bias.

        dtype: as in `parameters.bind`; None keeps fp32.
        """
        return parameters.bind(decoder, self.params, router_bias=self.router_bias, dtype=dtype)


def abstract_decoder(config: RunConfig) -> Decoder:
    """The run's decoder with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(config.train.seed), memory=config.memory))


def init_state(config: RunConfig, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step: parameters drawn from `train.seed`, biases 0. Call it under jit."""
    decoder = Decoder(config.model, rngs=nnx.Rngs(config.train.seed), memory=config.memory)
    params, bias = parameters.values(decoder), decoder.router_bias()
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        router_bias=bias,
        bias_ema=bias,
        counters={"skipped_steps": jnp.zeros((), jnp.int32)},
    )


def loss_sum(
    decoder: Decoder, config: RunConfig, params: dict[str, Array], router_bias: Array, batch: Batch
) -> tuple[Array, tuple[Array, Stats]]:
    """Summed loss of a batch in nats, and (number of targets, Stats). `decoder` gives the structure."""
    bound = parameters.bind(decoder, params, dtype=jnp.dtype(config.train.dtype))
    hidden, stats = bound.apply(batch["tokens"], batch["segment_ids"], router_bias)
    total, targets = cross_entropy(hidden, bound.lm_head[...], batch["targets"], batch["loss_mask"])
    return total, (targets, stats)


def next_bias(config: MoEConfig, bias: Array, ema: Array, stats: Stats) -> tuple[Array, Array]:
    """The router bias after a step, and the running mean behind it (k3.md 2.5). All [moe_layers, experts]."""
    if config.balancing == "quantile":
        estimate = router.quantile_estimate(stats.histogram, bias, stats.tokens, config.top_k)
        ema = config.balancing_ema * ema + (1 - config.balancing_ema) * estimate
        return router.centred(ema), ema
    if config.balancing == "sign":
        return router.sign_update(bias, stats.expert_load, config.sign_rate), ema
    return bias, ema


def make_train_step(
    config: RunConfig,
    decoder: Decoder,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[Array], Array],
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step function, to be jitted with its state donated. `decoder` is abstract.

    The batch is that of `k3jax.data`: tokens, targets, loss_mask, segment_ids, each [B,T]. Metrics are scalars, still
    on the device; the gradient norm is the one before clipping.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss_of = functools.partial(loss_sum, decoder, config)
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        (total, (targets, stats)), gradients = gradient_of(state.params, state.router_bias, batch)
        targets = jnp.maximum(targets, 1.0)
        loss = total / targets
        norm = optax.tree.norm(gradients) / targets
        factor = 1.0 / targets
        if config.optim.clip_norm is not None:
            factor = factor * jnp.minimum(1.0, config.optim.clip_norm / jnp.maximum(norm, 1e-30))
        gradients = jax.tree.map(lambda g: g * factor, gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        bias, ema = next_bias(config.model.moe, state.router_bias, state.bias_ema, stats)
        changed = optax.apply_updates(state.params, updates), opt_state, bias, ema
        kept = state.params, state.opt_state, state.router_bias, state.bias_ema
        finite = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(updates))
        params, opt_state, bias, ema = jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, kept)
        skipped = state.counters["skipped_steps"] + jnp.where(finite, 0, 1)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": schedule(state.step),
            "targets": targets,
            "skipped_steps": skipped,
            **health(stats),
        }
        state = TrainState(state.step + 1, params, opt_state, bias, ema, {"skipped_steps": skipped})
        return state, metrics

    return train_step


def health(stats: Stats) -> Metrics:
    """Scalars that tell a sick run: worst expert overload, largest attention logit, saturated decay channels."""
    tokens = jnp.maximum(stats.tokens, 1)
    shown = {}
    if stats.expert_load.shape[0]:
        load = stats.expert_load.astype(jnp.float32)
        mean = jnp.maximum(jnp.mean(load, axis=-1), 1e-9)
        shown["max_violation"] = jnp.max(jnp.max(load, axis=-1) / mean) - 1.0
    if stats.max_logit.shape[0]:
        shown["max_logit"] = jnp.max(stats.max_logit)
    if stats.gate_saturation.shape[0]:
        shown["gate_saturation"] = jnp.mean(stats.gate_saturation) / tokens
    return shown
