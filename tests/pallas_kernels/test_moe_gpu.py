"""The GPU kernels of expert_layer: their numbers in interpret mode, and that they lower for a GPU that is not there."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absent_gpu import CARDS, lower_for
from activation import situ
from test_expert_layer import check, check_bf16, check_kept, check_one_spoiled_token, routing, run

from pallas_kernels.moe import api, expert_layer, gpu
from pallas_kernels.moe.gpu_blocks import Tile, Tiles

KERNELS = "moe_up", "moe_down", "moe_d_hidden", "moe_d_rows", "moe_d_up", "moe_d_down"


# Several blocks of most experts, several tiles in each direction; the passes have blocks of different rows.
FORWARD, BACKWARD, MATRIX = Tile(16, 16, 16, 4, 1), Tile(32, 16, 16, 4, 1), Tile(16, 16, 32, 4, 1)
SMALL = Tiles(FORWARD, FORWARD, BACKWARD, BACKWARD, MATRIX, MATRIX)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setitem(api.LAYERS, "interpreted", functools.partial(gpu.expert_layer, interpret=True))
    monkeypatch.setitem(api.LAYERS, "small tiles", functools.partial(gpu.expert_layer, interpret=True, tiles=SMALL))


def draw(tokens, experts, k, latent, inner):
    """Tokens, weights, matrices scaled by their depth, gradient of the output."""
    rng = np.random.default_rng(tokens)
    shapes = (tokens, latent), (tokens, k), *[(experts, latent, inner)] * 2, (experts, inner, latent), (tokens, latent)
    depths = 1, 1, latent, latent, inner, 1
    return [rng.normal(size=s).astype(np.float32) / np.float32(d**0.5) for s, d in zip(shapes, depths, strict=True)]


@pytest.mark.parametrize(
    "experts, k, tokens, latent, inner, implementation",
    [
        (5, 2, 77, 16, 48, "small tiles"),
        (24, 4, 40, 48, 32, "small tiles"),
        (8, 2, 301, 64, 80, "interpreted"),
        (3, 1, 1, 16, 16, "interpreted"),
    ],
)
def test_equals_a_loop_over_experts(experts, k, tokens, latent, inner, implementation):
    """Memory that no kernel writes is NaN: the interpreter fills it."""
    for kind in ("uniform", "skewed", "one", "none"):
        ids = routing(kind, np.random.default_rng(experts), tokens, experts, k)
        check(implementation, kind, ids, draw(tokens, experts, k, latent, inner))


def test_an_experts_tokens_do_not_touch_the_others():
    """The token lies inside its experts' blocks."""
    arrays, ids = draw(60, 6, 2, 16, 32), routing("uniform", np.random.default_rng(6), 60, 6, 2)
    ids[20] = 2, 4
    check_one_spoiled_token("small tiles", ids, arrays, 20)


def test_work_follows_the_routed_rows():
    """Blocks hold each row once, an expert has at most one that is not full, and what the routing lacks is empty."""
    for kind in ("uniform", "skewed", "one", "none"):
        ids = routing(kind, np.random.default_rng(0), 300, 7, 3)
        sizes = gpu.Sizes(300, 900, 7, 16, 16, jnp.float32, jnp.float32, situ, SMALL, True)
        routed = gpu._route(jnp.asarray(ids), jnp.ones(ids.shape), sizes, FORWARD)
        expert, first, end = np.asarray(routed.table)
        held = [(e, i) for e, a, b in zip(expert, first, end, strict=True) for i in range(a, min(b, a + 16))]
        counts = np.bincount(ids[(ids >= 0) & (ids < 7)], minlength=7)
        assert held == [(e, i) for i, e in enumerate(np.repeat(np.arange(7), counts))]
        assert (first < end).sum() == (-(-counts // 16)).sum() and len(first) <= 900 // 16 + 7


def test_bf16():
    """Matrices are of bf16 numbers too: the kernels round them."""
    arrays, ids = draw(300, 6, 3, 64, 32), routing("uniform", np.random.default_rng(1), 300, 6, 3)
    for i in (2, 3, 4):
        arrays[i] = arrays[i].astype(ml_dtypes.bfloat16).astype(np.float32)
    check_bf16("interpreted", ids, arrays)


def test_keeps_its_arguments_only():
    *arrays, _ = map(jnp.asarray, draw(8, 4, 2, 16, 32))
    check_kept("interpreted", jnp.zeros((8, 2), jnp.int32), arrays)


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


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("tokens, experts, k, latent, inner", SIZES.values(), ids=SIZES)
def test_lowers_for_an_absent_gpu(tokens, experts, k, latent, inner, dtype, card):
    shapes = (tokens, latent), (tokens, k), *[(experts, latent, inner)] * 2, (experts, inner, latent), (tokens, latent)
    kinds = dtype, *[jnp.float32] * 4, dtype
    shapes = [jax.ShapeDtypeStruct(s, kind) for s, kind in zip(shapes, kinds, strict=True)]
    ids = jax.ShapeDtypeStruct((tokens, k), jnp.int32)
    text = lower_for(card, functools.partial(run, None), ids, *shapes).as_text()  # also the automatic choice
    assert all(text.count(f'name = "{kernel}"') == 1 for kernel in KERNELS)
