"""Sums and maxima over the devices that hold different tokens. Inside `Layout.per_device`.

    total(x_p) = sum of x_p over TOKENS;    largest(x_p) = their maximum

Invariant: `tensor`, whose devices hold the same tokens, is no part of any of these; so each token counts once. Outside
`per_device`, and on axes of size 1, all are the identity.
"""

from collections.abc import Mapping
from typing import TypeVar

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from k3jax.parallel.mesh import TOKENS, local_sizes, spec_names

T = TypeVar("T")


def _axes(done: frozenset[str] = frozenset()) -> tuple[str, ...]:
    sizes = local_sizes()
    return tuple(name for name in TOKENS if sizes.get(name, 1) > 1 and name not in done)


def total(tree: T) -> T:
    """Sum of every leaf."""
    axes = _axes()
    return jax.lax.psum(tree, axes) if axes else tree


def largest(x: Array) -> Array:
    """Maximum."""
    axes = _axes()
    return jax.lax.pmax(x, axes) if axes else x


def total_gradients(gradients: dict[str, Array], specs: Mapping[str, P]) -> dict[str, Array]:
    """Each device's gradients of its own tokens -> gradients of all tokens; `specs` of the parameters by path.

    Those of split parameters were summed over the axes that split them when they left by the reduce-scatter; those of
    an expert saw the tokens of all devices along `expert`.
    """

    def one(path: str, gradient: Array) -> Array:
        axes = _axes(frozenset(name for names in spec_names(specs[path]) for name in names))
        return jax.lax.psum(gradient, axes) if axes else gradient

    return {path: one(path, gradient) for path, gradient in gradients.items()}
