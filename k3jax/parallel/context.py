"""Rows cut into contiguous pieces over `context`: what a piece must know of the others. Inside `Layout.per_device`.

    KDA            (M_p, S_p) of every piece, one all-gather; state before piece p: fold S <- M_j S + S_j over j < p
    convolution    the last three tokens before the piece
    MLA            the compressed keys and values of the whole row, one all-gather

The algebra of (M, S) is that of pallas_kernels.kda.context; the gradients are those of the gathers, which sum over
devices. Invariant: documents know nothing of the cuts: one may begin before a piece and end behind it, a piece may be
padding only, and a token sees what it would see on one device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from k3jax.parallel.fsdp import gather
from k3jax.parallel.mesh import local_size
from pallas_kernels.kda import context as pieces
from pallas_kernels.kda import kda
from pallas_kernels.segments import take

AXIS = "context"
HALO = 3  # tokens that the convolution looks back


class Around(NamedTuple):
    """What a piece knows of its row, [B,...] int32.

    Attributes:
        row_ids: [B, T * pieces] segment ids of the whole row.
        left_id: [B] document of the last token before the piece that is not padding, 0 where there is none.
        last: [B,3] the piece's last tokens that are not padding, oldest first; -1 for "no such token".
        before: [B,3] the same of everything before the piece, as numbers among what all pieces call their last.
    """

    row_ids: Array
    left_id: Array
    last: Array
    before: Array

    @property
    def before_ids(self) -> Array:
        """Documents of the three tokens before the piece, 0 for "no such token": [B,3]."""
        return jnp.where(self.before >= 0, self.left_id[:, None], 0)


def cut() -> bool:
    """Whether rows arrive in pieces here."""
    return local_size(AXIS) > 1


def around(segment_ids: Array | None) -> Around | None:
    """What the layers need to know beside their own tokens, segment_ids [B,T]; None where rows are whole."""
    if not cut():
        return None
    row_ids = lax.all_gather(segment_ids, AXIS, axis=1, tiled=True)
    last = _last(segment_ids > 0)
    # Number p * HALO + i is token i of piece p's last.
    there = lax.all_gather(last, AXIS, axis=1, tiled=True) >= 0
    mine = lax.axis_index(AXIS)
    before = _last(there & (jnp.arange(there.shape[1])[None] < mine * HALO))
    ids = lax.all_gather(_ids(segment_ids, last), AXIS, axis=1, tiled=True)
    found = _ids(ids, before)
    # Only tokens of the last one's document matter, and they are neighbours.
    left_id = found[:, -1]
    return Around(row_ids, left_id, last, jnp.where(found == left_id[:, None], before, -1))


def _last(kept: Array) -> Array:
    """Positions of the last HALO True of [B,N] in each row, in order; -1 where there are fewer."""
    padded = jnp.pad(kept, ((0, 0), (HALO, 0)))  # a row may be shorter
    positions = jnp.where(padded, jnp.arange(padded.shape[1], dtype=jnp.int32)[None] - HALO, -1)
    return lax.top_k(positions, HALO)[0][:, ::-1]


def _ids(ids: Array, positions: Array) -> Array:
    """ids [B,N] at positions [B,M], 0 where these are -1."""
    return jnp.where(positions >= 0, take(ids, jnp.maximum(positions, 0)), 0)


def halo(x: Array, known: Around | None) -> Array | None:
    """The three tokens before the piece, 0 where there are none: x [B,T,C] -> [B,3,C]."""
    if known is None:
        return None
    own = jnp.where((known.last >= 0)[..., None], take(x, jnp.maximum(known.last, 0)), 0)
    everybody = gather(own, 1, (AXIS,))
    return jnp.where((known.before >= 0)[..., None], take(everybody, jnp.maximum(known.before, 0)), 0)


def whole_row(parts: tuple[Array, ...], known: Around | None) -> tuple[Array, ...]:
    """The tokens of all pieces, in one message: arrays [B,T,C] of one type -> [B, T * pieces, C]."""
    if known is None:
        return parts
    row = gather(jnp.concatenate(parts, axis=-1), 1, (AXIS,))
    return tuple(jnp.split(row, np.cumsum([part.shape[-1] for part in parts[:-1]]), axis=-1))


def start(length: int) -> Array:
    """Place in its row of the first token of this device's piece of `length` tokens."""
    return lax.axis_index(AXIS) * length


def kda_of_row(query: Array, key: Array, value: Array, log_decay: Array, beta: Array, known: Around | None, **options):
    """`kda` on a piece of a row: arguments and result as there, the final state being that behind the piece."""
    if known is None:
        return kda(query, key, value, log_decay, beta, **options)
    piece = pieces.summarize(key, value, log_decay, beta, left_segment_id=known.left_id, **options)
    state = _before(piece)
    state = pieces.enter(state, options["segment_ids"], known.left_id)
    return kda(query, key, value, log_decay, beta, initial_state=state, **options)


def _before(piece: pieces.Summary) -> Array:
    """The state before this device's piece: the pieces to its left, folded."""
    every = pieces.Summary(*(lax.all_gather(x, AXIS) for x in piece))
    mine = lax.axis_index(AXIS)

    def fold(state: Array, numbered: tuple[Array, pieces.Summary]) -> tuple[Array, None]:
        number, one = numbered
        return jnp.where(number < mine, pieces.leave(state, one), state), None

    numbers = jnp.arange(local_size(AXIS) - 1)  # nobody needs the last
    earlier = jax.tree.map(lambda x: x[:-1], every)
    return lax.scan(fold, jnp.zeros_like(piece.state), (numbers, earlier))[0]
