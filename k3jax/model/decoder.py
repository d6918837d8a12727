"""The decoder: embedding, layers in Attention Residuals blocks, final mix and norm, head (k3.md 2.3).

    p = embed[tokens];  S = ()
    every block:   S = (*S, p);  p = empty                              plain residuals: one block, p runs through
      every layer: p += Attention(norm(mix(S, p)));  p += FFN(norm(mix(S, p)))                   attention: KDA or MLA
    hidden = norm(mix(S, p));  logits = hidden W_head

Inside a block, layers run as head (unrolled) + groups (KDA, KDA, KDA, MLA repeated: a scan over groups, and in it a
scan over the three KDA layers) + tail (unrolled). Blocks are unrolled, so that block sums are constants of a block's
scan and are held once, not once per scan step. Invariant: a forward pass writes no module state; all it tells is in
its results.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax.config import MemoryConfig, ModelConfig
from k3jax.memory.policy import rematerialised
from k3jax.model import router
from k3jax.model.attn_res import AttnRes, Source, source
from k3jax.model.common import MLP, Keys, RMSNorm, normal, param
from k3jax.model.kda import KDA
from k3jax.model.mla import MLA
from k3jax.model.moe import MoE
from k3jax.model.stats import Stats
from k3jax.parallel import context, fsdp, tensor

SAVE_ALL = MemoryConfig("save_all")
KDA_IN_GROUP = 3
GROUP = (False,) * KDA_IN_GROUP + (True,)  # is it MLA? the repeated part of the stack


class BlockPlan(NamedTuple):
    """One AttnRes block: its first layer (from 0) and how many layers are head, scanned groups and tail."""

    first: int
    head: int
    groups: int
    tail: int


def plan_blocks(config: ModelConfig) -> list[BlockPlan]:
    """Cuts the layers into blocks, and each block into head, groups of (KDA, KDA, KDA, MLA) with experts, and tail."""
    size = config.attn_res_block or max(config.layers, 1)
    mla = [layer + 1 in config.mla_layers for layer in range(config.layers)]

    def is_group(at: int, end: int) -> bool:
        fits = at + len(GROUP) <= end and at >= config.dense_layers
        return fits and tuple(mla[at : at + len(GROUP)]) == GROUP

    blocks = []
    for first in range(0, config.layers, size):
        end = min(first + size, config.layers)
        at = next((at for at in range(first, end) if is_group(at, end)), end)
        groups = 0
        while is_group(at + groups * len(GROUP), end):
            groups += 1
        blocks.append(BlockPlan(first, at - first, groups, end - at - groups * len(GROUP)))
    return blocks


class Layer(nnx.Module):
    """A decoder layer: mix, norm, attention; mix, norm, FFN. Without Attention Residuals it has no mixes."""

    def __init__(self, config: ModelConfig, *, mla: bool, dense: bool, rngs: nnx.Rngs):
        self.config = config
        if config.attn_res_block:
            self.attention_res, self.mlp_res = AttnRes(config, rngs), AttnRes(config, rngs)
        self.attention_norm = RMSNorm(config.embed, "embed", config.norm_eps, rngs)
        self.attention = MLA(config, rngs) if mla else KDA(config, rngs)
        self.mlp_norm = RMSNorm(config.embed, "embed", config.norm_eps, rngs)
        self.mlp = MLP(config, config.mlp, rngs) if dense else MoE(config, rngs)

    def attention_part(
        self,
        block_sums: tuple[Source, ...],
        partial_sum: Array,
        empty: bool | Array,
        segment_ids: Array | None,
        around: context.Around | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """The attention sub-layer added to the partial sum [B,T,embed], and its statistics."""
        stats, mixed, attention = {}, partial_sum, fsdp.whole(self.attention)
        if self.config.attn_res_block:
            mixed, weights = self.attention_res(block_sums, partial_sum, empty)
            stats["attnres_weights"] = _token_sum(weights, segment_ids)
        if isinstance(attention, MLA):
            y, stats["max_logit"] = attention(self.attention_norm(mixed), segment_ids, around)
        else:
            y, saturation = attention(self.attention_norm(mixed), segment_ids, around)
            stats["gate_saturation"] = _token_sum(saturation, segment_ids)
        return partial_sum + y, stats

    def mlp_part(
        self, block_sums: tuple[Source, ...], partial_sum: Array, bias: Array | None, segment_ids: Array | None
    ) -> tuple[Array, dict[str, Array]]:
        """The FFN sub-layer added to the partial sum [B,T,embed], and its statistics. bias [experts] of the router."""
        stats, mixed, mlp = {}, partial_sum, fsdp.whole(self.mlp)
        if self.config.attn_res_block:
            mixed, weights = self.mlp_res(block_sums, partial_sum, False)
            stats["attnres_weights"] = _token_sum(weights, segment_ids)
        mixed = self.mlp_norm(mixed)
        if isinstance(mlp, MLP):
            return partial_sum + mlp(mixed), stats
        y, (stats["expert_load"], stats["histogram"]) = mlp(mixed, bias, _active(segment_ids))
        return partial_sum + y, stats


def _active(segment_ids: Array | None) -> Array | None:
    return None if segment_ids is None else segment_ids > 0


def _token_sum(x: Array, segment_ids: Array | None) -> Array:
    """Sum of x [...,B,T] over the non-padding tokens."""
    if segment_ids is not None:
        x = jnp.where((segment_ids > 0).reshape((1,) * (x.ndim - 2) + segment_ids.shape), x, 0.0)
    return jnp.sum(x, axis=(-2, -1))


class Groups(nnx.Module):
    """`count` groups of three KDA layers and one MLA layer, all with experts, stacked on a `layers` axis.

    kda holds 3 * count layers in their order, mla count.
    """

    def __init__(self, config: ModelConfig, count: int, rngs: nnx.Rngs):
        self.kda = _stacked(config, False, KDA_IN_GROUP * count, rngs)
        self.mla = _stacked(config, True, count, rngs)


def _stacked(config: ModelConfig, mla: bool, count: int, rngs: nnx.Rngs) -> Layer:
    """`count` layers as one, every variable with a leading `layers` axis."""
    keys = jax.random.split(rngs.params(), count)
    stacked = nnx.vmap(lambda key: Layer(config, mla=mla, dense=False, rngs=Keys(key)))(keys)
    for _, node in nnx.iter_graph(stacked):
        if isinstance(node, nnx.Variable):
            node.set_metadata(logical_axes=("layers", *node.get_metadata("logical_axes")))
            if isinstance(node, nnx.Param) and node.get_metadata("matrix_axes") is not None:
                batch, inside, out = (tuple(a + 1 for a in axes) for axes in node.get_metadata("matrix_axes"))
                node.set_metadata(matrix_axes=((0, *batch), inside, out))
    return stacked


class Block(nnx.Module):
    """The layers of one AttnRes block: `head` and `tail` lists around the stacked `groups`."""

    def __init__(self, config: ModelConfig, plan: BlockPlan, rngs: nnx.Rngs):
        def layer(at: int) -> Layer:
            dense = at < config.dense_layers
            return Layer(config, mla=at + 1 in config.mla_layers, dense=dense, rngs=rngs)

        scanned = plan.first + plan.head
        after = scanned + plan.groups * len(GROUP)
        self.head = nnx.List([layer(at) for at in range(plan.first, scanned)])
        if plan.groups:
            self.groups = Groups(config, plan.groups, rngs)
        self.tail = nnx.List([layer(at) for at in range(after, after + plan.tail)])


class Final(nnx.Module):
    """The last mix over all block sums, and the norm in front of the head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        if config.attn_res_block:
            self.res = AttnRes(config, rngs)
        self.norm = RMSNorm(config.embed, "embed", config.norm_eps, rngs)


