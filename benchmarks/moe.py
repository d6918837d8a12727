"""The experts of an MoE layer on this machine's CPUs: time, memory, and how evenly balancing rules load them.

    python benchmarks/moe.py [--picture=balancing.png]

1. Time: 4,096 tokens, latent width 256, 64 experts of inner width 256, 4 chosen of each token at random, fp32, output,
   and output and gradients of tokens, weights and matrices. Beside ours: `dense`, the same number of rows, sorted
   already, through one gated MLP with the same activation, what a layer with free dispatch would cost if it kept its
   activations; and `ragged`, the same layer by `lax.ragged_dot` (alternating with ours once more, in fewer turns).
2. Memory of the compiled layer with gradients for 16, 64 and 896 experts, beside the bytes of all arguments and results
   and of one array of dispatched rows.
3. Balancing: the largest load of an expert over the mean, less one, at every step: for scores that never change
   (Quantile Balancing alone), then for a router whose experts drift up and down, with Quantile Balancing and with the
   sign rule at two rates. `--picture` draws the drifting case.
"""

import argparse
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from sides import alternate, both, compiled, table

from k3jax.model import router
from k3jax.model.common import situ
from pallas_kernels.moe import expert_layer

TOKENS, LATENT, INNER, EXPERTS, TOP_K = 4_096, 256, 256, 64, 4
MEMORY = 16, 64, 896
STEPS, DRIFT = 60, 0.05  # DRIFT: of each expert's logit from step to step, standard deviation
RULES = {"quantile": None, "sign, rate 1e-3": 1e-3, "sign, rate 1e-2": 1e-2}
ACTIVATION = functools.partial(situ, beta=4.0, linear_beta=25.0)


