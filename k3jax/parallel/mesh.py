"""The device mesh, and the one table that says where an array lives.

    axis   rows of the batch   parameters, gradients, optimizer state
    data   split               repeated
    fsdp   split               split along one axis: by RULES, or by SPARE for those that RULES leaves whole

A parameter's metadata names its logical axes; the table turns them into a PartitionSpec. Vectors stay whole: gathering
one costs a message and saves nothing. Invariant: a logical parameter's spec follows from its axes and the mesh alone; a
size that does not divide, or two logical axes of one array on one mesh axis, is an error with names.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config import ConfigError, MeshConfig

AXES = ("data", "fsdp")
ROWS = ("data", "fsdp")  # the axes whose devices hold different rows
RULES = {"batch": ROWS, "embed": "fsdp", "expert_mlp": "fsdp"}
# What `fsdp` splits where RULES put nothing on it: the low-rank kernels, which have neither of its axes.
SPARE = ("q_lora", "kv_lora", "gate_rank")


def make_mesh(config: MeshConfig, rows: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a run over `devices` (all, by default). `rows` is the smallest batch that must divide over it.

    Raises ConfigError: the axes do not multiply to the number of devices, or the rows cannot be split.
    """
    devices = jax.devices() if devices is None else devices
    data = config.data if config.data is not None else max(len(devices) // config.fsdp, 1)
    if data * config.fsdp != len(devices):
        product = f"mesh.data x mesh.fsdp = {data} x {config.fsdp} = {data * config.fsdp}"
        raise ConfigError(f"{product} is not the number of devices, {len(devices)}")
    if rows % len(devices):
        raise ConfigError(
            f"data.batch_rows / train.accumulate = {rows} rows cannot be split over "
            f"mesh.data x mesh.fsdp = {data} x {config.fsdp} devices"
        )
    return jax.make_mesh((data, config.fsdp), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def partition_spec(
    path: str,
    shape: Sequence[int],
    logical_axes: Sequence[str],
    sizes: Mapping[str, int],
    rules: Mapping[str, Any] = RULES,
) -> P:
    """The spec of one parameter: `shape` and `logical_axes` as in its metadata, `sizes` of the mesh's axes by name.

    Raises ConfigError naming `path` and the axes.
    """
    if len(shape) != len(logical_axes):
        raise ConfigError(f"{path}: {len(shape)} axes are called {', '.join(logical_axes)}")
    if sum(axis not in ("layers", "blocks") for axis in logical_axes) < 2:
        return P()
    placed = [rules.get(axis) for axis in logical_axes]
    if "fsdp" not in placed:
        spare = next((i for i, axis in enumerate(logical_axes) if axis in SPARE and placed[i] is None), None)
        if spare is not None:
            placed[spare] = "fsdp"
    taken: dict[str, str] = {}
    for size, axis, mesh_axes in zip(shape, logical_axes, placed, strict=True):
        names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()
        for name in names:
            if name in taken:
                raise ConfigError(f"{path}: {taken[name]} and {axis} cannot both be split over mesh axis {name}")
            taken[name] = axis
        parts = math.prod(sizes.get(name, 1) for name in names)
        if size % parts:
            split = " x ".join(f"mesh.{name}" for name in names)
            raise ConfigError(f"{path}: {axis} of {size} cannot be split over {split} = {parts}")
    return P(*(None if name is None or sizes.get(name, 1) == 1 else name for name in placed))


@dataclass(frozen=True)
class Layout:
    """A mesh and the specs of all parameters on it. On one device nothing is split."""

    mesh: Mesh
    specs: Mapping[str, P] = field(default_factory=dict)  # path -> spec

    @classmethod
    def of(cls, mesh: Mesh, parameters: Mapping[str, Any]) -> "Layout":
        """parameters: path -> nnx.Param with `logical_axes`, abstract or not. Raises ConfigError."""
        specs = {
            path: partition_spec(path, variable.get_value().shape, variable.get_metadata("logical_axes"), mesh.shape)
            for path, variable in parameters.items()
        }
        return cls(mesh, specs)

    @property
    def alone(self) -> bool:
        """Whether there is one device, so that nothing is split."""
        return self.mesh.size == 1

    @property
    def rows(self) -> NamedSharding:
        """Of arrays [B, ...]: rows split over all axes that hold different rows."""
        return NamedSharding(self.mesh, P(ROWS))

    def shardings(self, tree: Any) -> Any:
        """The sharding of each leaf of a train state: a parameter's, wherever its path is a key; else repeated."""

        def of(path, leaf) -> NamedSharding:
            names = [getattr(key, "key", None) for key in path]
            return NamedSharding(self.mesh, next((self.specs[n] for n in names if n in self.specs), P()))

        return jax.tree_util.tree_map_with_path(of, tree)

    def place(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """A batch of host arrays [B, T] on its devices."""
        return {name: jax.device_put(array, self.rows) for name, array in batch.items()}

    def batch_shapes(self, rows: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What `place` gives for a batch of `k3jax.data`, as shapes: arrays [rows, seq_len]."""
        kinds = {"tokens": "int32", "targets": "int32", "loss_mask": "bool", "segment_ids": "int32"}
        return {n: jax.ShapeDtypeStruct((rows, seq_len), kind, sharding=self.rows) for n, kind in kinds.items()}

    def per_device(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`function` run by every device on its own part: shard_map over the whole mesh."""
        if self.alone:
            return function
        # The functions sum over devices themselves: replication is their contract, not something to infer.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def spread(self, steps: Callable[[jax.Array], jax.Array], stack: jax.Array) -> jax.Array:
        """steps(stack) of a stack of matrices [N, in, out], whole matrices spread over as many devices as divide N.

        Newton-Schulz needs whole matrices, and every device would otherwise work on all of them. The way is two hops,
        an exchange over fsdp and a slice over data, as XLA finds no way of one hop and would make everything whole.
        """
        if self.alone:
            return steps(stack)
        hops = [("fsdp",)] if stack.shape[0] % self.mesh.shape["fsdp"] == 0 else [()]
        if stack.shape[0] % math.prod(self.mesh.shape[name] for name in (*hops[0], "data")) == 0:
            hops.append((*hops[0], "data"))

        def placed(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(axes or None, None, None)))

        for axes in hops:
            stack = placed(stack, axes)
        stack = steps(stack)
        for axes in reversed(hops):
            stack = placed(stack, axes)
        return stack
