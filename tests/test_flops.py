"""FLOPs of every kind of layer: written-out arithmetic, the products in the traced layers, published counts."""

import math

import jax
import jax.numpy as jnp
import pytest
import sizes
from flax import nnx

from k3jax import config as configs
from k3jax import flops
from k3jax.model import common, kda, mla, moe, parameters
from k3jax.model.decoder import Decoder
from k3jax.parallel import context, expert
from k3jax.step import abstract_decoder

LINEAR = sizes.model(
    layers=3, attn_res_block=None, mla_layers=(3,), embed=24, mlp=40, vocab=264, activation="swiglu",
    kda={"heads": 3, "key_dim": 8, "value_dim": 12, "output_gate": "low_rank", "lower_bound": None},
    mla={"heads": 2, "q_lora": None, "kv_lora": 16, "qk_nope": 8, "qk_shared": 4, "value_dim": 10,
         "output_gate": False},
    moe={"routed_experts": 6, "top_k": 2, "shared_experts": 0, "latent": None, "expert_mlp": 14, "balancing": "sign"},
)  # fmt: skip


def test_small_by_hand():
    """d 24, two heads: every product of a token written out as 2 * in * out."""
    c = sizes.SMALL
    # q, k 24 -> 2 x 8 each; v, g 24 -> 2 x 12; f_a 24 -> 8, f_b 8 -> 2 x 8; b 24 -> 2; o 2 x 12 -> 24
    assert flops.kda_projections(c) == 2 * (384 + 384 + 576 + 576 + 192 + 128 + 48 + 576)
    # per head: S^T k, k v^T, S^T q of an 8 x 12 state; 64 (8 + 8 + 12) + 64^2 inside a chunk
    assert flops.kda_recurrence(c) == 2 * (3 * 2 * 96 + 64 * 28 + 4096)
    # q_a 24 -> 20, q_b 20 -> 2 x 12; kv_a 24 -> 16 + 4, k_b 16 -> 2 x 8, v_b 16 -> 2 x 10; g 24 -> 20, o 20 -> 24
    assert flops.mla_projections(c) == 2 * (480 + 480 + 480 + 256 + 320 + 480 + 480)
    # two heads, 50 of 100 tokens seen: a key of 12, a value of 10
    assert flops.mla_attention(c, 100) == 2 * 2 * 50 * (12 + 10)
    assert flops.dense_mlp(c) == 2 * 3 * 24 * 40
    # router 24 -> 6; 24 -> 18 -> 24; two experts 18 -> 14 -> 18, two matrices in; one shared of 14 at 24
    assert flops.moe(c) == 2 * (144 + 432 + 432 + 2 * 3 * 252 + 3 * 336)
    assert flops.head(c) == 2 * 24 * 264
    # sources of layer 1: 1, 2; layer 2: 2, 2; layer 3, a new block: 2, 3; head: 3
    assert flops.attn_res(c) == 4 * 24 * (1 + 2 + 2 + 2 + 2 + 3 + 3)


def test_whole_step():
    c = sizes.SMALL
    per_token = (
        2 * (flops.kda_projections(c) + flops.kda_recurrence(c))
        + flops.mla_projections(c)
        + flops.mla_attention(c, 50)
        + flops.dense_mlp(c)
        + 2 * flops.moe(c)
        + flops.attn_res(c)
        + flops.head(c)
    )
    assert sum(flops.forward(c, 50).values()) == per_token
    assert flops.train_step(c, 50, 7) == 3 * 350 * per_token
    assert flops.forward(LINEAR, 50)["attn_res"] == 0


