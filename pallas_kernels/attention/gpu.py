"""Attention with a key part that all heads share, by Pallas kernels (Triton) on NVIDIA GPUs from sm_80 on.

    logit[h,t,s] = scale * (query[t,h,:Kn] . key[s,h] + query[t,h,Kn:] . key_shared[s])

The rest is xla.py's: online softmax forward, FlashAttention-2 (arXiv 2307.08691) backward, m and l kept apart. Kernels:

    mla_forward    a program per head and tile of queries goes over tiles of keys        -> output, m, l
    mla_d_keys     per head and tile of keys, over tiles of the queries that see it      -> d_key, d_key_shared, d_value
    mla_d_query    per head and tile of queries, over tiles of keys                      -> d_query

A query sees the keys up to its own position whose document starts where its own does: one integer per position says
what is seen, and one per tile where its loop begins or ends. Both backward kernels compute the weights again, and so
every sum belongs to one program, in one order: no atomics, and the same call gives the same bits. Of a part of the
sequence each kernel also reads the position of the first query, `origin`, from which its loops take their other end.

Invariants: the shared part meets the heads only inside a tile; a tile that no query may look into is not read; logits,
softmax, sums and output are fp32 until the last cast, products of fp32 inputs three-pass TF32; the memory of a program
does not grow with T; the bits of a position do not depend on later ones.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from pallas_kernels import gpu
from pallas_kernels.attention.xla import LOWEST, part_ids
from pallas_kernels.gpu import Launch, Operand
from pallas_kernels.segments import keep_tokens, starts
from pallas_kernels.slices import cut, pad

# Widths of keys and values, and of the shared part: powers of two, from what a tensor core multiplies at once to what
# the registers of a program hold.
WIDTHS = 16, 32, 64, 128
SHARED_WIDTHS = 16, 32, 64
BF16, FP32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
LOG2_E = np.float32(np.log2(np.e))  # the hardware's exponential has base 2


class Tile(NamedTuple):
    """How a kernel is cut: queries and keys of a tile, warps of a program, tiles on their way at a time."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of the three kernels."""

    forward: Tile
    d_keys: Tile
    d_query: Tile


# By dtype, and whether a width is above 64: the largest tiles that fit into 99 KiB of shared memory, what the smallest
# GPU since sm_80 has, and with which bf16 spills no register at the widths (128, 64, 128), (64, 32, 64), (32, 16, 32).
# The compiler tells both without a GPU; nothing was timed. Three-pass products of fp32 hold each operand as two in
# registers: their tiles are small, and d_query, which keeps two operands through its loop, spills in any shape tried.
TILES = {
    (BF16, False): Tiles(Tile(128, 64, 4, 3), Tile(32, 64, 8, 2), Tile(64, 64, 4, 2)),
    (BF16, True): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 3)),
    (FP32, False): Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 16, 4, 1)),
    (FP32, True): Tiles(Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), Tile(32, 16, 8, 1)),
}
# Hopper and the servers' Blackwell have 227 KiB, and products of 64 rows or more by operands that lie there: each group
# of four warps gets 64 rows of its own.
SERVER_TILES = {(BF16, True): Tiles(Tile(128, 64, 8, 3), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2))}


def _whole(tile: Array) -> int:
    """Index of a block that covers all tiles."""
    return 0


