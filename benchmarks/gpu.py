"""The GPU kernels on this machine's GPU: are they right, how fast, how far from what the card can do.

    python benchmarks/gpu.py [--seed N] [--seconds 220]

1. Every kernel against fp32 mathematics on new random inputs (gpu_checks.py). One that fails makes the exit code 1.
2. What the card reaches here: bytes/s of a pass over a large array, FLOP/s of a large bf16 product.
3. Forward, and forward and backward, at K3's widths in bf16 (gpu_times.py, gpu_moe.py): the kernels, the XLA form, and
   where torch and flash-linear-attention are installed its Triton kernels for KDA; then each kernel of KDA alone.
4. What the kernels read and write, counted from their blocks (gpu_traffic.py, gpu_moe.py).

A line of JSON for each figure, then tables for RESULTS.md. Everything is compiled before anything is timed; what does
not fit into the time or the memory is left out, as its line says. Without a GPU the kernels run in Pallas' interpreter
at toy sizes: that shows that this script works, and its times say nothing.
"""

import argparse
import datetime
import functools
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gpu_checks
import gpu_moe
import gpu_times
import gpu_traffic
import jax
from gpu_checks import Case
from gpu_times import Plan

from pallas_kernels import gpu
from pallas_kernels.attention import api as attention_api
from pallas_kernels.attention import gpu as attention_gpu
from pallas_kernels.kda import api as kda_api
from pallas_kernels.kda import gpu as kda_gpu
from pallas_kernels.kda.short_conv import IMPLEMENTATIONS as CONVOLUTIONS
from pallas_kernels.moe import api as moe_api
from pallas_kernels.moe import gpu as moe_gpu

DTYPES = "bfloat16", "float32"
KDA_WIDTHS = (64, 64), (64, 128), (128, 64), (32, 32), (16, 16), (256, 256)
MLA_WIDTHS = (64, 32, 64), (32, 16, 32)
CASES = (
    *(Case("kda", dtype, (128, 128), ids, 300, 2) for dtype in DTYPES for ids in (False, True)),
    *(Case("kda", dtype, (128, 128), True, 300, 2, 3) for dtype in DTYPES),
    *(Case("kda", dtype, widths, True, 200, 1) for dtype in DTYPES for widths in KDA_WIDTHS),
    *(Case("mla", dtype, (128, 64, 128), ids, 600, 2) for dtype in DTYPES for ids in (False, True)),
    *(Case("mla", dtype, widths, True, 300, 2) for dtype in DTYPES for widths in MLA_WIDTHS),
    *(Case("conv", dtype, (128,), ids, 600, 3) for dtype in DTYPES for ids in (False, True)),
)
PLAN = Plan((2_048, 8_192, 32_768), (8, 96), 128, 64, (8_192, 96), 2**30, 8_192, 5, 0.05)
TOY_CASES = (
    Case("kda", "bfloat16", (32, 32), True, 100, 1),
    Case("kda", "float32", (16, 32), False, 40, 1, 2),
    Case("mla", "bfloat16", (32, 16, 32), False, 100, 1),
    Case("mla", "float32", (16, 16, 16), True, 100, 1),
    Case("conv", "bfloat16", (32,), True, 100, 1),
)
TOY_PLAN = Plan((128,), (2,), 16, 16, (64, 1), 2**20, 128, 1, 0)


def compile_all(jobs: dict[Any, tuple[Callable, Any]], until: float) -> dict[Any, Any]:
    """Key -> (function, shapes) to key -> program, or the reason that there is none; as many at a time as cores."""

    def one(job: tuple[Callable, Any]) -> Any:
        if time.monotonic() > until:
            return "no time left to compile it"
        try:
            return jax.jit(job[0]).lower(*job[1]).compile()
        except Exception as error:  # whatever stands in the way of one program, the others have their figures
            return f"does not compile: {gpu_times.in_one_line(error)}"

    with ThreadPoolExecutor() as pool:
        return dict(zip(jobs, pool.map(one, jobs.values()), strict=True))


