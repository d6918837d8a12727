"""Kimi Delta Attention as a layer (k3.md 2.1; the recurrence itself is pallas_kernels.kda).

    q, k, v = SiLU(conv4(W x)) per head;  beta = sigmoid(W_b x);  z = W_fb W_fa x + dt_bias
    log_decay = bound * sigmoid(e^a_log z)   or, without bound,   -e^a_log softplus(z)
    S_t = (I - beta k k^T) Diag(e^log_decay) S_{t-1} + beta k v^T;   o_t = S_t^T q_t       q, k L2-normalised
    y = W_o [ RMSNorm_V(o) * sigmoid(W_g x) ]

Invariant: padding (segment 0) and other documents never reach a token: neither through the state nor through the
convolution's window.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax.config import ModelConfig
from k3jax.model.common import RMSNorm, matrix, param, project, rms_norm, zeros
from k3jax.parallel import context, tensor
from pallas_kernels.kda import short_conv

CONV_WIDTH = 4
DT_RANGE = 1e-3, 0.1  # of the time step that dt_bias starts from, as in earlier gated linear attention


def _dt_bias(key: Array, shape: tuple[int, ...]) -> Array:
    low, high = (jnp.log(bound) for bound in DT_RANGE)
    step = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high)), 1e-4)
    return step + jnp.log(-jnp.expm1(-step))  # softplus(this) = step


def _a_log(key: Array, shape: tuple[int, ...]) -> Array:
    return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))


def _conv(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0) * CONV_WIDTH**-0.5


class KDA(nnx.Module):
    """One KDA layer. q, k [embed, heads, key_dim], v [embed, heads, value_dim], o [heads, value_dim, embed]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, d = config.kda, config.embed
        self.config = c
        axes = ("embed", "heads", "head_dim")
        self.q = matrix(rngs, config, (d, c.heads, c.key_dim), axes, batch=(1,))
        self.k = matrix(rngs, config, (d, c.heads, c.key_dim), axes, batch=(1,))
        self.v = matrix(rngs, config, (d, c.heads, c.value_dim), axes, batch=(1,))
        conv_axes = ("conv", "heads", "head_dim")
        self.q_conv = param(rngs, (CONV_WIDTH, c.heads, c.key_dim), conv_axes, _conv)
        self.k_conv = param(rngs, (CONV_WIDTH, c.heads, c.key_dim), conv_axes, _conv)
        self.v_conv = param(rngs, (CONV_WIDTH, c.heads, c.value_dim), conv_axes, _conv)
        self.f_a = matrix(rngs, config, (d, c.key_dim), ("embed", "gate_rank"))
        self.f_b = matrix(rngs, config, (c.key_dim, c.heads, c.key_dim), ("gate_rank", *axes[1:]), out=(1, 2))
        self.b = matrix(rngs, config, (d, c.heads), ("embed", "heads"))
        bounded = c.lower_bound is not None
        self.a_log = param(rngs, (c.heads,), ("heads",), zeros if bounded else _a_log, weight_decay=False)
        self.dt_bias = param(rngs, (c.heads, c.key_dim), axes[1:], _dt_bias, weight_decay=False)
        if c.output_gate == "full":
            self.g = matrix(rngs, config, (d, c.heads, c.value_dim), axes, out=(1, 2))
        else:
            rank = c.value_dim
            self.g_a = matrix(rngs, config, (d, rank), ("embed", "gate_rank"))
            self.g_b = matrix(rngs, config, (rank, c.heads, rank), ("gate_rank", *axes[1:]), out=(1, 2))
        self.o_norm = RMSNorm(c.value_dim, "head_dim", config.norm_eps, rngs)
        self.o = matrix(rngs, config, (c.heads, c.value_dim, d), ("heads", "head_dim", "embed"))

    def __call__(
        self, x: Array, segment_ids: Array | None, around: context.Around | None = None
    ) -> tuple[Array, Array]:
        """x [B,T,embed] -> (y [B,T,embed], saturation [B,T] fp32: share of decay channels at an end of their range).

        around: what a piece of a row knows of the rest (parallel/context.py); None: rows are whole.
        """
        c = self.config
        own = tensor.enter(x)  # for what this device computes of its own heads

        def convolved(kernel: nnx.Param, conv: nnx.Param) -> Array:
            heads = project(own, kernel[...])
            weight = conv[...].reshape(CONV_WIDTH, -1)
            rows = heads.reshape(*x.shape[:2], -1)
            left = {} if around is None else {"left": context.halo(rows, around), "left_segment_ids": around.before_ids}
            y, _ = short_conv(rows, weight.astype(x.dtype), segment_ids=segment_ids, silu=True, **left)
            return y.reshape(heads.shape)

        raw_decay = project(tensor.enter(project(x, self.f_a[...])), self.f_b[...])
        out, _ = context.kda_of_row(
            convolved(self.q, self.q_conv),
            convolved(self.k, self.k_conv),
            convolved(self.v, self.v_conv),
            raw_decay,
            project(own, self.b[...]),
            around,
            a_log=self.a_log[...],
            dt_bias=self.dt_bias[...],
            lower_bound=c.lower_bound,
            normalize_qk=True,
            beta_is_logit=True,
            segment_ids=segment_ids,
        )
        if c.output_gate == "full":
            gate = project(own, self.g[...])
        else:
            gate = project(tensor.enter(project(x, self.g_a[...])), self.g_b[...])
        out = rms_norm(out, tensor.enter(self.o_norm.weight[...]), self.o_norm.eps) * jax.nn.sigmoid(gate)
        y = tensor.leave(project(out, self.o[...], contracted=2))
        return y, self._saturation(jax.lax.stop_gradient(raw_decay))

    def _saturation(self, raw_decay: Array) -> Array:
        """Share of channels whose log decay is above 95 % or below 5 % of the bound; without bound, whose decay is."""
        z = raw_decay.astype(jnp.float32) + self.dt_bias[...][None, None]
        gain = jnp.exp(self.a_log[...])[None, None, :, None]
        bounded = self.config.lower_bound is not None
        part = jax.nn.sigmoid(gain * z) if bounded else jnp.exp(-gain * jax.nn.softplus(z))
        at_end = (part > 0.95) | (part < 0.05)
        return tensor.mean(jnp.mean(at_end.astype(jnp.float32), axis=(2, 3)))
