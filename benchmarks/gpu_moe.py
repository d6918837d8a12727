"""The MoE's GPU kernels: right against the form for CPUs in fp32, what they read and write, how long a layer takes.

Routing is random, one token in ten goes nowhere and holds NaN. FLOPs are the model's: three products of each routed
row forward, twice as many backward; what the backward pass computes again does not count. Bytes are those of bf16
tokens and matrices, fp32 gradients of matrices and even routing: `once` every array of a kernel once, `charged` what
its programs read, each for itself, which is what the L2 has to give. XLA's passes beside the kernels (sort, sums of a
token's rows, casts of matrices) are in neither.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gpu_checks
import gpu_times
import gpu_traffic
import jax
import jax.numpy as jnp
import sides
from gpu_times import Ceilings, Plan

from k3jax.model.common import situ
from pallas_kernels.moe import expert_layer
from pallas_kernels.moe import gpu as moe_gpu

ACTIVATION = functools.partial(situ, beta=4.0, linear_beta=25.0)
NAMES = "output", "d_tokens", "d_weights", "d_w1", "d_w3", "d_w2"
SIDES = "gpu", "ragged"
BOUNDS = {"bfloat16": (5e-3, 8e-3), "float32": (1e-5, 1e-4)}  # of the output, of gradients; rms in bf16


class Layer(NamedTuple):
    """Sizes of a layer of experts."""

    tokens: int
    experts: int
    top_k: int
    latent: int
    inner: int


CHECKED, TIMED = Layer(1_000, 24, 4, 256, 384), Layer(8_192, 112, 2, 3_584, 3_072)  # an eighth of K3's experts
TOY = Layer(90, 5, 2, 48, 80)


def draw(layer: Layer, dtype: Any, seed: jax.Array) -> tuple[jax.Array, ...]:
    """Ids, tokens, weights, w1, w3, w2 in `dtype`, gradient of the output; NaN in tokens that go nowhere."""
    tokens, experts, k, latent, inner = layer
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    ids = jax.lax.top_k(jax.random.uniform(next(keys), (tokens, experts)), k)[1]
    nowhere = jax.random.uniform(next(keys), (tokens, 1)) < 0.1
    weights = jax.random.uniform(next(keys), (tokens, k))
    x, d_output = (jnp.where(nowhere, jnp.nan, jax.random.normal(next(keys), (tokens, latent), dtype)) for _ in "xy")
    shapes = (experts, latent, inner), (experts, latent, inner), (experts, inner, latent)
    matrices = (jax.random.normal(next(keys), s, dtype) * s[1] ** -0.5 for s in shapes)
    return jnp.where(nowhere, experts, ids), x, weights, *matrices, d_output


def forward(implementation: str, ids, x, weights, w1, w3, w2, d_output) -> Any:
    """The output."""
    return expert_layer(x, ids, weights, w1, w3, w2, activation=ACTIVATION, implementation=implementation)


def both(implementation: str, ids, *arrays) -> Any:
    """Output and gradients."""
    output, gradients = sides.both(lambda *inputs: forward(implementation, ids, *inputs, None), *arrays)
    return output, *gradients


def check(layer: Layer, dtype: str, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each tensor, in gpu_checks' words."""
    arrays = jax.jit(functools.partial(draw, layer, jnp.dtype(dtype)))(seed)
    exact = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays]
    wanted = jax.device_get(jax.jit(functools.partial(both, "blocked"))(*exact))
    ours = jax.jit(functools.partial(both, "gpu")).lower(*arrays).compile()
    gpu_checks.poison()
    case = f"moe {dtype} {'x'.join(map(str, layer))}"
    for name, found, exact in zip(NAMES, jax.device_get(ours(*arrays)), wanted, strict=True):
        yield gpu_checks.row(case, dtype, name, found, exact, BOUNDS[dtype][name.startswith("d_")])


