"""TrainState and the one train_step.

    train_step(state, batch) -> (state, metrics)
    loss = sum over targets / their number;   g <- g * min(1, clip / |g|);   Muon and AdamW;   QK-Clip;   next bias

Rows are split over devices (parallel/mesh.py) and, on each, into micro-batches: sums over both, and one division by all
targets. Invariant: a pure function of the step's rows, however they are split. A step whose loss, gradient or update is
not finite changes no parameter, momentum or bias; it is counted, and step, learning rate and data go on. The router
bias that a step computes acts from the next step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from k3jax.config import MoEConfig, RunConfig
from k3jax.model import parameters, router
from k3jax.model.decoder import Decoder
from k3jax.model.loss import cross_entropy
from k3jax.model.stats import Stats
from k3jax.optim import qk_clip, trainable
from k3jax.parallel import Layout, fsdp, totals
from k3jax.parallel.mesh import BATCH

Batch = Mapping[str, Array]
Metrics = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step, and all that a checkpoint holds."""

    step: Array  # [] int32, finished steps
    params: dict[str, Array]  # path -> fp32
    opt_state: Any
    router_bias: Array  # [moe_layers, experts] fp32
    bias_ema: Array  # [moe_layers, experts] fp32, running mean of the quantile estimates
    counters: dict[str, Array]  # "skipped_steps", "skipped_in_a_row" [] int32

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
    return start_state(config, optimizer, parameters.values(decoder), decoder.router_bias())


def abstract_state(config: RunConfig, optimizer: optax.GradientTransformation, layout: Layout) -> TrainState:
    """The state with shapes in place of arrays, each with its sharding."""
    like = jax.eval_shape(lambda: init_state(config, optimizer))
    placed = layout.shardings(like)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, placed)


def start_state(
    config: RunConfig, optimizer: optax.GradientTransformation, params: dict[str, Array], router_bias: Array
) -> TrainState:
    """The state before the first step from given parameters and router biases [moe_layers, experts]."""
    learnt = trainable(tuple(params), config.optim.frozen)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init({path: value for path, value in params.items() if path in learnt}),
        router_bias=router_bias,
        bias_ema=router_bias,
        counters={name: jnp.zeros((), jnp.int32) for name in ("skipped_steps", "skipped_in_a_row")},
    )


def loss_sum(
    decoder: Decoder, config: RunConfig, params: dict[str, Array], router_bias: Array, batch: Batch
) -> tuple[Array, tuple[Array, Stats]]:
    """Summed loss of a batch in nats, and (number of targets, Stats). `decoder` gives the structure."""
    bound = parameters.bind(decoder, params, dtype=jnp.dtype(config.train.dtype))
    hidden, stats = bound.apply(batch["tokens"], batch["segment_ids"], router_bias)
    with jax.named_scope("head"):
        total, targets = cross_entropy(hidden, fsdp.whole(bound.lm_head)[...], batch["targets"], batch["loss_mask"])
    return total, (targets, stats)


def make_loss(config: RunConfig, decoder: Decoder, layout: Layout) -> Callable[..., tuple[Array, Array]]:
    """A function (params, router_bias, batch) -> (summed loss, number of targets), forward only, over all devices."""

    def loss(params, router_bias, batch):
        def one(sums, rows):
            total, (targets, _) = loss_sum(decoder, config, params, router_bias, rows)
            return (sums[0] + total, sums[1] + targets), None

        sums, _ = jax.lax.scan(one, (jnp.zeros(()), jnp.zeros(())), _split(batch, config.train.accumulate))
        return totals.total(sums)

    return layout.per_device(loss, (dict(layout.specs), P(), BATCH), P())


