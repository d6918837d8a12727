"""Five train steps on meshes of every axis, against one device: packing, balancing, mixing, QK-Clip, accumulation on.

Loss 1e-5, gradients 1e-4 (both relative to the largest entry), parameters after five steps 1e-4; integer statistics
exact, the bias within two bins.
"""

import functools

import jax
import numpy as np
import pytest
import sizes
from steps import keeping_gradients, layout_of, run_config, setup, uneven_batch

from k3jax.config import ConfigError, MeshConfig
from k3jax.model.router import BINS
from k3jax.parallel import make_mesh
from k3jax.step import abstract_decoder, make_gradients

STEPS, TAU = 5, 0.01
SINGLE = [{axis: size} for axis in ("data", "fsdp", "expert", "context", "tensor") for size in (2, 4, 8)]
PAIRS = [  # each two axes are on one of these meshes
    ({"data": 2, "fsdp": 2, "expert": 2}, 1, "save_all"),
    ({"data": 2, "context": 2, "tensor": 2}, 2, "recompute_all"),
    ({"fsdp": 2, "context": 2, "tensor": 2}, 1, "save_all"),
    ({"expert": 2, "context": 2, "tensor": 2}, 2, "recompute_all"),
]
MIXED = [({"fsdp": 2, "expert": 4}, 1, "recompute_all"), ({"data": 2, "tensor": 4}, 4, "save_all")]


def results(axes, accumulate=1, policy="save_all", model=sizes.APART):
    """(metrics, gradients) of each of the steps, and the last state; on the host."""
    config = run_config(model=model, accumulate=accumulate, policy=policy, qk_clip=TAU)
    _, layout, step, state = setup(config, change=keeping_gradients, **axes)
    batch, found = layout.place(uneven_batch()), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        found.append(jax.device_get((metrics, state.opt_state["gradients"])))
    return found, jax.device_get(state)


@functools.cache
def alone(model):
    return results({}, model=model)


def check(model, axes, accumulate, policy):
    (steps, state), (steps_2, state_2) = alone(model), results(axes, accumulate, policy, model)
    for (metrics, _), (metrics_2, _) in zip(steps, steps_2, strict=True):
        np.testing.assert_allclose(metrics_2["loss"], metrics["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics_2["grad_norm"], metrics["grad_norm"], rtol=1e-4)
        assert metrics_2["targets"] == metrics["targets"] > 30
    (metrics, gradients), (metrics_2, gradients_2) = steps[0], steps_2[0]
    scale = max(np.abs(g).max() for g in gradients.values())
    for path, gradient in gradients.items():
        largest = max(np.abs(gradient).max(), 1e-6 * scale)
        assert np.abs(gradients_2[path] - gradient).max() <= 1e-4 * largest, path
    health, health_2 = metrics["health"], metrics_2["health"]
    assert health_2["tokens"] == health["tokens"] == (uneven_batch()["segment_ids"] > 0).sum()
    np.testing.assert_array_equal(health_2["expert_load"], health["expert_load"])
    np.testing.assert_array_equal(health_2["expert_load"].sum(axis=1), model.moe.top_k * health["tokens"])
    np.testing.assert_allclose(health_2["max_logit"], health["max_logit"], rtol=1e-5)
    for name in ("gate_saturation", "attnres_weights"):
        np.testing.assert_allclose(health_2[name], health[name], rtol=1e-4, atol=1e-4, err_msg=name)
    for path, value in state.params.items():
        assert np.abs(state_2.params[path] - value).max() <= 1e-4 * max(np.abs(value).max(), 1), path
    np.testing.assert_allclose(state_2.router_bias, state.router_bias, atol=2 * 2.0 / BINS)


@pytest.mark.parametrize("model", [sizes.UNSCANNED, pytest.param(sizes.APART, marks=pytest.mark.slow)])
def test_clip_acted(model):
    """The comparisons cover both clippings only if they did something."""
    metrics = alone(model)[0][0][0]
    assert (metrics["health"]["max_logit"] > TAU).any() and metrics["grad_norm"] > 1


@pytest.mark.parametrize(("axes", "accumulate", "policy"), PAIRS + MIXED)
def test_same_steps(axes, accumulate, policy):
    """O12: one norm over all parameters, each counted once, on every mesh."""
    check(sizes.UNSCANNED, axes, accumulate, policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "accumulate", "policy"), [*((axes, 1, "save_all") for axes in SINGLE), *PAIRS, *MIXED], ids=str
)
def test_same_steps_of_scanned_layers(axes, accumulate, policy):
    check(sizes.APART, axes, accumulate, policy)


def two_layers(heads):
    """One KDA and one MLA layer whose components have different sizes (O16)."""
    return sizes.model(
        layers=2, dense_layers=0, attn_res_block=None, mla_layers=(2,), embed=16, vocab=264,
        kda={"heads": heads, "key_dim": 4, "value_dim": 8},
        mla={"heads": heads, "q_lora": 16, "kv_lora": 8, "qk_nope": 4, "qk_shared": 4, "value_dim": 8},
        moe={"routed_experts": 4, "top_k": 2, "latent": 8, "expert_mlp": 8},
    )  # fmt: skip


def gradients_of(axes, heads=4):
    config = run_config(model=two_layers(heads))
    decoder, layout, _, state = setup(config, **axes)
    run = jax.jit(make_gradients(config, decoder, layout))
    return jax.device_get(run(state.params, state.router_bias, layout.place(uneven_batch())))


def test_heads_are_split_by_component():
    """O16, and O10 (b): the histogram counts each token once, however often `tensor` repeats it."""
    loss, _, stats, gradients = gradients_of({})
    for axes in ({"tensor": 2}, {"tensor": 4}, {"data": 2, "tensor": 2}, {"expert": 2}):
        loss_2, _, stats_2, gradients_2 = gradients_of(axes)
        np.testing.assert_allclose(loss_2, loss, rtol=1e-5)
        for path, gradient in gradients.items():
            assert np.abs(gradients_2[path] - gradient).max() <= 1e-4 * np.abs(gradient).max(), (axes, path)
        assert stats_2.histogram.sum() == 2 * 4 * stats.tokens == stats.histogram.sum()
        np.testing.assert_array_equal(stats_2.expert_load, stats.expert_load)
        moved = np.abs(np.cumsum(stats_2.histogram, -1) - np.cumsum(stats.histogram, -1)).sum()
        assert moved <= 1e-3 * stats.histogram.sum()


def test_heads_that_do_not_divide_are_named():
    decoder = abstract_decoder(run_config(model=two_layers(6)))
    with pytest.raises(ConfigError, match=r"blocks\.0\.head\.0\.attention\.\w+: heads of 6 .* mesh\.tensor = 4"):
        layout_of(decoder, tensor=4)


def test_pieces_must_divide_the_row():
    with pytest.raises(ConfigError, match=r"data\.seq_len = 20 cannot be split over mesh\.context = 8"):
        make_mesh(MeshConfig(1, context=8), 1, seq_len=20)
