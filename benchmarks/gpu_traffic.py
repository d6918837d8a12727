"""What the GPU kernels read and write, counted from the blocks of their launches: nothing runs, no GPU is needed.

An operand counts twice over: `once`, every distinct block once, as if programs that share a block found it in a cache,
and `charged`, a block for every program that names it, as if there were none. What a program reads again of its own
block counts once, and a program that is given a whole row (MLA) is charged for all of it, also behind the diagonal.
The minimum is every input and output of the operation once, and once the states that the forward pass keeps for the
backward pass: for KDA a fp32 state per chunk, for MLA the sums of the softmax. XLA's passes beside the kernels (gates,
casts, sums over heads) are not in any of it.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from k3jax.hardware import DEVICES
from pallas_kernels.attention import gpu as attention_gpu
from pallas_kernels.gpu import Launch, Operand
from pallas_kernels.kda import gpu as kda_gpu

WIDTH = 128  # channels of keys and values, K3's; MLA has SHARED more in its keys
SHARED = 64
CARD = "NVIDIA H200"
BOUNDS = {"forward": 1.6, "backward": 2.2}  # of the ratio to the minimum, for KDA


def operand_bytes(operand: Operand, grid: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of its distinct blocks, and of the blocks of all programs."""
    index = np.broadcast_arrays(*operand.index(*np.ogrid[tuple(slice(n) for n in grid)]))
    counts = [n // (of or 1) for n, of in zip(operand.shape, operand.block, strict=True)]
    distinct = len(np.unique(np.ravel_multi_index(index, counts)))
    block = math.prod(n or 1 for n in operand.block) * jnp.dtype(operand.dtype).itemsize
    return distinct * block, math.prod(grid) * block


def launch_bytes(launch: Launch) -> tuple[int, int]:
    """Of all operands of a launch: bytes `once` and `charged`."""
    each = [operand_bytes(x, launch.grid) for x in (*launch.inputs, *launch.outputs)]
    return sum(once for once, _ in each), sum(charged for _, charged in each)


def kda_flops(length: int, heads: int, width: int) -> int:
    """Of the forward pass over a row; the count of k3jax/flops.py."""
    return length * heads * (6 * width**2 + 64 * 3 * width + 64**2)


def mla_flops(length: int, heads: int, width: int, shared: int) -> int:
    """Of the forward pass over a row; the count of k3jax/flops.py."""
    return length * heads * (2 * width + shared) * length


def kda_minimum(length: int, heads: int, width: int, chunk: int) -> dict[str, int]:
    """Bytes of the passes over a row: bf16 query, key, value and output, fp32 log_decay, beta and states."""
    rows, decays, beta, edge = 2 * width, 4 * width, 4, 4 * width**2
    states = edge // chunk
    forward = 4 * rows + decays + beta + states
    backward = 4 * rows + decays + beta + states + 3 * rows + decays + beta
    # The first state comes in and the last goes out, then their gradients.
    return {name: heads * (length * x + 2 * edge) for name, x in (("forward", forward), ("backward", backward))}


def mla_minimum(length: int, heads: int, width: int, shared: int) -> dict[str, int]:
    """Bytes of the passes over a row: bf16 arrays, fp32 row maxima and sums."""
    query, rows, of_all, numbers = 2 * (width + shared), 2 * width, 2 * shared, 8
    forward = heads * (query + 3 * rows + numbers) + of_all
    backward = heads * (2 * query + 6 * rows + numbers) + 2 * of_all
    return {"forward": length * forward, "backward": length * backward}


def of_pass(once: int, charged: int, minimum: int, flops: int) -> dict[str, Any]:
    """What is printed of a whole pass: its bytes beside the minimum, and the times of both on CARD."""
    card = DEVICES[CARD]
    return {
        "bytes_once": once,
        "bytes_charged": charged,
        "bytes_minimum": minimum,
        "ratio": round(once / minimum, 3),
        "ratio_charged": round(charged / minimum, 3),
        "card": CARD,
        "traffic_ms": round(1e3 * once / card.bandwidth, 4),
        "roofline_ms": round(1e3 * max(minimum / card.bandwidth, flops / card.bf16), 4),
    }


def traffic(length: int = 8192, heads: int = 96) -> list[dict[str, Any]]:
    """A row for each kernel and pass of both operations at K3's widths in bf16, with the times that CARD needs."""
    rows = []
    chunk = kda_gpu.tiles(WIDTH, WIDTH, jnp.bfloat16).chunk
    kda = kda_gpu.launches(1, length, heads, WIDTH, WIDTH, jnp.bfloat16)
    mla = attention_gpu.launches(1, length, heads, WIDTH, SHARED, WIDTH, jnp.bfloat16)
    operations = {
        "kda": (kda, kda_minimum(length, heads, WIDTH, chunk), kda_flops(length, heads, WIDTH)),
        "mla": (mla, mla_minimum(length, heads, WIDTH, SHARED), mla_flops(length, heads, WIDTH, SHARED)),
    }
    for operation, (passes, minimum, flops) in operations.items():
        for name, launches, products in zip(("forward", "backward"), passes, (flops, 2 * flops), strict=True):
            base = {"section": "traffic", "operation": operation, "direction": name, "tokens": length, "heads": heads}
            counts = {launch.name: launch_bytes(launch) for launch in launches}
            counts["all"] = tuple(map(sum, zip(*counts.values(), strict=True)))
            for kernel, (once, charged) in counts.items():
                per_token = {"bytes_per_token_and_head": round(once / length / heads)}
                rows.append(base | {"kernel": kernel, "bytes_once": once, "bytes_charged": charged} | per_token)
            rows[-1] |= of_pass(once, charged, minimum[name], products)
            if operation == "kda":
                rows[-1]["bound"] = BOUNDS[name]
    return rows
