"""Parameters in parts: whole where a layer runs, and back in parts as gradients. Inside `Layout.per_device`.

    whole(W_p) = concatenation of all W_p over SHARDS      its transpose: dW_p = (sum over SHARDS of dW)_p, in fp32

A layer's parameters are gathered where the layer runs, inside its rematerialised region and its scan step, so that one
layer is whole at a time; the gradient leaves by a reduce-scatter. (Embedding and head are whole from the forward to the
backward pass.) What lies apart over `tensor`, and experts over `expert`, stays apart: layers work on their own part of
these. Invariant: outside `per_device`, and on axes of size 1, all of this is the identity.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax.parallel.mesh import SHARDS, local_sizes, partition_spec, spec_names

# What only shows a gathered parameter in another form; keeping that would keep the parameter.
VIEWS = {"reshape", "convert_element_type", "transpose", "squeeze", "broadcast_in_dim", "slice"}
T = TypeVar("T")


def gathers() -> bool:
    """Whether parameters arrive in parts here."""
    sizes = local_sizes()
    return any(sizes.get(name, 1) > 1 for name in SHARDS)


def keeps(primitive: Any, *_: Any, **params: Any) -> bool:
    """Policy of `jax.checkpoint`: the backward pass keeps all but gathered parameters, and gathers those again."""
    inner = getattr(params.get("call_jaxpr"), "eqns", ())
    return primitive.name not in VIEWS and not any(equation.primitive.name == "all_gather" for equation in inner)


def whole(module: T) -> T:
    """A module (or one nnx.Param) whose parameters are parts, as one whose parameters are whole."""
    if not gathers():
        return module
    if isinstance(module, nnx.Param):
        return module.replace(_whole_value("parameter", module))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    flat = [(path, param.replace(_whole_value(".".join(map(str, path)), param)))
            for path, param in nnx.to_flat_state(params)]  # fmt: skip
    return nnx.merge(graphdef, nnx.from_flat_state(flat), rest)


def _whole_value(path: str, param: nnx.Param) -> Array:
    value, axes = param.get_value(), param.get_metadata("logical_axes")
    if len(axes) == value.ndim + 1:  # one layer of a scanned stack
        axes = axes[1:]
    spec = spec_names(partition_spec(path, (0,) * value.ndim, axes, local_sizes()))
    for at, (axis, names) in enumerate(zip(axes, spec, strict=False)):
        split = tuple(name for name in names if name in SHARDS)
        if split and axis != "experts":
            value = gather(value, at, split)
    return value


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(part: Array, axis: int, names: tuple[str, ...]) -> Array:
    """The parts that lie over mesh axes `names`, concatenated along `axis`."""
    return jax.lax.all_gather(part, names, axis=axis, tiled=True)


def _gather_forward(part: Array, axis: int, names: tuple[str, ...]) -> tuple[Array, None]:
    return gather(part, axis, names), None


def _gather_backward(axis: int, names: tuple[str, ...], _: None, gradient: Array) -> tuple[Array]:
    # Summed in fp32: a bf16 sum over many devices would lose what each of them computed.
    total = jax.lax.psum_scatter(gradient.astype(jnp.float32), names, scatter_dimension=axis, tiled=True)
    return (total.astype(gradient.dtype),)


gather.defvjp(_gather_forward, _gather_backward)
