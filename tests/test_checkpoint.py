"""Checkpoints: every leaf comes back bit for bit, and what does not fit is refused by name (O08, O17)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint import Checkpoints
from k3jax.config import ConfigError
from k3jax.step import TrainState


def state():
    """A small state with an int beyond float32, and the bias of O08, whose bits bf16 cannot hold."""
    return TrainState(
        step=jnp.int32(16_777_217),
        params={
            "blocks.0.head.0.attention.a_log": jnp.float32([1.00390625, -0.0]),
            "embed": jnp.ones((3, 2), jnp.bfloat16),
        },
        opt_state={
            "muon": {"momentum": {"embed": jnp.arange(6.0).reshape(3, 2)}},
            "adamw": (jnp.int32(3), jnp.ones(2)),
        },
        router_bias=jnp.float32([[7.00, 7.01, 7.02, 7.03]]),
        bias_ema=jnp.zeros((1, 4)),
        counters={"skipped_steps": jnp.int32(2)},
    )


def test_round_trip(tmp_path):
    before = state()
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.latest() is None
    checkpoints.save(3, before)
    checkpoints.save(5, before)
    checkpoints.close()
    again = Checkpoints(tmp_path, keep=1)
    assert again.latest() == 5 and not (tmp_path / "checkpoints" / "3").exists()
    after = again.restore(5, jax.eval_shape(lambda: before))
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert old.dtype == new.dtype
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": jnp.float32(0)}, "step is int32"),
        ({"router_bias": jnp.zeros((1, 4), jnp.bfloat16)}, "router_bias is float32"),
        ({"router_bias": jnp.zeros((2, 4))}, r"router_bias is float32\[1, 4\]"),
        ({"counters": {}}, "skipped_steps is not known"),
        ({"counters": {"skipped_steps": jnp.int32(0), "more": jnp.int32(0)}}, "more is missing"),
    ],
)
def test_misfit_is_refused(tmp_path, change, named):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state())
    with pytest.raises(ConfigError, match=named):
        checkpoints.restore(1, jax.eval_shape(lambda: dataclasses.replace(state(), **change)))
