"""Memory policies: save everything a sub-layer's backward needs, or only its inputs and compute the rest again.

Invariant: a policy changes bytes and time, never a number: outputs, gradients and statistics are those of `save_all`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from k3jax.config import MemoryConfig


def checkpointed(
    memory: MemoryConfig,
    method: Callable,
    module: nnx.Module,
    *args: Any,
    scanned: bool,
    never_saved: Sequence[str] = (),
) -> Any:
    """method(module, *args) under the policy. `scanned` says that the call stands in a scan's body.

    never_saved: names of `checkpoint_name` that even `save_all` computes again. Arrays in args are what the backward
    pass keeps under `recompute_all`; Python values are constants.
    """
    if memory.policy == "save_all" and not never_saved:
        return method(module, *args)
    names = jax.checkpoint_policies.save_anything_except_these_names(*never_saved)
    policy = names if memory.policy == "save_all" else None
    graphdef, state = nnx.split(module)
    leaves, structure = jax.tree.flatten(args)
    dynamic = [at for at, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    # A scan's body is one computation anyway; elsewhere XLA must be kept from merging both forward passes into one.
    @functools.partial(jax.checkpoint, prevent_cse=not scanned, policy=policy)
    def run(state, arrays):
        merged = list(leaves)
        for at, array in zip(dynamic, arrays, strict=True):
            merged[at] = array
        return method(nnx.merge(graphdef, state), *jax.tree.unflatten(structure, merged))

    return run(state, [leaves[at] for at in dynamic])
