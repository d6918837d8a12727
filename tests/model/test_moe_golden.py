"""MoE layers, latent and plain, against the published block: outputs, routing and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
import torch_layout
from flax import nnx
from golden_files import assert_close, golden, manifest

from k3jax.model import router
from k3jax.model.moe import MoE


@pytest.mark.parametrize("name", ["moe_latent", "moe_plain"])
def test_moe(name):
    arrays, cfg = golden(name), manifest()[name]["conventions"]["cfg"]
    config = sizes.model(
        embed=cfg["hidden_size"],
        activation={"situ": "situ", "silu": "swiglu"}[cfg["hidden_act"]],
        moe={
            "routed_experts": cfg["num_experts"],
            "top_k": cfg["num_experts_per_token"],
            "shared_experts": cfg["num_shared_experts"],
            "latent": cfg["routed_expert_hidden_size"],
            "expert_mlp": cfg["moe_intermediate_size"],
            "scaling": cfg["routed_scaling_factor"],
        },
    )
    moe = torch_layout.load(MoE(config, nnx.Rngs(0)), torch_layout.MOE, arrays)
    bias = moe.router.bias[...]

    @jax.jit
    def run(state, x, do):
        def loss(state, x):
            out, stats = nnx.merge(graphdef, state)(x, bias, None)
            return jnp.sum(out * do), (out, stats)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(state, x)

    graphdef, state = nnx.split(moe)
    (d_state, d_x), (out, (load, counts)) = run(state, arrays["x"], arrays["do"])
    assert_close(out, arrays["out"], 1e-5, "out")
    assert_close(d_x, arrays["d_x"], 5e-5, "d_x")
    torch_layout.check_gradients(d_state, torch_layout.MOE, arrays, 5e-5)

    chosen = arrays["topk_idx_sorted"]
    assert manifest()[name]["agreement"]["smallest top-k margin (choice score)"] > 1e-5
    np.testing.assert_array_equal(load, np.bincount(chosen.ravel(), minlength=cfg["num_experts"]))
    assert counts.sum() == arrays["x"].shape[0] * arrays["x"].shape[1] * cfg["num_experts"]
    scores = moe.router.scores(arrays["x"].reshape(-1, config.embed))
    routing = router.route(scores, bias, config.moe)
    order = np.argsort(routing.experts, axis=1)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(routing.experts), order, 1), chosen)
    weights = np.take_along_axis(np.asarray(routing.weights), order, 1)
    assert_close(weights, arrays["topk_weight_sorted"], 1e-6, "weights")
