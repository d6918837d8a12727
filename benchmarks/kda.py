"""The KDA operation, ours beside its peers, on this machine's CPUs.

    python benchmarks/kda.py [--long]

Work: [B,T,H,K] = [1,2048,8,64], V = 64, fp32, output, and output and gradients of all inputs: log decays between 0 and
-5 that a sigmoid makes of raw gates, beta after its own, as in a K3 layer. Sides, when they can be imported:
    tokamax       its `xla_chunked` (Python >= 3.12; pip install tokamax)
    fla           the PyTorch form of Flash Linear Attention, `naive_chunk_kda` (pip install flash-linear-attention)
    recurrence    our oracle, token by token (forward only)
Sides take turns in one process. CPU seconds count all threads and hardly change with other load; memory is what the
compiled program says it needs besides inputs and outputs. Then: time per token from 2,048 to 32,768 tokens. `--long`
runs one head over 1,048,576 tokens instead, forward and backward with a state kept for every 8 chunks, and prints the
largest size of the process.
"""

import argparse
import functools
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
from sides import Side, alternate, both, compiled, table

from pallas_kernels.kda import kda

SHAPE = 1, 2_048, 8, 64  # B T H K, V = K
BOUND = -5.0


def arrays(batch: int, length: int, heads: int, width: int) -> tuple[jax.Array, ...]:
    """query, key (both of unit length), value, raw gates, beta logits, gradient of the output."""
    rng = np.random.default_rng(0)
    q, k, v, g, do = (rng.normal(size=(batch, length, heads, width)).astype(np.float32) for _ in range(5))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    beta = rng.normal(size=(batch, length, heads)).astype(np.float32)
    return tuple(jnp.asarray(x) for x in (q, k, v, g, beta, do))


def ours(q, k, v, raw, beta, **options):
    """Our operation behind the gates of a layer: the output."""
    gain = jnp.zeros(q.shape[2])
    return kda(q, k, v, raw, beta, a_log=gain, lower_bound=BOUND, beta_is_logit=True, **options)[0]


def theirs(q, k, v, raw, beta):
    """tokamax's, which 0.0.17 has but does not export; its arrays have heads first."""
    from tokamax._src.ops.kda.api import kimi_delta_attention

    gate = {"a_log": jnp.zeros(q.shape[0]), "lower_bound": BOUND, "use_gate_in_kernel": True}
    return kimi_delta_attention(q, k, v, raw, jax.nn.sigmoid(beta), **gate, implementation="xla_chunked")[0]


def heads_first(x: jax.Array) -> jax.Array:
    """[B,T,H,*] -> [H,B,T,*]."""
    return jnp.moveaxis(x, 2, 0)


def torch_sides(inputs: tuple[jax.Array, ...]) -> tuple[Side, Side]:
    """Forward, and forward and backward, of Flash Linear Attention's PyTorch form.

    Raises:
        ImportError: no torch, or no flash-linear-attention.
    """
    import torch
    from fla.ops.kda.naive import naive_chunk_kda

    q, k, v, raw, beta, d_output = (torch.from_numpy(np.array(x)) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v, raw, beta)]

    def output():
        gates = BOUND * torch.sigmoid(leaves[3]), torch.sigmoid(leaves[4])
        return naive_chunk_kda(*leaves[:3], *gates, chunk_size=64)[0]

    def forward():
        with torch.no_grad():
            return output().numpy()

    def backward():
        for x in leaves:
            x.grad = None
        output().backward(d_output)

    return Side(forward, None), Side(backward, None)


def long() -> None:
    """One head over 1,048,576 tokens; run alone, as the size of the process is one of its figures."""
    length = 2**20
    operation = functools.partial(ours, implementation="xla", state_every=8)
    side = compiled(functools.partial(both, operation), *arrays(1, length, 1, SHAPE[3]))
    wall, cpu = time.perf_counter(), time.process_time()
    results = side.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(results))
    print(
        f"{length:,} tokens of 1 head, forward and backward: {cpu:.1f} CPU s, {wall:.1f} s,"
        f" {side.temporary / 2**20:.0f} MiB temporary,"
        f" largest size of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB,"
        f" {'all finite' if finite else 'NOT finite'}"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="1,048,576 tokens of one head instead")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if options.long:
        long()
        return
    inputs = arrays(*SHAPE)
    operation = functools.partial(ours, implementation="xla")
    forward = {"k3jax": compiled(operation, *inputs[:5])}
    backward = {"k3jax": compiled(functools.partial(both, operation), *inputs)}
    try:
        arranged = tuple(heads_first(x) for x in inputs)
        forward["tokamax"] = compiled(theirs, *arranged[:5])
        backward["tokamax"] = compiled(functools.partial(both, theirs), *arranged)
    except ImportError as error:
        print(f"tokamax is left out: {error}")
    try:
        forward["fla (torch)"], backward["fla (torch)"] = torch_sides(inputs)
    except ImportError as error:
        print(f"fla is left out: {error}")
    forward["recurrence"] = compiled(functools.partial(ours, implementation="reference"), *inputs[:5])
    exact = np.asarray(forward["recurrence"].run(), np.float64)
    for name, side in forward.items():
        output = np.asarray(side.run(), np.float64)
        output = np.moveaxis(output, 0, 2) if name == "tokamax" else output
        print(f"{name}: output within {np.abs(output - exact).max() / np.abs(exact).max():.1e} of the recurrence")
    table(f"forward, {SHAPE}", forward, alternate(forward))
    table(f"forward and backward, {SHAPE}", backward, alternate(backward))

    lengths = 2_048, 8_192, 32_768
    sides = {}
    for length in lengths:
        longer = arrays(SHAPE[0], length, *SHAPE[2:])
        sides[str(length)] = compiled(functools.partial(both, operation), *longer)
    figures = alternate(sides, 3)
    print("forward and backward, microseconds of CPU time per token:")
    for length in lengths:
        print(f"  {length:9,d} tokens  {1e6 * figures[str(length)].cpu / length:7.1f}")


if __name__ == "__main__":
    main()
