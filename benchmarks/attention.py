"""The MLA attention operation, ours beside `jax.nn.dot_product_attention`, on this machine's CPUs.

    python benchmarks/attention.py

Work: 1 row of 4,096 tokens, 8 heads, keys of 48 channels of their own and 16 shared, values of 64, fp32, causal;
output, and output and gradients of all inputs. The peer takes keys with the shared part copied to every head, which its
side does inside. Sides take turns in one process; memory is what the compiled program says it needs besides inputs and
outputs. Then the same with 8 documents in the row: ours skips what no query may look into.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from sides import alternate, both, compiled, table

from pallas_kernels.attention import mla_attention

TOKENS, HEADS, OWN, SHARED, VALUE = 4_096, 8, 48, 16, 64
DOCUMENTS = 8


def arrays() -> tuple[jax.Array, ...]:
    """query, key, key_shared, value, gradient of the output."""
    rng = np.random.default_rng(0)
    shapes = (HEADS, OWN + SHARED), (HEADS, OWN), (SHARED,), (HEADS, VALUE), (HEADS, VALUE)
    return tuple(jnp.asarray(rng.normal(size=(1, TOKENS, *s)).astype(np.float32)) for s in shapes)


def ours(query, key, key_shared, value, segment_ids=None):
    """Our output."""
    return mla_attention(query, key, key_shared, value, segment_ids=segment_ids)[0]


def theirs(query, key, key_shared, value, segment_ids=None):
    """The peer's output."""
    shared = jnp.broadcast_to(key_shared[:, :, None], (*key.shape[:3], SHARED))
    mask = None if segment_ids is None else (segment_ids[:, :, None] == segment_ids[:, None])[:, None]
    keys = jnp.concatenate([key, shared], axis=-1)
    return jax.nn.dot_product_attention(query, keys, value, mask=mask, is_causal=True)


def main() -> None:
    """Measures and prints."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    jax.config.update("jax_platforms", "cpu")
    inputs = arrays()
    documents = jnp.repeat(jnp.arange(1, DOCUMENTS + 1), TOKENS // DOCUMENTS)[None]
    for title, ids in ("one document", None), (f"{DOCUMENTS} documents", documents):
        operations = {"k3jax": ours, "jax.nn": theirs}
        operations = {name: functools.partial(f, segment_ids=ids) for name, f in operations.items()}
        forward = {name: compiled(f, *inputs[:4]) for name, f in operations.items()}
        backward = {name: compiled(functools.partial(both, f), *inputs) for name, f in operations.items()}
        one, two = (jax.tree.leaves(side.run()) for side in backward.values())
        error = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(one, two, strict=True))
        print(f"{title}: outputs and gradients agree within {error:.1e} of each array's maximum")
        table(f"forward, {title}", forward, alternate(forward))
        table(f"forward and backward, {title}", backward, alternate(backward))


if __name__ == "__main__":
    main()
