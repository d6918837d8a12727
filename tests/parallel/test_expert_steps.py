"""Three train steps with experts apart, whatever the router does: against one device.

The router bias, which no balancing changes here, makes the routing. Loss 1e-5, gradients 1e-4, Muon's parameters 1e-4.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import sizes
from steps import keeping_gradients, run_config, setup, uneven_batch

STEPS, EXPERTS, TOP_K, MOE_LAYERS = 3, 8, 3, 2
MODEL = dataclasses.replace(sizes.UNSCANNED, moe=dataclasses.replace(sizes.UNSCANNED.moe, balancing="none"))
BIAS = {  # on scores between 0 and 1
    "uniform": np.zeros(EXPERTS),
    "skewed": -0.1 * np.arange(EXPERTS),
    "all to one": np.where(np.arange(EXPERTS) < TOP_K, 2.0, 0.0),
    "one device empty": np.where(np.arange(EXPERTS) // 2 == 1, -2.0, 0.0),  # of four; half of the first of two
}


@functools.cache
def program(**axes):
    return setup(run_config(model=MODEL), change=keeping_gradients, **axes)[1:]


def results(kind, **axes):
    """(metrics, gradients) of each step, and the last state; on the host."""
    layout, step, state = program(**axes)
    bias = jax.device_put(np.tile(BIAS[kind], (MOE_LAYERS, 1)).astype(np.float32), state.router_bias.sharding)
    state, batch, found = dataclasses.replace(state, router_bias=bias), layout.place(uneven_batch()), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        found.append(jax.device_get((metrics, state.opt_state["gradients"])))
    return found, jax.device_get(state)


@pytest.mark.parametrize("kind", BIAS)
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "expert": 2, "tensor": 2},
        pytest.param({"expert": 4, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 4}, marks=pytest.mark.slow),
        pytest.param({"expert": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_routing(kind, axes):
    """O07: an expert without tokens has a gradient of exactly 0, wherever it is at home."""
    (steps, state), (steps_2, state_2) = results(kind), results(kind, **axes)
    for (metrics, _), (metrics_2, _) in zip(steps, steps_2, strict=True):
        np.testing.assert_allclose(metrics_2["loss"], metrics["loss"], rtol=1e-5)
        np.testing.assert_array_equal(metrics_2["health"]["expert_load"], metrics["health"]["expert_load"])
        load = metrics["health"]["expert_load"]
        assert (load.sum(axis=1) == TOP_K * metrics["health"]["tokens"]).all()
        if kind == "all to one":
            assert not load[:, TOP_K:].any()
        if kind == "one device empty":
            assert not load[:, 2:4].any() and load[:, 4:].any()
    (_, gradients), (_, gradients_2) = steps[0], steps_2[0]
    scale = max(np.abs(g).max() for g in gradients.values())
    for path, gradient in gradients.items():
        largest = max(np.abs(gradient).max(), 1e-6 * scale)
        assert np.abs(gradients_2[path] - gradient).max() <= 1e-4 * largest, path
        if path.endswith(("mlp.w1", "mlp.w2", "mlp.w3")) and gradient.ndim > 2:
            idle = {"all to one": slice(TOP_K, None), "one device empty": slice(2, 4)}.get(kind, slice(0))
            assert not gradients_2[path][..., idle, :, :].any()
    for path in state.opt_state["inner"]["muon"].momentum:  # AdamW's first steps make signs of gradients near its eps
        value = state.params[path]
        assert np.abs(state_2.params[path] - value).max() <= 1e-4 * max(np.abs(value).max(), 1), path
