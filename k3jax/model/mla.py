"""Multi-head latent attention, gated or plain, without position encoding (k3.md 2.2).

    q = W_qb RMSNorm(W_qa x)  (or W_q x);   [c, k_s] = W_kva x;   k_n, v = W_kb c', W_vb c'   with c' = RMSNorm(c)
    a = softmax_causal( (q_n . k_n + q_s . k_s) / sqrt(nope + shared) );   y = W_o [ sigmoid(W_g x) * (a v) ]

k_s is one key part for all heads, neither normalised nor rotated. The two low-rank norms have their own eps (1e-6 in
the published code, whatever the model's). Invariant: causal, and closed inside a document.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax.config import ModelConfig
from k3jax.model.common import RMSNorm, matrix, project
from k3jax.parallel import context, tensor
from pallas_kernels.attention import mla_attention


class MLA(nnx.Module):
    """One MLA layer. The published kv_b is held as two kernels, k_b and v_b: Muon and QK-Clip treat them apart."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, d = config.mla, config.embed
        self.config = c
        heads = ("heads", "head_dim")
        key_dim = c.qk_nope + c.qk_shared
        if c.q_lora is not None:
            self.q_a = matrix(rngs, config, (d, c.q_lora), ("embed", "q_lora"))
            self.q_norm = RMSNorm(c.q_lora, "q_lora", c.norm_eps, rngs)
            self.q_b = matrix(rngs, config, (c.q_lora, c.heads, key_dim), ("q_lora", *heads), batch=(1,))
        else:
            self.q = matrix(rngs, config, (d, c.heads, key_dim), ("embed", *heads), batch=(1,))
        self.kv_a = matrix(rngs, config, (d, c.kv_lora + c.qk_shared), ("embed", "kv_lora"))
        self.kv_norm = RMSNorm(c.kv_lora, "kv_lora", c.norm_eps, rngs)
        self.k_b = matrix(rngs, config, (c.kv_lora, c.heads, c.qk_nope), ("kv_lora", *heads), batch=(1,))
        self.v_b = matrix(rngs, config, (c.kv_lora, c.heads, c.value_dim), ("kv_lora", *heads), batch=(1,))
        if c.output_gate:
            self.g = matrix(rngs, config, (d, c.heads, c.value_dim), ("embed", *heads), out=(1, 2))
        self.o = matrix(rngs, config, (c.heads, c.value_dim, d), (*heads, "embed"))

    def __call__(
        self, x: Array, segment_ids: Array | None, around: context.Around | None = None
    ) -> tuple[Array, Array]:
        """x [B,T,embed] -> (y [B,T,embed], max_logit [H] fp32: the largest scaled logit of each head).

        around: what a piece of a row knows of the rest (parallel/context.py); None: rows are whole.
        """
        c = self.config
        if c.q_lora is not None:
            query = project(tensor.enter(self.q_norm(project(x, self.q_a[...]))), self.q_b[...])
        else:
            query = project(tensor.enter(x), self.q[...])
        compressed = project(x, self.kv_a[...])
        latent, key_shared = self.kv_norm(compressed[..., : c.kv_lora]), compressed[..., c.kv_lora :]
        latent, key_shared = (tensor.enter(part) for part in context.whole_row((latent, key_shared), around))
        key, value = project(latent, self.k_b[...]), project(latent, self.v_b[...])
        documents = segment_ids if around is None else around.row_ids
        place = {} if around is None else {"query_start": context.start(x.shape[1])}
        out, row_max = mla_attention(query, key, key_shared, value, segment_ids=documents, **place)
        if c.output_gate:
            out = out * jax.nn.sigmoid(project(tensor.enter(x), self.g[...]))
        max_logit = jax.lax.stop_gradient(jnp.max(row_max, axis=(0, 2), initial=-jnp.inf))
        return tensor.leave(project(out, self.o[...], contracted=2)), max_logit
