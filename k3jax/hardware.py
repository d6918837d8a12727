"""What devices can do at most: the vendors' own figures, by the name JAX calls a device (`device.device_kind`).

FLOP/s are dense (no 2:4 sparsity, which data sheets of GPUs print first) and per JAX device: a TPU7x chip is two of
them. Memory is nominal; `device.memory_stats()["bytes_limit"]` says what a process gets of it. Bandwidths are bytes/s,
the host link's in one direction. Invariant: only exact names are known, so that a laptop part or a MIG slice is never
taken for the whole device; anything else, CPUs too, is None.
"""

import importlib.util
import mmap
import re
from dataclasses import dataclass
from pathlib import Path

TERA, GIGA, GIB = 1e12, 1e9, 2**30
# One direction of 16 lanes.
PCIE3, PCIE4, PCIE5 = 16 * GIGA, 32 * GIGA, 64 * GIGA


@dataclass(frozen=True)
class Device:
    """Peaks of one JAX device in FLOP/s (None: it has no such arithmetic), memory in bytes, bandwidths in bytes/s."""

    bf16: float | None
    tf32: float | None
    fp32: float | None
    fp8: float | None
    memory: int
    bandwidth: float
    host_link: float | None  # None: not published

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of matrix products of "bfloat16" or "float32" arrays; fp32 ones may use TF32 where there is one."""
        return self.bf16 if dtype == "bfloat16" else self.tf32 or self.fp32


def _gpu(bf16, tf32, fp32, fp8, gib, gigabytes_per_second, host_link) -> Device:
    """A GPU from the figures of its data sheet: TFLOP/s, GiB, GB/s."""
    peaks = (None if peak is None else peak * TERA for peak in (bf16, tf32, fp32, fp8))
    return Device(*peaks, memory=gib * GIB, bandwidth=gigabytes_per_second * GIGA, host_link=host_link)


def _tpu(bf16, fp8, gib, gigabytes_per_second, host_link) -> Device:
    """A TPU; fp32 products are made of bf16 passes, how many is the program's choice, so they have no peak."""
    return _gpu(bf16, None, None, fp8, gib, gigabytes_per_second, host_link)


# NVIDIA V100 data sheet, Jan 2020. No bf16: fp32 runs outside the tensor cores.
_V100_SXM = (None, None, 15.7, None)
_V100_PCIE = (None, None, 14.0, None)
# NVIDIA T4 data sheet, Mar 2019.
_T4 = _gpu(None, None, 8.1, None, 16, 320, PCIE3)
# NVIDIA A100 data sheet, Jun 2021 (half of the sparse figures).
_A100 = (312, 156, 19.5, None)
# NVIDIA H100 architecture white paper v1.04, Table 2 (2023); NVL: H100 data sheet, Oct 2024.
_H100_SXM = (989.4, 494.7, 66.9, 1978.9)
_H100_PCIE = (756, 378, 51.2, 1513)
_H100_NVL = (835.5, 417.5, 60, 1670.5)
# NVIDIA H200 data sheet, Nov 2024: the arithmetic of H100, more and faster memory.
_H200 = _gpu(*_H100_SXM, 141, 4_800, PCIE5)
_H200_NVL = _gpu(*_H100_NVL, 141, 4_800, PCIE5)
# NVIDIA Blackwell data sheet, 2025: HGX B200 and GB200 NVL72, divided by 8 and 72 GPUs, half of the sparse figures.
# GB200's host link is NVLink-C2C: 450 GB/s each way of a superchip, shared by its two GPUs.
_B200 = _gpu(2_250, 1_100, 75, 4_500, 180, 7_700, PCIE5)
_GB200 = _gpu(2_500, 1_250, 80, 5_000, 186, 8_000, 225 * GIGA)
# NVIDIA L4 data sheet, Mar 2023 (half of the sparse figures).
_L4 = _gpu(121, 60, 30.3, 242, 24, 300, PCIE4)
# NVIDIA GA102 white paper v2.1 (2021) and Ada white paper v2.1 (2023), appendices A: with fp32 accumulation.
_RTX_3090 = _gpu(71, 35.6, 35.6, None, 24, 936, PCIE4)
_RTX_4090 = _gpu(165.2, 82.6, 82.6, 330.3, 24, 1_008, PCIE4)

