"""From what the caller hands over to what the recurrence consumes: masks, gates, normalisation, head groups.

    q = scale * n(query), k = n(key);  n(x) = x / sqrt(sum x^2 + 1e-6) or x
    log_decay as given, or with a_log and z = raw + dt_bias:  -e^a_log softplus(z), or bound * sigmoid(e^a_log z)
    beta as given, or sigmoid(beta);   value head h reads key head h // (HV / H)

(Kimi Linear, arXiv 2510.26692; K3 report, arXiv 2607.24653, equation 5 for the bounded gate.)

Segments turn into plain numbers here, so that no implementation needs to know them: padding has q = k = v = 0 and
decay 1, which leaves the state alone; the first token of a later document has decay 0, which forgets it.
Invariant: nothing that padding holds, NaN and inf included, reaches a result or a gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.segments import DOCUMENT_START, PADDING

NORM_EPSILON = 1e-6  # added to the sum of squares, not to their mean
FORGET = -1e30  # a log decay whose exponential is exactly 0, and finite so that 0 * FORGET is 0


class Inputs(NamedTuple):
    """The arrays of one call; shapes as in `kda`. `marks` [B,T] are those of segments.py; None: one document.

    Without a query only the final state is asked for.
    """

    query: Array | None
    key: Array
    value: Array
    log_decay: Array
    beta: Array
    a_log: Array | None
    dt_bias: Array | None
    initial_state: Array | None
    marks: Array | None


class Options(NamedTuple):
    """The static part of one call; meanings as in `kda`."""

    scale: float
    lower_bound: float | None
    normalize_qk: bool
    beta_is_logit: bool
    state_every: int


def keep_tokens(x: Array | None, marks: Array | None) -> Array | None:
    """x [B,T,...] with 0 at padding whatever it holds; the transpose does the same to the gradient."""
    if marks is None or x is None:
        return x
    kept = lax.broadcast_in_dim(lax.ne(marks, np.zeros((), marks.dtype)), x.shape, (0, 1))
    return lax.select(kept, x, lax.full_like(x, 0))


def activate(inputs: Inputs, options: Options) -> tuple[Array | None, Array, Array, Array, Array]:
    """-> query, key, log_decay [B,T,HV,K], value [B,T,HV,V], beta [B,T,HV], all fp32, of the plain recurrence."""
    marks = inputs.marks
    # Masked before anything else is computed: 0 * NaN would not be 0.
    key, value, raw_decay, beta = (
        keep_tokens(x, marks).astype(jnp.float32) for x in (inputs.key, inputs.value, inputs.log_decay, inputs.beta)
    )
    groups = value.shape[2] // key.shape[2]

    def per_value_head(x: Array) -> Array:
        x = _normalize(x) if options.normalize_qk else x
        return _repeat_heads(x, groups) if groups > 1 else x

    key, query = per_value_head(key), None
    if inputs.query is not None:
        query = per_value_head(keep_tokens(inputs.query, marks).astype(jnp.float32))
        if options.scale != 1:
            query = query * np.float32(options.scale)
    log_decay = raw_decay if inputs.a_log is None else _gate(raw_decay, inputs, options.lower_bound)
    if options.beta_is_logit:
        beta = lax.logistic(beta)
    if marks is not None:
        marks = lax.expand_dims(marks, (2, 3))
        if inputs.a_log is not None:
            log_decay = log_decay * lax.ne(marks, np.int32(PADDING)).astype(jnp.float32)
        log_decay = log_decay + lax.eq(marks, np.int32(DOCUMENT_START)).astype(jnp.float32) * np.float32(FORGET)
    return query, key, value, log_decay, beta


def _normalize(x: Array) -> Array:
    # The sum is a product with ones: XLA reduces over the last axis on a CPU ten times slower than it multiplies.
    ones = np.ones((x.shape[-1], 1), np.float32)
    squares = lax.dot_general(x * x, ones, (((3,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
    return x * lax.rsqrt(squares + np.float32(NORM_EPSILON))


def _repeat_heads(x: Array, groups: int) -> Array:
    batch, length, heads, width = x.shape
    x = lax.broadcast_in_dim(x, (batch, length, heads, groups, width), (0, 1, 2, 4))
    return x.reshape(batch, length, heads * groups, width)


def _gate(raw: Array, inputs: Inputs, lower_bound: float | None) -> Array:
    gain = lax.expand_dims(lax.exp(inputs.a_log.astype(jnp.float32)), (0, 1, 3))
    if inputs.dt_bias is not None:
        raw = raw + lax.expand_dims(inputs.dt_bias.astype(jnp.float32), (0, 1))
    if lower_bound is not None:
        return np.float32(lower_bound) * lax.logistic(gain * raw)
    return -gain * _softplus(raw)


@jax.custom_jvp
def _softplus(x: Array) -> Array:
    """log(1 + e^x) without a positive exponent; small values keep their precision."""
    return lax.max(x, np.float32(0)) + lax.log1p(lax.exp(-lax.abs(x)))


@_softplus.defjvp
def _softplus_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # By hand: max and abs have no derivative at 0, their sum has.
    (x,), (d_x,) = primals, tangents
    return _softplus(x), lax.logistic(x) * d_x