class Sizes(NamedTuple):
    """What a launch depends on; queries and keys come in multiples of every tile. Grids are (tile, head, batch)."""

    batch: int
    queries: int
    keys: int
    heads: int
    own: int
    shared: int
    value: int
    dtype: jnp.dtype
    scale: float
    documents: bool
    part: bool  # the queries are a part of the sequence
    tiles: Tiles
    interpret: bool

    def dot(self, a: Array, b: Array, b_axis: int) -> Array:
        """a b or, with b_axis = 1, a b^T; a is rounded to the inputs' dtype -> fp32."""
        return gpu.dot(a.astype(self.dtype), b, b_axis=b_axis, interpret=self.interpret)

    def logits(self, rows: tuple[Array, Array], columns: tuple[Array, Array]) -> Array:
        """Scaled logits of a tile from two pairs of own and shared part, those of queries and those of keys."""
        return np.float32(self.scale) * (self.dot(rows[0], columns[0], 1) + self.dot(rows[1], columns[1], 1))

    def parts(self) -> tuple:
        """Where the own and the shared part of a query lie."""
        return pl.ds(0, self.own), pl.ds(self.own, self.shared)

    def seen(self, queries: tuple[Array, Array], keys: tuple[Array, Array], diagonal: bool = True) -> Array | bool:
        """Which pairs of a tile are seen, from (position, start of the document) of each side, ready to broadcast."""
        seen = keys[0] <= queries[0] if diagonal else True
        if self.documents:
            # Their number stands for padding, which sees nothing and is seen by nothing, not even by itself.
            seen = seen & (keys[1] == jnp.where(queries[1] < self.keys, queries[1], -1))
        return seen

    def tokens(self, length: int, width: int, dtype=None, tile=None, at: Callable = _whole) -> Operand:
        """[B,length,H,width], a tile or all of a row, of one head."""
        shape = self.batch, length, self.heads, width
        return Operand(
            shape, dtype or self.dtype, (None, tile or length, None, width), lambda i, h, b: (b, at(i), h, 0)
        )

    def shared_tokens(self, tile=None, at: Callable = _whole) -> Operand:
        """key_shared [B,Tk,Ks]."""
        block = None, tile or self.keys, self.shared
        return Operand((self.batch, self.keys, self.shared), self.dtype, block, lambda i, h, b: (b, at(i), 0))

    def numbers(self, tile=None, at: Callable = _whole) -> Operand:
        """fp32 [B,H,Tq]."""
        shape, block = (self.batch, self.heads, self.queries), (None, None, tile or self.queries)
        return Operand(shape, jnp.float32, block, lambda i, h, b: (b, h, at(i)))

    def starts(self, tiles: int, at: Callable) -> tuple[Operand, ...]:
        """The document starts [B,Tk], a number for each of the tiles [B,tiles], and the origin of a part."""
        whole = Operand((self.batch, self.keys), jnp.int32, (None, self.keys), lambda i, h, b: (b, 0))
        borders = Operand((self.batch, tiles), jnp.int32, (None, None), lambda i, h, b: (b, at(i)))
        origin = Operand((1,), jnp.int32, (None,), lambda i, h, b: (0,))
        return (whole, borders, origin) if self.part else (whole, borders)

    def origin(self, refs: tuple) -> tuple[Array | None, tuple]:
        """The origin of a part, from the references behind the borders, and the rest of them, which are the results."""
        return (refs[0][...], refs[1:]) if self.part else (None, refs)


