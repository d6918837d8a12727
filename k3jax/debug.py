"""Where a step stopped being finite: the layers one by one, then the gradients.

The sub-layers run in their order by the same methods as in `Decoder.apply`, scanned groups taken apart, and the first
result with a NaN or an infinity names the place. If the whole forward pass is finite, the gradients are looked at from
the loss back, since everything below a bad one is bad too. Invariant: nothing is changed, and there is no second
implementation of a layer here.
"""

import functools
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from k3jax.config import ModelConfig
from k3jax.model.attn_res import source
from k3jax.model.common import MLP
from k3jax.model.decoder import GROUP, KDA_IN_GROUP, BlockPlan, Decoder, Layer, plan_blocks
from k3jax.model.loss import cross_entropy
from k3jax.model.mla import MLA

IN_LAYER = ("attention_res", "attention_norm", "attention", "mlp_res", "mlp_norm", "mlp")


def first_nonfinite(decoder: Decoder, batch: Mapping[str, Array]) -> str | None:
    """The first place of a step that is not finite, or None.

    decoder: holds parameters, of the type that the step computes in, and router biases (`TrainState.to_decoder`).
    batch: that of `train_step`. Answers, layers counted from 1: "embedding", "layer 3 (KDA)", "layer 3 (experts)",
    "layer 4 (MLA)", "layer 1 (MLP)", "final norm", "loss", "gradient of <path> (layer 3)", "gradient of lm_head".
    """
    for name, value in _forward(decoder, batch):
        if not _finite(value):
            return name
    return _gradient(decoder, batch)


def _finite(value: Array) -> bool:
    return bool(jnp.all(jnp.isfinite(value)))


def _forward(decoder: Decoder, batch: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """(name, result) of every place in order; each is computed when it is asked for."""
    config, mixes = decoder.config, bool(decoder.config.attn_res_block)
    segment_ids, biases = batch["segment_ids"], iter(decoder.router_bias())
    block_sums, partial_sum = (), decoder.embedded(batch["tokens"])
    yield "embedding", partial_sum
    number = 0
    for plan, block in zip(decoder.plans, decoder.blocks, strict=True):
        if mixes:
            block_sums = (*block_sums, source(partial_sum, config.norm_eps))
            partial_sum = jnp.zeros_like(partial_sum)
        for at, layer in enumerate(_layers(plan, block)):
            number += 1
            empty = mixes and at == 0
            partial_sum = _run(Layer.attention_part, layer, block_sums, partial_sum, empty, segment_ids)
            yield f"layer {number} ({'MLA' if isinstance(layer.attention, MLA) else 'KDA'})", partial_sum
            dense = isinstance(layer.mlp, MLP)
            bias = None if dense else next(biases)
            partial_sum = _run(Layer.mlp_part, layer, block_sums, partial_sum, bias, segment_ids)
            yield f"layer {number} ({'MLP' if dense else 'experts'})", partial_sum
    if mixes:
        partial_sum, _ = decoder.final.res(block_sums, partial_sum, False)
    hidden = decoder.final.norm(partial_sum)
    yield "final norm", hidden
    yield "loss", cross_entropy(hidden, decoder.lm_head[...], batch["targets"], batch["loss_mask"])[0]


def _run(method, layer: Layer, *args) -> Array:
    """The new partial sum of one sub-layer."""
    graphdef, state = nnx.split(layer)
    return _compiled(method, graphdef, state, args)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(method, graphdef, state, args):
    return method(nnx.merge(graphdef, state), *args)[0]


def _layers(plan: BlockPlan, block) -> Iterator[Layer]:
    """The layers of a block in order, those of scanned groups as single ones."""

    def one(stacked: Layer, at: int) -> Layer:
        graphdef, state = nnx.split(stacked)
        return nnx.merge(graphdef, jax.tree.map(lambda x: x[at], state))

    yield from block.head
    for group in range(plan.groups):
        for at in range(KDA_IN_GROUP):
            yield one(block.groups.kda, group * KDA_IN_GROUP + at)
        yield one(block.groups.mla, group)
    yield from block.tail


def _gradient(decoder: Decoder, batch: Mapping[str, Array]) -> str | None:
    """The parameter nearest to the loss whose gradient is not finite."""
    graphdef, params, rest = nnx.split(decoder, nnx.Param, ...)
    found = []
    for path, gradient in nnx.to_flat_state(_gradients(params, graphdef, rest, dict(batch))):
        value = gradient.get_value()
        stacked = "groups" in path
        rows = value if stacked else value[None]
        bad = np.asarray(jnp.any(~jnp.isfinite(rows), axis=tuple(range(1, rows.ndim))))
        name = f"gradient of {'.'.join(map(str, path))}"
        for row in np.flatnonzero(bad):
            near = place(decoder.config, path, int(row))
            found.append((near, name + (f" (layer {near[0]})" if path[0] == "blocks" else "")))
    return max(found)[1] if found else None


@functools.partial(jax.jit, static_argnums=1)
@jax.grad
def _gradients(params, graphdef, rest, batch):
    bound = nnx.merge(graphdef, params, rest)
    hidden, _ = bound.apply(batch["tokens"], batch["segment_ids"])
    return cross_entropy(hidden, bound.lm_head[...], batch["targets"], batch["loss_mask"])[0]


def place(config: ModelConfig, path: tuple, row: int = 0) -> tuple[int, int]:
    """How near the loss a parameter is: (layer from 1, place in the layer); 0 is the embedding, above is the end.

    path: attribute names and list places, as in nnx's flat states; row: which of a stack's layers.
    """
    if path[0] != "blocks":
        number = {"embed": 0, "final": config.layers + 1, "lm_head": config.layers + 2}[path[0]]
        return number, int(path[1:2] == ("norm",))
    _, block, part, which, name = path[:5]
    plan = plan_blocks(config)[block]
    number = plan.first + 1 + (0 if part == "head" else plan.head)
    if part == "groups":
        group, at = divmod(row, KDA_IN_GROUP) if which == "kda" else (row, KDA_IN_GROUP)
        number += group * len(GROUP) + at
    else:
        number += which + (plan.groups * len(GROUP) if part == "tail" else 0)
    return number, IN_LAYER.index(name)
