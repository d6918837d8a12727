"""What the collectives of a train step send, worked out from config, mesh and shapes alone.

    of `size` bytes that it gives, a device in a group of n sends
        gather  size (n - 1)      scatter, exchange  size (n - 1) / n      sum, maximum  2 size (n - 1) / n

    parameters   every kernel that lies apart over SHARDS: gathered where its layer runs; its gradient, in fp32, back
    repeated     the gradient of every parameter, summed over the axes of TOKENS that do not split it
    tensor       forward: a sum [tokens, embed] for each sub-layer; backward: one for all that enters a device's part
    context      KDA: M [heads, K, K] and S [heads, K, V] of a piece, three tokens for each convolution;
                 MLA: the row of compressed keys and values
    expert       forth and back [devices, tokens min(k, own experts), latent], and a weight for each of these rows
    whole step   histogram [layers, experts, bins] and the other statistics, loss, norms
    Muon         parts of m blocks for each device of an exchange, there and back (parallel/matrices.py)

A sub-layer that is computed again in the backward pass also talks again. But where a layer runs in no loop, forward and
backward pass are one piece of program: in it, XLA's CPU compiler finds gathers of the same parameter and does them once
(from jax 0.12 on, only in a loop of one round). It sends bf16 as fp32, and buffers for whatever may come to an expert.

Invariant: no program is looked at. The census (collectives.py) looks at nothing else, and a test holds both together.
"""

import collections
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from k3jax.config import RunConfig
from k3jax.model import parameters, router
from k3jax.model.decoder import plan_blocks
from k3jax.model.loss import PIECE
from k3jax.optim import trainable
from k3jax.parallel import matrices
from k3jax.parallel.context import HALO
from k3jax.parallel.mesh import AXES, ROWS, SHARDS, TOKENS, axis_sizes, partition_spec, spec_names
from k3jax.step import abstract_decoder

GATHER, SCATTER, SUM, EXCHANGE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
MERGES = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12)
ITEM = 4  # bytes of a number on its way, whatever the type it is computed in


class Term(NamedTuple):
    """One line of the formula.

    Attributes:
        name: what is sent, and when.
        kind: of collective, as in hlo.KINDS.
        axes: mesh axes it runs over, "fsdp+expert", in the mesh's order.
        count: how many of them there are in a step; a compiler may join several into one.
        sent: bytes that one device sends in a step.
    """

    name: str
    kind: str
    axes: str
    count: int
    sent: float


class _Layers(NamedTuple):
    """`count` layers of one kind."""

    mla: bool
    dense: bool
    count: int


def terms(config: RunConfig) -> list[Term]:
    """All terms of the run's step in the order of the table above; mesh.data is 1 where the config leaves it open.

    Raises ConfigError: a size that the mesh does not divide. Frozen parameters have no gradient here; that nothing
    behind them may need one is not seen.
    """
    step = _Step(config)
    variables = parameters.variables(abstract_decoder(config))
    step.parameters(variables)
    step.embedding_and_head()
    for layers in _stack(config):
        (step.mla if layers.mla else step.kda)(layers)
        (step.dense if layers.dense else step.moe)(layers)
    step.statistics()
    step.muon(variables)
    return [Term(*key, int(count), sent) for key, (count, sent) in step.found.items()]


def _stack(config: RunConfig) -> list[_Layers]:
    """The layers of a model, by kind."""
    model = config.model
    found = collections.Counter((at + 1 in model.mla_layers, at < model.dense_layers) for at in range(model.layers))
    return [_Layers(*kind, count) for kind, count in found.items()]


