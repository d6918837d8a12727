"""The experts of an MoE layer by Pallas kernels (Triton) on NVIDIA GPUs from sm_80 on.

    A = X W1;  C = X W3;  Y = (p act(A, C)) W2;          u[t] = sum of the rows of token t

The rest, with the gradients, is xla.py's. Rows and blocks of rows are gpu_blocks.py's. Kernels:

    moe_up         a program per block and tile of F, over L           x -> p act(A, C)
    moe_down       per block and tile of L, over F                     -> Y by row; XLA sums the rows of a token

    moe_d_hidden   per block and tile of F, over L                     x, dU -> p act(A, C), dA, dC, parts of dp
    moe_d_rows     per block and tile of L, over F                     dA, dC -> dX by row; XLA sums
    moe_d_up       per expert, tile of L and tile of F, over its rows  x, dA, dC -> dW1, dW3
    moe_d_down     per expert, tile of F and tile of L, over its rows  p act(A, C), dU -> dW2

The number of blocks is static, as many as the worst routing has; a program of one that the routing does not have
returns at once, so work follows the routed rows.

Invariants: rows of x and dU are gathered by the kernels, no copy of them is stored; nothing reaches another expert, and
what is routed nowhere reaches nothing; every sum belongs to one program, in one order: no atomics, and the same call
gives the same bits; sums, the activation and its derivatives are fp32, products of fp32 inputs three-pass TF32; only
the arguments are kept for the backward pass.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import gpu
from pallas_kernels.gpu import Launch
from pallas_kernels.moe import dispatch
from pallas_kernels.moe import gpu_kernels as kernels
from pallas_kernels.moe.dispatch import Activation, Plan
from pallas_kernels.moe.gpu_blocks import Sizes, Tile, Tiles

WIDTHS = 16  # divides the widths: what a tensor core multiplies at once
BF16, FP32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)

# By dtype: no register is spilled at any width of the compile test, and all fit into 99 KiB of shared memory, what the
# smallest GPU since sm_80 has; the compiler tells both without a GPU, and nothing was timed. Blocks of 64 rows: larger
# tiles of two sums spill. An expert with fewer rows costs no more for it, since then reading its matrices takes longer.
# Three-pass products of fp32 hold each operand as two in registers: small tiles.
TILES = {
    BF16: Tiles(
        up=Tile(64, 128, 32, 4, 3),
        down=Tile(64, 128, 64, 4, 3),
        d_hidden=Tile(64, 128, 32, 8, 3),
        d_rows=Tile(64, 128, 32, 4, 3),
        d_up=Tile(64, 128, 32, 4, 4),
        d_down=Tile(128, 128, 32, 4, 4),
    ),
    FP32: Tiles(
        up=Tile(64, 64, 16, 8, 3),
        down=Tile(64, 64, 32, 4, 2),
        d_hidden=Tile(64, 64, 16, 8, 3),
        d_rows=Tile(64, 64, 16, 4, 3),
        d_up=Tile(64, 64, 16, 8, 3),
        d_down=Tile(64, 64, 32, 4, 3),
    ),
}
# Hopper and the servers' Blackwell have 227 KiB, and tensor cores that outgrew the L2: what programs read from it per
# product bounds them, so tiles are as large as registers allow, 128 rows by 256 columns of all sums together, or 192 of
# the three of d_hidden. Each of two groups of four warps has 64 of the rows.
SERVER_TILES = {
    BF16: Tiles(
        up=Tile(128, 128, 64, 8, 3),
        down=Tile(128, 256, 64, 8, 3),
        d_hidden=Tile(128, 64, 64, 8, 3),
        d_rows=Tile(128, 256, 32, 8, 3),
        d_up=Tile(128, 128, 64, 8, 3),
        d_down=Tile(128, 256, 64, 8, 3),
    ),
}


def expert_layer(
    x: Float[Array, "T L"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    w1: Float[Array, "E L F"],
    w3: Float[Array, "E L F"],
    w2: Float[Array, "E F L"],
    activation: Activation,
    *,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> Float[Array, "T L"]:
    """As the operation (api.py); with `interpret` the kernels run on any device, slowly.

    Raises:
        NotImplementedError: no GPU from sm_80 on, a dtype or a width that the kernels do not take.
    """
    if not interpret:
        gpu.require()
    number, latent, inner = w1.shape
    if latent % WIDTHS or inner % WIDTHS:
        raise NotImplementedError(f"the GPU kernel takes widths that {WIDTHS} divides, not {latent} and {inner}")
    if x.dtype not in (BF16, FP32):
        raise NotImplementedError(f"the GPU kernel takes tokens in bfloat16 or float32, not {x.dtype}")
    found = tiles_for(latent, inner, x.dtype, tiles)
    shape = len(x), experts.size, number, latent, inner
    sizes = Sizes(*shape, jnp.dtype(x.dtype), jnp.dtype(w1.dtype), activation, found, interpret)
    return _expert_layer(x, experts, weights, w1, w3, w2, sizes)


def launches(
    tokens: int, top_k: int, experts: int, latent: int, inner: int, dtype: jnp.dtype, activation: Activation
) -> tuple[tuple[Launch, ...], tuple[Launch, ...]]:
    """The kernels of the forward and of the backward pass, in order, for matrices in fp32."""
    dtype = jnp.dtype(dtype)
    found = tiles_for(latent, inner, dtype)
    sizes = Sizes(tokens, tokens * top_k, experts, latent, inner, dtype, FP32, activation, found, False)
    backward = kernels.d_hidden, kernels.d_rows, kernels.d_up, kernels.d_down
    return (kernels.up(sizes), kernels.down(sizes)), tuple(kernel(sizes) for kernel in backward)


def tiles_for(latent: int, inner: int, dtype: jnp.dtype, given: Tiles | None = None) -> Tiles:
    """Those of the GPU that the program is made for, or the given ones, cut to what divides the widths."""

    def fit(tile: Tile, columns: int, depth: int) -> Tile:
        return tile._replace(columns=math.gcd(tile.columns, columns), depth=math.gcd(tile.depth, depth))

    def fit_matrix(tile: Tile, rows: int, columns: int) -> Tile:
        return tile._replace(rows=math.gcd(tile.rows, rows), columns=math.gcd(tile.columns, columns))

    given = given or gpu.tiles(TILES, SERVER_TILES, jnp.dtype(dtype))
    return Tiles(
        fit(given.up, inner, latent),
        fit(given.down, latent, inner),
        fit(given.d_hidden, inner, latent),
        fit(given.d_rows, latent, inner),
        fit_matrix(given.d_up, latent, inner),
        fit_matrix(given.d_down, inner, latent),
    )


class Routed(NamedTuple):
    """Where the rows lie."""

    plan: Plan
    token: Int[Array, "M"]
    weight: Float[Array, "M"]
    bounds: Int[Array, "E+1"]
    table: Int[Array, "3 blocks"]


def _route(experts: Int[Array, "T k"], weights: Float[Array, "T k"], sizes: Sizes, tile: Tile) -> Routed:
    """What a pass over blocks of the tile's rows needs to know."""
    plan, counts, token, weight = dispatch.route(experts, weights, sizes.experts)
    bounds = jnp.pad(lax.cumsum(counts), (1, 0))
    ends = lax.cumsum(lax.div(counts + (tile.rows - 1), jnp.int32(tile.rows)))
    index = lax.iota(jnp.int32, sizes.blocks(tile.rows))
    # A block beyond the last one counts as one more of the last expert, and begins behind that one's end.
    expert = jnp.minimum(jnp.searchsorted(ends, index, side="right").astype(jnp.int32), sizes.experts - 1)
    before = jnp.pad(ends, (1, 0))[expert]
    table = jnp.stack([expert, bounds[expert] + tile.rows * (index - before), bounds[expert + 1]])
    return Routed(plan, token.astype(jnp.int32), weight, bounds, table)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _expert_layer(x, experts, weights, w1, w3, w2, sizes):
    routed = _route(experts, weights, sizes, sizes.tiles.up)
    w1, w3, w2 = (w.astype(sizes.dtype) for w in (w1, w3, w2))
    (hidden,) = kernels.up(sizes)(x, routed.token, routed.weight, routed.table, w1, w3)
    (rows,) = kernels.down(sizes)(hidden, routed.table, w2)
    return dispatch.sum_rows(rows, routed.plan.source, routed.plan.slot)


