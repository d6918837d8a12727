"""A sequence in pieces, one to a device: what a piece does to the state that enters it, before that state is known.

The recurrence (api.py) is affine in the state, so a piece of any length is a pair (M, S), and pieces compose:

    S_end = M S_start + S,     M = prod_t (I - beta_t k_t k_t^T) Diag(e^log_decay_t),     S = S_end from S_start = 0
    (M, S) of an earlier piece, then (M', S') of a later one:     (M' M, M' S + S')

Composition is associative, so that the states before all pieces are a prefix over devices; each piece then runs `kda`
from its own (Kimi Linear, arXiv 2510.26692, section 3; context parallelism of K3, arXiv 2607.24653).
M comes out of the same scan as S: columns of the state that start as the identity and into which nothing is written.
Invariants: everything can be differentiated; a document that begins in a piece has M = 0 and nothing of an earlier one.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.kda import xla
from pallas_kernels.kda.inputs import prepare
from pallas_kernels.segments import first_id


class Summary(NamedTuple):
    """(M, S) of a piece, fp32."""

    transition: Float[Array, "B HV K K"]
    state: Float[Array, "B HV K V"]


def summarize(
    key: Float[Array, "B T H K"],
    value: Float[Array, "B T HV V"],
    log_decay: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    a_log: Float[Array, "HV"] | None = None,
    dt_bias: Float[Array, "HV K"] | None = None,
    lower_bound: float | None = None,
    normalize_qk: bool = False,
    beta_is_logit: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    left_segment_id: Int[Array, "B"] | None = None,
    state_every: int = 1,
) -> Summary:
    """The pair (M, S) of a piece of a sequence.

    Args:
        key, value, log_decay, beta, a_log, dt_bias, lower_bound, normalize_qk, beta_is_logit, segment_ids, state_every:
            as in `kda`.
        left_segment_id: document of the last token before the piece that is not padding, 0 where there is none; needs
            `segment_ids`. None: the state that enters belongs to each row's first document.

    Raises:
        ValueError: a shape or an option that does not fit.
    """
    inputs, options = prepare(
        "summarize",
        None,
        key,
        value,
        log_decay,
        beta,
        a_log=a_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        normalize_qk=normalize_qk,
        beta_is_logit=beta_is_logit,
        segment_ids=segment_ids,
        state_every=state_every,
    )
    batch, _, heads, width = value.shape
    keys = key.shape[3]
    identity = np.concatenate([np.zeros((keys, width), np.float32), np.eye(keys, dtype=np.float32)], axis=1)
    start = lax.broadcast_in_dim(identity, (batch, heads, *identity.shape), (2, 3))
    if left_segment_id is not None:
        start = enter(start, segment_ids, left_segment_id)
    wide = lax.pad(value, np.zeros((), value.dtype), ((0, 0, 0),) * 3 + ((0, keys, 0),))
    _, state = xla.kda(inputs._replace(value=wide, initial_state=start), options)
    return Summary(state[..., width:], state[..., :width])


def combine(earlier: Summary, later: Summary) -> Summary:
    """The summary of two neighbouring pieces together."""
    return Summary(_matmul(later.transition, earlier.transition), leave(earlier.state, later))


def leave(state: Float[Array, "B HV K V"], piece: Summary) -> Float[Array, "B HV K V"]:
    """The state behind a piece, from the one before it."""
    return _matmul(piece.transition, state) + piece.state


def enter(
    state: Float[Array, "B HV K V"], segment_ids: Int[Array, "B T"], left_segment_id: Int[Array, "B"]
) -> Float[Array, "B HV K V"]:
    """The `initial_state` of a piece, from the state before it: 0 in rows where the piece begins with a new document.

    Args:
        state: behind everything to the left.
        segment_ids: of the piece.
        left_segment_id: as in `summarize`.

    Raises:
        ValueError: shapes that do not fit.
    """
    if segment_ids is None or left_segment_id.shape != segment_ids.shape[:1]:
        found = None if segment_ids is None else segment_ids.shape
        raise ValueError(f"left_segment_id {left_segment_id.shape} needs segment_ids [B, T] of its rows, got {found}")
    first = first_id(segment_ids)
    goes_on = (first == left_segment_id) | (first == 0) | (left_segment_id == 0)
    return lax.select(lax.broadcast_in_dim(goes_on, state.shape, (0,)), state, jnp.zeros_like(state))


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")
