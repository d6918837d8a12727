"""Memory policies: save everything a sub-layer's backward needs, or only its inputs and compute the rest again.

Invariant: a policy changes bytes and time, never a number: outputs, gradients and statistics are those of `save_all`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from k3jax.config import MemoryConfig


def rematerialised(
    memory: MemoryConfig,
    method: Callable,
    module: nnx.Module,
    *args: Any,
    scanned: bool,
    keeps: Callable[..., bool] | None = None,
) -> Any:
    """method(module, *args) under the policy. `scanned` says that the call stands in a scan's body.

    keeps: policy of `jax.checkpoint` that says what even `save_all` must not keep; None: it keeps all. Arrays in args
    are what the backward pass keeps under `recompute_all`; Python values are constants.
    """
    if memory.policy == "save_all" and keeps is None:
        return method(module, *args)
    policy = keeps if memory.policy == "save_all" else None
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