def make_gradients(config: RunConfig, decoder: Decoder, layout: Layout) -> Callable[..., Any]:
    """A function (params, router_bias, batch) -> (summed loss, targets, Stats, gradients of the sum), over all rows.

    `train.accumulate` micro-batches run one after the other on each device. Frozen parameters have no gradient.
    """
    learnt = trainable(tuple(layout.specs), config.optim.frozen)
    parts = config.train.accumulate

    def gradients(params, router_bias, batch):
        frozen = {path: value for path, value in params.items() if path not in learnt}

        def loss_of(moving, rows):
            return loss_sum(decoder, config, frozen | moving, router_bias, rows)

        moving = {path: value for path, value in params.items() if path in learnt}
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)

        def one(rows):
            (total, (targets, stats)), gradient = gradient_of(moving, rows)
            return total, targets, stats, gradient

        def added(sums, rows):
            total, targets, stats, gradient = one(rows)
            merged = sums[2].merge(stats)
            return (sums[0] + total, sums[1] + targets, merged, jax.tree.map(jnp.add, sums[3], gradient)), None

        if parts == 1:
            total, targets, stats, gradient = one(batch)
        else:
            split = _split(batch, parts)
            shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], split))
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            none = empty[2].replace(max_logit=jnp.full_like(empty[2].max_logit, -jnp.inf))
            (total, targets, stats, gradient), _ = jax.lax.scan(added, (*empty[:2], none, empty[3]), split)
        total, targets = totals.total((total, targets))
        return total, targets, stats.over_devices(), totals.total_gradients(gradient, layout.specs)

    moved = {path: spec for path, spec in layout.specs.items() if path in learnt}
    return layout.per_device(gradients, (dict(layout.specs), P(), BATCH), (P(), P(), Stats.specs(), moved))


def _split(batch: Batch, parts: int) -> Batch:
    """Micro-batches of a batch's rows on a new leading axis."""
    return {name: x.reshape(parts, -1, *x.shape[1:]) for name, x in batch.items()}


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
    layout: Layout,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step function, to be jitted with its state donated. `decoder` is abstract.

    The batch is that of `k3jax.data`: tokens, targets, loss_mask, segment_ids, each [B,T], placed by `layout`. Metrics
    are scalars, and under "health" the arrays of every layer (`health`), all still on the device; the gradient norm is
    the one before clipping.
    """
    gradients_of = make_gradients(config, decoder, layout)
    tau, nope, places = config.optim.qk_clip, config.model.mla.qk_nope, decoder.mla_places()
    frozen = layout.specs.keys() - trainable(tuple(layout.specs), config.optim.frozen)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        total, targets, stats, gradients = gradients_of(state.params, state.router_bias, batch)
        targets = jnp.maximum(targets, 1.0)
        loss = total / targets
        gradients, norm = clipped(gradients, targets, config.optim.clip_norm)
        moving = {path: state.params[path] for path in gradients}
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(gradients, state.opt_state, moving, step=state.step)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(updates))
        moved = optax.apply_updates(moving, updates)
        params = state.params | moved
        if tau is not None:
            with jax.named_scope("qk_clip"):
                params = qk_clip(params, stats.max_logit, places, tau, nope, frozen=frozen)
        with jax.named_scope("balancing"):
            bias, ema = next_bias(config.model.moe, state.router_bias, state.bias_ema, stats)
        changed = {path: params[path] for path in moving}, opt_state, bias, ema
        kept = moving, state.opt_state, state.router_bias, state.bias_ema
        moved, opt_state, bias, ema = jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, kept)
        counters = {
            "skipped_steps": state.counters["skipped_steps"] + jnp.where(finite, 0, 1),
            "skipped_in_a_row": jnp.where(finite, 0, state.counters["skipped_in_a_row"] + 1),
        }
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": schedule(state.step),
            "targets": targets,
            **counters,
            **worst(stats),
            "health": health(stats, state.router_bias),
        }
        return TrainState(state.step + 1, state.params | moved, opt_state, bias, ema, counters), metrics

    return train_step


def clipped(gradients: dict[str, Array], targets: Array, limit: float | None) -> tuple[dict[str, Array], Array]:
    """Gradients of a sum over `targets` -> those of the mean, scaled to a global norm of at most `limit`; and the norm.

    That is the one before clipping, over all logical parameters, each counted once wherever its parts lie.
    """
    norm = optax.tree.norm(gradients) / targets
    factor = 1.0 / targets
    if limit is not None:
        factor = factor * jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda g: g * factor, gradients), norm


def health(stats: Stats, router_bias: Array) -> dict[str, Array]:
    """The arrays of every layer that a log shows: those of Stats but the histogram, and the bias they came under."""
    shown = {name: value for name, value in vars(stats).items() if name != "histogram"}
    return shown | {"router_bias": router_bias}


def worst(stats: Stats) -> Metrics:
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
