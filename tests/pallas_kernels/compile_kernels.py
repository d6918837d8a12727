"""Compiles the GPU kernels for one absent card: `python compile_kernels.py H100 [--fits]`.

A row for each kernel, sizes and dtype: seconds, shared memory of a program in bytes, "ok" or the compiler's words.
Registers may not spill, or with `--fits` they may: that is for the sizes for which only the shared memory has to do.
"""

import argparse
import itertools
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from absent_gpu import CARDS, abstract_gpu, compile_for
from activation import situ

from pallas_kernels.attention import gpu as attention_gpu
from pallas_kernels.gpu import Launch
from pallas_kernels.kda import gpu as kda_gpu
from pallas_kernels.kda import gpu_short_conv
from pallas_kernels.moe import gpu as moe_gpu

BF16, FP32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
LENGTH, HEADS, EXPERTS = 8192, 8, 112
KDA, KDA_FITS = [(128, 128), (64, 64), (64, 128), (128, 64), (32, 32), (16, 16)], [(256, 256), (256, 64), (64, 256)]
MLA = [(128, 64, 128), (64, 32, 64), (32, 16, 32)]
CONV = [(HEADS * 128,), (64,), (32,)]
MOE = [(3584, 3072), (512, 512), (256, 256), (64, 64), (48, 16)]  # latent and inner width
SPILLS = {
    "kda": [*itertools.product(KDA, (BF16, FP32))],
    "mla": [*itertools.product(MLA, (BF16,))],
    "short_conv": [*itertools.product(CONV, (BF16, FP32))],
    "moe": [*itertools.product(MOE, (BF16, FP32))],
}
ONLY_FITS = {
    "kda": [*itertools.product(KDA_FITS, (BF16, FP32))],
    "mla": [*itertools.product(MLA, (FP32,))],
    "short_conv": [],
    "moe": [],
}


def launches(card: str, cases: dict) -> Iterator[tuple[Launch, tuple[int, ...], jnp.dtype]]:
    """The kernels of forward and backward for each of the widths and dtypes."""
    for (operation, module), number in zip((("kda", kda_gpu), ("mla", attention_gpu)), (5, 3), strict=True):
        for widths, dtype in cases[operation]:
            with abstract_gpu(card):
                forward, backward = module.launches(1, LENGTH, HEADS, *widths, dtype)
            # The backward pass runs a forward kernel again and asks it for more: that one is compiled.
            found = {x.name: x for x in (*forward, *backward)}
            assert len(found) == number
            yield from ((x, widths, dtype) for x in found.values())
    for channels, dtype in cases["short_conv"]:
        yield gpu_short_conv.launch(1, LENGTH, *channels, dtype), channels, dtype
    for widths, dtype in cases["moe"]:
        with abstract_gpu(card):
            forward, backward = moe_gpu.launches(LENGTH, 2, EXPERTS, *widths, dtype, situ)
        yield from ((x, widths, dtype) for x in (*forward, *backward))


def compiled(card: str, launch: Launch, folder: Path) -> tuple[int, str]:
    """Bytes of shared memory, and "ok" or why not; the compiler writes what it found into the folder."""
    for path in folder.iterdir():
        path.unlink()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in launch.inputs]
    try:
        compile_for(card, lambda *arrays: launch(*arrays), *shapes)
    except jax.errors.JaxRuntimeError as error:
        return 0, str(error).splitlines()[0]
    (text,) = (path.read_text() for path in folder.glob("*thunk_sequence.txt"))
    return int(re.search(rf"{launch.name} .*shared_memory: (\d+) bytes", text)[1]), "ok"


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("card", choices=CARDS)
    parser.add_argument("--fits", action="store_true", help="the sizes that may spill")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # what is not compiled tells nothing
    with tempfile.TemporaryDirectory() as folder:
        spills = "" if options.fits else "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} {spills}"
        compile_for(options.card, lambda x: x + 1, jax.ShapeDtypeStruct((8,), FP32))  # the first waits for the compiler
        print("| kernel | widths | dtype | compiled in | shared bytes | |\n|---|---|---|---|---|---|")
        for launch, widths, dtype in launches(options.card, ONLY_FITS if options.fits else SPILLS):
            start = time.perf_counter()
            shared, result = compiled(options.card, launch, Path(folder))
            cells = f"`{launch.name}` | {' x '.join(map(str, widths))} | {dtype.name}"
            print(f"| {cells} | {time.perf_counter() - start:.1f} s | {shared:,} | {result} |", flush=True)


if __name__ == "__main__":
    main()