class _Step:
    """Adds up what one device sends. Shapes are of its own part: `tokens` of `rows` pieces of rows."""

    def __init__(self, config: RunConfig):
        self.config, self.model = config, config.model
        self.sizes = axis_sizes(config.mesh, 1)
        self.parts = config.train.accumulate
        self.rows = config.data.batch_rows // self.parts // self.devices(ROWS)
        self.tokens = self.rows * config.data.seq_len // self.sizes["context"]
        self.again = config.memory.policy == "recompute_all"
        self.found: dict[tuple[str, str, str], tuple[int, float]] = {}

    def devices(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[name] for name in axes)

    def add(self, name: str, kind: str, axes: Iterable[str], numbers: float, times: int = 1) -> None:
        """`times` collectives over `axes`, to each of which a device gives `numbers` numbers."""
        names = [axis for axis in AXES if axis in axes and self.sizes[axis] > 1]
        devices = self.devices(names)
        if devices == 1 or not numbers or not times:
            return
        share = (devices - 1) / devices
        sent = times * numbers * ITEM * {GATHER: devices - 1, SUM: 2 * share}.get(kind, share)
        key = name, kind, "+".join(names)
        before = self.found.get(key, (0, 0.0))
        self.found[key] = before[0] + times, before[1] + sent

    def spec(self, path: str, variable: nnx.Param) -> P:
        return partition_spec(path, variable.get_value().shape, variable.get_metadata("logical_axes"), self.sizes)

    # ---- parameters and their gradients ------------------------------------------------------------------------
    def parameters(self, variables: dict[str, nnx.Param]) -> None:
        learnt = trainable(tuple(variables), self.config.optim.frozen)
        plans = list(enumerate(plan_blocks(self.model)))
        looping = [f"blocks.{at}.groups.kda." for at, plan in plans if plan.groups]
        looping += [f"blocks.{at}.groups.mla." for at, plan in plans if plan.groups > 1]  # one round is no loop
        unrolled = [f"blocks.{at}.{part}." for at, _ in plans for part in ("head", "tail")]
        again = tuple(looping if MERGES else looping + unrolled)
        for path, variable in variables.items():
            shape, axes = variable.get_value().shape, variable.get_metadata("logical_axes")
            spec = spec_names(self.spec(path, variable))
            split = {name for names in spec for name in names}
            gathered = {name for axis, names in zip(axes, spec, strict=False) if axis != "experts"
                        for name in names if name in SHARDS}  # fmt: skip
            own = math.prod(shape) // self.devices(split)
            layers = shape[0] if axes[0] == "layers" else 1
            each = own / layers, layers * self.parts
            if gathered:
                self.add("parameters gathered, forward", GATHER, gathered, *each)
                if path.startswith(again):
                    self.add("parameters gathered again, backward", GATHER, gathered, *each)
                if path in learnt:
                    whole = each[0] * self.devices(gathered), each[1]
                    self.add("gradients scattered", SCATTER, gathered, *whole)
            if path in learnt:
                self.add("gradients of repeated parameters", SUM, set(TOKENS) - split, own)
                for names in spec:  # one axis after the other
                    self.add("norms of gradient and update", SUM, names, 1, 2)

    def embedding_and_head(self) -> None:
        """Rows of the embedding; tokens of a row's other pieces; cross-entropy over a vocabulary that lies apart."""
        self.tensor("embedding", self.model.embed)
        for numbers in (self.tokens, HALO * self.rows, HALO * self.rows):
            self.add("what a piece knows of its row", GATHER, ("context",), numbers, self.parts)
        piece = min(self.tokens, max(16, PIECE // (self.model.vocab // self.sizes["tensor"])))
        pieces = -(-self.tokens // piece)
        for what, times in (("maximum", 2), ("sum of exponentials", 2), ("target's logit", 1)):
            # Logits are computed again in the backward pass, which needs the first two.
            self.add(f"cross-entropy: {what}", SUM, ("tensor",), piece, times * pieces * self.parts)
        self.tensor("head, backward", self.model.embed)

    def tensor(self, name: str, width: float, layers: int = 1) -> None:
        """A sum over `tensor` of [tokens, width] in each of `layers`."""
        self.add(f"tensor: {name}", SUM, ("tensor",), self.tokens * width, layers * self.parts)

    # ---- attention ---------------------------------------------------------------------------------------------
    def kda(self, layers: _Layers) -> None:
        c, count = self.model.kda, layers.count
        self.tensor("KDA", self.model.embed, count)
        self.tensor("KDA saturation", 1, count)
        low_rank = 0 if c.output_gate == "full" else c.value_dim
        self.tensor("KDA, backward", self.model.embed + c.key_dim + low_rank, count)
        self.add("tensor: KDA norms, backward", SUM, ("tensor",), c.value_dim, count * self.parts)
        heads = c.heads // self.sizes["tensor"]
        for width in (c.key_dim, c.key_dim, c.value_dim):
            self.context("convolution's three tokens", self.rows * HALO * heads * width, count)
        for name, width in (("KDA M", c.key_dim), ("KDA S", c.value_dim)):
            self.context(name, self.rows * heads * c.key_dim * width, count)

    def mla(self, layers: _Layers) -> None:
        c, count = self.model.mla, layers.count
        self.tensor("MLA", self.model.embed, count)
        query = self.model.embed if c.q_lora is None else c.q_lora
        self.tensor("MLA, backward", query + self.model.embed * c.output_gate, count)
        width, row = c.kv_lora + c.qk_shared, self.sizes["context"]
        self.tensor("MLA keys and values, backward", width * row, count)
        self.context("MLA compressed row", self.tokens * width, count)

    def context(self, name: str, numbers: float, layers: int) -> None:
        """A gather over `context` in each of `layers`, and its gradient."""
        times = layers * self.parts
        self.add(f"context: {name}", GATHER, ("context",), numbers, times)
        self.add(f"context: {name}, again", GATHER, ("context",), numbers, times * self.again)
        self.add(f"context: {name}, gradient", SCATTER, ("context",), numbers * self.sizes["context"], times)

    # ---- feed-forward ------------------------------------------------------------------------------------------
    def dense(self, layers: _Layers) -> None:
        self.tensor("MLP", self.model.embed, layers.count)
        self.tensor("MLP, backward", self.model.embed, layers.count)

    def moe(self, layers: _Layers) -> None:
        c, count = self.model.moe, layers.count
        latent, shared = c.latent or self.model.embed, self.model.embed * bool(c.shared_experts)
        self.tensor("experts", latent + shared, count)
        self.tensor("experts, backward", latent + c.top_k + shared, count)
        needed = self.again and bool(c.latent)  # a norm and a projection stand behind the sum, and need it
        self.tensor("experts, again", latent * needed, count)

        own = c.routed_experts // self.sizes["expert"]
        rows = self.sizes["expert"] * self.tokens * min(c.top_k, own)
        times = count * self.parts
        # Experts that keep nothing have their rows sent again, and so has the whole sub-layer if it needs their sum.
        # The compiler for CPUs finds that these rows are the same, and does not see it of the weights.
        sent = ("rows forth", latent, 1), ("weights forth", 1, 1 + needed), ("rows back", latent, needed)
        for name, width, again in sent:
            self.add(f"expert: {name}", EXCHANGE, ("expert",), rows * width, times)
            self.add(f"expert: {name}, again", EXCHANGE, ("expert",), rows * width, times * again)
            self.add(f"expert: {name}, gradient", EXCHANGE, ("expert",), rows * width, times)
        self.add("expert: counts of rows", GATHER, ("expert",), c.routed_experts, 2 * times)

    # ---- the whole step ----------------------------------------------------------------------------------------
    def statistics(self) -> None:
        """Loss and Stats of all tokens."""
        model, stack = self.model, _stack(self.config)
        routed = sum(layers.count for layers in stack if not layers.dense)
        mla = sum(layers.count for layers in stack if layers.mla)
        kda = model.layers - mla
        bins = router.BINS if model.moe.balancing == "quantile" else 0
        mixes = (2 * model.layers + 1) * (len(plan_blocks(model)) + 1) if model.attn_res_block else 0
        heads = model.mla.heads // self.sizes["tensor"]
        self.add("router: histogram", SUM, TOKENS, routed * model.moe.routed_experts * bins)
        self.add("router: expert load", SUM, TOKENS, routed * model.moe.routed_experts)
        self.add("other statistics", SUM, TOKENS, kda + mixes + 1)
        self.add("largest logits", SUM, TOKENS, mla * heads)
        self.add("loss and targets", SUM, TOKENS, 2)
        self.add("largest logits, shown", GATHER, ("tensor",), mla * heads)
        self.add("largest logits, shown", SUM, ("tensor",), bool(mla))

    def muon(self, variables: dict[str, nnx.Param]) -> None:
        """Whole matrices for Newton-Schulz: the messages of the exchanges that parallel/matrices.py chooses."""
        learnt = trainable(tuple(variables), self.config.optim.frozen)
        found = {p: v for p, v in variables.items() if p in learnt and v.get_metadata("matrix_axes") is not None}
        shapes = {path: variable.get_value().shape for path, variable in found.items()}
        names = {path: spec_names(self.spec(path, variable)) for path, variable in found.items()}
        axes = {path: variable.get_metadata("matrix_axes") for path, variable in found.items()}
        for stack in matrices.stacks(shapes, axes, names, self.sizes):
            way = stack.exchange
            # A part of each block that the devices of the exchange will hold, those included that fill up.
            parts = way.held * math.prod(way.block.sizes) / self.devices(way.gathered)
            self.add("Muon: parts there and back", EXCHANGE, way.exchanged, parts, 2)
            self.add("Muon: parts gathered", GATHER, way.gathered, parts)
            self.add("Muon: shared work back", GATHER, way.shared, parts)
            self.add("Muon: norms of blocks", SUM, way.exchanged + way.gathered, way.blocks)
