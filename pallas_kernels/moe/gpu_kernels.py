"""The MoE's GPU kernels: two of the forward pass, four of the backward pass (gpu.py says what each is for).

Grids begin with the tiles of the columns: programs that run at a time share rows and their expert's matrices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu import Launch, Operand
from pallas_kernels.moe.gpu_blocks import Rows, Sizes, Tile, in_block, part, rows_from, sums, whole, zeros


def up(sizes: Sizes) -> Launch:
    """x, tokens and weights of the rows, blocks, w1, w3 -> p act(A, C) [M,F]."""
    tile = sizes.tiles.up

    def body(x_ref, token_ref, weight_ref, table_ref, w1_ref, w3_ref, hidden_ref):
        columns = part(pl.program_id(0), tile.columns)

        def block(expert: Array, rows: Rows) -> None:
            token = rows.numbers(token_ref)

            def step(i: Array) -> tuple[Array, Array]:
                depth = part(i, tile.depth)
                x = rows.gather(x_ref, token, depth)
                return sizes.dot(x, w1_ref[expert, depth, columns]), sizes.dot(x, w3_ref[expert, depth, columns])

            inner = sums(sizes.latent // tile.depth, step, 2, tile)
            rows.write(hidden_ref, columns, rows.numbers(weight_ref)[:, None] * sizes.activation(*inner))

        in_block(table_ref, tile, block)

    numbers = sizes.numbers(jnp.int32), sizes.numbers(jnp.float32)
    return _of_blocks(
        "moe_up",
        sizes,
        tile,
        body,
        sizes.inner,
        (sizes.of_tokens(), *numbers, sizes.table(tile), sizes.up_matrix(), sizes.up_matrix()),
        (sizes.of_rows(sizes.inner),),
    )


def down(sizes: Sizes) -> Launch:
    """p act(A, C), blocks, w2 -> Y [M,L]."""
    tile = sizes.tiles.down

    def body(hidden_ref, table_ref, w2_ref, out_ref):
        columns = part(pl.program_id(0), tile.columns)

        def block(expert: Array, rows: Rows) -> None:
            def step(i: Array) -> tuple[Array]:
                depth = part(i, tile.depth)
                return (sizes.dot(rows.read(hidden_ref, depth), w2_ref[expert, depth, columns]),)

            rows.write(out_ref, columns, *sums(sizes.inner // tile.depth, step, 1, tile))

        in_block(table_ref, tile, block)

    inputs = sizes.of_rows(sizes.inner), sizes.table(tile), sizes.down_matrix()
    return _of_blocks("moe_down", sizes, tile, body, sizes.latent, inputs, (sizes.of_rows(sizes.latent),))


def d_hidden(sizes: Sizes) -> Launch:
    """x, dU, tokens and weights of the rows, blocks, w1, w3, w2 -> p act(A, C), dA, dC [M,F], dp by tile [M,tiles]."""
    tile = sizes.tiles.d_hidden

    def body(
        x_ref, d_out_ref, token_ref, weight_ref, table_ref, w1_ref, w3_ref, w2_ref,
        hidden_ref, d_gate_ref, d_linear_ref, d_weight_ref,
    ):  # fmt: skip
        column = pl.program_id(0)
        columns = part(column, tile.columns)

        def block(expert: Array, rows: Rows) -> None:
            token = rows.numbers(token_ref)

            def step(i: Array) -> tuple[Array, Array, Array]:
                depth = part(i, tile.depth)
                x, d_out = (rows.gather(ref, token, depth) for ref in (x_ref, d_out_ref))
                return (
                    sizes.dot(x, w1_ref[expert, depth, columns]),
                    sizes.dot(x, w3_ref[expert, depth, columns]),
                    sizes.dot(d_out, w2_ref[expert, columns, depth], b_axis=1),
                )

            *inner, d_hidden = sums(sizes.latent // tile.depth, step, 3, tile)
            weight = rows.numbers(weight_ref)[:, None]
            hidden, pull_back = jax.vjp(sizes.activation, *inner)
            d_gate, d_linear = pull_back(weight * d_hidden)
            rows.write_numbers(d_weight_ref, column, jnp.sum(hidden * d_hidden, axis=1))
            rows.write(hidden_ref, columns, weight * hidden)
            rows.write(d_gate_ref, columns, d_gate)
            rows.write(d_linear_ref, columns, d_linear)

        in_block(table_ref, tile, block)

    inputs = sizes.of_tokens(), sizes.of_tokens(), sizes.numbers(jnp.int32), sizes.numbers(jnp.float32)
    matrices = sizes.up_matrix(), sizes.up_matrix(), sizes.down_matrix()
    d_weight = whole((sizes.rows, sizes.inner // tile.columns), jnp.float32)
    outputs = *(sizes.of_rows(sizes.inner),) * 3, d_weight
    return _of_blocks("moe_d_hidden", sizes, tile, body, sizes.inner, (*inputs, sizes.table(tile), *matrices), outputs)


def d_rows(sizes: Sizes) -> Launch:
    """dA, dC, blocks, w1, w3 -> dX [M,L]."""
    tile = sizes.tiles.d_rows

    def body(d_gate_ref, d_linear_ref, table_ref, w1_ref, w3_ref, out_ref):
        columns = part(pl.program_id(0), tile.columns)

        def block(expert: Array, rows: Rows) -> None:
            def step(i: Array, total: Array) -> Array:
                depth = part(i, tile.depth)
                for d_ref, w_ref in ((d_gate_ref, w1_ref), (d_linear_ref, w3_ref)):
                    total = total + sizes.dot(rows.read(d_ref, depth), w_ref[expert, columns, depth], b_axis=1)
                return total

            rows.write(out_ref, columns, lax.fori_loop(0, sizes.inner // tile.depth, step, *zeros(1, tile)))

        in_block(table_ref, tile, block)

    inputs = *(sizes.of_rows(sizes.inner),) * 2, sizes.table(tile), *(sizes.up_matrix(),) * 2
    return _of_blocks("moe_d_rows", sizes, tile, body, sizes.latent, inputs, (sizes.of_rows(sizes.latent),))


def d_up(sizes: Sizes) -> Launch:
    """x, dA, dC, tokens of the rows, bounds of the experts -> dW1, dW3."""
    tile = sizes.tiles.d_up

    def body(x_ref, d_gate_ref, d_linear_ref, token_ref, bounds_ref, d_w1_ref, d_w3_ref):
        latent, inner = part(pl.program_id(1), tile.rows), part(pl.program_id(0), tile.columns)

        def step(rows: Rows, token: Array) -> tuple[Array, Array]:
            x = rows.gather(x_ref, token, latent)
            return tuple(sizes.dot(x, rows.read(ref, inner), a_axis=0) for ref in (d_gate_ref, d_linear_ref))

        d_w1, d_w3 = _over_rows(bounds_ref, token_ref, step, 2, tile)
        d_w1_ref[...], d_w3_ref[...] = d_w1.astype(sizes.matrices), d_w3.astype(sizes.matrices)

    inputs = sizes.of_tokens(), *(sizes.of_rows(sizes.inner),) * 2, sizes.numbers(jnp.int32), sizes.bounds()
    return _of_experts("moe_d_up", sizes, tile, body, (sizes.latent, sizes.inner), inputs, 2)


def d_down(sizes: Sizes) -> Launch:
    """p act(A, C), dU, tokens of the rows, bounds of the experts -> dW2."""
    tile = sizes.tiles.d_down

    def body(hidden_ref, d_out_ref, token_ref, bounds_ref, d_w2_ref):
        inner, latent = part(pl.program_id(1), tile.rows), part(pl.program_id(0), tile.columns)

        def step(rows: Rows, token: Array) -> tuple[Array]:
            return (sizes.dot(rows.read(hidden_ref, inner), rows.gather(d_out_ref, token, latent), a_axis=0),)

        (d_w2,) = _over_rows(bounds_ref, token_ref, step, 1, tile)
        d_w2_ref[...] = d_w2.astype(sizes.matrices)

    inputs = sizes.of_rows(sizes.inner), sizes.of_tokens(), sizes.numbers(jnp.int32), sizes.bounds()
    return _of_experts("moe_d_down", sizes, tile, body, (sizes.inner, sizes.latent), inputs, 1)


def _over_rows(
    bounds_ref, token_ref, step: Callable[[Rows, Array], tuple[Array, ...]], number: int, tile: Tile
) -> tuple[Array, ...]:  # fmt: skip
    """The sums of the arrays step(rows, their tokens) over the rows of the expert of a program in a grid (*, *, E)."""
    expert = pl.program_id(2)
    begin, end = bounds_ref[expert], bounds_ref[expert + 1]

    def rows(i: Array | int) -> Rows:
        return rows_from(begin + i * tile.depth, end, tile.depth)

    def one(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        token, *total = carry
        # The tokens of the next rows are read ahead: Triton does not overlap a load with products if its addresses are
        # loaded in the same turn.
        return rows(i + 1).numbers(token_ref), *map(jnp.add, total, step(rows(i), token))

    count = lax.div(end - begin + (tile.depth - 1), jnp.int32(tile.depth))
    return lax.fori_loop(0, count, one, (rows(0).numbers(token_ref), *zeros(number, tile)))[1:]


def _of_blocks(
    name: str, sizes: Sizes, tile: Tile, body, width: int, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
) -> Launch:  # fmt: skip
    grid = width // tile.columns, sizes.blocks(tile.rows)
    return Launch(name, body, grid, inputs, outputs, tile.warps, tile.stages, sizes.interpret)


def _of_experts(
    name: str, sizes: Sizes, tile: Tile, body, widths: tuple[int, int], inputs: tuple[Operand, ...], number: int
) -> Launch:  # fmt: skip
    block = None, tile.rows, tile.columns
    output = Operand((sizes.experts, *widths), sizes.matrices, block, lambda column, row, expert: (expert, row, column))
    grid = widths[1] // tile.columns, widths[0] // tile.rows, sizes.experts
    return Launch(name, body, grid, inputs, (output,) * number, tile.warps, tile.stages, sizes.interpret)
