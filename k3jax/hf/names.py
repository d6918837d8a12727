"""Published tensor names and layouts against ours, in one table.

Theirs: matrices [out, in], one tensor per layer and expert. Ours: kernels [in, out] with heads split, repeated layers
stacked on a leading axis, experts on the next (model/decoder.py). Invariant: the name alone decides the layout, never a
shape (with square matrices a guess from shapes transposes in silence); every variable of a decoder has a row here.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from k3jax.config import ConfigError, ModelConfig
from k3jax.model.decoder import KDA_IN_GROUP, Decoder, plan_blocks

Shape = tuple[int, ...]
SKIPPED = ("vision_tower.", "mm_projector.")  # known, not ours: carried along by save(like=...)
FP32 = ("router.weight", "router.bias", "a_log", "dt_bias")  # ends of paths that are fp32 whatever the model's type
PADDED_TO = 128  # K3 stores A_log zero-padded to a multiple of this


class Layout(NamedTuple):
    """How a published tensor holds our arrays, mostly one."""

    shapes: Callable[..., tuple[Shape, ...]]  # our shapes -> the published ones that are read; the first is written
    ours: Callable[..., tuple[np.ndarray, ...]]  # (tensor, *our shapes) -> our arrays
    published: Callable[..., np.ndarray]  # (published shape, *our arrays) -> tensor


def _linear(inputs: int) -> Layout:
    """[out, in] against a kernel whose first `inputs` axes are the input."""
    return Layout(
        lambda s: ((math.prod(s[inputs:]), math.prod(s[:inputs])),),
        lambda tensor, s: (tensor.T.reshape(s),),
        lambda shape, kernel: kernel.reshape(shape[::-1]).T,
    )


def _reshaped(shape: Callable[[Shape], Shape]) -> Layout:
    return Layout(lambda s: (shape(s),), lambda tensor, s: (tensor.reshape(s),), lambda shape, x: x.reshape(shape))


def _without_padding(tensor: np.ndarray, s: Shape) -> tuple[np.ndarray]:
    flat = tensor.reshape(-1)
    if np.any(flat[s[0] :]):
        raise ConfigError(f"padding after {s[0]} heads is not 0")
    return (flat[: s[0]],)


def _with_padding(shape: Shape, heads: np.ndarray) -> np.ndarray:
    return np.pad(heads, (0, math.prod(shape) - heads.size)).reshape(shape)


def _split_heads(tensor: np.ndarray, key: Shape, value: Shape) -> tuple[np.ndarray, np.ndarray]:
    rows = tensor.reshape(key[1], key[2] + value[2], key[0])
    return rows[:, : key[2]].transpose(2, 0, 1), rows[:, key[2] :].transpose(2, 0, 1)


LINEAR, LINEAR_FROM_HEADS = _linear(1), _linear(2)
FLAT = _reshaped(lambda s: (math.prod(s),))
SAME = _reshaped(lambda s: s)
ROW = _reshaped(lambda s: (1, *s))
CONV = Layout(  # [channels, 1, taps] against [taps, heads, head_dim]
    lambda s: ((math.prod(s[1:]), 1, s[0]),),
    lambda tensor, s: (tensor[:, 0].T.reshape(s),),
    lambda shape, taps: taps.reshape(shape[2], shape[0]).T[:, None],
)
PER_HEAD = Layout(
    lambda s: (s, (1, 1, *s, 1), (-(-s[0] // PADDED_TO) * PADDED_TO,)),
    _without_padding,
    _with_padding,
)
KEY_VALUE = Layout(  # rows of each head: its keys, then its values; against [kv_lora, heads, dim] twice
    lambda key, value: ((key[1] * (key[2] + value[2]), key[0]),),
    _split_heads,
    lambda shape, key, value: np.concatenate([key.transpose(1, 2, 0), value.transpose(1, 2, 0)], axis=1).reshape(shape),
)

# (published name, our path or paths, layout). A row counts for the layers whose model has the path.
TOP = (
    ("model.embed_tokens.weight", "embed", SAME),
    ("model.norm.weight", "final.norm.weight", FLAT),
    ("model.output_attn_res_norm.weight", "final.res.norm.weight", FLAT),
    ("model.output_attn_res_proj.weight", "final.res.query", ROW),
    ("lm_head.weight", "lm_head", LINEAR),
)
LAYER = (  # under model.layers.<number from 0>.
    ("input_layernorm.weight", "attention_norm.weight", FLAT),
    ("post_attention_layernorm.weight", "mlp_norm.weight", FLAT),
    ("self_attention_res_norm.weight", "attention_res.norm.weight", FLAT),
    ("self_attention_res_proj.weight", "attention_res.query", ROW),
    ("mlp_res_norm.weight", "mlp_res.norm.weight", FLAT),
    ("mlp_res_proj.weight", "mlp_res.query", ROW),
    ("self_attn.q_proj.weight", "attention.q", LINEAR),  # KDA, and MLA without q_lora
    ("self_attn.g_proj.weight", "attention.g", LINEAR),  # KDA and MLA
    ("self_attn.o_proj.weight", "attention.o", LINEAR_FROM_HEADS),
    ("self_attn.k_proj.weight", "attention.k", LINEAR),  # KDA from here
    ("self_attn.v_proj.weight", "attention.v", LINEAR),
    ("self_attn.q_conv1d.weight", "attention.q_conv", CONV),
    ("self_attn.k_conv1d.weight", "attention.k_conv", CONV),
    ("self_attn.v_conv1d.weight", "attention.v_conv", CONV),
    ("self_attn.f_a_proj.weight", "attention.f_a", LINEAR),
    ("self_attn.f_b_proj.weight", "attention.f_b", LINEAR),
    ("self_attn.b_proj.weight", "attention.b", LINEAR),
    ("self_attn.g_a_proj.weight", "attention.g_a", LINEAR),
    ("self_attn.g_b_proj.weight", "attention.g_b", LINEAR),
    ("self_attn.A_log", "attention.a_log", PER_HEAD),
    ("self_attn.dt_bias", "attention.dt_bias", FLAT),
    ("self_attn.o_norm.weight", "attention.o_norm.weight", FLAT),
    ("self_attn.q_a_proj.weight", "attention.q_a", LINEAR),  # MLA from here
    ("self_attn.q_a_layernorm.weight", "attention.q_norm.weight", FLAT),
    ("self_attn.q_b_proj.weight", "attention.q_b", LINEAR),
    ("self_attn.kv_a_proj_with_mqa.weight", "attention.kv_a", LINEAR),
    ("self_attn.kv_a_layernorm.weight", "attention.kv_norm.weight", FLAT),
    ("self_attn.kv_b_proj.weight", ("attention.k_b", "attention.v_b"), KEY_VALUE),
)
DENSE = (
    ("mlp.gate_proj.weight", "mlp.w1", LINEAR),
    ("mlp.up_proj.weight", "mlp.w3", LINEAR),
    ("mlp.down_proj.weight", "mlp.w2", LINEAR),
)
MOE = (
    ("block_sparse_moe.gate.weight", "mlp.router.weight", LINEAR),
    ("block_sparse_moe.gate.e_score_correction_bias", "mlp.router.bias", FLAT),
    ("block_sparse_moe.routed_expert_down_proj.weight", "mlp.latent_down", LINEAR),
    ("block_sparse_moe.routed_expert_norm.weight", "mlp.latent_norm.weight", FLAT),
    ("block_sparse_moe.routed_expert_up_proj.weight", "mlp.latent_up", LINEAR),
    ("block_sparse_moe.shared_experts.gate_proj.weight", "mlp.shared.w1", LINEAR),
    ("block_sparse_moe.shared_experts.up_proj.weight", "mlp.shared.w3", LINEAR),
    ("block_sparse_moe.shared_experts.down_proj.weight", "mlp.shared.w2", LINEAR),
    ("block_sparse_moe.experts.{}.w1.weight", "mlp.w1", LINEAR),  # one tensor per expert
    ("block_sparse_moe.experts.{}.w3.weight", "mlp.w3", LINEAR),
    ("block_sparse_moe.experts.{}.w2.weight", "mlp.w2", LINEAR),
)


class Tensor(NamedTuple):
    """A published tensor: which of our arrays it holds, at which index of their leading (layer, expert) axes."""

    paths: tuple[str, ...]
    index: tuple[int, ...]
    layout: Layout
    ours: tuple[Shape, ...]  # shapes of our arrays behind the index
    shapes: tuple[Shape, ...]  # published shapes that are read; the first is written


def values(decoder: Decoder) -> dict[str, Any]:
    """Path -> array, or ShapeDtypeStruct, of all variables; unlike model.parameters with the router biases."""
    flat = nnx.to_flat_state(nnx.state(decoder))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


def filled(decoder: Decoder, arrays: dict[str, Any]) -> Decoder:
    """A decoder of the same structure that holds these arrays: the inverse of `values`."""
    graphdef, state = nnx.split(decoder)
    flat = {path: variable.replace(arrays[".".join(map(str, path))]) for path, variable in nnx.to_flat_state(state)}
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _layers(config: ModelConfig) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """(layer from 0, path of its module, its row in the stack) of every layer in order."""
    for block, plan in enumerate(plan_blocks(config)):
        stem, at = f"blocks.{block}", plan.first
        for place in range(plan.head):
            yield at + place, f"{stem}.head.{place}", ()
        at += plan.head
        for group in range(plan.groups):
            for place in range(KDA_IN_GROUP):
                yield at + place, f"{stem}.groups.kda", (group * KDA_IN_GROUP + place,)
            yield at + KDA_IN_GROUP, f"{stem}.groups.mla", (group,)
            at += KDA_IN_GROUP + 1
        for place in range(plan.tail):
            yield at + place, f"{stem}.tail.{place}", ()


def tensors(decoder: Decoder, prefix: str = "") -> dict[str, Tensor]:
    """Every published tensor of a decoder (abstract or not) by its name, layer after layer.

    `prefix` stands before all names. Raises ValueError for a variable that the table does not name.
    """
    config = decoder.config
    have = {path: tuple(value.shape) for path, value in values(decoder).items()}
    table, named = {}, set()

    def add(rows, name_stem: str, stem: str, index: tuple[int, ...]) -> None:
        for name, paths, layout in rows:
            paths = tuple(stem + path for path in ((paths,) if isinstance(paths, str) else paths))
            if paths[0] not in have:
                continue
            named.update(paths)
            experts = range(config.moe.routed_experts) if "{}" in name else (None,)
            lead = len(index) + ("{}" in name)
            ours = tuple(have[path][lead:] for path in paths)
            shapes = layout.shapes(*ours)
            if layout is PER_HEAD and config.kda.lower_bound is None:
                shapes = (shapes[1], shapes[0], *shapes[2:])  # as Kimi Linear's code declares it
            for expert in experts:
                at = index if expert is None else (*index, expert)
                table[prefix + name_stem + name.format(expert)] = Tensor(paths, at, layout, ours, shapes)

    add(TOP[:1], "", "", ())
    for number, stem, index in _layers(config):
        rows = LAYER + (DENSE if number < config.dense_layers else MOE)
        add(rows, f"model.layers.{number}.", f"{stem}.", index)
    add(TOP[1:], "", "", ())
    if named != have.keys():
        raise ValueError(f"no published name for {', '.join(sorted(have.keys() - named)[:5])}")
    return table
