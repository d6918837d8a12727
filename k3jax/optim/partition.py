"""Which parameter goes where: Muon and on which blocks, or AdamW, and its weight decay.

Every parameter carries metadata: `matrix_axes` (batch, in, out; None: AdamW) and whether it decays. `TABLE`
says by name what that metadata must be (k3.md 4.2, 4.3; that gates, norms and pseudo-queries do not decay is
our choice).

Invariant: a parameter that the table does not name, or whose metadata says otherwise, stops the run. Nothing
lands in an optimizer by default, and the split into blocks follows from the parameter alone, never from a
shard of it.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import optax
from jax import Array
from rich.table import Table

from k3jax.optim.muon import MatrixAxes, block_shape, muon


@dataclass(frozen=True)
class ParamInfo:
    """A parameter's shape and metadata, as the model gives them."""

    shape: tuple[int, ...]
    logical_axes: tuple[str, ...]
    matrix_axes: MatrixAxes | None
    decay: bool


@dataclass(frozen=True)
class Row:
    """Where one parameter goes: `count` blocks (Muon: matrices [in, out]; AdamW: stacked layers)."""

    path: str
    shape: tuple[int, ...]
    group: str  # "muon" | "adamw"
    matrix_axes: MatrixAxes | None
    count: int
    block: tuple[int, ...]
    weight_decay: float
    note: str


@dataclass(frozen=True)
class Kind:
    """What the table says of some names, which are the ends of paths; `*` is any text.

    split: logical axes that count Muon's matrices, besides `layers`, in those parameters that have them.
    """

    group: str
    names: tuple[str, ...]
    note: str
    decay: bool = True
    split: tuple[str, ...] = ()


TABLE = (
    Kind("muon", ("q", "k", "v", "q_b", "k_b", "v_b"), "per head", split=("heads",)),
    Kind("muon", ("o", "g", "g_a", "g_b", "f_a", "f_b", "b", "q_a", "kv_a"), "whole"),
    Kind("muon", ("router.weight", "latent_down", "latent_up"), "whole"),
    Kind("muon", ("w1", "w2", "w3"), "per expert, or whole", split=("experts",)),
    Kind("adamw", ("embed", "lm_head"), "vocabulary"),
    Kind("adamw", ("q_conv", "k_conv", "v_conv"), "convolution"),
    Kind("adamw", ("a_log", "dt_bias"), "decay gate", decay=False),
    Kind("adamw", ("*norm.weight",), "norm", decay=False),
    Kind("adamw", ("query",), "pseudo-query", decay=False),
)


def partition(parameters: Mapping[str, ParamInfo], weight_decay: float = 0.1) -> tuple[Row, ...]:
    """One row for each parameter, in the order given. weight_decay is that of the parameters that decay.

    Raises:
        ValueError: parameters that the table does not name, or whose metadata contradicts it: all of them by
        path.
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
        counted = tuple(i for i, name in enumerate(info.logical_axes) if name in ("layers", *kind.split))
        if tuple(sorted(info.matrix_axes[0])) != counted:
            return f"matrix_axes {info.matrix_axes} of {info.logical_axes}, the table counts over {counted}"
    return None


def _row(path: str, info: ParamInfo, kind: Kind, weight_decay: float) -> Row:
    if info.matrix_axes is not None:
        count, *block = block_shape(info.shape, info.matrix_axes, path)
    else:
        stacked = info.logical_axes[:1] == ("layers",)
        count, block = (info.shape[0], info.shape[1:]) if stacked else (1, info.shape)
    decay = weight_decay if kind.decay else 0.0
    return Row(path, info.shape, kind.group, info.matrix_axes, count, tuple(block), decay, kind.note)


def format_table(rows: Iterable[Row]) -> Table:
    """The rows as a table for rich's `print`, one line for each kind of parameter, layers taken together."""
    lines: dict[tuple, list[Row]] = {}
    for row in rows:
        name = re.sub(r"^blocks\.\d+\.(head\.\d+|tail\.\d+|groups\.\w+)\.", "*.", row.path)
        lines.setdefault((name, row.block, row.group, row.note, row.weight_decay), []).append(row)
    table = Table("parameter", "optimizer", "weight decay", box=None)
    for title in ("tensors", "blocks", "block", "parameters"):
        table.add_column(title, justify="right")
    for (name, block, group, note, decay), members in lines.items():
        count = sum(row.count for row in members)
        sides = " x ".join(map(str, block))
        size = f"{count * math.prod(block):,}"
        table.add_row(name, f"{group}, {note}", f"{decay:g}", str(len(members)), f"{count:,}", sides, size)
    return table


def build(
    rows: Iterable[Row],
    *,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.95,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Muon and AdamW under one learning rate over the flat dict of all parameters that the rows name.

    AdamW (k3.md 4.1):  p <- (1 - lr wd) p - lr m' / (sqrt(v') + eps),  m' and v' the bias-corrected moments.
    The state is {"muon": MuonState, "adamw": optax.ScaleByAdamState}, each over a dict of its own paths.
    """
    rows = tuple(rows)
    decay = {row.path: row.weight_decay for row in rows}
    axes = {row.path: row.matrix_axes for row in rows if row.group == "muon"}
    parts = {
        "muon": muon(learning_rate, momentum=momentum, weight_decay=decay, batch_axes=axes),
        "adamw": _adamw(learning_rate, adam_b1, adam_b2, eps, decay),
    }

    def split(tree: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
        return {group: {row.path: tree[row.path] for row in rows if row.group == group} for group in parts}

    def init(params):
        if different := sorted(params.keys() ^ decay.keys()):
            raise ValueError(f"optimizer: rows and parameters differ in {', '.join(different)}")
        return {group: parts[group].init(part) for group, part in split(params).items()}

    def update(gradients, state, params):
        updates, new = {}, {}
        mine, held = split(gradients), split(params)
        for group, part in parts.items():
            done, new[group] = part.update(mine[group], state[group], held[group])
            updates |= done
        return {path: updates[path] for path in gradients}, new

    return optax.GradientTransformation(init, update)


def _adamw(learning_rate, b1, b2, eps, decay) -> optax.GradientTransformation:
    """optax's Adam; decay by path and the rate in one place, which keeps the state to count and moments."""
    adam = optax.scale_by_adam(b1, b2, eps)

    def update(gradients, state, params):
        rate = -(learning_rate(state.count) if callable(learning_rate) else learning_rate)
        directions, new = adam.update(gradients, state)
        return {
            path: rate * (step + decay[path] * params[path] if decay[path] else step)
            for path, step in directions.items()
        }, new

    return optax.GradientTransformation(adam.init, update)