def _expert_layer_forward(x, experts, weights, w1, w3, w2, sizes):
    # Everything that is kept for the backward pass, and the one place where it can be named for a memory policy.
    residuals = x, experts, weights, w1, w3, w2
    return _expert_layer(*residuals, sizes), residuals


def _expert_layer_backward(sizes, residuals, dy):
    x, experts, weights, *matrices = residuals
    plan, token, weight, bounds, table = _route(experts, weights, sizes, sizes.tiles.d_hidden)
    w1, w3, w2 = (w.astype(sizes.dtype) for w in matrices)
    hidden, d_gate, d_linear, d_weight = kernels.d_hidden(sizes)(x, dy, token, weight, table, w1, w3, w2)
    (d_rows,) = kernels.d_rows(sizes)(d_gate, d_linear, table, w1, w3)
    d_w1, d_w3 = kernels.d_up(sizes)(x, d_gate, d_linear, token, bounds)
    (d_w2,) = kernels.d_down(sizes)(hidden, dy, token, bounds)
    dx = dispatch.sum_rows(d_rows, plan.source, plan.slot)
    d_weights = jnp.sum(dispatch.take(d_weight, plan.slot), axis=2).astype(weights.dtype)
    return dx, None, d_weights, d_w1, d_w3, d_w2


_expert_layer.defvjp(_expert_layer_forward, _expert_layer_backward)
