"""Draws a run.

    python -m k3jax.report WORKDIR [--out=FOLDER] [--log=FILE]

WORKDIR/tensorboard becomes FOLDER/curves.png: the loss on training and held-out rows, learning rate, gradient norm,
expert balance, tokens per second, and what every sub-layer reads from the depth below it. --log takes a recorded
terminal (`python -m k3jax.train ... 2>&1 | tee log.txt`) and becomes FOLDER/terminal.svg. FOLDER is WORKDIR/report
unless given. Exit code 2: a mistake in flags or input, named in one line; 3: what the machine refuses.
"""

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from k3jax import command, metrics
from k3jax.config import ConfigError

FLAGS = {
    "out": "folder of the pictures; WORKDIR/report if not given",
    "log": "recorded terminal output of a run, drawn as it looked",
}
LINES = 60  # of a longer log, the first third and the last two thirds are shown
COLUMNS = 120
INK, FAINT, HELD_OUT = "#1f4e79", "#9dbad5", "#c0392b"


def main(argv: list[str]) -> int:
    """Runs the command line `argv` (its first entry is the program) and returns the exit code."""
    return command.guarded(_report, argv)


def _report(argv: list[str]) -> int:
    given = command.parse(argv, __doc__, FLAGS, dict.fromkeys(FLAGS), positional="WORKDIR")
    if given is None:
        return 0
    workdir = Path(given["WORKDIR"])
    if not workdir.is_dir():
        raise ConfigError(f"WORKDIR {workdir} is no folder")
    events = metrics.read_events(workdir / "tensorboard")
    log = _read(Path(given["log"])) if given["log"] else None
    out = Path(given["out"] or workdir / "report")
    out.mkdir(parents=True, exist_ok=True)
    _save(out / "curves.png", draw_curves(events, workdir.name))
    if log is not None:
        _save(out / "terminal.svg", draw_terminal(log, "python -m k3jax.train").encode())
    return 0


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")
    except OSError as error:
        raise ConfigError(f"--log={path} cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise ConfigError(f"--log={path} is empty")
    return text


def _save(path: Path, data: bytes) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(data)
    os.replace(beside, path)
    print(path)


def draw_curves(events: Mapping[str, Mapping[int, Any]], title: str) -> bytes:
    """A PNG of a run's curves. events: name -> step -> number or matrix, as `metrics.read_events` gives them.

    A panel without numbers says so. Raises ConfigError if there is no training loss at all.
    """
    from matplotlib.figure import Figure

    if not events.get(metrics.LOSS):
        raise ConfigError(f"the event files hold no {metrics.LOSS}")
    figure = Figure(figsize=(13, 7.5), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, 4, height_ratios=(1.7, 1))
    last = max(events[metrics.LOSS])
    figure.suptitle(f"{title}, {last:,} steps", fontsize=13, fontweight="bold")
    _loss_panel(figure.add_subplot(grid[0, :3]), events)
    _depth_panel(figure, figure.add_subplot(grid[0, 3]), events.get(metrics.ATTN_RES, {}))
    small = (
        (metrics.LEARNING_RATE, "learning rate"),
        (metrics.GRAD_NORM, "gradient norm"),
        (metrics.MAX_VIOLATION, "expert load: max / mean - 1"),
        (metrics.TOKENS_PER_SECOND, "tokens per second"),
    )
    for at, (name, label) in enumerate(small):
        axes = figure.add_subplot(grid[1, at])
        steps, values = _curve(events.get(name, {}))
        axes.plot(steps, values, color=INK, linewidth=1)
        _labelled(axes, label, values)
        finite = values[np.isfinite(values)]
        if name in (metrics.GRAD_NORM, metrics.MAX_VIOLATION) and _ratio(finite) > 30:
            axes.set_yscale("log")
        elif len(finite):
            axes.set_ylim(bottom=0)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _curve(points: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, thinned to what a picture can show."""
    steps, values = np.array(list(points), np.int64), np.array(list(points.values()), np.float64)
    stride = max(1, len(steps) // 4000)
    return steps[::stride], values[::stride]


def _ratio(values: np.ndarray) -> float:
    """Largest by smallest of positive values; 1 if there is another one, or none."""
    return values.max() / values.min() if len(values) and values.min() > 0 else 1.0


def _labelled(axes: Any, label: str, values: np.ndarray) -> None:
    axes.set_title(label, fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(True, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if not np.isfinite(values).any():
        axes.text(0.5, 0.5, "no numbers", transform=axes.transAxes, ha="center", color="gray")


def _loss_panel(axes: Any, events: Mapping[str, Mapping[int, Any]]) -> None:
    steps, values = _curve(events[metrics.LOSS])
    finite = np.isfinite(values)
    axes.plot(steps, values, color=FAINT, linewidth=0.8, label="training, one step")
    axes.plot(steps[finite], _smooth(values[finite]), color=INK, linewidth=1.8, label="training, smoothed")
    held_out, losses = _curve(events.get(metrics.EVAL_LOSS, {}))
    if len(held_out):
        axes.plot(held_out, losses, "o-", color=HELD_OUT, markersize=5, linewidth=1.2, label="held out")
        axes.annotate(f"{losses[-1]:.3f}", (held_out[-1], losses[-1]), (0, 8), textcoords="offset points", ha="right")
    for step in steps[~finite]:  # a skipped step
        axes.axvline(step, color=HELD_OUT, alpha=0.3, linewidth=0.8)
    _labelled(axes, "loss, nats per token", values)
    axes.legend(frameon=False, fontsize=9)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of 2 % of the run, shorter at its ends."""
    half = max(1, len(values) // 100)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _depth_panel(figure: Any, axes: Any, weights: Mapping[int, np.ndarray]) -> None:
    if not weights:
        _labelled(axes, "Attention Residuals", np.zeros(0))
        return
    step = max(weights)
    image = metrics.heat_map(axes, weights[step])
    axes.set_title(f"Attention Residuals at step {step:,}", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.yaxis.label.set_size(8)
    figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=8)


def draw_terminal(log: str, title: str) -> str:
    """An SVG of a recorded terminal. A bar that was drawn over and over shows its last state; ANSI colours stay."""
    from rich.console import Console
    from rich.text import Text

    lines = log.rstrip("\n").split("\n")
    if len(lines) > LINES:
        lines = [*lines[: LINES // 3], "...", *lines[-(LINES - LINES // 3 - 1) :]]
    texts = [Text.from_ansi(line) for line in lines]  # a carriage return begins a line anew
    width = min(COLUMNS, max(40, *(text.cell_len for text in texts)))
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for text in texts:
        console.print(text)
    return console.export_svg(title=title)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
