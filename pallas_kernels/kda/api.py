"""Kimi Delta Attention: what callers see.

    S_t = (I - beta_t k_t k_t^T) Diag(e^log_decay_t) S_{t-1} + beta_t k_t v_t^T;     o_t = scale * S_t^T q_t

Invariant: the result does not depend on the implementation, apart from rounding.
"""

from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import select
from pallas_kernels.kda import gpu, reference, xla
from pallas_kernels.kda.inputs import prepare

IMPLEMENTATIONS = {"gpu": gpu.kda, "xla": xla.kda, "reference": reference.kda}  # most preferred first


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
        state_every: chunks (16 tokens in `xla`, 64 or with fp32 16 in `gpu`) per state kept for the backward pass.
            Larger saves memory and computes the states in between again.
        implementation: "gpu" (Pallas kernels, sm_80 and newer), "xla", "reference", or None for the best that takes the
            case.

    Returns:
        The output, and the fp32 state after the last token that is not padding. Sums are in fp32 throughout;
        gradients come back in each input's dtype. T may be 0. The output at t, and gradients at t of a loss on
        outputs up to t, do not depend, to the bit, on anything at t' > t from which no product overflows fp32.

    Raises:
        ValueError: a shape or an option that does not fit.
        NotImplementedError: the named implementation does not take this case.
    """
    inputs, options = prepare(
        "kda",
        query,
        key,
        value,
        log_decay,
        beta,
        scale=scale,
        a_log=a_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        normalize_qk=normalize_qk,
        beta_is_logit=beta_is_logit,
        initial_state=initial_state,
        segment_ids=segment_ids,
        state_every=state_every,
    )
    return select.run("kda", IMPLEMENTATIONS, implementation, inputs, options)
