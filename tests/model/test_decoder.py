"""The whole decoder: parameter counts, finite differences, packing, padding, size of the 93-layer program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
from flax import nnx
from golden_files import assert_close

from k3jax import config as configs
from k3jax.config import MemoryConfig
from k3jax.model import parameters
from k3jax.model.decoder import SAVE_ALL, BlockPlan, Decoder, plan_blocks
from k3jax.model.loss import cross_entropy


def abstract(name):
    config = configs.load(f"configs/k3.py:{name}").model
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("k3_2p8t", 2_779_484_476_000, 104_189_612_640),
        ("kimi_linear_48b", 49_122_681_728, 3_106_972_544),
    ],
)
def test_published_counts(name, total, active):
    assert parameters.count(abstract(name)) == (total, active)


@pytest.mark.parametrize(
    ("name", "total", "active"), [("tiny", 2.6e6, 1.5e6), ("colab", 197e6, 59e6), ("proxy_1b", 1.22e9, 0.40e9)]
)
def test_our_counts(name, total, active):
    found = parameters.count(abstract(name))
    assert found == (pytest.approx(total, rel=0.02), pytest.approx(active, rel=0.02))


def test_plan():
    """Head, groups and tail of every block, by hand."""
    k3 = configs.load("configs/k3.py:k3_2p8t").model
    assert plan_blocks(k3) == [
        BlockPlan(0, 4, 2, 0),
        *(BlockPlan(first, 0, 3, 0) for first in range(12, 84, 12)),
        BlockPlan(84, 0, 2, 1),
    ]
    assert plan_blocks(sizes.MESH) == [BlockPlan(0, 4, 1, 0), BlockPlan(8, 0, 2, 0), BlockPlan(16, 1, 0, 0)]
    linear = configs.load("configs/k3.py:kimi_linear_48b").model
    assert plan_blocks(linear) == [BlockPlan(0, 4, 5, 3)]
    assert plan_blocks(sizes.SMALL) == [BlockPlan(0, 2, 0, 0), BlockPlan(2, 1, 0, 0)]


@functools.cache
def small(config=sizes.SMALL, memory=SAVE_ALL):
    """A model whose pseudo-queries, biases and norms are away from their special initial values."""

    @jax.jit
    def create():
        params = parameters.values(Decoder(config, rngs=nnx.Rngs(1)))
        keys = dict(zip(params, jax.random.split(jax.random.key(2), len(params)), strict=True))
        stds = {path: 0.3 if path.endswith("query") else 0.05 for path in params}
        return {path: p + stds[path] * jax.random.normal(keys[path], p.shape) for path, p in params.items()}

    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(1), memory=memory))
    return parameters.bind(abstract, create())


def loss_of(decoder, tokens, bias=None):
    """Mean next-token loss as a function of the parameters."""
    targets = jnp.roll(tokens, -1, axis=1)
    mask = jnp.ones_like(tokens).at[:, -1].set(0)

    def loss(params):
        bound = parameters.bind(decoder, params)
        hidden, _ = bound.apply(tokens, router_bias=bias)
        total, count = cross_entropy(hidden, bound.lm_head[...], targets, mask)
        return total / count

    return loss


@pytest.mark.parametrize("form", ["k3", pytest.param("kimi_linear", marks=pytest.mark.slow)])
def test_finite_differences(form):
    """One element of every parameter kind: central difference against autodiff, within 1 %."""
    config = sizes.SMALL
    if form == "kimi_linear":
        config = sizes.model(
            layers=3, attn_res_block=None, mla_layers=(3,), embed=24, mlp=40, activation="swiglu",
            kda={"heads": 2, "key_dim": 8, "value_dim": 12, "output_gate": "low_rank", "lower_bound": None},
            mla={"heads": 2, "q_lora": None, "kv_lora": 16, "qk_nope": 8, "qk_shared": 4, "value_dim": 10,
                 "output_gate": False},
            moe={"routed_experts": 6, "top_k": 2, "latent": None, "expert_mlp": 14, "balancing": "sign"},
        )  # fmt: skip
    decoder = small(config)
    tokens = jax.random.randint(jax.random.key(3), (2, 19), 0, 64)
    # A bias that decides alone: no difference steps over a change of experts, where the loss jumps.
    bias = jnp.tile(jnp.linspace(0.0, 10.0, config.moe.routed_experts), (config.moe_layers, 1))
    loss = jax.jit(loss_of(decoder, tokens, bias))
    params = parameters.values(decoder)
    gradients = jax.jit(jax.grad(loss_of(decoder, tokens, bias)))(params)
    kinds = {}
    for path in params:
        kinds.setdefault(path.split(".", 4)[-1] if path.startswith("blocks") else path, path)
    assert len(kinds) >= (40 if form == "k3" else 30)
    for kind, path in kinds.items():
        gradient = np.asarray(gradients[path])
        if kind.startswith("attention_res") and path.startswith("blocks.0.head.0"):
            assert not gradient.any()  # layer 1 has one source; another layer's is tested below
            path = path.replace("head.0", "head.1")
            gradient = np.asarray(gradients[path])
        at = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        step = 2e-3
        moved = [loss({**params, path: params[path].at[at].add(sign * step)}) for sign in (1, -1, 2, -2)]
        near, far = (float(moved[0]) - float(moved[1])) / (2 * step), (float(moved[2]) - float(moved[3])) / (4 * step)
        slope = (4 * near - far) / 3
        noise = 3e-7 * float(moved[0]) / step
        assert abs(slope - gradient[at]) <= 0.01 * abs(gradient[at]) + noise, f"{path}{at}: {slope}, {gradient[at]}"


def test_packing_and_padding():
    """Packed documents with padding between them equal each document alone: hidden states, statistics, gradients."""
    decoder = small(memory=MemoryConfig("recompute_all"))
    config, length = decoder.config, 9
    bias = 0.05 * jax.random.normal(jax.random.key(5), (config.moe_layers, config.moe.routed_experts))
    documents = [jax.random.randint(jax.random.key(at), (1, length), 0, 64) for at in range(2)]
    gap = jnp.zeros((1, 2), jnp.int32)
    packed = jnp.concatenate([gap, documents[0], gap, documents[1], gap], axis=1)
    segments = jnp.array([[0] * 2 + [1] * length + [0] * 2 + [2] * length + [0] * 2])
    probe = jax.random.normal(jax.random.key(9), (1, packed.shape[1], config.embed))

    def weighted(params, tokens, segments, probe):
        hidden, stats = parameters.bind(decoder, params).apply(tokens, segments, bias)
        keep = jnp.ones(tokens.shape) if segments is None else (segments > 0).astype(jnp.float32)
        return jnp.sum(hidden * probe * keep[..., None]), (hidden, stats)

    gradient = jax.jit(jax.grad(weighted, has_aux=True))
    params = parameters.values(decoder)
    together, (hidden, stats) = gradient(params, packed, segments, probe)
    total, merged = jax.tree.map(jnp.zeros_like, together), None
    for document, begin in zip(documents, (2, 4 + length), strict=True):
        part = slice(begin, begin + document.shape[1])
        alone, (expected, more) = gradient(params, document, None, probe[:, part])
        assert_close(hidden[:, part], expected, 1e-5, "hidden")
        total = jax.tree.map(jnp.add, total, alone)
        merged = more if merged is None else merged.merge(more)
    for path in params:
        assert_close(together[path], total[path], 5e-5, path) if np.any(total[path]) else None
    assert stats.tokens == merged.tokens == 2 * length
    np.testing.assert_array_equal(stats.expert_load, merged.expert_load)
    np.testing.assert_array_equal(stats.histogram.sum(axis=-1), 2 * length)
    assert_close(stats.max_logit, merged.max_logit, 1e-5, "max_logit")
    assert_close(stats.attnres_weights, merged.attnres_weights, 1e-5, "attnres_weights")


def test_recomputation_changes_nothing():
    tokens = jax.random.randint(jax.random.key(3), (2, 19), 0, 64)
    kept, again = (small(memory=MemoryConfig(policy)) for policy in ("save_all", "recompute_all"))
    params = parameters.values(kept)
    (loss, gradient), (other, same) = (jax.jit(jax.value_and_grad(loss_of(d, tokens)))(params) for d in (kept, again))
    assert_close(loss, other, 1e-6)
    for path in params:
        assert_close(gradient[path], same[path], 5e-5, path) if np.any(gradient[path]) else None


def test_bfloat16_stays_near():
    """bf16 activations with fp32 scores and bias: logits within a few bf16 roundings of fp32."""
    decoder = small()
    tokens = jax.random.randint(jax.random.key(3), (2, 19), 0, 64)
    run = nnx.jit(lambda decoder: decoder(tokens))
    wide = run(decoder)
    narrow = parameters.bind(decoder, parameters.values(decoder), dtype=jnp.bfloat16)
    assert narrow.lm_head.dtype == jnp.bfloat16 == narrow.apply(tokens)[0].dtype
    # The embedding's gradients add up in fp32, and scores are fp32.
    assert narrow.embed.dtype == jnp.float32 == narrow.blocks[0].head[1].mlp.router.weight.dtype
    got = run(narrow)
    assert got.dtype == jnp.float32
    error = np.sqrt(np.mean((got - wide) ** 2) / np.mean(wide**2))
    assert error < 0.1, error


def test_shapes_are_checked():
    decoder = small()
    with pytest.raises(ValueError, match=r"\(3,\)"):
        decoder.apply(jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"\(1, 4\).*\(1, 5\)"):
        decoder.apply(jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 5), jnp.int32))
