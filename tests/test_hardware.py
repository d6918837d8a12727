"""Peaks of devices, against figures from elsewhere."""

import dataclasses

import jax
import pytest

from k3jax import hardware

DENSE_BF16 = {  # TFLOP/s, as each maker prints them for matrices without zeros
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 1979 / 2,
    "NVIDIA H100 PCIe": 1513 / 2,
    "NVIDIA H100 NVL": 1671 / 2,
    "NVIDIA H200": 1979 / 2,
    "NVIDIA B200": 36_000 / 2 / 8,  # HGX B200: 36 PFLOP/s with zeros, 8 GPUs
    "NVIDIA GB200": 360_000 / 2 / 72,  # NVL72
    "NVIDIA L4": 242 / 2,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71,
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5p": 459,
    "TPU v6 lite": 918,
    "TPU7x": 2307 / 2,  # two JAX devices per chip
}


@pytest.mark.parametrize("kind", DENSE_BF16)
def test_dense_bf16(kind):
    assert hardware.lookup(kind).bf16 == pytest.approx(DENSE_BF16[kind] * 1e12, rel=1e-3)
    assert hardware.lookup(kind).peak("bfloat16") == hardware.lookup(kind).bf16


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 494.7e12),  # TF32
        ("NVIDIA A100-SXM4-80GB", 156e12),
        ("Tesla T4", 8.1e12),  # neither bf16 nor TF32
        ("Tesla V100-SXM2-16GB", 15.7e12),
        ("TPU v4", None),  # bf16 passes
    ],
)
def test_fp32(kind, peak):
    assert hardware.lookup(kind).peak("float32") == peak


def test_no_bf16_before_ampere():
    old = {kind for kind, device in hardware.DEVICES.items() if device.peak("bfloat16") is None}
    assert old == {kind for kind in hardware.DEVICES if kind.startswith("Tesla")} and len(old) == 5


@pytest.mark.parametrize("kind", hardware.DEVICES)
def test_figures_fit_together(kind):
    """Half the width, twice the speed; a byte of memory is read in 5 to 80 ms; slips of a power of ten fall out."""
    device = hardware.lookup(kind)
    if device.fp8:
        assert device.fp8 == pytest.approx(2 * device.bf16, rel=2e-3)
    if device.tf32:
        assert device.bf16 == pytest.approx(2 * device.tf32, rel=0.03)
        assert device.tf32 >= device.fp32
    assert device.memory % 2**30 == 0 and 16 <= device.memory / 2**30 <= 192
    assert 0.005 < device.memory / device.bandwidth < 0.09
    assert device.host_link is None or 1e10 < device.host_link < device.bandwidth / 5
    assert all(value is None or value > 0 for value in dataclasses.astuple(device))


@pytest.mark.parametrize(
    "kind",
    ["cpu", "", "NVIDIA", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA GeForce RTX 4090 Laptop GPU",
     "NVIDIA GeForce RTX 3090 Ti", "NVIDIA L40S", "TPU", "AMD Instinct MI300X"],
)  # fmt: skip
def test_what_is_not_known_is_none(kind):
    assert hardware.lookup(kind) is None


def test_this_machine():
    assert hardware.lookup(jax.devices("cpu")[0].device_kind) is None
