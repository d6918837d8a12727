"""Collectives over the axes that split rows, for code that runs inside `Layout.per_device`.

    whole(W_p) = concatenation of all W_p over fsdp        its transpose: dW_p = (sum over fsdp of dW)_p, in fp32
    total(x_p) = sum of x_p over data and fsdp

A layer's parameters are gathered where the layer runs, inside its rematerialised region and its scan step, so that one
layer is whole at a time; the gradient leaves by a reduce-scatter. (Embedding and head are whole from the forward to the
backward pass.) Invariant: outside `per_device`, and on axes of size
1, all of these are the identity.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import AxisType

from k3jax.parallel.mesh import ROWS, partition_spec

# What only shows a gathered parameter in another form; keeping that would keep the parameter.
VIEWS = {"reshape", "convert_element_type", "transpose", "squeeze", "broadcast_in_dim", "slice"}
T = TypeVar("T")


def _sizes() -> dict[str, int]:
    """Sizes of the mesh axes that this code runs on one device of."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if kind == AxisType.Manual}


def gathers() -> bool:
    """Whether parameters arrive in parts here."""
    return _sizes().get("fsdp", 1) > 1


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
    spec = partition_spec(path, (0,) * value.ndim, axes, _sizes())
    split = next((axis for axis, name in enumerate(spec) if name == "fsdp"), None)
    return value if split is None else _gather(value, split)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(part: Array, axis: int) -> Array:
    return jax.lax.all_gather(part, "fsdp", axis=axis, tiled=True)


def _gather_forward(part: Array, axis: int) -> tuple[Array, None]:
    return _gather(part, axis), None


def _gather_backward(axis: int, _: None, gradient: Array) -> tuple[Array]:
    # Summed in fp32: a bf16 sum over many devices would lose what each of them computed.
    total = jax.lax.psum_scatter(gradient.astype(jnp.float32), "fsdp", scatter_dimension=axis, tiled=True)
    return (total.astype(gradient.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def total(tree: T) -> T:
    """Sum over all devices that hold different rows."""
    axes = tuple(name for name in ROWS if name in _sizes())
    return jax.lax.psum(tree, axes) if axes else tree


def largest(x: Array) -> Array:
    """Maximum over all devices that hold different rows."""
    axes = tuple(name for name in ROWS if name in _sizes())
    return jax.lax.pmax(x, axes) if axes else x


def total_gradients(gradients: dict[str, Array], specs: dict[str, Any]) -> dict[str, Array]:
    """Each device's gradients of its own rows -> gradients of all rows; `specs` of the parameters by path.

    Those of split parameters were summed over fsdp when they left by the reduce-scatter.
    """
    sizes = _sizes()
    if not sizes:
        return gradients

    def one(path: str, gradient: Array) -> Array:
        done = {name for entry in specs[path] for name in ((entry,) if isinstance(entry, str) else entry or ())}
        return jax.lax.psum(gradient, tuple(name for name in ROWS if name in sizes and name not in done))

    return {path: one(path, gradient) for path, gradient in gradients.items()}
