"""KDA token by token: the recurrence as it is written.

    S_t = (I - beta_t k_t k_t^T) Diag(e^log_decay_t) S_{t-1} + beta_t k_t v_t^T;     o_t = S_t^T q_t

(Kimi Linear, arXiv 2510.26692; K3 report, arXiv 2607.24653, equation 1.) The decay comes first, the correction is made
against the decayed state, the output is read after the write.
Invariant: a plain scan in fp32, differentiated by JAX; nothing here is arranged for speed.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.kda.inputs import Inputs, Options, activate, first_state
from pallas_kernels.segments import keep_tokens


def token(state: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
    """One token: state [B,H,K,V], (query, key [B,H,K], value [B,H,V], log_decay [B,H,K], beta [B,H]).

    -> the state after it, output [B,H,V].
    """
    q, k, v, g, b = x
    state = jnp.exp(g)[..., None] * state
    error = v - jnp.einsum("bhkv,bhk->bhv", state, k, precision="highest")
    state = state + (b[..., None] * k)[..., None] * error[..., None, :]
    return state, jnp.einsum("bhkv,bhk->bhv", state, q, precision="highest")


def kda(inputs: Inputs, options: Options) -> tuple[Array, Array]:
    """-> output [B,T,HV,V] in value's dtype, final_state [B,HV,K,V] fp32."""
    query, key, value, log_decay, beta = activate(inputs, options)
    time_first = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, log_decay, beta)]
    state, output = lax.scan(token, first_state(inputs), tuple(time_first))
    output = jnp.moveaxis(output, 0, 1).astype(inputs.value.dtype)
    return keep_tokens(output, inputs.marks), state
