"""Pieces of arrays along one axis, where the position is known only when the program runs.

Invariant: positions are >= 0 and the piece lies inside; nothing is clamped or wrapped, which keeps programs small.
"""

import numpy as np
from jax import Array, lax


def cut(x: Array, start: Array, size: int, axis: int = 1) -> Array:
    """x[..., start : start + size, ...] along `axis`."""
    index, sizes = [0] * x.ndim, list(x.shape)
    index[axis], sizes[axis] = start, size
    return lax.dynamic_slice(x, index, sizes, allow_negative_indices=False)


def put(x: Array, part: Array, start: Array, axis: int = 1) -> Array:
    """x with `part`, in x's dtype, from `start` on along `axis`."""
    index = [0] * x.ndim
    index[axis] = start
    return lax.dynamic_update_slice(x, part.astype(x.dtype), index, allow_negative_indices=False)


def pad(x: Array, count: int, content: float = 0) -> Array:
    """x [B,T,...] with `count` more positions that hold `content`."""
    return lax.pad(x, np.asarray(content, x.dtype), [(0, 0, 0), (0, count, 0)] + [(0, 0, 0)] * (x.ndim - 2))
