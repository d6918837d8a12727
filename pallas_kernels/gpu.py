"""What the Pallas GPU kernels (Triton) share: which GPUs take them, products, launches.

A kernel is described by a Launch: a body, a grid, and for every array the block that a program of the grid works on.
Invariants: the compiler parameters are always given (without them jax 0.10 takes another backend); a product of fp32
numbers is never rounded to single-pass TF32; nothing that a kernel did not write is read.
"""

import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

GPUS = "gpu", "cuda"  # names of the platform
OLDEST = 8.0  # compute capability: sm_80 and newer have bf16 and asynchronous copies
ABSENT = {9: r" G?H\d00\b", 10: r" G?B\d00\b", 12: r"\bRTX (PRO|50)"}  # kinds of devices that can only be named


class Operand(NamedTuple):
    """One array of a kernel and the block that a program gets of it; None in `block` drops that axis."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    block: tuple[int | None, ...]
    index: Callable[..., tuple]  # program ids -> index of the block


class Launch(NamedTuple):
    """One kernel with everything but its arrays."""

    name: str
    body: Callable[..., None]  # of the references to inputs and then outputs
    grid: tuple[int, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    warps: int
    stages: int
    interpret: bool  # on any device, as plain XLA operations

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Runs it."""
        return pl.pallas_call(
            self.body,
            grid=self.grid,
            in_specs=[pl.BlockSpec(x.block, x.index) for x in self.inputs],
            out_specs=[pl.BlockSpec(x.block, x.index) for x in self.outputs],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.outputs],
            compiler_params=triton.CompilerParams(num_warps=self.warps, num_stages=self.stages),
            interpret=self.interpret,
            name=self.name,
        )(*arrays)


def platform() -> str:
    """What the program is made for: the platform of an absent device that is named, else JAX's default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def require() -> None:
    """Refuses where the program is not being made for a GPU that takes the kernels.

    Raises:
        NotImplementedError: another backend, or a GPU older than sm_80.
    """
    if platform() not in GPUS:
        raise NotImplementedError(f"the GPU kernel needs a GPU, this is made for {platform()}")
    if jax.default_backend() == "gpu":  # where it is not, the program is made for an absent one
        found = str(jax.devices()[0].compute_capability)
        if not found.replace(".", "").isdigit():
            raise NotImplementedError(f"the GPU kernel needs an NVIDIA GPU, this one is {found}")
        if float(found) < OLDEST:
            raise NotImplementedError(f"the GPU kernel needs compute capability {OLDEST}, this GPU has {found}")


def generation() -> int:
    """Major compute capability of the GPU that the program is made for: 8, 9 (Hopper), 10 (servers' Blackwell), 12.

    Without a GPU, as in interpret mode, it is 9.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if jax.default_backend() == "gpu":
        return int(float(jax.devices()[0].compute_capability))
    kind = "" if device is None or device.platform not in GPUS else device.device_kind
    return next((major for major, kinds in ABSENT.items() if re.search(kinds, kind)), 8 if kind else 9)


def tiles(table: Mapping[Hashable, Any], servers: Mapping[Hashable, Any], key: Hashable) -> Any:
    """The key's tiles for the GPU that the program is made for, present or absent.

    Servers' Hopper and Blackwell, with 227 KiB of shared memory, may have their own; all else is in `table`.
    """
    return servers[key] if generation() in (9, 10) and key in servers else table[key]


def dot(a: Array, b: Array, *, a_axis: int = 1, b_axis: int = 0, interpret: bool) -> Array:
    """Product of two matrices over one axis of each -> fp32; of fp32 numbers in three passes of TF32."""
    precision = None
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