def attention(
    query: Float[Array, "B Tq H K"],
    key: Float[Array, "B Tk H Kn"],
    key_shared: Float[Array, "B Tk Ks"],
    value: Float[Array, "B Tk H V"],
    segment_ids: Int[Array, "B Tk"] | None,
    scale: float,
    *,
    query_start: Int[Array, ""] | None = None,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Float[Array, "B Tq H V"], Float[Array, "B H Tq"]]:
    """(output in value's dtype, row_max fp32); with `interpret` the kernels run on any device, slowly.

    Raises:
        NotImplementedError: no GPU from sm_80 on, a dtype or a width that the kernels do not take.
    """
    if not interpret:
        gpu.require()
    (batch, length, heads, _), total, width = query.shape, key.shape[1], value.shape[3]
    own, shared = key.shape[3], key_shared.shape[2]
    if own not in WIDTHS or shared not in SHARED_WIDTHS or width not in WIDTHS:
        raise NotImplementedError(
            f"the GPU kernel takes key and value widths of {WIDTHS} and shared ones of {SHARED_WIDTHS}, "
            f"not {own}, {width} and {shared}"
        )
    if value.dtype not in (BF16, FP32) or not query.dtype == key.dtype == key_shared.dtype == value.dtype:
        found = f"{query.dtype}, {key.dtype}, {key_shared.dtype}, {value.dtype}"
        raise NotImplementedError(f"the GPU kernel takes inputs that are all bfloat16 or all float32, not {found}")
    if 0 in query.shape:
        return jnp.zeros((batch, length, heads, width), value.dtype), jnp.zeros((batch, heads, length), jnp.float32)
    tiles = tiles or gpu.tiles(TILES, SERVER_TILES, (value.dtype, max(own, width) > 64))
    key_ids, query_ids = part_ids(segment_ids, query_start, length, key)
    query = keep_tokens(query, query_ids)
    arrays = [keep_tokens(x, key_ids) for x in (key, key_shared, value)]
    # Filled up behind the last token, where no query looks; so far that a last tile of queries stands among the keys.
    most = max(max(tile.queries, tile.keys) for tile in tiles)
    missing = -length % most
    missing_keys = missing + -(total + missing) % most
    if missing:
        query = pad(query, missing)
    if missing_keys:
        arrays = [pad(x, missing_keys) for x in arrays]
    queries, keys = length + missing, total + missing_keys
    if key_ids is None:
        start = jnp.zeros((batch, keys), jnp.int32)
    else:
        start = pad(jnp.where(key_ids != 0, starts(key_ids), keys), missing_keys, keys)
    documents, part = key_ids is not None, query_start is not None
    sizes = Sizes(
        batch, queries, keys, heads, own, shared, width, value.dtype, float(scale), documents, part, tiles, interpret
    )
    output, row_max = _attention(query, *arrays, start, query_start, sizes)
    output, row_max = output[:, :length].astype(value.dtype), row_max[:, :, :length]
    return keep_tokens(output, query_ids), row_max


def launches(
    batch: int, length: int, heads: int, own: int, shared: int, value: int, dtype: jnp.dtype, part: bool = False
) -> tuple[tuple[Launch, ...], tuple[Launch, ...]]:
    """The kernels of the forward and of the backward pass, in order, for documents; the length in whole tiles.

    With `part`, those of a part of the sequence, here of all of it.
    """
    dtype = jnp.dtype(dtype)
    tiles = gpu.tiles(TILES, SERVER_TILES, (dtype, max(own, value) > 64))
    scale = (own + shared) ** -0.5
    sizes = Sizes(batch, length, length, heads, own, shared, value, dtype, scale, True, part, tiles, False)
    return (_forward(sizes),), (_d_keys(sizes), _d_query(sizes))


def _begins(start: Int[Array, "B Tq"], tile: int) -> Int[Array, "B tiles"]:
    """For each tile of queries the first position that one of them sees; Tk where all are padding."""
    return start.reshape(start.shape[0], -1, tile).min(axis=2)


def _first_keys(start: Int[Array, "B Tq"], tile: Tile) -> Int[Array, "B tiles"]:
    """For each tile of queries the first tile of keys that it sees."""
    return lax.div(_begins(start, tile.queries), np.int32(tile.keys))


