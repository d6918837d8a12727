"""A decoder's parameters as a flat dict, path -> array, and back.

Paths are attribute names and list places joined by dots: `blocks.0.head.0.attention.q`. Invariant: the dict is the
whole trainable state; the router biases, which no gradient reaches, travel beside it.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax.model.decoder import Decoder

# fp32 in every forward pass (design: numbers that decide): statistics, gates, mixing and the router.
KEPT_FP32 = ("router.weight", "a_log", "dt_bias", "norm.weight", "query")


def variables(decoder: Decoder) -> dict[str, nnx.Param]:
    """Path -> nnx.Param, with its metadata (`logical_axes`, `matrix_axes`, `weight_decay`)."""
    return {".".join(map(str, path)): param for path, param in nnx.to_flat_state(nnx.state(decoder, nnx.Param))}


def values(decoder: Decoder) -> dict[str, Array]:
    """Path -> array (or ShapeDtypeStruct of an abstract decoder)."""
    return {path: variable.get_value() for path, variable in variables(decoder).items()}


def bind(decoder: Decoder, parameters: Mapping[str, Array], *, router_bias: Array | None = None, dtype=None) -> Decoder:
    """A new decoder of the same structure that holds `parameters`; `decoder` may be abstract.

    dtype: type that the matrices, convolutions and the head are cast to, and so that of the activations; None leaves
    all as they are. The embedding stays: its rows are cast where they are read, so that their gradients add up in
    fp32. router_bias [moe_layers, experts] is written into the routers if given; without it those of an abstract
    decoder are 0.
    """
    graphdef, params, rest = nnx.split(decoder, nnx.Param, ...)
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, rest)
    flat = {}
    for path, variable in nnx.to_flat_state(params):
        name = ".".join(map(str, path))
        value = parameters[name]
        if dtype is not None and name != "embed" and not name.endswith(KEPT_FP32):
            value = value.astype(dtype)
        flat[path] = variable.replace(value)
    bound = nnx.merge(graphdef, nnx.from_flat_state(flat), rest)
    if router_bias is not None:
        bound.set_router_bias(router_bias)
    return bound


def count(decoder: Decoder) -> tuple[int, int]:
    """(total, active) parameters of a decoder, abstract or not; the router bias counts.

    Active ones leave out the embedding and, of the routed experts, those that a token does not visit.
    """
    total = passive = 0
    moe = decoder.config.moe
    for path, variable in nnx.to_flat_state(nnx.state(decoder)):
        size, axes = variable.get_value().size, variable.get_metadata("logical_axes")
        total += size
        if path == ("embed",):
            passive += size
        elif "expert_mlp" in axes:
            passive += size // moe.routed_experts * (moe.routed_experts - moe.top_k)
    return total, total - passive