def charged(layer: Layer, kernel: str) -> int:
    """Bytes that the programs of a kernel read of rows and matrices, and write."""
    tokens, experts, k, latent, inner = layer
    rows, tile = tokens * k, getattr(moe_gpu.tiles_for(latent, inner, jnp.bfloat16), kernel)
    if kernel in ("d_up", "d_down"):
        height, width = (latent, inner) if kernel == "d_up" else (inner, latent)
        results = 2 if kernel == "d_up" else 1  # of as many arrays with the columns
        # An array with the rows of the result is read for each tile of its columns, and the other way round.
        reads = rows * height * (width // tile.columns) + results * rows * width * (height // tile.rows)
        return 2 * reads + 4 * results * experts * latent * inner
    # Arrays of rows, matrices, results; what is contracted, and the width of the results.
    of_rows, matrices, results, depth, width = {
        "up": (1, 2, 1, latent, inner), "down": (1, 1, 1, inner, latent),
        "d_hidden": (2, 3, 3, latent, inner), "d_rows": (2, 2, 1, inner, latent),
    }[kernel]  # fmt: skip
    blocks = experts * math.ceil(rows / experts / tile.rows)
    reads = of_rows * rows * depth * (width // tile.columns) + matrices * blocks * depth * width
    return 2 * (reads + results * rows * width)


def traffic(layer: Layer = TIMED) -> Iterator[dict[str, Any]]:
    """A row for each kernel and pass, with the times that the card of gpu_traffic needs."""
    tokens, experts, k, latent, inner = layer
    of_tokens, matrices, flops = 2 * tokens * latent, 3 * experts * latent * inner, 6 * tokens * k * latent * inner
    minimum = {"forward": 2 * of_tokens + 2 * matrices, "backward": 3 * of_tokens + 6 * matrices}
    passes = moe_gpu.launches(tokens, k, experts, latent, inner, jnp.bfloat16, ACTIVATION)
    for (direction, least), launches, products in zip(minimum.items(), passes, (flops, 2 * flops), strict=True):
        base = {"section": "traffic", "operation": "moe", "direction": direction, "tokens": tokens, "experts": experts}
        total = 0, 0
        for launch in launches:
            both = gpu_traffic.launch_bytes(launch)[0], charged(layer, launch.name.removeprefix("moe_"))
            yield base | {"kernel": launch.name, "bytes_once": both[0], "bytes_charged": both[1]}
            total = total[0] + both[0], total[1] + both[1]
        yield base | {"kernel": "all"} | gpu_traffic.of_pass(*total, least, products)


def time_layers(layer: Layer, plan: Plan, most: Ceilings, until: float) -> Iterator[dict[str, Any]]:
    """A row for each side and direction."""
    dtype = jnp.bfloat16
    arrays = jax.jit(functools.partial(draw, layer, dtype))(0)
    routed = int(jnp.sum(arrays[0] < layer.experts))
    passes: dict[str, Callable] = {"forward": forward, "forward+backward": both}
    ours = {}
    for side in SIDES:
        for direction, function in passes.items():
            row = {"section": "moe", "side": side, "direction": direction} | layer._asdict()
            if time.monotonic() > until:
                yield row | {"skipped": "no time left"}
                continue
            try:
                program = jax.jit(functools.partial(function, side)).lower(*arrays).compile()
                taken = gpu_times.seconds(plan, functools.partial(program, *arrays))
            except RuntimeError as error:
                yield row | {"skipped": gpu_times.in_one_line(error)}
                continue
            flops = 6 * routed * layer.latent * layer.inner * (1 if direction == "forward" else 3)
            matrices = sum(x.nbytes for x in arrays[3:6]) * (1 if direction == "forward" else 3)
            row |= gpu_times.shares(matrices, flops, taken, most)
            ours.setdefault(direction, taken)
            yield row | {"times_gpu": gpu_times.short(taken / ours[direction])} if side != "gpu" else row
