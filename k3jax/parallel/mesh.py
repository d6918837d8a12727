"""The device mesh, and the one table that says where an array lives.

    axis     tokens of the batch         parameters, gradients, optimizer state
    data     rows are split              repeated
    fsdp     rows are split              split along one axis, gathered where a layer runs
    expert   rows are split              whole experts apart; the rest as over fsdp
    context  rows are cut into pieces    as over fsdp
    tensor   the same on each            heads, inner width of MLPs and experts, vocabulary apart

Devices that hold different tokens sum their gradients; those along `tensor` share the work on the same tokens. Tensor
comes last: its devices are neighbours, which talk in every sub-layer.

A parameter's metadata names its logical axes; the table turns them into a PartitionSpec. Vectors are split over tensor
at most: gathering one costs a message and saves nothing. Invariant: a logical parameter's spec follows from its axes
and the mesh alone; a size that does not divide, or two logical axes of one array on one mesh axis, is an error with
names.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config import ConfigError, MeshConfig
from k3jax.parallel import matrices

AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")  # the axes whose devices hold different rows
TOKENS = (*ROWS, "context")  # and different tokens
SHARDS = ("fsdp", "expert", "context")  # those of TOKENS over which parameters lie in parts
BATCH = P(ROWS, "context")  # of arrays [B,T]
RULES = {
    "embed": SHARDS,
    "experts": "expert",  # of their kernels; the router needs all of its outputs
    "expert_mlp": ("tensor", "fsdp", "context"),
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}
# What SHARDS split where RULES put none of them: the low-rank kernels, which have neither embed nor expert_mlp.
SPARE = {"q_lora": SHARDS, "kv_lora": SHARDS, "gate_rank": "fsdp"}


def make_mesh(
    config: MeshConfig, rows: int, devices: Sequence[jax.Device] | None = None, *, seq_len: int | None = None
) -> Mesh:
    """The mesh of a run over `devices` (all, by default). `rows` is the smallest batch that must divide over it.

    Raises ConfigError: the axes do not multiply to the number of devices, or the rows, or tokens of a row, cannot be
    split.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(config, len(devices))
    if math.prod(sizes.values()) != len(devices):
        product = f"{_product(sizes)} = {math.prod(sizes.values())}"
        raise ConfigError(f"{product} is not the number of devices, {len(devices)}")
    if rows % math.prod(sizes[name] for name in ROWS):
        raise ConfigError(
            f"data.batch_rows / train.accumulate = {rows} rows cannot be split over "
            f"{_product({name: sizes[name] for name in ROWS})} devices"
        )
    if seq_len is not None and seq_len % sizes["context"]:
        raise ConfigError(f"data.seq_len = {seq_len} cannot be split over mesh.context = {sizes['context']} devices")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def abstract_mesh(config: MeshConfig) -> AbstractMesh:
    """The mesh of devices that need not be there; mesh.data is 1 where it is left open."""
    sizes = axis_sizes(config, 1)
    return AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """Devices along each axis; `data` takes what the others leave of `devices`, where the config leaves it open."""
    sizes = {name: getattr(config, name) for name in AXES}
    if sizes["data"] is None:
        sizes["data"] = max(devices // math.prod(sizes[name] for name in AXES[1:]), 1)
    return sizes


def in_words(mesh: Mesh | AbstractMesh) -> str:
    """The axes that a reader wants to see: `data 2 x fsdp 4`."""
    return " x ".join(f"{name} {size}" for name, size in _shown(mesh.shape).items())


def _shown(sizes: Mapping[str, int]) -> dict[str, int]:
    """data, fsdp and the axes that are in use."""
    return {name: size for name, size in sizes.items() if size > 1 or name in ("data", "fsdp")}


def _product(sizes: Mapping[str, int]) -> str:
    """The sizes shown, as a product: `mesh.data x mesh.fsdp = 2 x 4`."""
    shown = _shown(sizes)
    names, numbers = " x ".join(f"mesh.{name}" for name in shown), " x ".join(map(str, shown.values()))
    return f"{names} = {numbers}"


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
    placed = [_names(rules.get(axis)) for axis in logical_axes]
    if "experts" in logical_axes and "expert_mlp" not in logical_axes:
        placed[logical_axes.index("experts")] = ()
    vector = sum(axis not in ("layers", "blocks") for axis in logical_axes) < 2
    if vector:
        placed = [tuple(name for name in names if name not in SHARDS) for names in placed]
    elif not any(name in SHARDS for names in placed for name in names):
        spare = next((i for i, axis in enumerate(logical_axes) if axis in SPARE and not placed[i]), None)
        if spare is not None:
            placed[spare] = _names(SPARE[logical_axes[spare]])
    placed = [tuple(name for name in names if sizes.get(name, 1) > 1) for names in placed]
    taken: dict[str, str] = {}
    for size, axis, names in zip(shape, logical_axes, placed, strict=True):
        for name in names:
            if name in taken:
                raise ConfigError(f"{path}: {taken[name]} and {axis} cannot both be split over mesh axis {name}")
            taken[name] = axis
        parts = math.prod(sizes[name] for name in names)
        if size % parts:
            split = " x ".join(f"mesh.{name}" for name in names)
            raise ConfigError(f"{path}: {axis} of {size} cannot be split over {split} = {parts}")
    if vector and not any(placed):
        return P()
    return P(*(names[0] if len(names) == 1 else names or None for names in placed))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """A rule, or an entry of a spec, as a tuple of mesh axes."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def spec_names(spec: P) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each array axis of a spec."""
    return tuple(map(_names, spec))


def local_sizes() -> dict[str, int]:
    """Sizes of the mesh axes that the calling code runs on one device of; empty outside `Layout.per_device`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if kind == AxisType.Manual}


def local_size(axis: str) -> int:
    """Devices along one mesh axis, as `local_sizes`; 1 outside."""
    return local_sizes().get(axis, 1)


def from_host(array: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """A whole array that every process has, on all their devices; each process places its own parts."""
    return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)


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
    def batch(self) -> NamedSharding:
        """Of arrays [B,T]: rows split over all axes that hold different rows, and cut into pieces over context."""
        return NamedSharding(self.mesh, BATCH)

    @property
    def repeated(self) -> NamedSharding:
        """Of what every device holds whole, as numbers that are read."""
        return NamedSharding(self.mesh, P())

    def shardings(self, tree: Any) -> Any:
        """The sharding of each leaf of a train state: a parameter's, wherever its path is a key; else repeated."""

        def of(path, leaf) -> NamedSharding:
            names = [getattr(key, "key", None) for key in path]
            return NamedSharding(self.mesh, next((self.specs[n] for n in names if n in self.specs), P()))

        return jax.tree_util.tree_map_with_path(of, tree)

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """A batch of host arrays [B,T] on its devices. Each process gives the whole batch and places its own parts."""
        return {name: from_host(array, self.batch) for name, array in batch.items()}

    def batch_shapes(self, rows: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What `place` gives for a batch of `k3jax.data`, as shapes: arrays [rows, seq_len]."""
        kinds = {"tokens": "int32", "targets": "int32", "loss_mask": "bool", "segment_ids": "int32"}
        return {n: jax.ShapeDtypeStruct((rows, seq_len), kind, sharding=self.batch) for n, kind in kinds.items()}

    def per_device(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`function` run by every device on its own part: shard_map over the whole mesh."""
        if self.alone:
            return function
        # The functions sum over devices themselves: replication is their contract, not something to infer.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    @property
    def spread(self) -> Callable | None:
        """How Muon works on whole matrices, `optim.muon.Spread`; None on one device, where nothing else is needed."""
        return None if self.alone else self._spread

    def _spread(
        self,
        work: Callable[[jax.Array, matrices.Exchange], jax.Array],
        arrays: Mapping[str, jax.Array],
        matrix_axes: Mapping[str, matrices.MatrixAxes],
    ) -> dict[str, jax.Array]:
        specs = {path: self.specs[path] for path in arrays}
        names = {path: spec_names(spec) for path, spec in specs.items()}
        stacks = matrices.stacks({path: x.shape for path, x in arrays.items()}, matrix_axes, names, self.mesh.shape)
        run = self.per_device(functools.partial(matrices.on_stacks, work, stacks), (specs,), specs)
        return run(dict(arrays))
