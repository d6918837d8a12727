"""From what the caller hands over to what the recurrence consumes: checks, masks, gates, normalisation, head groups.

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

from pallas_kernels.segments import DOCUMENT_START, PADDING, TOKEN, keep_tokens, marks
from pallas_kernels.slices import pad

SEQUENCES = ("query", "key", "value", "log_decay", "beta", "marks")  # the inputs that are as long as the sequence
NORM_EPSILON = 1e-6  # added to the sum of squares, not to their mean
FORGET = -1e30  # a log decay whose exponential is exactly 0, and finite so that 0 * FORGET is 0


class Inputs(NamedTuple):
    """The arrays of one call; shapes as in `kda`. `marks` [B,T] are those of segments.py; None: one document.

    Without a query only the final state is asked for, which `xla` alone takes.
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


def prepare(
    operation: str,
    query: Array | None,
    key: Array,
    value: Array,
    log_decay: Array,
    beta: Array,
    *,
    scale: float | None = None,
    a_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    normalize_qk: bool = False,
    beta_is_logit: bool = False,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    state_every: int = 1,
) -> tuple[Inputs, Options]:
    """Checks the arguments of `kda` and packs them up; query may be None. `operation` is the name in messages.

    Raises:
        ValueError: a shape or an option that does not fit.
    """
    rows, of_rows = ("key", key) if query is None else ("query", query)
    if of_rows.ndim != 4:
        raise ValueError(f"{operation}: {rows} has shape {of_rows.shape}, expected [B, T, H, K]")
    if value.ndim != 4:
        raise ValueError(f"{operation}: value has shape {value.shape}, expected [B, T, HV, V]")
    batch, length, heads, width = of_rows.shape
    value_heads, value_width = value.shape[2:]
    beside = f"{rows} {of_rows.shape} and value {value.shape}"
    if min(width, value_width, heads, value_heads) < 1:
        raise ValueError(f"{operation}: {beside} need at least one head and one channel")
    if value_heads % heads:
        raise ValueError(
            f"{operation}: value's heads must be a multiple of {rows}'s: value has shape {value.shape},"
            f" {rows} {of_rows.shape}"
        )
    expected = {
        "key": (key, (batch, length, heads, width)),
        "value": (value, (batch, length, value_heads, value_width)),
        "log_decay": (log_decay, (batch, length, value_heads, width)),
        "beta": (beta, (batch, length, value_heads)),
        "a_log": (a_log, (value_heads,)),
        "dt_bias": (dt_bias, (value_heads, width)),
        "initial_state": (initial_state, (batch, value_heads, width, value_width)),
        "segment_ids": (segment_ids, (batch, length)),
    }
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{operation}: {name} has shape {array.shape}, expected {shape} beside {beside}")
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"{operation}: segment_ids are {segment_ids.dtype}, expected integers")
    if a_log is None and (dt_bias is not None or lower_bound is not None):
        raise ValueError(f"{operation}: dt_bias and lower_bound belong to the gate, which needs a_log")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"{operation}: lower_bound is {lower_bound}, expected a negative log decay")
    if not isinstance(state_every, int) or state_every < 1:
        raise ValueError(f"{operation}: state_every is {state_every!r}, expected an integer >= 1")
    documents = None if segment_ids is None else marks(segment_ids)
    inputs = Inputs(query, key, value, log_decay, beta, a_log, dt_bias, initial_state, documents)
    options = Options(
        scale=width**-0.5 if scale is None else float(scale),
        lower_bound=None if lower_bound is None else float(lower_bound),
        normalize_qk=normalize_qk,
        beta_is_logit=beta_is_logit,
        state_every=state_every,
    )
    return inputs, options


def pad_to(inputs: Inputs, length: int) -> Inputs:
    """The inputs with padding, which is skipped, behind the last token, up to `length` tokens."""
    batch, found = inputs.value.shape[:2]
    if found == length:
        return inputs
    if inputs.marks is None:
        inputs = inputs._replace(marks=jnp.full((batch, found), TOKEN, jnp.int32))
    arrays = {name: getattr(inputs, name) for name in SEQUENCES}
    return inputs._replace(**{name: pad(x, length - found) for name, x in arrays.items() if x is not None})


def first_state(inputs: Inputs) -> Array:
    """The state before the row's first document, [B,HV,K,V] fp32."""
    if inputs.initial_state is not None:
        return inputs.initial_state.astype(jnp.float32)
    batch, _, heads, width = inputs.value.shape
    return jnp.zeros((batch, heads, inputs.key.shape[3], width), jnp.float32)


def activate(inputs: Inputs, options: Options, repeat: bool = True) -> tuple[Array | None, Array, Array, Array, Array]:
    """-> query, key [B,T,HV,K], value [B,T,HV,V], log_decay [B,T,HV,K], beta [B,T,HV] of the plain recurrence, fp32.

    Without `repeat` query and key keep their own heads, [B,T,H,K].
    """
    documents = inputs.marks
    # Masked before anything else is computed: 0 * NaN would not be 0.
    key, value, raw_decay, beta = (
        keep_tokens(x, documents).astype(jnp.float32) for x in (inputs.key, inputs.value, inputs.log_decay, inputs.beta)
    )
    groups = value.shape[2] // key.shape[2] if repeat else 1

    def per_value_head(x: Array) -> Array:
        x = _normalize(x) if options.normalize_qk else x
        return _repeat_heads(x, groups) if groups > 1 else x

    key, query = per_value_head(key), None
    if inputs.query is not None:
        query = per_value_head(keep_tokens(inputs.query, documents).astype(jnp.float32))
        if options.scale != 1:
            query = query * np.float32(options.scale)
    log_decay = raw_decay if inputs.a_log is None else _gate(raw_decay, inputs, options.lower_bound)
    if options.beta_is_logit:
        beta = lax.logistic(beta)
    if documents is not None:
        documents = lax.expand_dims(documents, (2, 3))
        if inputs.a_log is not None:
            log_decay = log_decay * lax.ne(documents, np.int32(PADDING)).astype(jnp.float32)
        log_decay = log_decay + lax.eq(documents, np.int32(DOCUMENT_START)).astype(jnp.float32) * np.float32(FORGET)
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
