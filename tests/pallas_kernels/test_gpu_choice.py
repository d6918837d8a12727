"""Which GPUs get the kernels: the automatic choice on cards that are only named."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu, select
from pallas_kernels.attention import mla_attention
from pallas_kernels.kda import kda


def pretend(monkeypatch, capability):
    """A GPU of this compute capability as the first device, as far as our own code asks."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])


def kda_call(implementation):
    rng = np.random.default_rng(0)
    shapes = *[(1, 8, 2, 16)] * 4, (1, 8, 2)
    query, key, value, raw, beta = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    return kda(query, key, value, -jnp.exp(raw), jax.nn.sigmoid(beta), implementation=implementation)


def mla_call(implementation):
    rng = np.random.default_rng(0)
    shapes = (1, 8, 2, 32), (1, 8, 2, 16), (1, 8, 16), (1, 8, 2, 16)
    return mla_attention(*(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes), implementation=implementation)


@pytest.mark.parametrize("name, call", [("kda", kda_call), ("mla_attention", mla_call)])
def test_an_sm_75_card_takes_xla_and_says_so_once(monkeypatch, caplog, name, call):
    wanted = call("xla")
    pretend(monkeypatch, "7.5")
    select._say.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        found, _ = call(None), call(None)
    reason = "gpu: the GPU kernel needs compute capability 8.0, this GPU has 7.5"
    assert [record.getMessage() for record in caplog.records] == [f"{name}: xla ({reason})"]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(NotImplementedError, match=r"compute capability 8\.0, this GPU has 7\.5"):
        call("gpu")


@pytest.mark.parametrize("capability, generation", [("8.0", 8), ("8.9", 8), ("9.0", 9), ("10.0", 10), ("12.0", 12)])
def test_newer_cards_take_the_kernels(monkeypatch, capability, generation):
    pretend(monkeypatch, capability)
    gpu.require()
    assert gpu.generation() == generation


def test_other_makes_are_refused(monkeypatch):
    pretend(monkeypatch, "gfx942")
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, this one is gfx942"):
        gpu.require()
