"""QK-Clip: after an update, heads whose attention logits have grown too far are scaled back (Kimi K2; k3.md 4.4).

    S = largest scaled logit of a head over all data of the step;   gamma = tau / S  where S > tau,  else 1
    q_nope <- sqrt(gamma) q_nope;   q_shared <- gamma q_shared;   k_nope <- sqrt(gamma) k_nope

The shared key part belongs to all heads, so that the query alone carries its gamma; values are left alone. A head's
logit q_n . k_n + q_s . k_s thus becomes exactly gamma times what it was. KDA needs none: it normalises query and key.

Invariant: a head at or below tau, or that saw no token (S = -inf), keeps its parameters bit for bit.
"""

from collections.abc import Mapping, Sequence, Set

import jax.numpy as jnp
from jax import Array, lax


def qk_clip(
    params: Mapping[str, Array],
    max_logit: Array,
    places: Sequence[tuple[str, int | None]],
    tau: float,
    nope: int,
    *,
    frozen: Set[str] = frozenset(),
) -> dict[str, Array]:
    """The parameters with the query and key kernels of every head above `tau` scaled.

    Args:
        params: path -> array; q_b (or q) [in, heads, nope + shared] and k_b [in, heads, nope], with a leading axis
            where layers are stacked.
        max_logit: [mla_layers, heads] fp32, the largest scaled logits over the whole step, in layer order.
        places: the MLA modules in layer order: (path prefix, number of stacked layers; None: one, not stacked). Each
            takes that many rows of max_logit.
        tau: largest logit that is left alone.
        nope: query and key channels that are a head's own; the rest of the query meets the shared key.
        frozen: paths that must not change. A module with a frozen query or key is left alone.

    Raises:
        ValueError: places and max_logit do not name the same number of layers.
        KeyError: a place that is no MLA module.
    """
    counts = [1 if stacked is None else stacked for _, stacked in places]
    if sum(counts) != max_logit.shape[0]:
        raise ValueError(f"qk_clip: places name {sum(counts)} layers, max_logit has {max_logit.shape[0]}")
    if not places:
        return dict(params)
    paths = [(f"{at}.q_b" if f"{at}.q_b" in params else f"{at}.q", f"{at}.k_b") for at, _ in places]
    # A logit of inf says that the step is broken, not by how much the head must shrink.
    over = (max_logit > tau) & (max_logit < jnp.inf)
    gamma = jnp.where(over, tau / max_logit, 1.0)[..., None]
    root = jnp.where(over[..., None], jnp.sqrt(gamma), 1.0)
    # The factors of all layers' channels at once: a module then costs six equations.
    own = jnp.broadcast_to(root, (*max_logit.shape, nope))
    shared = jnp.broadcast_to(gamma, (*max_logit.shape, params[paths[0][0]].shape[-1] - nope))
    factors = jnp.concatenate([own, shared], axis=-1), own
    clipped, first = dict(params), 0
    for pair, count, (_, stacked) in zip(paths, counts, places, strict=True):
        if frozen.isdisjoint(pair):
            for path, factor in zip(pair, factors, strict=True):
                rows = lax.slice_in_dim(factor, first, first + count)
                clipped[path] = _scaled(params[path], rows, stacked is not None)
        first += count
    return clipped


def _scaled(kernel: Array, factor: Array, stacked: bool) -> Array:
    """kernel [(layers,) in, heads, channels] times factor [layers, heads, channels]."""
    axes = (0, 2, 3) if stacked else (0, 1, 2)  # not stacked: one layer, whose axis is spread over `in`
    return kernel * lax.broadcast_in_dim(factor.astype(kernel.dtype), kernel.shape, axes)
