"""The GPU kernels of expert_layer: their numbers in interpret mode, and that they lower for a GPU that is not there."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absent_gpu import lower_for
from test_expert_layer import NAMES, check, oracle, routing, run, situ

from pallas_kernels.moe import api, expert_layer, gpu

KERNELS = "moe_up", "moe_down", "moe_d_hidden", "moe_d_rows", "moe_d_up", "moe_d_down"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setitem(api.LAYERS, "interpreted", functools.partial(gpu.expert_layer, interpret=True))


def draw(tokens, experts, k, latent, inner):
    """Tokens, weights, matrices scaled by their depth, gradient of the output."""
    rng = np.random.default_rng(tokens)
    shapes = (tokens, latent), (tokens, k), *[(experts, latent, inner)] * 2, (experts, inner, latent), (tokens, latent)
    depths = 1, 1, latent, latent, inner, 1
    return [rng.normal(size=s).astype(np.float32) / np.float32(d**0.5) for s, d in zip(shapes, depths, strict=True)]


@pytest.mark.parametrize(
    "experts, k, tokens, latent, inner", [(5, 2, 77, 16, 48), (24, 4, 40, 48, 16), (3, 1, 1, 16, 16)]
)
def test_equals_a_loop_over_experts(experts, k, tokens, latent, inner):
    """Memory that no kernel writes is NaN: the interpreter fills it."""
    for kind in ("uniform", "skewed", "one", "none"):
        ids = routing(kind, np.random.default_rng(experts), tokens, experts, k)
        check("interpreted", kind, ids, draw(tokens, experts, k, latent, inner))


def test_bf16():
    """Relative rms of rounded operands; gradients in the type of what they are of."""
    arrays, ids = draw(300, 6, 3, 64, 32), routing("uniform", np.random.default_rng(1), 300, 6, 3)
    for i in (0, 5):
        arrays[i] = arrays[i].astype(ml_dtypes.bfloat16)
    for i in (2, 3, 4):
        arrays[i] = arrays[i].astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = oracle(arrays[0], ids, *arrays[1:])
    actual = run("interpreted", ids, *arrays)
    assert [a.dtype.name for a in actual] == ["bfloat16", "bfloat16", "float32", *["float32"] * 3]
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        error = np.asarray(a, np.float64) - e
        assert np.sqrt(np.mean(error**2) / np.mean(e**2)) < 8e-3, name


def test_keeps_its_arguments_only():
    *arrays, _ = map(jnp.asarray, draw(8, 4, 2, 16, 32))
    ids = jnp.zeros((8, 2), jnp.int32)

    def layer(x, weights, w1, w3, w2):
        return expert_layer(x, ids, weights, w1, w3, w2, activation=situ, implementation="interpreted")

    kept = sorted(x.shape for x in jax.tree.leaves(jax.vjp(layer, *arrays)[1]))
    assert kept == sorted(x.shape for x in (ids, *arrays))


def test_refusals():
    for latent, dtype, said in ((24, jnp.float32, "16 divides, not 24 and 16"), (16, jnp.float16, "not float16")):
        x, weights, w1, w3, w2, _ = map(jnp.asarray, draw(4, 2, 1, latent, 16))
        ids = jnp.zeros((4, 1), jnp.int32)
        with pytest.raises(NotImplementedError, match=said):
            api.LAYERS["interpreted"](x.astype(dtype), ids, weights, w1, w3, w2, situ)
    with pytest.raises(NotImplementedError, match="needs a GPU, this is made for cpu"):
        expert_layer(x.astype(jnp.float32), ids, weights, w1, w3, w2, activation=situ, implementation="gpu")


SIZES = {"tiny": (2048, 16, 4, 64, 64), "colab": (32_768, 64, 8, 256, 256), "proxy_1b": (16_384, 64, 8, 512, 512)}
SIZES["k3_2p8t"] = 8_192, 896, 16, 3_584, 3_072


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("tokens, experts, k, latent, inner", SIZES.values(), ids=SIZES)
def test_lowers_for_an_absent_gpu(tokens, experts, k, latent, inner, dtype):
    shapes = (tokens, latent), (tokens, k), *[(experts, latent, inner)] * 2, (experts, inner, latent), (tokens, latent)
    kinds = dtype, *[jnp.float32] * 4, dtype
    shapes = [jax.ShapeDtypeStruct(s, kind) for s, kind in zip(shapes, kinds, strict=True)]
    ids = jax.ShapeDtypeStruct((tokens, k), jnp.int32)
    text = lower_for("H100", functools.partial(run, "gpu"), ids, *shapes).as_text()
    assert all(kernel in text for kernel in KERNELS)
