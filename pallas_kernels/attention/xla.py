"""Causal attention with a key part that all heads share, chunk by chunk over the queries, by XLA.

    logit[h,t,s] = scale * (query[t,h,:Kn] . key[s,h] + query[t,h,Kn:] . key_shared[s])      s <= t, t's document
    row_max[h,t] = max_s logit[h,t,s]
    weight[s]    = e^(logit[h,t,s] - row_max[h,t])
    output[t,h]  = sum_s weight[s] value[s,h] / sum_s weight[s]

The shared part is not copied to the heads. Invariant: memory is linear in T: at most `QUERY_CHUNK` rows of logits live
at a time, in the backward pass too, which recomputes them. Logits, softmax and output are fp32 until the last cast, so
the backward pass sees an unrounded output (K3 report, 2.2).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

QUERY_CHUNK = 256


def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T H Kn"],
    key_shared: Float[Array, "B T Ks"],
    value: Float[Array, "B T H V"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    chunk: int = QUERY_CHUNK,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
    """(output in value's dtype, row_max fp32); chunk is the number of queries at a time."""
    batch, length, heads, _ = query.shape
    if length == 0:
        return jnp.zeros_like(value), jnp.zeros((batch, heads, 0), jnp.float32)
    if segment_ids is not None:
        active = segment_ids != 0
        query, key, key_shared, value = (_only(active, x) for x in (query, key, key_shared, value))

    def rows(query, segments, first):
        """`query` [B,C,H,K] at positions from `first` against all keys -> ([B,C,H,V], [B,H,C]), fp32."""
        wide = {"preferred_element_type": jnp.float32}
        own, shared = jnp.split(query.swapaxes(1, 2), [key.shape[-1]], axis=-1)
        logits = jnp.einsum("bhck,bshk->bhcs", own, key, **wide)
        # Against the shared key all heads' queries are rows of one product; as two axes XLA:CPU's gradient is slow.
        shared = shared.reshape(batch, -1, shared.shape[-1])
        logits += jnp.einsum("brk,bsk->brs", shared, key_shared, **wide).reshape(logits.shape)
        position = first + lax.iota(jnp.int32, query.shape[1])
        seen = (position[:, None] >= lax.iota(jnp.int32, length)[None])[None]
        if segments is not None:
            seen = seen & (segments[:, :, None] == segment_ids[:, None]) & (segments != 0)[:, :, None]
        logits = jnp.where(seen[:, None], scale * logits, -jnp.inf)
        row_max = lax.stop_gradient(jnp.max(logits, axis=-1))
        # A row of padding sees nothing: e^(-inf - 0) = 0 is safe, e^(-inf + inf) is not; its sum is 0.
        weights = jnp.exp(logits - jnp.maximum(row_max, jnp.finfo(jnp.float32).min)[..., None])
        total = jnp.maximum(jnp.sum(weights, axis=-1), jnp.finfo(jnp.float32).tiny)
        output = jnp.einsum("bhcs,bshv->bhcv", weights.astype(value.dtype), value, **wide)
        return (output / total[..., None]).swapaxes(1, 2), row_max

    if length <= chunk:
        output, row_max = rows(query, segment_ids, 0)
    else:
        count = -(-length // chunk)

        def cut(x):
            x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
            return x.reshape(batch, count, chunk, *x.shape[2:]).swapaxes(0, 1)

        firsts = jnp.arange(0, count * chunk, chunk)
        chunks = cut(query), None if segment_ids is None else cut(segment_ids), firsts
        output, row_max = lax.map(jax.checkpoint(lambda x: rows(*x), prevent_cse=False), chunks)
        output = output.swapaxes(0, 1).reshape(batch, count * chunk, *value.shape[2:])[:, :length]
        row_max = jnp.moveaxis(row_max, 0, 2).reshape(batch, heads, count * chunk)[:, :, :length]
    if segment_ids is not None:
        output = _only(active, output)
    return output.astype(value.dtype), row_max


def _only(active, x):
    """x [B,T,...] with 0 in padding, forward and backward."""
    return lax.select(lax.broadcast_in_dim(active, x.shape, (0, 1)), x, jnp.zeros_like(x))
