"""The collectives of a train step: what its compiled program says, beside what the formula says.

    sent by a device, of each kind over each set of mesh axes = sum over the program's collectives of times * bytes

The step is the one that training compiles, from shapes: nothing runs, no parameter exists. Invariant: the program's
side knows nothing of the model, the formula's side nothing of the program.
"""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from rich.table import Table

from k3jax.config import RunConfig
from k3jax.estimate import aot, formula, hlo
from k3jax.model import parameters
from k3jax.optim import make_optimizer
from k3jax.parallel import Layout, make_mesh
from k3jax.parallel.mesh import abstract_mesh
from k3jax.step import abstract_decoder, abstract_state, make_train_step

# Machine code is of no interest: what makes the compiler twice as quick and changes no collective.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


class Line(NamedTuple):
    """Collectives of one kind over one set of axes.

    Attributes:
        kind: as in hlo.KINDS.
        axes: mesh axes, "fsdp+expert"; hlo.UNNAMED where a group is no set of axes.
        count: how many the program runs in a step.
        sent: bytes that one device sends in them.
        wanted: the same by the formula.
    """

    kind: str
    axes: str
    count: int
    sent: float
    wanted: float


class Census(NamedTuple):
    """All lines, the formula's terms behind them, and how long the compiler took."""

    lines: tuple[Line, ...]
    terms: tuple[formula.Term, ...]
    seconds: float

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a step."""
        return sum(line.sent for line in self.lines)

    @property
    def wanted(self) -> float:
        """The same by the formula."""
        return sum(line.wanted for line in self.lines)

    def to_dict(self) -> dict:
        """For JSON: totals, every line of the program, every term of the formula; bytes as whole numbers."""
        program = [[line.kind, line.axes, line.count, round(line.sent)] for line in self.lines if line.count]
        wanted = [[term.name, term.kind, term.axes, term.count, round(term.sent)] for term in self.terms]
        totals = {"sent": round(self.sent), "wanted": round(self.wanted), "seconds": round(self.seconds)}
        return totals | {"program": sorted(program), "formula": sorted(wanted)}


def census(config: RunConfig) -> Census:
    """The census of a run's step on CPU devices, as many as its mesh has; mesh.data is 1 where it is left open.

    Raises ConfigError for what the mesh does not divide, and MachineError if JAX has started with fewer devices.
    """
    terms = tuple(formula.terms(config))
    devices = aot.cpu_devices(abstract_mesh(config.mesh).size)
    start = time.monotonic()
    mesh, text = step_text(config, devices)
    seconds = time.monotonic() - start
    return Census(lines(hlo.collectives(text), terms, mesh), terms, seconds)


def step_text(config: RunConfig, devices: Sequence[jax.Device]) -> tuple[Mesh, str]:
    """The mesh, and the optimised HLO of the train step for these devices, lowered as training lowers it."""
    rows, width = config.data.batch_rows, config.data.seq_len
    mesh = make_mesh(config.mesh, rows // config.train.accumulate, devices, seq_len=width)
    decoder = abstract_decoder(config)
    variables = parameters.variables(decoder)
    layout = Layout.of(mesh, variables)
    optimizer, schedule, _ = make_optimizer(config, variables, spread=layout.spread)
    like = abstract_state(config, optimizer, layout)
    shardings = jax.tree.map(lambda x: x.sharding, like)
    step = make_train_step(config, decoder, optimizer, schedule, layout)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.repeated))
    lowered = jitted.lower(like, layout.batch_shapes(rows, width))
    return mesh, _compiled(lowered, QUICK if devices[0].platform == "cpu" else {}).as_text()


def _compiled(lowered: jax.stages.Lowered, options: dict) -> jax.stages.Compiled:
    """Compiled with those options that this version of XLA knows."""
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        unknown = next((name for name in options if f"No such compile option: '{name}'" in str(error)), None)
        if unknown is None:
            raise
        return _compiled(lowered, {name: value for name, value in options.items() if name != unknown})


def lines(found: Iterable[hlo.Collective], terms: Iterable[formula.Term], mesh: Mesh) -> tuple[Line, ...]:
    """Both sides by kind and axes, the largest first."""
    sums: dict[tuple[str, str], list] = {}
    for one in found:
        entry = sums.setdefault((one.kind, hlo.axes_of(one, mesh.shape)), [0, 0.0, 0.0])
        entry[0] += one.times
        entry[1] += one.times * one.sent
    for term in terms:
        sums.setdefault((term.kind, term.axes), [0, 0.0, 0.0])[2] += term.sent
    ordered = sorted(sums.items(), key=lambda item: (-max(item[1][1:]), item[0]))
    return tuple(Line(*key, *entry) for key, entry in ordered)


def format_tables(found: Census) -> tuple[Table, Table]:
    """For rich's `print`: the lines with a line of totals, and the formula's terms."""
    both, parts = (Table(box=None, pad_edge=False) for _ in range(2))
    for title in ("collective", "over"):
        both.add_column(title, no_wrap=True)
    for title in ("calls", "bytes sent", "by formula", "ratio"):
        both.add_column(title, no_wrap=True, justify="right")
    for line in found.lines:
        both.add_row(line.kind, line.axes, f"{line.count:,}", *_beside(line.sent, line.wanted))
    both.add_row("all", "", f"{sum(line.count for line in found.lines):,}", *_beside(found.sent, found.wanted))
    for title in ("what the formula counts", "collective", "over"):
        parts.add_column(title, no_wrap=True)
    for title in ("messages", "bytes sent"):  # of which a compiler joins many into one call
        parts.add_column(title, no_wrap=True, justify="right")
    for term in sorted(found.terms, key=lambda term: -term.sent):
        parts.add_row(term.name, term.kind, term.axes, f"{term.count:,}", f"{term.sent:,.0f}")
    return both, parts


def _beside(sent: float, wanted: float) -> tuple[str, str, str]:
    return f"{sent:,.0f}", f"{wanted:,.0f}", f"{wanted / sent:.4f}" if sent else "-"
