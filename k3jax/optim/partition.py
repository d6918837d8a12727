"""Which parameter goes where: Muon and on which blocks, or AdamW, and its weight decay.

Every parameter carries metadata: `matrix_axes` (batch, in, out; None: AdamW) and whether it decays. `TABLE` says by
name what that metadata must be (k3.md 4.2, 4.3; that decay gates, norms and pseudo-queries do not decay is our choice).

Invariant: a parameter that the table does not name, or whose metadata says otherwise, stops the run. Nothing lands in
an optimizer by default, and the split into blocks follows from the parameter alone, never from a shard of it.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import optax
from jax import Array
from rich.table import Table

from k3jax.optim.muon import Spread, block_shape, muon, rate_at
from k3jax.parallel.matrices import MatrixAxes


@dataclass(frozen=True)
class ParamInfo:
    """A parameter's shape and metadata, as the model gives them."""

    shape: tuple[int, ...]
    logical_axes: tuple[str, ...]
    matrix_axes: MatrixAxes | None
    decay: bool


@dataclass(frozen=True)
class Row:
    """Where one parameter goes: `count` blocks (Muon: matrices [in, out]; AdamW: the arrays of stacked layers)."""

    path: str
    shape: tuple[int, ...]
    group: str  # "muon" | "adamw" | "frozen"
    matrix_axes: MatrixAxes | None
    count: int
    block: tuple[int, ...]
    weight_decay: float
    split: str  # what Muon's matrices are counted by: "per head" | "per expert" | "whole"; others: ""
    rate_scale: float = 1.0  # factor on the learning rate, and so on the decay

    def freeze(self) -> "Row":
        """The row of the same parameter when nothing may change it."""
        return dataclasses.replace(self, group="frozen", weight_decay=0.0, split="", rate_scale=1.0)


@dataclass(frozen=True)
class Kind:
    """What the table says of some names, which are the ends of paths; `*` is any text.

    split: logical axis that counts Muon's matrices, besides `layers`, in those parameters that have it.
    """

    group: str
    names: tuple[str, ...]
    decay: bool = True
    split: str | None = None


ADAM = 0.9, 0.95, 1e-8  # factors of the two moments, eps

TABLE = (
    Kind("muon", ("q", "k", "v", "q_b", "k_b", "v_b"), split="heads"),
    Kind("muon", ("o", "g", "g_a", "g_b", "f_a", "f_b", "b", "q_a", "kv_a")),
    Kind("muon", ("router.weight", "latent_down", "latent_up")),
    Kind("muon", ("w1", "w2", "w3"), split="experts"),  # of routed experts; dense and shared ones have no such axis
    Kind("adamw", ("embed", "lm_head")),
    Kind("adamw", ("q_conv", "k_conv", "v_conv")),
    Kind("adamw", ("a_log", "dt_bias"), decay=False),
    Kind("adamw", ("*norm.weight",), decay=False),
    Kind("adamw", ("query",), decay=False),  # the pseudo-queries of Attention Residuals
)


def partition(parameters: Mapping[str, ParamInfo], weight_decay: float = 0.1) -> tuple[Row, ...]:
    """One row for each parameter, in the order given. weight_decay is that of the parameters that decay.

    Raises:
        ValueError: parameters that the table does not name, or whose metadata contradicts it: all of them by path.
    """
    rows, unnamed, contradictions = [], [], []
    for path, info in parameters.items():
        kind = next((k for k in TABLE if any(fnmatchcase(f".{path}", f"*.{name}") for name in k.names)), None)
        if kind is None:
            unnamed.append(path)
        elif problem := _contradiction(info, kind):
            contradictions.append(f"{path}: {problem}")
        else:
            rows.append(_row(path, info, kind, weight_decay))
    problems = [f"the optimizer table does not name {', '.join(unnamed)}"] if unnamed else []
    if problems or contradictions:
        raise ValueError("; ".join(problems + contradictions))
    return tuple(rows)


def _contradiction(info: ParamInfo, kind: Kind) -> str | None:
    if info.decay != kind.decay:
        return f"weight_decay is {info.decay}, the table says {kind.decay}"
    if (info.matrix_axes is not None) != (kind.group == "muon"):
        return f"matrix_axes is {info.matrix_axes}, the table says {kind.group}"
    if info.matrix_axes is not None:
        counted = tuple(i for i, name in enumerate(info.logical_axes) if name in ("layers", kind.split))
        if tuple(sorted(info.matrix_axes[0])) != counted:
            return f"matrix_axes {info.matrix_axes} of {info.logical_axes}, the table counts over {counted}"
    return None


