"""Kimi Delta Attention: what callers see, and every check of what they hand over.

    S_t = (I - beta_t k_t k_t^T) Diag(e^log_decay_t) S_{t-1} + beta_t k_t v_t^T;     o_t = scale * S_t^T q_t

Invariant: the result does not depend on the implementation, apart from rounding.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import select
from pallas_kernels.kda import reference, xla
from pallas_kernels.kda.inputs import Inputs, Options
from pallas_kernels.segments import marks

IMPLEMENTATIONS = {"xla": xla.kda, "reference": reference.kda}  # most preferred first


def kda(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T H K"],
    value: Float[Array, "B T HV V"],
    log_decay: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    a_log: Float[Array, "HV"] | None = None,
    dt_bias: Float[Array, "HV K"] | None = None,
    lower_bound: float | None = None,
    normalize_qk: bool = False,
    beta_is_logit: bool = False,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state_every: int = 1,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Gated delta rule with one decay per key channel (Kimi Linear, arXiv 2510.26692; K3, 2607.24653, eq. 1 and 5).

    Args:
        query, key: value head h reads head h // (HV / H); HV is a multiple of H.
        value: its dtype is that of the output.
        log_decay: natural logarithm of the decay, finite, <= 0; the raw gate if `a_log` is given.
        beta: write strength in [0, 2], or its logit.
        scale: multiplies the query; None is K**-0.5.
        a_log: log of the gate's gain. The log decay is then -e^a_log softplus(raw + dt_bias), or with a
            `lower_bound` lower_bound * sigmoid(e^a_log (raw + dt_bias)).
        dt_bias: added to the raw gate; None is 0.
        lower_bound: the smallest log decay, < 0.
        normalize_qk: query and key become x / sqrt(sum x^2 + 1e-6).
        beta_is_logit: beta becomes sigmoid(beta).
        initial_state: state before the row's first document; None is 0.
        segment_ids: a document is a maximal run of equal non-zero ids and starts from a zero state (the row's first
            one from `initial_state`). 0 is padding: skipped, with output and gradient 0 whatever it holds. An id must
            not return after another one.
        state_every: chunks (of 16 tokens in `xla`) per state kept for the backward pass. Larger saves memory and
            computes the states in between again.
        implementation: "xla", "reference", or None for the best that takes the case.

    Returns:
        The output, and the fp32 state after the last token that is not padding. Sums are in fp32 throughout;
        gradients come back in each input's dtype. T may be 0. The output at t does not depend, to the bit, on
        anything finite at t' > t.

    Raises:
        ValueError: a shape or an option that does not fit.
        NotImplementedError: the named implementation does not take this case.
    """
    check(query, key, value, log_decay, beta, a_log, dt_bias, lower_bound, initial_state, segment_ids, state_every)
    inputs, options = gather(
        query, key, value, log_decay, beta, scale, a_log, dt_bias, lower_bound, normalize_qk, beta_is_logit,
        initial_state, segment_ids, state_every,
    )  # fmt: skip
    return select.run("kda", IMPLEMENTATIONS, implementation, inputs, options)


def gather(
    query, key, value, log_decay, beta, scale, a_log, dt_bias, lower_bound, normalize_qk, beta_is_logit,
    initial_state, segment_ids, state_every,
) -> tuple[Inputs, Options]:  # fmt: skip
    """The arguments of `kda` as the implementations take them; query may be None."""
    documents = None if segment_ids is None else marks(segment_ids)
    inputs = Inputs(query, key, value, log_decay, beta, a_log, dt_bias, initial_state, documents)
    options = Options(
        scale=key.shape[3] ** -0.5 if scale is None else float(scale),
        lower_bound=None if lower_bound is None else float(lower_bound),
        normalize_qk=normalize_qk,
        beta_is_logit=beta_is_logit,
        state_every=state_every,
    )
    return inputs, options


def check(query, key, value, log_decay, beta, a_log, dt_bias, lower_bound, initial_state, segment_ids, state_every):
    """Raises ValueError, with the shapes, for arguments of `kda` that do not fit; query may be None."""
    first, query = ("key", key) if query is None else ("query", query)
    if query.ndim != 4:
        raise ValueError(f"kda: {first} has shape {query.shape}, expected [B, T, H, K]")
    if value.ndim != 4:
        raise ValueError(f"kda: value has shape {value.shape}, expected [B, T, HV, V]")
    batch, length, heads, width = query.shape
    value_heads, value_width = value.shape[2:]
    if min(width, value_width, heads, value_heads) < 1:
        raise ValueError(f"kda: {first} {query.shape} and value {value.shape} need at least one head and one channel")
    if value_heads % heads:
        raise ValueError(
            f"kda: value's heads must be a multiple of query's: value has shape {value.shape}, {first} {query.shape}"
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
            raise ValueError(
                f"kda: {name} has shape {array.shape}, expected {shape}"
                f" beside {first} {query.shape} and value {value.shape}"
            )
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"kda: segment_ids are {segment_ids.dtype}, expected integers")
    if a_log is None and (dt_bias is not None or lower_bound is not None):
        raise ValueError("kda: dt_bias and lower_bound belong to the gate, which needs a_log")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"kda: lower_bound is {lower_bound}, expected a negative log decay")
    if not isinstance(state_every, int) or state_every < 1:
        raise ValueError(f"kda: state_every is {state_every!r}, expected an integer >= 1")
