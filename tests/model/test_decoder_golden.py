"""Whole models against the published code: both golden checkpoints through hf.load; logits, loss, every gradient.

kimi_k3_tiny is unrolled (its blocks of 2 hold no group of four); the 17-layer MESH model below shows that the scanned
form is the same function.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
import torch_layout
from flax import nnx
from golden_files import FOLDER, assert_close, golden

from k3jax import hf
from k3jax.config import MemoryConfig
from k3jax.model import parameters
from k3jax.model.decoder import Decoder, plan_blocks
from k3jax.model.loss import cross_entropy


def run(decoder, arrays, segments):
    """(loss, logits, gradients by path) of the mean loss over shifted labels that are not -100."""
    tokens, labels = jnp.asarray(arrays["input_ids"]), arrays["labels"]
    targets = np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], -100)], axis=1)
    mask = targets != -100

    @jax.jit
    def gradient(params):
        def loss(params):
            bound = parameters.bind(decoder, params, router_bias=decoder.router_bias())
            hidden, _ = bound.apply(tokens, segments)
            total, count = cross_entropy(hidden, bound.lm_head[...], jnp.asarray(targets), jnp.asarray(mask))
            return total / count, bound(tokens, segments)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, logits), gradients = gradient(parameters.values(decoder))
    return loss, logits, gradients


def published(path: str, decoder: Decoder) -> tuple[str, str]:
    """Name and layout of a gradient in the golden file."""
    config = decoder.config
    if match := re.match(r"blocks\.(\d+)\.head\.(\d+)\.(.*)", path):
        at, rest = plan_blocks(config)[int(match[1])].first + int(match[2]), match[3]
    elif match := re.match(r"blocks\.(\d+)\.tail\.(\d+)\.(.*)", path):
        plan = plan_blocks(config)[int(match[1])]
        at, rest = plan.first + plan.head + 4 * plan.groups + int(match[2]), match[3]
    else:
        top = {
            "embed": ("model.embed_tokens.weight", torch_layout.VECTOR),
            "lm_head": ("lm_head.weight", torch_layout.LINEAR),
            "final.norm.weight": ("model.norm.weight", torch_layout.VECTOR),
            "final.res.norm.weight": ("model.output_attn_res_norm.weight", torch_layout.VECTOR),
            "final.res.query": ("model.output_attn_res_proj.weight", torch_layout.VECTOR),
        }
        return top[path]
    mla, dense = at + 1 in config.mla_layers, at < config.dense_layers
    attention = torch_layout.MLA if mla else torch_layout.KDA
    mlp = (torch_layout.MLP, "mlp") if dense else (torch_layout.MOE, "block_sparse_moe")
    name, layout = torch_layout.layer(attention, *mlp)[rest]
    return f"model.layers.{at}.{name}", layout


def test_kimi_k3_tiny():
    arrays = golden("kimi_k3_tiny")
    decoder = hf.load(FOLDER / "kimi_k3_tiny")
    loss, logits, gradients = run(decoder, arrays, None)
    assert_close(logits, arrays["logits"], 2e-5, "logits")
    assert_close(loss, arrays["loss"], 1e-6, "loss")
    seen = set()
    for path, value in gradients.items():
        name, layout = published(path, decoder)
        assert_close(value, torch_layout.ours(arrays, "dw.", name, layout, value.shape), 1e-4, path)
        seen.add(name)
    # Layer 1 has one source to mix: its pseudo-query and key norm are in the files, and nothing reads them.
    for unread in ("norm.weight", "query"):
        assert not np.any(gradients[f"blocks.0.head.0.attention_res.{unread}"])
    given = {re.sub(r"experts\.\d+", "experts.{}", name[3:]) for name in arrays if name.startswith("dw.")}
    assert {name for name in given - seen if not name.endswith("e_score_correction_bias")} == set()


def transformers_gradient(arrays: dict, name: str, layout: str, shape: tuple[int, ...]) -> np.ndarray:
    """A gradient under transformers' in-memory names: one convolution, forget_gate, stacked experts."""
    pieces = {"q_conv1d": 0, "k_conv1d": 1, "v_conv1d": 2}
    for piece, at in pieces.items():
        if f"self_attn.{piece}" in name:
            whole = arrays["dw." + name.replace(piece, "conv1d")]
            return torch_layout.ours({"part": np.split(whole, 3)[at]}, "", "part", layout, shape)
    if layout == "experts":
        stem = "dw." + name.split("block_sparse_moe.")[0] + "mlp.experts."
        if ".w2." in name:
            return arrays[stem + "down_proj"].transpose(0, 2, 1)
        half = np.split(arrays[stem + "gate_up_proj"], 2, axis=1)[0 if ".w1." in name else 1]
        return half.transpose(0, 2, 1)
    candidates = [name, name.replace("block_sparse_moe.", "mlp."), *(
        name.replace(old, f"forget_gate.{new}")
        for old, new in (("A_log", "A_log"), ("dt_bias", "dt_bias"), ("f_a_proj", "f_a_proj"), ("f_b_proj", "f_b_proj"))
        if old in name
    )]  # fmt: skip
    found = next(candidate for candidate in candidates if f"dw.{candidate}" in arrays)
    return torch_layout.ours(arrays, "dw.", found, layout, shape)