def _end_queries(start: Int[Array, "B Tq"], keys: int, tile: Tile) -> Int[Array, "B tiles"]:
    """For each tile of keys the end of the tiles of queries that may see it. Documents follow one another."""
    begins = _begins(start, tile.queries)
    ends = tile.keys * (1 + np.arange(keys // tile.keys, dtype=np.int32))
    number = 1 + np.arange(begins.shape[1], dtype=np.int32)
    return jnp.where(begins[:, None] < ends[None, :, None], number[None, None], 0).max(axis=2)


def _first(index: Array, size: int, origin: Array | None) -> Array:
    """The first position of a tile."""
    return index * size if origin is None else origin + index * size


def _key_tiles(index: Array, tile: Tile, origin: Array | None) -> tuple[Array, Array]:
    """The first tile of keys on the diagonal of a tile of queries, and the end of its tiles."""
    end = lax.div(_first(index + 1, tile.queries, origin) + tile.keys - 1, np.int32(tile.keys))
    return lax.div(_first(index, tile.queries, origin), np.int32(tile.keys)), end


def _query_tiles(index: Array, tile: Tile, origin: Array | None) -> tuple[Array, Array]:
    """The first tile of queries on the diagonal of a tile of keys, and the first one behind the diagonal."""

    def queries_before(key: Array) -> Array:
        return key if origin is None else jnp.maximum(key - origin, 0)

    behind = lax.div(queries_before((index + 1) * tile.keys) + tile.queries - 1, np.int32(tile.queries))
    return lax.div(queries_before(index * tile.keys), np.int32(tile.queries)), behind


def _positions(index: Array, size: int, origin: Array | None = None) -> tuple[pl.Slice, Array]:
    """The positions of a tile among the keys, as a piece of a reference and as numbers."""
    return pl.ds(_first(index, size, origin), size), _first(index, size, origin) + lax.iota(jnp.int32, size)


def _forward(sizes: Sizes) -> Launch:
    """query, key, key_shared, value, document starts, first tiles of keys -> output fp32, m, l."""
    tile = sizes.tiles.forward
    last = sizes.queries // tile.queries - 1

    def body(query_ref, key_ref, shared_ref, value_ref, start_ref, first_ref, *refs):
        origin, (output_ref, max_ref, sum_ref) = sizes.origin(refs)
        index = last - pl.program_id(0)
        at, position = _positions(index, tile.queries, origin)
        queries = tuple(query_ref[:, part] for part in sizes.parts())
        looking = position[:, None], start_ref[at][:, None]

        def one_tile(diagonal: bool, index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            largest, total, weighted = carry
            at, position = _positions(index, tile.keys)
            logits = sizes.logits(queries, (key_ref[at, :], shared_ref[at, :]))
            seen = sizes.seen(looking, (position[None], start_ref[at][None]), diagonal)
            logits = jnp.where(seen, logits, -jnp.inf)
            new = jnp.maximum(largest, jnp.max(logits, axis=1))
            # A query that has seen nothing yet has the maximum -inf: 2^(-inf - lowest) = 0 is safe, 2^(-inf + inf) not.
            finite = jnp.maximum(new, LOWEST)
            weights, shrink = jnp.exp2(LOG2_E * (logits - finite[:, None])), jnp.exp2(LOG2_E * (largest - finite))
            total = shrink * total + jnp.sum(weights, axis=1)
            return new, total, shrink[:, None] * weighted + sizes.dot(weights, value_ref[at, :], 0)

        nothing = jnp.zeros(tile.queries, jnp.float32)
        carry = nothing - jnp.inf, nothing, jnp.zeros((tile.queries, sizes.value), jnp.float32)
        first, (diagonal, end) = first_ref[...], _key_tiles(index, tile, origin)
        carry = lax.fori_loop(first, diagonal, functools.partial(one_tile, False), carry)
        carry = lax.fori_loop(jnp.maximum(first, diagonal), end, functools.partial(one_tile, True), carry)
        largest, total, weighted = carry
        total = jnp.maximum(total, np.finfo(np.float32).tiny)  # 0 where nothing is seen
        output_ref[...] = weighted / total[:, None]
        max_ref[...], sum_ref[...] = largest, total

    def at(i: Array) -> Array:
        return last - i  # the longest loops start first

    rows = sizes.numbers(tile.queries, at)
    return Launch(
        "mla_forward",
        body,
        (last + 1, sizes.heads, sizes.batch),
        (
            sizes.tokens(sizes.queries, sizes.own + sizes.shared, None, tile.queries, at),
            sizes.tokens(sizes.keys, sizes.own), sizes.shared_tokens(), sizes.tokens(sizes.keys, sizes.value),
            *sizes.starts(last + 1, at),
        ),
        (sizes.tokens(sizes.queries, sizes.value, jnp.float32, tile.queries, at), rows, rows),
        tile.warps,
        tile.stages,
        sizes.interpret,
    )  # fmt: skip


def _d_keys(sizes: Sizes) -> Launch:
    """query, key, key_shared, value, d_output, m, l, dots, starts, ends of queries -> d_key, d_key_shared, d_value.

    d_key_shared comes by head, [B,T,H,Ks] fp32, and XLA sums it. Written and read, that is 512 bytes per token and head
    at K3's widths, beside about 4,000 that the backward pass moves in any case. A program that takes several heads in
    turn has no such traffic, but it spills registers and leaves fewer programs. Tiles are held with a row per key.
    """
    tile = sizes.tiles.d_keys

    def body(
        query_ref, key_ref, shared_ref, value_ref, d_output_ref, max_ref, sum_ref, dots_ref, start_ref, end_ref, *refs
    ):  # fmt: skip
        origin, (d_key_ref, d_shared_ref, d_value_ref) = sizes.origin(refs)
        index = pl.program_id(0)
        at, position = _positions(index, tile.keys)
        keys, value = (key_ref[...], shared_ref[...]), value_ref[...]
        looked_at = position[:, None], start_ref[at][:, None]

        def one_tile(diagonal: bool, index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_key, d_shared, d_value = carry
            among_keys, position = _positions(index, tile.queries, origin)
            at = among_keys if origin is None else pl.ds(index * tile.queries, tile.queries)
            queries, d_output = tuple(query_ref[at, part] for part in sizes.parts()), d_output_ref[at, :]
            seen = sizes.seen((position[None], start_ref[among_keys][None]), looked_at, diagonal)
            weights = _weights(sizes.logits(keys, queries), seen, max_ref[at][None]) * (1 / sum_ref[at])[None]
            d_logits = _d_logits(weights, sizes.dot(value, d_output, 1), dots_ref[at][None], seen)
            d_key = d_key + sizes.dot(d_logits, queries[0], 0)
            d_shared = d_shared + sizes.dot(d_logits, queries[1], 0)
            return d_key, d_shared, d_value + sizes.dot(weights, d_output, 0)

        carry = tuple(jnp.zeros(x.shape, jnp.float32) for x in (*keys, value))
        end, (diagonal, behind) = end_ref[...], _query_tiles(index, tile, origin)
        carry = lax.fori_loop(diagonal, jnp.minimum(behind, end), functools.partial(one_tile, True), carry)
        d_key, d_shared, d_value = lax.fori_loop(behind, end, functools.partial(one_tile, False), carry)
        d_key_ref[...] = (np.float32(sizes.scale) * d_key).astype(sizes.dtype)
        d_shared_ref[...] = np.float32(sizes.scale) * d_shared
        d_value_ref[...] = d_value.astype(sizes.dtype)

    def at(i: Array) -> Array:
        return i

    numbers = sizes.numbers()
    tiles = sizes.keys // tile.keys
    of_keys, of_values = (sizes.tokens(sizes.keys, x, None, tile.keys, at) for x in (sizes.own, sizes.value))
    return Launch(
        "mla_d_keys",
        body,
        (tiles, sizes.heads, sizes.batch),
        (
            sizes.tokens(sizes.queries, sizes.own + sizes.shared), of_keys, sizes.shared_tokens(tile.keys, at),
            of_values, sizes.tokens(sizes.queries, sizes.value), numbers, numbers, numbers, *sizes.starts(tiles, at),
        ),
        (of_keys, sizes.tokens(sizes.keys, sizes.shared, jnp.float32, tile.keys, at), of_values),
        tile.warps,
        tile.stages,
        sizes.interpret,
    )  # fmt: skip


def _d_query(sizes: Sizes) -> Launch:
    """query, key, key_shared, value, d_output, m, l, dots, starts, first tiles of keys -> d_query."""
    tile = sizes.tiles.d_query
    last = sizes.queries // tile.queries - 1

    def body(
        query_ref, key_ref, shared_ref, value_ref, d_output_ref, max_ref, sum_ref, dots_ref, start_ref, first_ref, *refs
    ):  # fmt: skip
        origin, (d_query_ref,) = sizes.origin(refs)
        index = last - pl.program_id(0)
        at, position = _positions(index, tile.queries, origin)
        queries, d_output = tuple(query_ref[:, part] for part in sizes.parts()), d_output_ref[...]
        looking = position[:, None], start_ref[at][:, None]
        largest, dots = max_ref[...][:, None], dots_ref[...][:, None]

        def one_tile(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            at, position = _positions(index, tile.keys)
            keys = key_ref[at, :], shared_ref[at, :]
            seen = sizes.seen(looking, (position[None], start_ref[at][None]))
            weights = _weights(sizes.logits(queries, keys), seen, largest)
            d_logits = _d_logits(weights, sizes.dot(d_output, value_ref[at, :], 1), dots, seen)
            return carry[0] + sizes.dot(d_logits, keys[0], 0), carry[1] + sizes.dot(d_logits, keys[1], 0)

        carry = tuple(jnp.zeros(x.shape, jnp.float32) for x in queries)
        # One loop that always compares positions: the registers of sm_80 do not hold what two loops have in common.
        carry = lax.fori_loop(first_ref[...], _key_tiles(index, tile, origin)[1], one_tile, carry)
        total = sum_ref[...][:, None]  # a query's weights have it in common
        for part, d_part in zip(sizes.parts(), carry, strict=True):
            d_query_ref[:, part] = (np.float32(sizes.scale) * d_part / total).astype(sizes.dtype)

    def at(i: Array) -> Array:
        return last - i

    of_queries = sizes.tokens(sizes.queries, sizes.own + sizes.shared, None, tile.queries, at)
    numbers = sizes.numbers(tile.queries, at)
    return Launch(
        "mla_d_query",
        body,
        (last + 1, sizes.heads, sizes.batch),
        (
            of_queries, sizes.tokens(sizes.keys, sizes.own), sizes.shared_tokens(),
            sizes.tokens(sizes.keys, sizes.value), sizes.tokens(sizes.queries, sizes.value, None, tile.queries, at),
            numbers, numbers, numbers, *sizes.starts(last + 1, at),
        ),
        (of_queries,),
        tile.warps,
        tile.stages,
        sizes.interpret,
    )  # fmt: skip


def _weights(logits: Array, seen: Array | bool, largest: Array) -> Array:
    """e^(logit - largest) of a tile, 0 where a pair is not seen."""
    return jnp.exp2(LOG2_E * (jnp.where(seen, logits, -jnp.inf) - jnp.maximum(largest, LOWEST)))


def _d_logits(weights: Array, products: Array, dots: Array, seen: Array | bool) -> Array:
    """Gradient of the logits of a tile; products are those of values and gradients of outputs."""
    # What is not seen may be so large that its product overflows, and 0 * inf is not 0.
    return jnp.where(seen, weights * (products - dots), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(query, key, key_shared, value, start, query_start, sizes):
    """-> output [B,Tq,H,V] fp32, row_max [B,H,Tq]."""
    return _attention_forward(query, key, key_shared, value, start, query_start, sizes)[0]


def _looking(start, query_start, sizes):
    """The document starts [B,Tq] of the queries, and the origin as the kernels read it."""
    if query_start is None:
        return start, ()
    return cut(start, query_start, sizes.queries), (query_start[None],)


def _attention_forward(query, key, key_shared, value, start, query_start, sizes):
    arrays = query, key, key_shared, value, start
    looking, origin = _looking(start, query_start, sizes)
    borders = _first_keys(looking, sizes.tiles.forward)
    output, row_max, sums = _forward(sizes)(*arrays, borders, *origin)
    # Everything that is kept for the backward pass, and the one place where it can be named for a memory policy.
    residuals = *arrays, query_start, output, row_max, sums
    return (output, row_max), residuals


def _attention_backward(sizes, residuals, gradients):
    *inputs, start, query_start, output, row_max, sums = residuals
    d_output, _ = gradients  # the row maximum carries no gradient
    dots = jnp.einsum("bthv,bthv->bht", d_output, output, precision="highest")
    arrays = *inputs, d_output.astype(sizes.dtype), row_max, sums, dots, start
    looking, origin = _looking(start, query_start, sizes)
    borders = _end_queries(looking, sizes.keys, sizes.tiles.d_keys)
    d_key, d_shared, d_value = _d_keys(sizes)(*arrays, borders, *origin)
    borders = _first_keys(looking, sizes.tiles.d_query)
    (d_query,) = _d_query(sizes)(*arrays, borders, *origin)
    return d_query, d_key, d_shared.sum(axis=2).astype(sizes.dtype), d_value, None, None


_attention.defvjp(_attention_forward, _attention_backward)