# Cloud TPU documentation, pages v4, v5e, v5p, v6e, TPU7x (docs.cloud.google.com/tpu/docs, read Dec 2026); only TPU7x
# multiplies fp8 faster than bf16. Host links: "How to scale your model", part 2 (jax-ml.github.io/scaling-book, 2025):
# about 15 GB/s per chip, twice that on v6e; that of TPU7x is not published.
_V4 = _tpu(275, None, 32, 1_200, 15 * GIGA)
_V5E = _tpu(197, None, 16, 819, 15 * GIGA)
_V5P = _tpu(459, None, 95, 2_765, 15 * GIGA)
_V6E = _tpu(918, None, 32, 1_638, 32 * GIGA)
_TPU7X = _tpu(2_307 / 2, 4_614 / 2, 96, 7_380 / 2, None)

DEVICES: dict[str, Device] = {
    "Tesla V100-SXM2-16GB": _gpu(*_V100_SXM, 16, 900, PCIE3),
    "Tesla V100-SXM2-32GB": _gpu(*_V100_SXM, 32, 900, PCIE3),
    "Tesla V100-PCIE-16GB": _gpu(*_V100_PCIE, 16, 900, PCIE3),
    "Tesla V100-PCIE-32GB": _gpu(*_V100_PCIE, 32, 900, PCIE3),
    "Tesla T4": _T4,
    "NVIDIA A100-SXM4-40GB": _gpu(*_A100, 40, 1_555, PCIE4),
    "NVIDIA A100-SXM4-80GB": _gpu(*_A100, 80, 2_039, PCIE4),
    "NVIDIA A100-PCIE-40GB": _gpu(*_A100, 40, 1_555, PCIE4),
    "NVIDIA A100 80GB PCIe": _gpu(*_A100, 80, 1_935, PCIE4),
    "NVIDIA H100 80GB HBM3": _gpu(*_H100_SXM, 80, 3_350, PCIE5),
    "NVIDIA H100 PCIe": _gpu(*_H100_PCIE, 80, 2_000, PCIE5),
    "NVIDIA H100 NVL": _gpu(*_H100_NVL, 94, 3_900, PCIE5),
    "NVIDIA H200": _H200,
    "NVIDIA H200 NVL": _H200_NVL,
    "NVIDIA B200": _B200,
    "NVIDIA GB200": _GB200,
    "NVIDIA L4": _L4,
    "NVIDIA GeForce RTX 3090": _RTX_3090,
    "NVIDIA GeForce RTX 4090": _RTX_4090,
    "TPU v4": _V4,
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": _TPU7X,
}


def lookup(device_kind: str) -> Device | None:
    """The device that JAX calls `device_kind`, or None for one that is not in the table."""
    return DEVICES.get(device_kind)


def cuda_plugin() -> Path | None:
    """The shared object of JAX's CUDA plugin, or None where it is not installed."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = [] if spec is None else spec.submodule_search_locations
    files = (Path(folder) / "xla_cuda13" / "xla_cuda_plugin.so" for folder in folders)
    return next((path for path in files if path.exists()), None)


def gpu_descriptions() -> dict[str, str]:
    """Name of a GPU -> its description for a compiler, as text in the CUDA plugin, which must be there, has them."""
    with cuda_plugin().open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        texts = re.findall(rb"(?:^|\x00)([^\x00]*gpu_device_info \{[^\x00]+)", content)
    named = ((re.search(r'device_description_str: "([^"]+)"', text), text) for text in map(bytes.decode, texts))
    return {match[1]: text for match, text in named if match}
