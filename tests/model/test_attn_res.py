"""Attention Residuals: the published mix, and the order of sources at block borders (O14)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
import torch_layout
from flax import nnx
from golden_files import assert_close, golden

from k3jax.config import MemoryConfig
from k3jax.model import parameters
from k3jax.model.attn_res import AttnRes, source
from k3jax.model.common import MLP
from k3jax.model.decoder import Decoder


def test_mix():
    arrays = golden("attnres_mix")
    config = sizes.model(embed=32)
    res = torch_layout.load(AttnRes(config, nnx.Rngs(0)), torch_layout.ATTN_RES, arrays)
    graphdef, state = nnx.split(res)

    @jax.jit
    def run(state, bank, partial, do):
        def loss(state, bank, partial):
            sums = tuple(source(bank[None, :, i], config.norm_eps) for i in range(bank.shape[1]))
            out, weights = nnx.merge(graphdef, state)(sums, partial[None], False)
            return jnp.sum(out[0] * do), (out[0], weights)

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(state, bank, partial)

    (d_state, d_bank, d_partial), (out, weights) = run(
        state, arrays["block_residual"], arrays["prefix_sum"], arrays["do"]
    )
    assert_close(out, arrays["out"], 1e-5, "out")
    assert_close(d_bank, arrays["d_block_residual"], 5e-5, "d_block_residual")
    assert_close(d_partial, arrays["d_prefix_sum"], 5e-5, "d_prefix_sum")
    torch_layout.check_gradients(d_state, torch_layout.ATTN_RES, arrays, 5e-5)
    np.testing.assert_allclose(weights.sum(axis=0), 1.0, rtol=1e-6)


class Same(nnx.Module):
    """A norm that does nothing, so that sub-layers see the mixed value itself."""

    def __call__(self, x):
        return x


class Forced(MLP):
    """A sub-layer that notes what it is given under its name and adds a constant."""

    def __init__(self, seen: dict, name: str, value: float):
        self.note = nnx.static(lambda x: seen.__setitem__(name, float(x)))
        self.value, self.attention = value, name.startswith("attn")

    def __call__(self, x, *_):
        jax.debug.callback(self.note, x[0, 0, 0])
        y = jnp.full_like(x, self.value)
        return (y, jnp.zeros(x.shape[:2])) if self.attention else y


@pytest.mark.parametrize("policy", ["save_all", "recompute_all"])
def test_block_borders(policy):
    """O14: 4 layers in blocks of 2, uniform mixing, sub-layers forced to attn 2, 6, 10, 14 and ffn 4, 8, 12, 16."""
    config = sizes.model(embed=1, layers=4, attn_res_block=2, mla_layers=(), dense_layers=4, mlp=1)
    decoder, seen = Decoder(config, rngs=nnx.Rngs(0), memory=MemoryConfig(policy)), {}
    layers = [layer for block in decoder.blocks for layer in block.head]
    for at, layer in enumerate(layers):
        layer.attention_norm = layer.mlp_norm = Same()
        layer.attention = Forced(seen, f"attn{at}", 2.0 + 4.0 * at)
        layer.mlp = Forced(seen, f"ffn{at}", 4.0 + 4.0 * at)
    decoder.final.norm = Same()
    params = parameters.values(decoder)

    def final(embedding):
        bound = parameters.bind(decoder, params | {"embed": jnp.full((config.vocab, 1), embedding)})
        return bound.apply(jnp.zeros((1, 1), jnp.int32))[0][0, 0, 0]

    value, gradient = jax.value_and_grad(final)(1.0)
    jax.effects_barrier()
    inputs = [seen[f"{kind}{at}"] for at in range(4) for kind in ("attn", "ffn")]
    expected = [1, 1.5, 3.5, 6.5, 10.5, 10.33333, 14.33333, 19, 24.33333]
    np.testing.assert_allclose([*inputs, value], expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, 1 / 3, rtol=1e-6)
