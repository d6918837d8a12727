"""Compiles every GPU kernel for one absent card and prints a line for each: `python compile_kernels.py H100`."""

import os
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from absent_gpu import abstract_gpu, compile_for

from pallas_kernels import gpu
from pallas_kernels.kda import gpu as kda_gpu
from pallas_kernels.kda.gpu_backward import chunk_gradients, chunk_pairs, scan_gradients
from pallas_kernels.kda.gpu_blocks import Sizes
from pallas_kernels.kda.gpu_forward import chunk_operands, scan_states

WIDTHS = [(128, 128), (64, 64), (64, 128), (128, 64), (32, 32), (16, 16)]
DTYPES = [jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)]


def launches(card, width, value_width, dtype, length=8192, heads=8):
    """The kernels of forward and backward."""
    with abstract_gpu(card):
        tiles = kda_gpu.tiles(width, value_width, dtype)
    sizes = Sizes(
        1, length, heads, heads, width, value_width, dtype, tiles.chunk, width**-0.5, 1, tiles, interpret=False
    )
    yield chunk_operands(sizes, with_inverse=True)
    yield from (make(sizes) for make in (scan_states, scan_gradients, chunk_pairs, chunk_gradients))


def compiled(card, launch: gpu.Launch) -> str:
    """ "ok", or why not."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in launch.inputs]
    try:
        compile_for(card, lambda *arrays: launch(*arrays), *shapes)
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return "ok"


if __name__ == "__main__":
    for widths in WIDTHS:
        for dtype in DTYPES:
            for launch in launches(sys.argv[1], *widths, dtype):
                start = time.perf_counter()
                result = compiled(sys.argv[1], launch)
                seconds = time.perf_counter() - start
                print(f"{launch.name} {widths} {dtype.name} {seconds:.1f} s: {result}", flush=True)