def products(function, *args):
    """FLOPs of all dot_generals that tracing `function` finds, loops multiplied out."""

    def count(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
                total += 2 * math.prod(eqn.outvars[0].aval.shape) * inner
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for value in eqn.params.values():
                inside = getattr(value, "jaxpr", value)
                if hasattr(inside, "eqns"):
                    total += times * count(inside)
        return total

    return count(jax.make_jaxpr(function)(*args).jaxpr)


@pytest.fixture
def bare(monkeypatch):
    """Layers without their kernels, whose programs do more than the mathematics; the experts' rows are counted."""
    rows = []

    def no_kda(query, key, value, *args, **kwargs):
        return jnp.zeros_like(value), None

    def no_attention(query, key, shared, value, **kwargs):
        return jnp.zeros_like(value), jnp.zeros((value.shape[0], value.shape[2], value.shape[1]))

    def no_experts(x, experts, weights, *matrices, activation):
        rows.extend(2 * experts.size * math.prod(matrix.shape[1:]) for matrix in matrices)
        return jnp.zeros_like(x)

    monkeypatch.setattr(context, "kda", no_kda)
    monkeypatch.setattr(mla, "mla_attention", no_attention)
    monkeypatch.setattr(expert, "expert_layer", no_experts)
    return rows


CONFIGS = pytest.mark.parametrize("config", [sizes.SMALL, LINEAR], ids=["small", "linear"])


@CONFIGS
def test_layers_do_these_products(config, bare):
    rngs = common.Keys(jax.random.key(0))
    x = jnp.zeros((2, 9, config.embed))
    assert products(lambda x: kda.KDA(config, rngs)(x, None), x) == 18 * flops.kda_projections(config)
    assert products(lambda x: mla.MLA(config, rngs)(x, None), x) == 18 * flops.mla_projections(config)
    assert products(lambda x: common.MLP(config, config.mlp, rngs)(x), x) == 18 * flops.dense_mlp(config)
    bias = jnp.zeros(config.moe.routed_experts)
    around = products(lambda x: moe.MoE(config, rngs)(x, bias, None), x)
    assert around + sum(bare) == 18 * flops.moe(config)


@CONFIGS
def test_decoder_does_these_products(config, bare):
    """The count of the whole decoder: kinds times layers. The mixes' scores are products, their sums are not."""
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    tokens = jnp.zeros((2, 9), jnp.int32)
    traced = products(lambda values: parameters.bind(decoder, values)(tokens), parameters.values(decoder))
    per_token = (
        len(config.kda_layers) * flops.kda_projections(config)
        + len(config.mla_layers) * flops.mla_projections(config)
        + config.dense_layers * flops.dense_mlp(config)
        + config.moe_layers * (flops.moe(config) - 2 * 3 * config.moe.top_k * experts_width(config))
        + flops.head(config)
    )
    # A block's first sub-layer computes the score of a partial sum that is not there yet.
    blocks = -(-config.layers // config.attn_res_block) if config.attn_res_block else 0
    scores = flops.attn_res(config) // 2 + blocks * 2 * config.embed
    assert traced == 18 * (per_token + scores)


def experts_width(config):
    return (config.moe.latent or config.embed) * config.moe.expert_mlp


def test_recurrence_does_three_products():
    """The oracle's two (S^T k, S^T q) and the outer product it adds elementwise: the published 6 d^2."""
    from pallas_kernels.kda import kda as kernel

    q = jnp.zeros((1, 5, 2, 8))
    v, beta = jnp.zeros((1, 5, 2, 12)), jnp.zeros((1, 5, 2))
    traced = products(lambda *args: kernel(*args, implementation="reference"), q, q, v, q, beta)
    assert traced == 5 * 2 * 2 * 2 * 8 * 12
    chunk = 64 * (8 + 8 + 12) + 64**2
    assert flops.kda_recurrence(sizes.model(kda={"heads": 2, "key_dim": 8, "value_dim": 12})) == (
        traced // 5 + 2 * (2 * 8 * 12 + chunk)
    )


def test_attention_sees_half_the_row():
    """All pairs i >= j of a row of 64, one by one: a part 65 / 64 more than T / 2 on average."""
    c = sizes.MESH
    pairs = sum(1 for i in range(64) for j in range(64) if j <= i)
    exact = pairs * c.mla.heads * 2 * (c.mla.qk_nope + c.mla.qk_shared + c.mla.value_dim)
    assert 64 * flops.mla_attention(c, 64) * 65 == exact * 64


def test_published_counts():
    """k3.md 1.2: 24 MLA layers need 6.0 GFLOP per token at 8k and 773 at 1M, 69 KDA layers 0.84 at any length."""
    c = configs.load("configs/k3.py:k3_2p8t").model
    assert 24 * flops.mla_attention(c, 8192) == pytest.approx(6.0e9, rel=0.01)
    assert 24 * flops.mla_attention(c, 2**20) == pytest.approx(773e9, rel=0.001)
    assert 69 * flops.kda_recurrence(c) == 69 * 96 * (6 * 128**2 + 3 * 64 * 128 + 64**2)
    assert 69 * flops.kda_recurrence(c) == pytest.approx(0.84e9, rel=0.005)


# Active parameters that are no product's: convolutions, norms, a_log, dt_bias, AttnRes, router bias.
VECTORS = {
    "k3_2p8t": 69 * (3 * 12288 * 4 + 96 + 12288 + 128) + 24 * (1536 + 512) + 92 * (896 + 3584) + 4_021_248,
    "kimi_linear_48b": 20 * (3 * 4096 * 4 + 32 + 4096 + 128) + 7 * 512 + 26 * 256 + 27 * 2 * 2304 + 2304,
}


@pytest.mark.parametrize(("name", "active"), [("k3_2p8t", 104_189_612_640), ("kimi_linear_48b", 3_106_972_544)])
def test_six_times_the_active_parameters(name, active):
    """The products with weights are 6 * (active parameters - vectors) a token: 0.015 % under 6 * active for K3.

    What 6 N leaves out, attention, recurrence and mixes, adds 3.3 % at 8,192 tokens.
    """
    run = configs.load(f"configs/k3.py:{name}")
    c = run.model
    assert parameters.count(abstract_decoder(run))[1] == active
    kinds = flops.forward(c, run.data.seq_len)
    without = len(c.kda_layers) * flops.kda_recurrence(c) + len(c.mla_layers) * flops.mla_attention(c, 8192)
    with_weights = 3 * (sum(kinds.values()) - kinds["attn_res"] - without)
    assert with_weights == 6 * (active - VECTORS[name])
    assert with_weights / (6 * active) == pytest.approx(1, abs=5e-4)
    if name == "k3_2p8t":
        assert 1 - with_weights / (6 * active) == pytest.approx(1.49e-4, rel=0.01)
        whole = flops.train_step(c, 8192, 1) / 8192
        assert whole / (6 * active) == pytest.approx(1.033, abs=5e-4)
