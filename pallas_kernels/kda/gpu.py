"""KDA by Pallas kernels (Triton) on NVIDIA GPUs from sm_80 on: what goes into the kernels, and their backward pass.

Gates, normalisation and masks (inputs.py) are elementwise and left to XLA, which fuses each of them into one pass over
its array; the backward pass computes them again. In between, forward is chunk_operands and scan_states
(gpu_forward.py), backward chunk_operands, scan_gradients, chunk_pairs and chunk_gradients (gpu_backward.py).

Invariants: residuals are the inputs and one fp32 state for every `state_every` chunks; fp32 inputs keep fp32 accuracy;
what padding holds reaches nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import gpu
from pallas_kernels.kda import chunk, reference
from pallas_kernels.kda.gpu_backward import chunk_gradients, chunk_pairs, scan_gradients
from pallas_kernels.kda.gpu_blocks import Sizes, Tiles
from pallas_kernels.kda.gpu_forward import chunk_operands, scan_states
from pallas_kernels.kda.inputs import Inputs, Options, activate, first_state, pad_to
from pallas_kernels.segments import keep_tokens

WIDTHS = 16, 32, 64, 128, 256  # of keys and values: powers of two, at least a tensor core's tile


# By the GPU's generation, dtype, and the wider of keys and values. Chosen by compiling for H100, A100 and B200: the
# largest pieces whose programs keep to 255 registers and to the shared memory there is; only some programs of heads
# 256 wide spill. A scan's program takes all value channels that it can, as each more program of a head reads all
# operands again.
HOPPER = {
    ("bfloat16", 64): Tiles(64, 16, 8, 64, 8, 2, 64, 8, 2, 64, 8, 16, 4),
    ("bfloat16", 128): Tiles(64, 16, 4, 128, 8, 2, 128, 8, 2, 128, 8, 16, 4),
    ("bfloat16", 256): Tiles(64, 16, 4, 32, 8, 2, 32, 8, 2, 128, 8, 16, 8),
    # Products of fp32 numbers take three times the registers and more: few tokens.
    ("float32", 64): Tiles(16, 32, 4, 64, 8, 2, 64, 8, 2, 64, 8, 64, 8),
    ("float32", 128): Tiles(16, 32, 4, 32, 4, 2, 32, 8, 2, 64, 4, 64, 8),
    ("float32", 256): Tiles(16, 32, 4, 16, 4, 1, 16, 4, 1, 64, 4, 32, 8),
}
# Operands of products come from registers here, not from shared memory: half the tokens.
AMPERE = HOPPER | {
    ("bfloat16", 64): Tiles(32, 16, 4, 64, 8, 2, 64, 8, 2, 64, 8, 16, 4),
    ("bfloat16", 128): Tiles(32, 16, 4, 128, 8, 2, 128, 8, 2, 128, 8, 16, 4),
    ("bfloat16", 256): Tiles(32, 16, 4, 32, 8, 2, 32, 8, 2, 64, 8, 16, 4),
    ("float32", 64): Tiles(16, 32, 2, 64, 8, 2, 64, 8, 2, 64, 8, 64, 8),
}
BLACKWELL = HOPPER | {
    ("bfloat16", 128): Tiles(64, 16, 4, 64, 8, 2, 128, 8, 2, 64, 8, 16, 4),
    ("float32", 128): Tiles(16, 32, 4, 32, 4, 2, 32, 8, 1, 64, 8, 64, 8),
}
TILES = {8: AMPERE, 9: HOPPER, 10: BLACKWELL, 12: AMPERE}


def tiles(width: int, value_width: int, dtype: jnp.dtype) -> Tiles:
    """The row of TILES for these widths, no piece larger than the whole."""
    table = TILES.get(gpu.generation(), AMPERE)
    found = table[jnp.dtype(dtype).name, max(64, width, value_width)]
    cut = {name: min(getattr(found, name), width) for name in ("operand_channels", "gradient_channels")}
    cut |= {name: min(getattr(found, name), value_width) for name in ("scan_values", "back_values", "pairs_values")}
    return found._replace(**cut)


def kda(inputs: Inputs, options: Options, interpret: bool = False) -> tuple[Array, Array]:
    """-> output [B,T,HV,V] in value's dtype and final_state [B,HV,K,V] fp32.

    With `interpret` the kernels run on any device, slowly.

    Raises:
        NotImplementedError: no GPU from sm_80 on, a width that is not in WIDTHS, no query.
    """
    if not interpret:
        gpu.require()
    width, value_width = inputs.key.shape[3], inputs.value.shape[3]
    if width not in WIDTHS or value_width not in WIDTHS:
        raise NotImplementedError(f"the GPU kernels take widths of {WIDTHS}, not {width} and {value_width}")
    if inputs.query is None:
        raise NotImplementedError("the GPU kernels need a query")
    batch, length = inputs.value.shape[:2]
    if length <= 1 or batch == 0:
        return reference.kda(inputs, options)
    size = tiles(width, value_width, _dtype(inputs)).chunk
    output, state = _kda(pad_to(inputs, -(-length // size) * size), options, interpret)
    return output[:, :length], state


def _dtype(inputs: Inputs) -> jnp.dtype:
    """That of the operands of products: bf16 if query, key and value all are."""
    narrow = all(x.dtype == jnp.bfloat16 for x in (inputs.query, inputs.key, inputs.value))
    return jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)


def _sizes(inputs: Inputs, options: Options, interpret: bool) -> Sizes:
    batch, length, heads, width = inputs.key.shape
    value_heads, value_width = inputs.value.shape[2:]
    dtype = _dtype(inputs)
    cut = tiles(width, value_width, dtype)
    return Sizes(
        batch, length, heads, value_heads, width, value_width, dtype, cut.chunk, options.scale, options.state_every,
        cut, interpret,
    )  # fmt: skip


def launches(
    batch: int, length: int, heads: int, width: int, value_width: int, dtype: jnp.dtype, interpret: bool = False
) -> tuple[tuple[gpu.Launch, ...], tuple[gpu.Launch, ...]]:
    """The kernels of the forward and of the backward pass, in order; the length in whole chunks, a state for each."""
    cut = tiles(width, value_width, dtype)
    sizes = Sizes(
        batch, length, heads, heads, width, value_width, jnp.dtype(dtype), cut.chunk, width**-0.5, 1, cut, interpret
    )  # fmt: skip
    backward = chunk_operands(sizes, True), scan_gradients(sizes), chunk_pairs(sizes), chunk_gradients(sizes)
    return (chunk_operands(sizes), scan_states(sizes)), backward


def _arrays(inputs: Inputs, options: Options, dtype: jnp.dtype) -> tuple[Array, ...]:
    """Query, key, value in `dtype`; log_decay, beta and the initial state [B,HV,V,K] in fp32."""
    *rows, log_decay, beta = activate(inputs, options._replace(scale=1.0), repeat=False)
    return *(x.astype(dtype) for x in rows), log_decay, beta, first_state(inputs).swapaxes(2, 3)


def _tables(sizes: Sizes) -> tuple[Array, Array]:
    covers, pairs, _ = chunk.tables(sizes.chunk)
    return jnp.asarray(covers, jnp.bfloat16), jnp.asarray(pairs[0, 0, :, : sizes.chunk], sizes.dtype)


def _forward(inputs: Inputs, options: Options, interpret: bool) -> tuple[Array, Array, Array]:
    """-> output, states [B,HV,states,V,K], final state [B,HV,K,V]."""
    sizes = _sizes(inputs, options, interpret)
    query, key, value, log_decay, beta, state = _arrays(inputs, options, sizes.dtype)
    operands = chunk_operands(sizes)(query, key, log_decay, beta, *_tables(sizes))
    output, states, last = scan_states(sizes)(*operands, value, beta, state)
    return output.astype(inputs.value.dtype), states, last.swapaxes(2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _kda(inputs: Inputs, options: Options, interpret: bool) -> tuple[Array, Array]:
    output, _, state = _forward(inputs, options, interpret)
    return output, state


def _kda_forward(inputs: Inputs, options: Options, interpret: bool) -> tuple[tuple[Array, Array], tuple[Inputs, Array]]:
    output, states, state = _forward(inputs, options, interpret)
    # Everything that is kept for the backward pass, and the one place where it can be named for a memory policy.
    residuals = inputs, states
    return (output, state), residuals


def _kda_backward(
    options: Options, interpret: bool, residuals: tuple[Inputs, Array], gradients: tuple[Array, Array]
) -> tuple[Inputs]:
    inputs, states = residuals
    sizes = _sizes(inputs, options, interpret)
    differentiable = {name: x for name, x in inputs._asdict().items() if x is not None and name != "marks"}

    def prepare(arrays: dict[str, Array]) -> tuple[Array, ...]:
        return _arrays(inputs._replace(**arrays), options, sizes.dtype)

    (query, key, value, log_decay, beta, first), pull_back = jax.vjp(prepare, differentiable)
    tables = _tables(sizes)
    *operands, inverse = chunk_operands(sizes, True)(query, key, log_decay, beta, *tables)
    if sizes.state_every > 1:
        _, states, _ = scan_states(sizes._replace(state_every=1))(*operands, value, beta, first)
    d_output = keep_tokens(gradients[0], inputs.marks).astype(sizes.dtype)
    d_last = gradients[1].astype(jnp.float32).swapaxes(2, 3)
    d_states, d_error, d_first = scan_gradients(sizes)(*operands, beta, d_output, d_last)
    pairs = chunk_pairs(sizes)(value, beta, operands[1], inverse, states, d_output, d_error)
    update, d_scores, d_lower, d_value, d_beta = pairs
    d_query, d_key, d_log_decay, d_beta_parts = chunk_gradients(sizes)(
        query, key, log_decay, beta, states, d_states, d_output, d_value, update, d_scores, d_lower, *tables
    )
    group = sizes.value_heads // sizes.heads
    if group > 1:
        shape = *key.shape[:3], group, key.shape[3]
        d_query, d_key = (x.reshape(shape).sum(axis=3).astype(sizes.dtype) for x in (d_query, d_key))
    (sums,) = pull_back((d_query, d_key, d_value, d_log_decay, d_beta + d_beta_parts.sum(axis=3), d_first))
    return (Inputs(**(dict.fromkeys(Inputs._fields) | sums)),)


_kda.defvjp(_kda_forward, _kda_backward)
