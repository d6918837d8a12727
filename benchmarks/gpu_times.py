"""How long the passes of KDA and MLA take on this machine's GPU, beside what a copy and a product reach on it.

Bytes and FLOPs of a pass are the minimum traffic of gpu_traffic.py and the model's FLOPs, the same for every side.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gpu_traffic
import jax
import jax.numpy as jnp
import numpy as np
import sides

from pallas_kernels.attention import mla_attention
from pallas_kernels.gpu import Launch
from pallas_kernels.kda import gpu, gpu_short_conv, kda

BF16 = jnp.bfloat16
SIDES = "gpu", "xla", "fla"  # ours first: where time runs out, the peers are left out
ENOUGH = 0.2  # seconds of a call that is timed once


class Plan(NamedTuple):
    """How large everything is."""

    lengths: tuple[int, ...]
    heads: tuple[int, ...]
    width: int  # of keys and values
    shared: int  # more in MLA's keys
    alone: tuple[int, int]  # length and heads at which kernels are timed one by one
    copied: int  # bytes of the array that is copied
    product: int  # rows of the matrices that are multiplied
    repeats: int
    wanted: float  # seconds of a timing, filled up with calls


class Pass(NamedTuple):
    """One timing; `direction` is "forward" or "forward+backward"."""

    operation: str
    tokens: int
    heads: int
    direction: str
    side: str


class Ceilings(NamedTuple):
    """What the device reached: bytes/s, FLOP/s."""

    copy: float
    product: float


def short(x: float) -> float:
    """Four digits."""
    return float(f"{x:.4g}")


def in_one_line(error: Exception) -> str:
    """Its kind and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def passes(plan: Plan) -> list[Pass]:
    """All timings, in order."""
    return [
        Pass(operation, tokens, heads, direction, side)
        for side in SIDES
        for operation in (("kda",) if side == "fla" else ("kda", "mla"))
        for tokens in plan.lengths
        for heads in plan.heads
        for direction in ("forward", "forward+backward")
    ]


