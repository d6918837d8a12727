"""Where every parameter of a run lives: logical axes, PartitionSpec, bytes on one device.

    bytes on a device = sum over arrays of  size * itemsize / (devices that split it)

Read from the abstract decoder, the abstract train state and an abstract mesh. Invariant: the specs are those of
training (parallel/mesh.py), asked for and not worked out again; every parameter and every array of its optimizer state
is in exactly one row.
"""

import io
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from rich.table import Table

from k3jax.config import RunConfig
from k3jax.model import parameters
from k3jax.optim import make_optimizer
from k3jax.optim.partition import without_layer
from k3jax.parallel import Layout
from k3jax.parallel.mesh import abstract_mesh, in_words
from k3jax.step import abstract_decoder, init_state


class Share(NamedTuple):
    """One kind of parameter: the same name, shape and spec in any number of layers.

    Attributes:
        name: its path, `*` for the place of its layer.
        shape: of one array, without the axis over stacked layers.
        axes: logical axes, as many as `shape`.
        spec: mesh axes over which each is split; None: whole.
        count: arrays of the kind in the model.
        parameter_bytes: of all of them on one device.
        state_bytes: the same with optimizer state, between steps.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    spec: tuple
    count: int
    parameter_bytes: int
    state_bytes: int


def shares(config: RunConfig) -> tuple[AbstractMesh, tuple[Share, ...]]:
    """The mesh, and all kinds in the model's order; mesh.data is 1 where the config leaves it open.

    Raises ConfigError: a size that the mesh does not divide.
    """
    mesh = abstract_mesh(config.mesh)
    variables = parameters.variables(abstract_decoder(config))
    specs = Layout.of(mesh, variables).specs
    optimizer, _, _ = make_optimizer(config, variables)
    state = jax.eval_shape(lambda: init_state(config, optimizer))
    of_state = dict.fromkeys(specs, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        owner = next((key.key for key in path if getattr(key, "key", None) in of_state), None)
        if owner is not None:
            of_state[owner] += _bytes(leaf, specs[owner], mesh)
    found: dict[tuple, tuple[int, int, int]] = {}
    for path, variable in variables.items():
        value, axes, spec = variable.get_value(), variable.get_metadata("logical_axes"), specs[path]
        placed = (*spec, *[None] * (value.ndim - len(spec)))
        stacked = int(axes[:1] == ("layers",))
        count = value.shape[0] if stacked else 1
        kind = without_layer(path), value.shape[stacked:], axes[stacked:], placed[stacked:]
        new = count, _bytes(value, spec, mesh), of_state[path]
        found[kind] = tuple(map(sum, zip(found.get(kind, (0, 0, 0)), new, strict=True)))
    return mesh, tuple(Share(*kind, *numbers) for kind, numbers in found.items())


def _bytes(array: jax.ShapeDtypeStruct, spec: P, mesh: AbstractMesh) -> int:
    """Bytes of an array on one device."""
    names = [name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry)]
    return math.prod(array.shape) * array.dtype.itemsize // math.prod(mesh.shape[name] for name in names)


def named(mesh: AbstractMesh) -> str:
    """The mesh in words."""
    return f"{mesh.size:,} devices ({in_words(mesh)})"


def format_table(found: Iterable[Share]) -> Table:
    """The kinds as a table for rich's `print`, the largest shares last, with a line of totals."""
    found = sorted(found, key=lambda share: share.state_bytes)
    table = Table(box=None, pad_edge=False)
    table.add_column("parameter", no_wrap=True)
    table.add_column("axes")
    for title in ("shape", "arrays", "per device", "with optimizer"):
        table.add_column(title, no_wrap=True, justify="right")
    for share in found:
        axes = ", ".join(axis + _split(at) for axis, at in zip(share.axes, share.spec, strict=True))
        shape, bytes_ = "x".join(map(str, share.shape)), (share.parameter_bytes, share.state_bytes)
        table.add_row(share.name, axes, shape, f"{share.count:,}", *map(_short, bytes_))
    totals = (sum(share[at] for share in found) for at in (5, 6))
    table.add_row("all", "", "", f"{sum(share.count for share in found):,}", *map(_short, totals))
    return table


def _split(names: str | tuple[str, ...] | None) -> str:
    """What an axis is split over, `[fsdp]`; nothing for a whole one."""
    return "" if names is None else f"[{'+'.join((names,) if isinstance(names, str) else names)}]"


def _short(number: int) -> str:
    """Bytes with three digits: 1536 -> 1.5 KiB."""
    power = min(max(number.bit_length() - 1, 0) // 10, 5)
    return f"{float(f'{number / 1024**power:.3g}'):g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def draw(found: Iterable[Share], title: str, largest: int = 25) -> bytes:
    """A PNG: bytes per device of the `largest` kinds, parameters and optimizer state; whole ones stand out."""
    from matplotlib.figure import Figure

    found = sorted(found, key=lambda share: share.state_bytes)
    shown, rest = found[-largest:], found[:-largest]
    labels = [f"{x.name}  {'x'.join(map(str, x.shape))} {''.join(map(_split, x.spec)) or 'whole'}" for x in shown]
    sums = [(x.parameter_bytes, x.state_bytes - x.parameter_bytes, any(x.spec)) for x in shown]
    if rest:
        labels.insert(0, f"{len(rest)} smaller kinds")
        parameter_bytes = sum(x.parameter_bytes for x in rest)
        sums.insert(0, (parameter_bytes, sum(x.state_bytes for x in rest) - parameter_bytes, True))
    weights, states, split = zip(*sums, strict=True)
    unit = 1024 ** min(max(max(map(sum, zip(weights, states, strict=True))).bit_length() - 1, 0) // 10, 3)
    figure = Figure(figsize=(9, 1.2 + 0.26 * len(labels)), dpi=100, layout="constrained")
    axes = figure.subplots()
    colours = ["#1f4e79" if parts else "#c0392b" for parts in split]
    rows, left = range(len(labels)), [x / unit for x in weights]
    axes.barh(rows, left, color=colours, label="parameters (red: whole on every device)")
    axes.barh(rows, [x / unit for x in states], left=left, color="#9dbad5", label="optimizer state")
    axes.set_yticks(rows, labels)
    total = sum(x.state_bytes for x in found)
    axes.set(xlabel=f"{_short(unit).split()[1]} per device", title=f"{title}: {_short(total)} per device")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