def correctness(cases: tuple[Case, ...], seed: int, until: float) -> Iterator[dict[str, Any]]:
    """Rows of gpu_checks.py; a case that does not compile or run is a row that fails."""
    jobs = {}
    for case in cases:
        arrays, exact, ids = gpu_checks.inputs(case, seed)
        for name, function, found in zip(
            ("ours", "reference"), gpu_checks.programs(case), (arrays, exact), strict=True
        ):
            jobs[case, name] = function, (found, ids)
    programs = compile_all(jobs, until)
    for case in cases:
        pair = [programs[case, name] for name in ("ours", "reference")]
        broken = [x for x in pair if isinstance(x, str)]
        try:
            if broken:
                raise RuntimeError(broken[0])
            yield from gpu_checks.check(case, seed, *pair)
        except RuntimeError as error:
            yield {"section": "correctness", "case": case.name, "error": gpu_times.in_one_line(error), "pass": False}


def rows(cases: tuple[Case, ...], plan: Plan, seed: int, limit: float, interpret: bool) -> Iterator[dict[str, Any]]:
    """All figures, in order; `limit` is in seconds."""
    start = time.monotonic()
    yield from gpu_traffic.traffic()
    yield from gpu_moe.traffic()
    yield from correctness(cases, seed, start + limit)
    for dtype in DTYPES:
        yield from gpu_moe.check(gpu_moe.TOY if interpret else gpu_moe.CHECKED, dtype, seed)
    launches = gpu_times.kernels(plan, interpret)
    kernels = {name: (lambda *x, launch=x: launch(*x), gpu_times.kernel_shapes(x)) for name, x in launches.items()}
    programs = compile_all(gpu_times.jobs(plan) | kernels, start + 0.6 * limit)
    most = gpu_times.ceilings(plan)
    yield {"section": "ceiling", "of": "copy", "gigabytes_per_second": gpu_times.short(most.copy / 1e9)}
    yield {"section": "ceiling", "of": "bf16 product", "teraflops": gpu_times.short(most.product / 1e12)}
    yield from gpu_times.time_kernels(plan, launches, programs, most, start + limit)
    yield from gpu_moe.time_layers(gpu_moe.TOY if interpret else gpu_moe.TIMED, plan, most, start + 0.7 * limit)
    yield from gpu_times.time_passes(plan, programs, most, start + limit)


def table(found: list[dict[str, Any]]) -> None:
    """Prints the rows of a section as markdown, a column for each name that one of them has."""
    names = list(dict.fromkeys(name for row in found for name in row if name not in ("section", "card")))
    words = {None: "", True: "pass", False: "FAIL"}
    print(f"\n| {' | '.join(name.replace('_', ' ') for name in names)} |\n|{'---|' * len(names)}")
    for row in found:
        cells = [row.get(name) for name in names]
        cells = [words[x] if x is None or isinstance(x, bool) else f"{x:,}" if isinstance(x, int) else x for x in cells]
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> int:
    """Measures and prints; 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the inputs (default: a new one)")
    parser.add_argument("--seconds", type=float, default=220, help="after these nothing new is begun (default: 220)")
    options = parser.parse_args()
    interpret = jax.default_backend() != "gpu"
    if interpret:
        kda_api.IMPLEMENTATIONS["gpu"] = functools.partial(kda_gpu.kda, interpret=True)
        CONVOLUTIONS["gpu"] = functools.partial(CONVOLUTIONS["gpu"], interpret=True)
        moe_api.LAYERS["gpu"] = functools.partial(moe_gpu.expert_layer, interpret=True)
        attention_api.IMPLEMENTATIONS["gpu"] = functools.partial(attention_gpu.attention, interpret=True)
    else:
        gpu.require()
    where = "no GPU, kernels interpreted at toy sizes" if interpret else jax.devices()[0].device_kind
    title = f"{datetime.date.today():%d %B %Y}, {where}, jax {jax.__version__}, seed {options.seed}"
    print(json.dumps({"section": "run", "title": title}), flush=True)
    start, found = time.monotonic(), []
    sizes = (TOY_CASES, TOY_PLAN) if interpret else (CASES, PLAN)
    for row in rows(*sizes, options.seed, options.seconds, interpret):
        found.append(row)
        print(json.dumps(row), flush=True)
    print(f"\n## `python benchmarks/gpu.py`: {title}, {time.monotonic() - start:.0f} s")
    for section in dict.fromkeys(row["section"] for row in found):
        table([row for row in found if row["section"] == section])
    return 0 if all(row["pass"] for row in found if row["section"] == "correctness") else 1


if __name__ == "__main__":
    sys.exit(main())