def shapes(plan: Plan, which: Pass) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a pass by name, d_output last."""
    tokens, heads = which.tokens, which.heads
    rows = jax.ShapeDtypeStruct((1, tokens, heads, plan.width), BF16)
    if which.operation == "kda":
        decays, beta = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (rows.shape, rows.shape[:3]))
        return {"query": rows, "key": rows, "value": rows, "log_decay": decays, "beta": beta, "d_output": rows}
    query = jax.ShapeDtypeStruct((1, tokens, heads, plan.width + plan.shared), BF16)
    shared = jax.ShapeDtypeStruct((1, tokens, plan.shared), BF16)
    return {"query": query, "key": rows, "key_shared": shared, "value": rows, "d_output": rows}


def draw(wanted: dict[str, jax.ShapeDtypeStruct], seed: int) -> list[jax.Array]:
    """Random arrays: log decays between -5 and 0, beta between 0 and 1, with them query and key of length 1."""
    found, recurrent = [], "beta" in wanted
    for key, (name, x) in zip(jax.random.split(jax.random.key(seed), len(wanted)), wanted.items(), strict=True):
        array = jax.random.normal(key, x.shape, BF16).astype(jnp.float32)
        if name in ("log_decay", "beta"):
            array = jax.nn.sigmoid(array) * (-5 if name == "log_decay" else 1)
        elif recurrent and name in ("query", "key"):
            array = array / jnp.linalg.norm(array, axis=-1, keepdims=True)
        found.append(array.astype(x.dtype))
    return found


def program(which: Pass) -> Callable[..., Any]:
    """The output of the arrays of `shapes`, or output and gradients."""
    operation = functools.partial(kda if which.operation == "kda" else mla_attention, implementation=which.side)

    def forward(*arrays: jax.Array) -> jax.Array:
        return operation(*arrays)[0]

    both = functools.partial(sides.both, forward)
    return both if which.direction == "forward+backward" else lambda *arrays: forward(*arrays[:-1])


def jobs(plan: Plan) -> dict[Any, tuple[Callable[..., Any], Any]]:
    """What has to be compiled, by Pass, and by (operation, tokens, heads) what draws the arrays: (function, shapes)."""
    of_passes, of_arrays = {}, {}
    for which in passes(plan):
        wanted = shapes(plan, which)
        if which.side != "fla":
            of_passes[which] = program(which), wanted.values()
        of_arrays[which[:3]] = functools.partial(draw, wanted), [jax.ShapeDtypeStruct((), jnp.int32)]
    return of_arrays | of_passes


def torch_program(which: Pass, arrays: list[jax.Array]) -> Callable[[], None]:
    """The same on the same numbers by flash-linear-attention's Triton kernels; returns when it is done.

    Raises:
        ImportError: one of them is not installed, or torch has no CUDA.
    """
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch has no CUDA here")
    from fla.ops.kda import chunk_kda

    *leaves, d_output = (torch.from_dlpack(x).clone() for x in arrays)
    leaves = [x.requires_grad_() for x in leaves]

    def forward() -> None:
        with torch.no_grad():
            chunk_kda(*leaves, output_final_state=True)

    def both() -> None:
        torch.autograd.grad(chunk_kda(*leaves, output_final_state=True)[0], leaves, d_output)

    return both if which.direction == "forward+backward" else forward


def seconds(plan: Plan, run: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready) -> float:
    """Of one call: the median of several timings, each of so many calls that the host's part in them is small."""
    wait(run())

    def timing(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = run()
        wait(result)
        return (time.perf_counter() - start) / calls

    first = timing(1)
    if first > ENOUGH:
        return first
    calls = max(1, min(100, int(plan.wanted / first)))
    return statistics.median(timing(calls) for _ in range(plan.repeats))


def work(plan: Plan, which: Pass) -> tuple[int, int]:
    """Minimum bytes and model FLOPs of a pass; a backward pass has twice the FLOPs of a forward one."""
    row = which.tokens, which.heads, plan.width
    if which.operation == "kda":
        least = gpu_traffic.kda_minimum(*row, gpu.tiles(plan.width, plan.width, BF16).chunk)
        flops = gpu_traffic.kda_flops(*row)
    else:
        least, flops = gpu_traffic.mla_minimum(*row, plan.shared), gpu_traffic.mla_flops(*row, plan.shared)
    return (least["forward"], flops) if which.direction == "forward" else (sum(least.values()), 3 * flops)


def ceilings(plan: Plan) -> Ceilings:
    """Measures a pass that reads and writes a large array, and a large bf16 product."""
    x, a = jnp.ones((plan.copied // 4,), jnp.float32), jnp.ones((plan.product, plan.product), BF16)
    halve, square = jax.jit(lambda x: x / 2), jax.jit(lambda a: a @ a)
    copy, product = seconds(plan, lambda: halve(x)), seconds(plan, lambda: square(a))
    return Ceilings(2 * plan.copied / copy, 2 * plan.product**3 / product)


def shares(bytes_: float, flops: float | None, taken: float, most: Ceilings) -> dict[str, float]:
    """Rates and their shares of the ceilings, for a row."""
    row = {"ms": short(1e3 * taken), "gigabytes_per_second": short(bytes_ / taken / 1e9)}
    row["share_of_copy"] = short(bytes_ / taken / most.copy)
    if flops is not None:
        row |= {"teraflops": short(flops / taken / 1e12), "share_of_product": short(flops / taken / most.product)}
    return row


def time_passes(plan: Plan, compiled: dict[Any, Any], most: Ceilings, until: float) -> Iterator[dict[str, Any]]:
    """A row for each pass; `compiled` has the programs of `jobs`, or in words why there is none."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    ours = {}
    for which in passes(plan):
        row = {"section": "time"} | which._asdict()
        try:
            if time.monotonic() > until:
                raise TimeoutError("no time left")
            draw_arrays, found = compiled[which[:3]], compiled.get(which)
            if isinstance(draw_arrays, str) or isinstance(found, str):
                raise RuntimeError(found or draw_arrays)
            if found:
                size = found.memory_analysis()
                size = size.argument_size_in_bytes + size.output_size_in_bytes + size.temp_size_in_bytes
                if size > 0.95 * limit:
                    raise MemoryError(f"needs {size / 2**30:.0f} GiB")
                taken = seconds(plan, functools.partial(found, *draw_arrays(np.int32(0))))
            else:
                taken = seconds(plan, torch_program(which, draw_arrays(np.int32(0))), synchronize)
        except (ImportError, TimeoutError, MemoryError, RuntimeError) as error:  # JAX's and torch's are RuntimeErrors
            yield row | {"skipped": in_one_line(error)}
            continue
        row |= shares(*work(plan, which), taken, most)
        if which.side == "gpu":
            ours[which] = taken
        elif which._replace(side="gpu") in ours:
            row["times_gpu"] = short(taken / ours[which._replace(side="gpu")])
        yield row


def synchronize(_: None) -> None:
    """Waits for torch's GPU."""
    import torch

    torch.cuda.synchronize()


def kernels(plan: Plan, interpret: bool) -> dict[str, Launch]:
    """The kernels of KDA, that of the operands runs in both passes, and of the convolution of one of its inputs."""
    tokens, heads = plan.alone
    forward, backward = gpu.launches(1, tokens, heads, plan.width, plan.width, BF16, interpret)
    conv = gpu_short_conv.launch(1, tokens, heads * plan.width, BF16, interpret)
    return {f"{x.name}{' (backward)' if x is backward[0] else ''}": x for x in (*forward, *backward, conv)}


def kernel_shapes(launch: Launch) -> list[jax.ShapeDtypeStruct]:
    """What a launch takes."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in launch.inputs]


def time_kernels(
    plan: Plan, launches: dict[str, Launch], compiled: dict[Any, Any], most: Ceilings, until: float
) -> Iterator[dict[str, Any]]:
    """A row for each of `kernels`, its bytes those of its blocks, each counted once."""
    for name, launch in launches.items():
        row = {"section": "kernel", "kernel": name, "tokens": plan.alone[0], "heads": plan.alone[1]}
        found = "no time left" if time.monotonic() > until else compiled[name]
        if isinstance(found, str):
            yield row | {"skipped": found}
            continue
        # Proper log decays, integers that are tokens; what the rest holds does not matter as long as it stays small.
        tokens = jnp.arange(plan.alone[0], dtype=jnp.int32)
        arrays = [
            jnp.resize(tokens, x.shape) if x.dtype == jnp.int32 else jnp.full(x.shape, -0.01, x.dtype)
            for x in launch.inputs
        ]
        taken = seconds(plan, functools.partial(found, *arrays))
        yield row | shares(gpu_traffic.launch_bytes(launch)[0], None, taken, most)