def arrays(experts: int = EXPERTS) -> tuple[jax.Array, ...]:
    """Ids, tokens, weights, w1, w3, w2, gradient of the output."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((TOKENS, experts)), axis=1)[:, :TOP_K].astype(np.int32)
    shapes = (TOKENS, LATENT), (TOKENS, TOP_K), *[(experts, LATENT, INNER)] * 2, (experts, INNER, LATENT)
    rest = (rng.normal(size=s).astype(np.float32) / math.sqrt(s[-1]) for s in (*shapes, (TOKENS, LATENT)))
    return tuple(map(jnp.asarray, (ids, *rest)))


def layer(ids, x, weights, w1, w3, w2, implementation=None):
    """Our output."""
    return expert_layer(x, ids, weights, w1, w3, w2, activation=ACTIVATION, implementation=implementation)


def dense(x, w1, w3, w2):
    """One gated MLP."""
    return ACTIVATION(x @ w1, x @ w3) @ w2


def times() -> None:
    """Part 1."""
    ids, *inputs, d_output = arrays()
    rows, d_rows = (jnp.tile(x, (TOP_K, 1)) for x in (inputs[0], d_output))
    single = rows, *(w[0] for w in inputs[2:])
    operation = functools.partial(layer, ids)
    forward = {"k3jax": compiled(operation, *inputs), "dense": compiled(dense, *single)}
    backward = {
        "k3jax": compiled(functools.partial(both, operation), *inputs, d_output),
        "dense": compiled(functools.partial(both, dense), *single, d_rows),
    }
    table("forward", forward, alternate(forward))
    figures = alternate(backward)
    table("forward and backward", backward, figures)
    ratio = figures["k3jax"].wall / figures["dense"].wall, figures["k3jax"].cpu / figures["dense"].cpu
    print(f"  ours / dense: {ratio[0]:.2f} x the time, {ratio[1]:.2f} x the CPU time")
    ragged = functools.partial(layer, ids, implementation="ragged")
    sides = {"k3jax": backward["k3jax"], "ragged": compiled(functools.partial(both, ragged), *inputs, d_output)}
    results = [jax.tree.leaves(side.run()) for side in sides.values()]
    error = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(*results, strict=True))
    print(f"outputs and gradients of k3jax and ragged agree within {error:.1e} of each array's maximum")
    table("forward and backward", sides, alternate(sides, 1))


def memory() -> None:
    """Part 2."""
    print("memory, forward and backward:")
    for experts in MEMORY:
        ids, *inputs = (
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(functools.partial(arrays, experts))
        )
        program = jax.jit(lambda ids, *rest: both(functools.partial(layer, ids), *rest)).lower(ids, *inputs).compile()
        used = program.memory_analysis()
        outside = used.argument_size_in_bytes + used.output_size_in_bytes
        analytic = outside + 4 * TOKENS * TOP_K * LATENT
        total = outside + used.temp_size_in_bytes
        of_all, temporary = total / 2**20, used.temp_size_in_bytes / 2**20
        print(
            f"  {experts:4d} experts: {of_all:8.1f} MiB, of them temporary {temporary:6.1f};"
            f" {total / analytic:.2f} x the analytic {analytic / 2**20:8.1f} MiB"
        )


@functools.partial(jax.jit, static_argnames="rate")
def balance(scores: jax.Array, bias: jax.Array, rate: float | None) -> tuple[jax.Array, jax.Array]:
    """Overload of the worst expert under a bias, and the next bias: Quantile Balancing, or the sign rule of a rate."""
    chosen, cutoff = router.select(scores, bias, TOP_K)
    load = router.load(chosen, EXPERTS)
    if rate is None:
        counts = router.histogram(scores, cutoff, bias)
        bias = router.centred(router.quantile_estimate(counts[None], bias[None], jnp.int32(len(scores)), TOP_K)[0])
    else:
        bias = router.sign_update(bias[None], load[None], rate)[0]
    return load.max() / load.mean() - 1, bias


def frozen() -> Iterator[np.ndarray]:
    """Logits that never change, some experts far more wanted than others."""
    logits = np.random.default_rng(3).normal(size=(TOKENS, EXPERTS)) + np.linspace(2, -2, EXPERTS)
    while True:
        yield logits


def drifting() -> Iterator[np.ndarray]:
    """New tokens at every step, and experts whose logits go for a random walk."""
    rng = np.random.default_rng(3)
    offset = np.linspace(2, -2, EXPERTS)
    while True:
        yield rng.normal(size=(TOKENS, EXPERTS)) + offset
        offset = offset + DRIFT * rng.normal(size=EXPERTS)


def overloads(logits: Iterator[np.ndarray], rate: float | None, steps: int) -> list[float]:
    """The worst expert's overload at each step."""
    bias, found = jnp.zeros(EXPERTS), []
    for _, of_step in zip(range(steps), logits, strict=False):
        overload, bias = balance(jnp.asarray(1 / (1 + np.exp(-of_step)), jnp.float32), bias, rate)
        found.append(float(overload))
    return found


def balancing(picture: str | None) -> None:
    """Part 3."""
    print("balancing, largest load / mean - 1:")
    print("  frozen scores, quantile:", " -> ".join(f"{x:.3f}" for x in overloads(frozen(), None, 5)))
    found = {name: overloads(drifting(), rate, STEPS) for name, rate in RULES.items()}
    for name, values in found.items():
        late = values[5:]
        print(
            f"  drifting, {name:16s} first {values[0]:.2f}, from the sixth step on {min(late):.2f} to {max(late):.2f}"
        )
    signs = [values for name, values in found.items() if name != "quantile"]
    below = sum(q < min(s) for q, *s in zip(found["quantile"][5:], *(x[5:] for x in signs), strict=True))
    print(f"  quantile is below both sign rules at {below} of the {STEPS - 5} steps from the sixth on")
    if picture:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for name, values in found.items():
            axes.plot(range(1, STEPS + 1), values, label=name)
        axes.set(yscale="log", xlabel="step", ylabel="largest load / mean - 1", title="Balancing a drifting router")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(picture, dpi=80)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", metavar="PNG", help="where to draw the drifting case")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    times()
    memory()
    balancing(options.picture)


if __name__ == "__main__":
    main()
