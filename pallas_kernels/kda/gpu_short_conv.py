"""Backward pass of short_conv with SiLU on GPUs: each row of x and d_y is read once, each row of d_x written once.

    p_k = sum_j w_{3-j} x_{k-j}       d_k = d_y_k s (1 + p_k (1 - s)),  s = sigmoid(p_k)
    d_x_k = sum_j w_{3-j} d_{k+j}     d_w_{3-j} = sum_k d_k x_{k-j}                      j = 0..3, of one document

d_x needs d at four tokens: XLA writes all d out first and moves 2.7 times the bytes that it must, with documents 3.1
times (optimised HLO for H100, bf16; written by hand it moves more). Here a program goes through TOKENS tokens from the
last to the first and holds three tokens of x, and of what d_x has so far, in registers; it starts three tokens behind
its own. With the partial sums of d_w that is 1.08 times.

Tokens are numbered without the padding, which comes after them: `order` has the position of token k, `before` how many
tokens before it its window takes in, -1 for padding.

Invariants: sums are fp32; every row of d_x is written by one program; what padding holds reaches nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import gpu
from pallas_kernels.gpu import Launch, Operand
from pallas_kernels.segments import take

TAPS = 3  # tokens before the current one
TOKENS = 64  # of a program: each has partial sums of d_weight, 16 bytes to a channel
TOGETHER = 4  # tokens whose loads are under way at the same time; divides TOKENS
CHANNELS = 128  # of a program, at most: four to a thread


def check(x: Array, left: Array | None, silu: bool, interpret: bool) -> None:
    """Refuses what the kernel does not take.

    Raises:
        NotImplementedError: no GPU from sm_80 on, no SiLU, tokens before the row, channels not in 32s, nothing to do.
    """
    if not interpret:
        gpu.require()
    if not silu or left is not None:
        raise NotImplementedError("the GPU kernel is for SiLU and rows that nothing comes before")
    if x.shape[2] % 32 or not x.size:
        raise NotImplementedError(f"the GPU kernel takes a multiple of 32 channels, not shape {x.shape}")


def gradients(x: Array, weight: Array, segment_ids: Array | None, d_y: Array, interpret: bool) -> tuple[Array, Array]:
    """x, d_y [B,T,C], weight [4,C], segment_ids [B,T] -> d_x [B,T,C], d_weight [4,C], in the inputs' dtypes."""
    kernel = launch(*x.shape, x.dtype, interpret)
    d_x, parts = kernel(x, d_y, weight.astype(jnp.float32), *_tokens(x, segment_ids))
    return d_x, parts.sum(axis=(0, 1)).astype(weight.dtype)


def _tokens(x: Array, segment_ids: Array | None) -> tuple[Array, Array]:
    """`order` and `before`, int32 [B,N] with TAPS more at the front and the back, where they are 0 and -1."""
    batch, length = x.shape[:2]
    ids = jnp.ones((batch, length), jnp.int32) if segment_ids is None else segment_ids
    order = lax.broadcasted_iota(np.int32, ids.shape, 1)
    if segment_ids is not None:
        order = jnp.argsort(ids == 0, axis=1, stable=True).astype(jnp.int32)
        ids = take(ids, order)
    padded = jnp.pad(ids, ((0, 0), (TAPS, 0)))
    same = [padded[:, TAPS - j : TAPS - j + length] == ids for j in range(1, TAPS + 1)]
    before = jnp.where(ids == 0, -1, sum(x.astype(jnp.int32) for x in same))
    ends = (0, 0), (TAPS, -length % TOKENS + TAPS)
    return jnp.pad(order, ends), jnp.pad(before, ends, constant_values=-1)


def launch(batch: int, length: int, channels: int, dtype: jnp.dtype, interpret: bool = False) -> Launch:
    """x, d_y, weight, order, before -> d_x, and for each program's tokens d_weight [B,blocks,4,C] fp32."""
    width = min(channels & -channels, CHANNELS)
    blocks = -(-length // TOKENS)

    def body(x_ref, d_y_ref, weight_ref, order_ref, before_ref, d_x_ref, parts_ref):
        end = (pl.program_id(1) + 1) * TOKENS
        weight = [weight_ref[TAPS - j, :] for j in range(TAPS + 1)]  # by the distance of the tokens that it joins
        zero = jnp.zeros((width,), jnp.float32)

        def load(last: Array, count: int) -> list[tuple[Array, ...]]:
            """For token `last` and those before it: the token TAPS before it, d_y, `before`, the position."""
            at = [(order_ref[last - u], order_ref[last - u + TAPS], before_ref[last - u + TAPS]) for u in range(count)]
            return [(x_ref[first, :], d_y_ref[here, :], before, here) for first, here, before in at]

        def step(window: list[Array], sums: list[Array], token: tuple[Array, ...]) -> tuple[list[Array], ...]:
            """One token: `window` is it and those before it, `sums` what its d_x and theirs have so far."""
            first, d_y, before, _ = token
            window = [*window, first.astype(jnp.float32)]
            taps = [jnp.where(before >= j, x, 0) for j, x in enumerate(window)]
            p = functools.reduce(lax.add, [w * x for w, x in zip(weight, taps, strict=True)])
            s = jax.nn.sigmoid(p)
            d = jnp.where(before >= 0, d_y.astype(jnp.float32) * (s * (1 + p * (1 - s))), 0)
            parts = [w * d if j == 0 else jnp.where(before >= j, w * d, 0) for j, w in enumerate(weight)]
            sums = [a + b for a, b in zip(sums, parts[:TAPS], strict=True)] + parts[TAPS:]
            return window[1:], sums, [d * x for x in taps]

        # Tokens behind the own ones, for what they give to the own ones.
        window = [x_ref[order_ref[end + j + TAPS], :].astype(jnp.float32) for j in reversed(range(TAPS))]
        sums = [zero] * TAPS
        for token in load(end + TAPS - 1, TAPS):
            window, sums, _ = step(window, sums, token)
            sums = sums[1:]

        def some(index: Array, carry: tuple[list[Array], ...]) -> tuple[list[Array], ...]:
            window, sums, d_weight = carry
            last = end - 1 - index * TOGETHER
            for u, token in enumerate(load(last, TOGETHER)):
                window, (d_x, *sums), products = step(window, sums, token)
                d_weight = [a + b for a, b in zip(d_weight, products, strict=True)]
                inside = jnp.broadcast_to(last - u < length, (width,))
                triton.store(d_x_ref.at[token[3], :], d_x.astype(dtype), mask=inside)
            return window, sums, d_weight

        *_, d_weight = lax.fori_loop(0, TOKENS // TOGETHER, some, (window, sums, [zero] * (TAPS + 1)))
        for j, x in enumerate(d_weight):
            parts_ref[TAPS - j, :] = x

    row = Operand((batch, length, channels), dtype, (None, length, width), lambda c, t, b: (b, 0, c))
    numbers = blocks * TOKENS + 2 * TAPS
    tokens = Operand((batch, numbers), jnp.int32, (None, numbers), lambda c, t, b: (b, 0))
    weight = Operand((TAPS + 1, channels), jnp.float32, (TAPS + 1, width), lambda c, t, b: (0, c))
    parts_shape, parts_block = (batch, blocks, TAPS + 1, channels), (None, None, TAPS + 1, width)
    parts = Operand(parts_shape, jnp.float32, parts_block, lambda c, t, b: (b, t, 0, c))
    grid = channels // width, blocks, batch
    return Launch("short_conv_gradients", body, grid, (row, row, weight, tokens, tokens), (row, parts), 1, 1, interpret)