def _row(path: str, info: ParamInfo, kind: Kind, weight_decay: float) -> Row:
    split = ""
    if info.matrix_axes is not None:
        count, *block = block_shape(info.shape, info.matrix_axes, path)
        split = f"per {kind.split.removesuffix('s')}" if kind.split in info.logical_axes else "whole"
    else:
        stacked = info.logical_axes[:1] == ("layers",)
        count, block = (info.shape[0], info.shape[1:]) if stacked else (1, info.shape)
    decay = weight_decay if kind.decay else 0.0
    return Row(path, info.shape, kind.group, info.matrix_axes, count, tuple(block), decay, split)


def format_table(rows: Iterable[Row]) -> Table:
    """The rows as a table for rich's `print`, one line for each kind of parameter, layers taken together.

    Every model of configs/k3.py fits into 80 columns: hence a total of three digits (the exact one is blocks x block).
    """
    lines: dict[tuple, int] = {}
    for row in rows:
        name = without_layer(row.path)
        rate = "" if row.rate_scale == 1 else f" x{row.rate_scale:g}"
        line = name, f"{row.group} {row.split}".rstrip() + rate, f"{row.weight_decay:g}", row.block
        lines[line] = lines.get(line, 0) + row.count
    table = Table(box=None, pad_edge=False)
    table.add_column("parameter", no_wrap=True)
    table.add_column("optimizer")  # a scaled rate may take a second line
    for title in ("decay", "blocks", "block", "total"):
        table.add_column(title, no_wrap=True, justify="right")
    for (*texts, block), count in lines.items():
        table.add_row(*texts, str(count), "x".join(map(str, block)), _short(count * math.prod(block)))
    return table


def without_layer(path: str) -> str:
    """A parameter's path with `*` for the place of its layer: the same for all layers of a kind."""
    return re.sub(r"^blocks\.\d+\.(head\.\d+|tail\.\d+|groups\.\w+)\.", "*.", path)


def _short(number: int) -> str:
    """Three digits and a power of a thousand: 1234567 -> 1.23 M."""
    power = (len(str(number)) - 1) // 3
    return f"{float(f'{number / 1000**power:.3g}'):g} {' KMGT'[power]}".rstrip()


def build(
    rows: Iterable[Row],
    *,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.95,
    spread: Spread | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon and AdamW under one learning rate over the flat dict of all parameters that the rows name.

    Frozen ones may be in the dicts of parameters and gradients or not: they have no state and get no update. The
    update takes `step=`, at which the learning rate is read (without it: the number of updates done, which falls
    behind the run's step when one is skipped). A row's rate_scale multiplies its update. spread: as in
    `muon.muon`.

    AdamW (k3.md 4.1):  p <- (1 - lr wd) p - lr m' / (sqrt(v') + 1e-8),  m' and v' the bias-corrected moments with
    factors 0.9 and 0.95. The state is {"muon": MuonState, "adamw": optax.ScaleByAdamState}, each over a dict of its
    own paths.
    """
    rows = tuple(rows)
    frozen = {row.path for row in rows if row.group == "frozen"}
    decay = {row.path: row.weight_decay for row in rows if row.path not in frozen}
    scales = {row.path: row.rate_scale for row in rows if row.rate_scale != 1}
    axes = {row.path: row.matrix_axes for row in rows if row.group == "muon"}
    parts = {
        "muon": muon(learning_rate, momentum=momentum, weight_decay=decay, batch_axes=axes, spread=spread),
        "adamw": _adamw(learning_rate, decay),
    }

    def split(tree: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
        return {group: {row.path: tree[row.path] for row in rows if row.group == group} for group in parts}

    def init(params):
        if different := sorted((params.keys() ^ decay.keys()) - frozen):
            raise ValueError(f"optimizer: rows and parameters differ in {', '.join(different)}")
        return {group: parts[group].init(part) for group, part in split(params).items()}

    def update(gradients, state, params, *, step: Array | None = None, **_):
        updates, new = {}, {}
        mine, held = split(gradients), split(params)
        for group, part in parts.items():
            done, new[group] = part.update(mine[group], state[group], held[group], step=step)
            updates |= done
        updates |= {path: scale * updates[path] for path, scale in scales.items()}
        return {path: updates[path] for path in gradients if path not in frozen}, new

    return optax.GradientTransformationExtraArgs(init, update)


def _adamw(learning_rate, decay) -> optax.GradientTransformationExtraArgs:
    """optax's Adam; decay by path and the rate in one place, which keeps the state to count and moments."""
    adam = optax.scale_by_adam(*ADAM)

    def update(gradients, state, params, *, step: Array | None = None):
        rate = -rate_at(learning_rate, state.count, step)
        directions, new = adam.update(gradients, state)
        return {
            path: rate * (direction + decay[path] * params[path] if decay[path] else direction)
            for path, direction in directions.items()
        }, new

    return optax.GradientTransformationExtraArgs(adam.init, update)
