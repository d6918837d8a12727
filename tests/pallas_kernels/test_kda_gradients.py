"""Gradients of kda where they are easily lost: at a gate's kink, under vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close

from pallas_kernels.kda import kda

LENGTH, HEADS, WIDTH = 70, 2, 8
ARGUMENTS = "query", "key", "value", "log_decay", "beta"


def arrays(seed=0, batch=1):
    """Raw gates and beta logits, fp32."""
    rng = np.random.default_rng(seed)
    shapes = dict.fromkeys(ARGUMENTS, (batch, LENGTH, HEADS, WIDTH)) | {"beta": (batch, LENGTH, HEADS)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def results(inputs, d_output):
    """output and gradients of sum(output * d_output), the log decay bounded by -30."""
    gate = {"a_log": np.zeros(HEADS, np.float32), "lower_bound": -30.0}

    def call(inputs):
        return kda(**inputs, **gate, normalize_qk=True, beta_is_logit=True)[0]

    output, pull_back = jax.vjp(call, inputs)
    return output, pull_back(d_output)[0]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("lower_bound, slope", [(None, -0.5), (-5.0, -1.25)])
def test_slope_of_a_gate_at_zero(lower_bound, slope, implementation):
    """What max(x, 0) and |x| add up to has a derivative at 0 that they have not: softplus'(0) = sigmoid(0) = 1/2."""
    zero, beta = np.zeros((1, 1, 1, 2), np.float32), np.zeros((1, 1, 1), np.float32)
    a_log = np.log(np.float32([3]))

    def state_of(raw):
        options = {"a_log": a_log, "lower_bound": lower_bound, "implementation": implementation}
        return kda(zero, zero, zero, raw, beta, initial_state=np.ones((1, 1, 2, 2), np.float32), **options)[1]

    state, pull_back = jax.vjp(jax.jit(state_of), zero)
    decay = np.exp(-2.5) if lower_bound else 0.5**3  # e^(-3 ln 2)
    np.testing.assert_allclose(state, np.full((1, 1, 2, 2), decay), rtol=1e-6)
    np.testing.assert_allclose(
        pull_back(jnp.ones_like(state))[0], np.full((1, 1, 1, 2), 2 * 3 * slope * decay), rtol=1e-6
    )


def test_vmap():
    inputs = arrays(2, batch=3)
    probe = np.random.default_rng(3).normal(size=inputs["value"].shape).astype(np.float32)
    output, gradients = jax.jit(results)(inputs, probe)
    split = {name: x[:, None] for name, x in inputs.items()}
    mapped_output, mapped_gradients = jax.jit(jax.vmap(results))(split, probe[:, None])
    assert_close(mapped_output[:, 0], output, 1e-6, "output")
    for name in ARGUMENTS:
        assert_close(mapped_gradients[name][:, 0], gradients[name], 1e-6, name)
