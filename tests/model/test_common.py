"""SiTU against the published activation and its bounds; RMSNorm's order of casts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close, golden

from k3jax.model.common import rms_norm, situ


@pytest.mark.parametrize("name", ["situ_k3", "situ_nolinear"])
def test_situ(name):
    arrays = golden(name)
    beta, linear_beta = float(arrays["beta"]), float(arrays["linear_beta"])
    linear_beta = None if np.isnan(linear_beta) else linear_beta

    def out(x):
        half = x.shape[-1] // 2
        return situ(x[..., :half], x[..., half:], beta, linear_beta)

    value, pull = jax.vjp(out, arrays["x"])
    assert_close(value, arrays["out"], 1e-5, "out")
    assert_close(pull(jnp.asarray(arrays["do"]))[0], arrays["d_x"], 5e-5, "d_x")


def test_situ_is_bounded_and_known_at_one():
    huge = jnp.array([-1e30, 1e30, 1e4])
    assert np.all(np.abs(situ(huge, huge, 4.0, 25.0)) <= 100.0)
    # O18: 4 tanh(1/4) sigmoid(1) 25 tanh(1/25)
    np.testing.assert_allclose(situ(jnp.ones(1), jnp.ones(1), 4.0, 25.0), 0.71581783, rtol=1e-6)


def test_rms_norm_casts_back_before_the_weight():
    x = jnp.array([[1.0, 2.0, 3.0, 5.0]], jnp.bfloat16)
    weight = jnp.array([1.001, 1.0, 1.0, 1.0])
    wide = np.array([[1.0, 2.0, 3.0, 5.0]])
    expected = (wide / np.sqrt((wide**2).mean() + 1e-5)).astype(jnp.bfloat16) * weight.astype(jnp.bfloat16)[None]
    np.testing.assert_array_equal(np.asarray(rms_norm(x, weight, 1e-5)), np.asarray(expected))
