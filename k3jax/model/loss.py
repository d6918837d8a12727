"""Next-token cross-entropy, in pieces of tokens.

    loss = sum over target tokens of (logsumexp(h W) - (h W)_target) / their number

Invariant: logits exist for one piece at a time, in the forward and in the backward pass alike, so [B,T,vocab] is never
held in fp32. The sum and the count are returned apart: a step divides once, by all of its targets.
"""

import jax
import jax.numpy as jnp
from jax import Array

from k3jax.parallel import tensor

PIECE = 2**23  # logits of one piece; 32 MiB in fp32


def cross_entropy(
    hidden: Array, lm_head: Array, targets: Array, loss_mask: Array, *, piece: int = PIECE
) -> tuple[Array, Array]:
    """Summed loss in nats and number of targets.

    hidden [B,T,D] after the final norm, lm_head [D,vocab] (of whose columns devices along `tensor` hold each a part),
    targets [B,T] int32, loss_mask [B,T] (0: not a target) -> (sum [] fp32, count [] fp32). Targets outside the mask may
    hold anything.
    """
    width, vocab = lm_head.shape
    mask = (loss_mask != 0).reshape(-1)
    tokens = mask.shape[0]
    count = jnp.sum(mask, dtype=jnp.float32)
    if tokens == 0:
        return jnp.zeros(()), count
    rows = min(tokens, max(16, piece // vocab))
    pieces = -(-tokens // rows)
    spare = pieces * rows - tokens

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, [(0, spare)] + [(0, 0)] * (x.ndim - 1)) if spare else x
        return padded.reshape(pieces, rows, *x.shape[1:])

    kernel = lm_head.astype(jnp.float32)  # and cast inside: so the gradients of the pieces add up in fp32

    @jax.checkpoint
    def one(h: Array, target: Array, kept: Array) -> Array:
        logits = jnp.dot(h, kernel.astype(h.dtype), preferred_element_type=jnp.float32)
        chosen = tensor.pick(logits, jnp.where(kept, target, 0))
        return jnp.sum(jnp.where(kept, tensor.log_sum_exp(logits) - chosen, 0.0))

    xs = cut(tensor.enter(hidden).reshape(tokens, width)), cut(targets.reshape(-1)), cut(mask)
    if pieces == 1:
        return one(*(x[0] for x in xs)), count
    total, _ = jax.lax.scan(lambda total, x: (total + one(*x), None), jnp.zeros(()), xs)
    return total, count
