"""Attention for training multi-head latent attention (MLA) without position encoding.

    logit[h,t,s] = scale * query[t,h] . [key[s,h]; key_shared[s]]
    output[t,h]  = sum_s softmax_s(logit[h,t])_s value[s,h]

over s <= t of the same document (k3.md 2.2; Kimi K3 report, Eq 7). Invariant: position t is bitwise independent of
whatever stands at later positions and in other documents as long as no product overflows; padding may hold anything.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import select
from pallas_kernels.attention import gpu, xla

IMPLEMENTATIONS = {"gpu": gpu.attention, "xla": xla.attention}  # most preferred first


def mla_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T H Kn"],
    key_shared: Float[Array, "B T Ks"],
    value: Float[Array, "B T H V"],
    *,
    scale: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
    """Causal softmax attention whose keys have a part of their own per head and one part for all heads.

    Args:
        query: [B, T, H, K], K = Kn + Ks; the last Ks channels meet the shared key.
        key: [B, T, H, Kn].
        key_shared: [B, T, Ks].
        value: [B, T, H, V].
        scale: factor of the logits; None is K**-0.5.
        segment_ids: [B, T] integers. A maximal run of equal non-zero ids is a document, which sees only itself; 0 is
            padding, which may hold anything: output 0, row_max -inf, gradient 0. None: one document.
        implementation: "gpu" (Pallas kernels, sm_80 and newer), "xla", or None, the best that takes the case.

    Returns:
        output: [B, T, H, V] in value's dtype; logits, softmax and sums are fp32. Memory is linear in T.
        row_max: [B, H, T] fp32, the largest scaled logit of each query (for QK-Clip). It carries no gradient.
        Both can be differentiated once, in reverse.

    Raises:
        ValueError: shapes that do not belong together, an unknown implementation.
    """
    shapes = f"query {query.shape}, key {key.shape}, key_shared {key_shared.shape}, value {value.shape}"
    if (query.ndim, key.ndim, key_shared.ndim, value.ndim) != (4, 4, 3, 4):
        raise ValueError(f"mla_attention: [B,T,H,K], [B,T,H,Kn], [B,T,Ks], [B,T,H,V] expected, got {shapes}")
    if not query.shape[:3] == key.shape[:3] == value.shape[:3] or key_shared.shape[:2] != query.shape[:2]:
        raise ValueError(f"mla_attention: batch, tokens or heads differ: {shapes}")
    if query.shape[3] != key.shape[3] + key_shared.shape[2]:
        raise ValueError(f"mla_attention: query's channels must be key's and key_shared's together: {shapes}")
    if segment_ids is not None and segment_ids.shape != query.shape[:2]:
        raise ValueError(f"mla_attention: segment_ids {query.shape[:2]} expected, got {segment_ids.shape}")
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"mla_attention: segment_ids are {segment_ids.dtype}, expected integers")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    arguments = query, key, key_shared, value, segment_ids, scale
    return select.run("mla_attention", IMPLEMENTATIONS, implementation, *arguments)