def test_kimi_linear_tiny():
    arrays = golden("kimi_linear_tiny")
    decoder = hf.load(FOLDER / "kimi_linear_tiny")
    real = arrays["attention_mask"] == 1
    loss, logits, gradients = run(decoder, arrays, jnp.asarray(arrays["attention_mask"]))
    assert_close(logits[real], arrays["logits"][real], 2e-5, "logits")
    assert_close(loss, arrays["loss"], 1e-6, "loss")
    for path, value in gradients.items():
        name, layout = published(path, decoder)
        assert_close(value, transformers_gradient(arrays, name, layout, value.shape), 1e-4, path)


@pytest.mark.parametrize("res", [8, None])
def test_scan_equals_unrolled(res):
    """Groups under lax.scan against the same layers one by one, statistics too, with recomputation and padding."""
    config = dataclasses.replace(sizes.MESH, attn_res_block=res)
    scanned = Decoder(config, rngs=nnx.Rngs(0), memory=MemoryConfig("recompute_all"))
    bias = 0.05 * jax.random.normal(jax.random.key(1), (config.moe_layers, config.moe.routed_experts))
    scanned = parameters.bind(scanned, randomised(parameters.values(scanned)), router_bias=bias)
    unrolled = unroll(scanned)
    tokens = jax.random.randint(jax.random.key(2), (2, 21), 0, config.vocab)
    segments = jnp.ones_like(tokens).at[0, 9:].set(2).at[1, 17:].set(0)

    @jax.jit
    def both():
        return scanned.apply(tokens, segments), unrolled(tokens, segments)

    (hidden, stats), (expected, expected_stats) = both()
    assert_close(hidden, expected, 1e-5, "hidden")
    for name in ("expert_load", "histogram", "max_logit", "gate_saturation", "attnres_weights"):
        value, other = getattr(stats, name), getattr(expected_stats, name)
        assert value.shape == other.shape
        if name == "histogram":  # a score on a bin's edge may round to the next bin: at most 0.1 % do, by one bin
            moved = np.abs(np.cumsum(value - other, axis=-1))
            assert moved.max() <= 1 and moved.sum() <= 1e-3 * other.sum()
        elif value.dtype == jnp.int32:
            np.testing.assert_array_equal(value, other, name)
        else:
            assert_close(value, other, 1e-5, name)
    assert stats.tokens == 38 and (stats.expert_load.sum(axis=1) == 38 * config.moe.top_k).all()


def randomised(params):
    """Pseudo-queries away from 0, so that mixing is not uniform."""
    return {
        path: 0.3 * jax.random.normal(jax.random.key(len(path)), value.shape) if path.endswith("query") else value
        for path, value in params.items()
    }


def unroll(decoder: Decoder):
    """apply() with every layer of the groups taken out of its stack and called on its own."""
    config = decoder.config
    plain = Decoder(config, rngs=nnx.Rngs(0))
    plain.embed, plain.final, plain.lm_head = decoder.embed, decoder.final, decoder.lm_head
    plain.plans = tuple(p._replace(head=p.head + 4 * p.groups + p.tail, groups=0, tail=0) for p in decoder.plans)
    for at, (plan, block) in enumerate(zip(decoder.plans, decoder.blocks, strict=True)):
        layers = list(block.head)
        for group in range(plan.groups):
            for stack, rows in ((block.groups.kda, range(3 * group, 3 * group + 3)), (block.groups.mla, [group])):
                graphdef, state = nnx.split(stack)
                layers += [nnx.merge(graphdef, jax.tree.map(lambda x, row=row: x[row], state)) for row in rows]
        plain.blocks[at].head, plain.blocks[at].tail = nnx.List([*layers, *block.tail]), nnx.List([])
    return lambda tokens, segments: plain.apply(tokens, segments, decoder.router_bias())
