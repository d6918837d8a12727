"""Attention for training multi-head latent attention (MLA) without position encoding.

    logit[h,t,s] = scale * query[t,h] . [key[s,h]; key_shared[s]]
    output[t,h]  = sum_s softmax_s(logit[h,t])_s value[s,h]

over s <= t of the same document (k3.md 2.2; Kimi K3 report, Eq 7). A device that holds a part of the queries calls with
the keys and values of all tokens and the position of its first query: outputs are those of the part, and the gradients
of keys and values are the part's share, to be summed over the parts.

Invariant: position t is bitwise independent of whatever stands at later positions and in other documents as long as no
product overflows; padding, and all that stands behind the last query, may hold anything.
"""

import functools
import numbers

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import select
from pallas_kernels.attention import gpu, xla

IMPLEMENTATIONS = {"gpu": gpu.attention, "xla": xla.attention}  # most preferred first


def mla_attention(
    query: Float[Array, "B Tq H K"],
    key: Float[Array, "B Tk H Kn"],
    key_shared: Float[Array, "B Tk Ks"],
    value: Float[Array, "B Tk H V"],
    *,
    scale: float | None = None,
    segment_ids: Int[Array, "B Tk"] | None = None,
    query_start: int | Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Tq H V"], Float[Array, "B H Tq"]]:
    """Causal softmax attention whose keys have a part of their own per head and one part for all heads.

    Args:
        query: [B, Tq, H, K], K = Kn + Ks; the last Ks channels meet the shared key.
        key: [B, Tk, H, Kn].
        key_shared: [B, Tk, Ks].
        value: [B, Tk, H, V].
        scale: factor of the logits; None is K**-0.5.
        segment_ids: [B, Tk] integers, of the keys. A maximal run of equal non-zero ids is a document, which sees only
            itself; 0 is padding, which may hold anything: output 0, row_max -inf, gradient 0. None: one document.
        query_start: position of the first query among the keys, an integer in 0 .. Tk - Tq; the others follow it. It
            may be known only when the program runs, and then its value is not checked. Keys behind the last query may
            hold anything and get the gradient 0; the work is that of the keys before. None: Tq = Tk.
        implementation: "gpu" (Pallas kernels, sm_80 and newer), "xla", or None, the best that takes the case.

    Returns:
        output: [B, Tq, H, V] in value's dtype; logits, softmax and sums are fp32. Memory is linear in Tk.
        row_max: [B, H, Tq] fp32, the largest scaled logit of each query (for QK-Clip). It carries no gradient.
        Both can be differentiated once, in reverse.

    Raises:
        ValueError: shapes that do not belong together, a query_start that leaves the keys, an unknown implementation.
    """
    shapes = f"query {query.shape}, key {key.shape}, key_shared {key_shared.shape}, value {value.shape}"
    if (query.ndim, key.ndim, key_shared.ndim, value.ndim) != (4, 4, 3, 4):
        raise ValueError(f"mla_attention: [B,T,H,K], [B,T,H,Kn], [B,T,Ks], [B,T,H,V] expected, got {shapes}")
    lead = query.shape[:3] if query_start is None else (query.shape[0], key.shape[1], query.shape[2])
    if not lead == key.shape[:3] == value.shape[:3] or key_shared.shape[:2] != lead[:2]:
        raise ValueError(f"mla_attention: batch, tokens or heads differ: {shapes}")
    if query.shape[3] != key.shape[3] + key_shared.shape[2]:
        raise ValueError(f"mla_attention: query's channels must be key's and key_shared's together: {shapes}")
    if segment_ids is not None and segment_ids.shape != lead[:2]:
        raise ValueError(f"mla_attention: segment_ids {lead[:2]} expected, got {segment_ids.shape}")
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"mla_attention: segment_ids are {segment_ids.dtype}, expected integers")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    arguments = query, key, key_shared, value, segment_ids, scale
    implementations = IMPLEMENTATIONS
    if query_start is not None:
        start = _query_start(query_start, key.shape[1] - query.shape[1], shapes)
        implementations = {name: functools.partial(f, query_start=start) for name, f in IMPLEMENTATIONS.items()}
    return select.run("mla_attention", implementations, implementation, *arguments)


def _query_start(query_start: int | Array, largest: int, shapes: str) -> Int[Array, ""]:
    """query_start as int32."""
    if largest < 0:
        raise ValueError(f"mla_attention: more queries than keys: {shapes}")
    start = jnp.asarray(query_start)
    if start.ndim or not jnp.issubdtype(start.dtype, jnp.integer):
        raise ValueError(f"mla_attention: query_start is {start.dtype}{list(start.shape)}, expected one integer")
    if isinstance(query_start, numbers.Integral) and not 0 <= query_start <= largest:
        raise ValueError(f"mla_attention: query_start = {query_start} is not in 0 .. {largest}: {shapes}")
    return start.astype(jnp.int32)