class Decoder(nnx.Module):
    """A K3 or Kimi-Linear text decoder of `config`. embed [vocab, embed], lm_head [embed, vocab], untied."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, memory: MemoryConfig = SAVE_ALL):
        self.config = config
        self.memory = memory
        rngs = Keys(rngs.params())
        init = normal(config.init_std)
        self.embed = param(rngs, (config.vocab, config.embed), ("vocab", "embed"), init)
        self.plans = tuple(plan_blocks(config))
        self.blocks = nnx.List([Block(config, plan, rngs) for plan in self.plans])
        self.final = Final(config, rngs)
        self.lm_head = param(rngs, (config.embed, config.vocab), ("embed", "vocab"), init)

    def __call__(self, tokens: Array, segment_ids: Array | None = None) -> Array:
        """tokens [B,T] int32, segment_ids [B,T] int32 (0: padding) -> logits [B,T,vocab] fp32."""
        hidden, _ = self.apply(tokens, segment_ids)
        kernel = fsdp.whole(self.lm_head)[...].astype(hidden.dtype)
        return jnp.einsum("btd,dv->btv", hidden, kernel, preferred_element_type=jnp.float32)

    def apply(
        self, tokens: Array, segment_ids: Array | None = None, router_bias: Array | None = None
    ) -> tuple[Array, Stats]:
        """tokens [B,T] int32 -> (hidden [B,T,embed] after the final norm, Stats). Activations have lm_head's type.

        segment_ids [B,T] int32: documents are runs of equal ids, 0 is padding. router_bias [moe_layers, experts] fp32
        stands in for the routers' own.
        """
        if tokens.ndim != 2 or (segment_ids is not None and segment_ids.shape != tokens.shape):
            shape = None if segment_ids is None else segment_ids.shape
            raise ValueError(f"tokens and segment_ids must be [B,T], got {tokens.shape} and {shape}")
        config, mixes = self.config, bool(self.config.attn_res_block)
        bias = self.router_bias() if router_bias is None else router_bias
        if context.cut() and segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        around = context.around(segment_ids)
        block_sums, pieces = (), []
        partial_sum = self.embedded(tokens)
        for index, (plan, block) in enumerate(zip(self.plans, self.blocks, strict=True)):
            with jax.named_scope(f"block_{index}"):
                if mixes:
                    block_sums = (*block_sums, source(partial_sum, config.norm_eps))
                    partial_sum = jnp.zeros_like(partial_sum)
                routed = max(plan.first - config.dense_layers, 0)
                for at, layer in enumerate(block.head):
                    dense = plan.first + at < config.dense_layers
                    row = None if dense else bias[routed]
                    partial_sum, stats = self._layer(
                        layer, block_sums, partial_sum, mixes and at == 0, row, segment_ids, around, scanned=False
                    )
                    pieces.append(jax.tree.map(lambda s: s[None], stats))
                    routed += not dense
                if plan.groups:
                    rows = bias[routed : routed + plan.groups * len(GROUP)].reshape(plan.groups, len(GROUP), -1)
                    starts = mixes and not plan.head
                    partial_sum, stats = self._scan(
                        block.groups, block_sums, partial_sum, starts, rows, segment_ids, around
                    )
                    pieces.append(stats)
                    routed += plan.groups * len(GROUP)
                for layer in block.tail:
                    partial_sum, stats = self._layer(
                        layer, block_sums, partial_sum, False, bias[routed], segment_ids, around, scanned=False
                    )
                    pieces.append(jax.tree.map(lambda s: s[None], stats))
                    routed += 1
        if mixes:
            partial_sum, weights = self.final.res(block_sums, partial_sum, False)
            pieces.append({"attnres_weights": _token_sum(weights, segment_ids)[None, None]})
        return self.final.norm(partial_sum), self._stats(pieces, tokens, segment_ids)

    def embedded(self, tokens: Array) -> Array:
        """Rows of the embedding in the activations' type, that of lm_head: tokens [B,T] -> [B,T,embed]."""
        return tensor.look_up(fsdp.whole(self.embed)[...], tokens, self.lm_head[...].dtype)

    def _layer(self, layer, block_sums, partial_sum, empty, bias, segment_ids, around, *, scanned):
        """One layer -> (partial sum, statistics of both sub-layers); each sub-layer under the memory policy."""
        keeps = fsdp.keeps if fsdp.gathers() else None
        run = functools.partial(rematerialised, self.memory, scanned=scanned, keeps=keeps)
        with jax.named_scope("mla" if isinstance(layer.attention, MLA) else "kda"):
            args = block_sums, partial_sum, empty, segment_ids, around
            partial_sum, stats = run(Layer.attention_part, layer, *args)
        with jax.named_scope("mlp" if isinstance(layer.mlp, MLP) else "moe"):
            args = block_sums, partial_sum, bias, segment_ids
            partial_sum, more = run(Layer.mlp_part, layer, *args)
        if self.config.attn_res_block:
            pair = jnp.stack([stats.pop("attnres_weights"), more.pop("attnres_weights")])
            stats["attnres_weights"] = pair
        return partial_sum, stats | more

    def _scan(self, groups, block_sums, partial_sum, starts, bias, segment_ids, around):
        """The scanned groups of a block -> (partial sum, statistics with the layers in order on axis 0).

        bias [groups,4,experts]. `starts`: the first layer has no partial sum yet.
        """
        count = bias.shape[0]
        (kda, kda_state), (mla, mla_state) = nnx.split(groups.kda), nnx.split(groups.mla)
        kda_state = jax.tree.map(lambda x: x.reshape(count, KDA_IN_GROUP, *x.shape[1:]), kda_state)
        empty = starts & (jnp.arange(count * KDA_IN_GROUP) == 0).reshape(count, KDA_IN_GROUP)

        def one(graphdef, partial_sum, state, bias, empty):
            layer = nnx.merge(graphdef, state)
            return self._layer(layer, block_sums, partial_sum, empty, bias, segment_ids, around, scanned=True)

        def group(partial_sum, xs):
            kda_state, mla_state, bias, empty = xs
            partial_sum, stats = jax.lax.scan(
                lambda partial_sum, xs: one(kda, partial_sum, *xs),
                partial_sum,
                (kda_state, bias[:KDA_IN_GROUP], empty),
            )
            partial_sum, last = one(mla, partial_sum, mla_state, bias[KDA_IN_GROUP], False)
            stats, last = dict(stats), {name: s[None] for name, s in last.items()}
            shared = [name for name in stats if name in last]  # in their order: all processes compile one program
            both = {name: jnp.concatenate([stats.pop(name), last.pop(name)]) for name in shared}
            return partial_sum, both | stats | last

        partial_sum, stats = jax.lax.scan(group, partial_sum, (kda_state, mla_state, bias, empty))
        return partial_sum, {name: s.reshape(s.shape[0] * s.shape[1], *s.shape[2:]) for name, s in stats.items()}

    def _stats(self, pieces: list[dict[str, Array]], tokens: Array, segment_ids: Array | None) -> Stats:
        config = self.config
        bins = router.BINS if config.moe.balancing == "quantile" else 0
        experts = config.moe.routed_experts
        sources = len(self.blocks) + 1

        def joined(name: str, shape: tuple[int, ...], dtype=jnp.float32) -> Array:
            found = [piece[name] for piece in pieces if name in piece]
            return jnp.concatenate(found) if found else jnp.zeros((0, *shape), dtype)

        # Sub-layers of early blocks know fewer sources; the partial sum is put last for all.
        for piece in pieces:
            if "attnres_weights" in piece:
                w = piece["attnres_weights"].reshape(-1, piece["attnres_weights"].shape[-1])
                spare = jnp.zeros((w.shape[0], sources - w.shape[1]))
                piece["attnres_weights"] = jnp.concatenate([w[:, :-1], spare, w[:, -1:]], axis=1)
        counted = tokens.size if segment_ids is None else jnp.sum(segment_ids > 0, dtype=jnp.int32)
        stats = Stats(
            tokens=jnp.asarray(counted, jnp.int32),
            expert_load=joined("expert_load", (experts,), jnp.int32),
            histogram=joined("histogram", (experts, bins), jnp.int32),
            max_logit=joined("max_logit", (config.mla.heads,)),
            gate_saturation=joined("gate_saturation", ()),
            attnres_weights=joined("attnres_weights", (sources,)),
        )
        return jax.lax.stop_gradient(stats)

    def mla_places(self) -> list[tuple[str, int | None]]:
        """Where the MLA layers are, in layer order: (path of the attention, how many are stacked there; None: one)."""
        places = []
        for at, (plan, block) in enumerate(zip(self.plans, self.blocks, strict=True)):
            for part, layers in (("head", block.head), ("groups", ()), ("tail", block.tail)):
                if part == "groups" and plan.groups:
                    places.append((f"blocks.{at}.groups.mla.attention", plan.groups))
                found = (i for i, layer in enumerate(layers) if isinstance(layer.attention, MLA))
                places += [(f"blocks.{at}.{part}.{i}.attention", None) for i in found]
        return places

    def router_bias(self) -> Array:
        """The routers' biases in layer order, [moe_layers, experts] fp32."""
        rows = [jnp.zeros((0, self.config.moe.routed_experts), jnp.float32)]
        for block in self.blocks:
            rows += [layer.mlp.router.bias[...][None] for layer in block.head if isinstance(layer.mlp, MoE)]
            if hasattr(block, "groups"):
                kda, mla = (layer.mlp.router.bias[...] for layer in (block.groups.kda, block.groups.mla))
                grouped = [kda.reshape(mla.shape[0], KDA_IN_GROUP, -1), mla[:, None]]
                rows.append(jnp.concatenate(grouped, axis=1).reshape(-1, mla.shape[-1]))
            rows += [layer.mlp.router.bias[...][None] for layer in block.tail]
        return jnp.concatenate(rows)

    def set_router_bias(self, bias: Array) -> None:
        """Writes biases [moe_layers, experts] back into the routers."""
        at = 0

        def write(layers: nnx.List) -> None:
            nonlocal at
            for layer in layers:
                if isinstance(layer.mlp, MoE):
                    layer.mlp.router.bias.set_value(bias[at])
                    at += 1

        for plan, block in zip(self.plans, self.blocks, strict=True):
            write(block.head)
            if plan.groups:
                rows = bias[at : at + plan.groups * len(GROUP)].reshape(plan.groups, len(GROUP), -1)
                kda = rows[:, :KDA_IN_GROUP].reshape(-1, rows.shape[-1])
                block.groups.kda.mlp.router.bias.set_value(kda)
                block.groups.mla.mlp.router.bias.set_value(rows[:, -1])
                at += plan.groups * len(GROUP)
            write(block.tail)
