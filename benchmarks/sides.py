"""What the benchmarks of single operations share: sides that take turns in one process, and a table of ratios."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

ROUNDS = 9
PAUSE = 0.1  # seconds between two sides, in which the threads of one come to rest


class Side(NamedTuple):
    """One implementation, compiled."""

    run: Callable[[], Any]
    temporary: int | None  # bytes that the program needs besides inputs and outputs; None where nothing tells


class Figures(NamedTuple):
    """Medians over the rounds."""

    cpu: float  # seconds of all threads
    wall: float  # seconds


def compiled(function: Callable, *arguments: Any) -> Side:
    """A side from a JAX function: compiles it and reads the size of its temporary memory."""
    program = jax.jit(function).lower(*arguments).compile()
    return Side(lambda: jax.block_until_ready(program(*arguments)), program.memory_analysis().temp_size_in_bytes)


def both(operation: Callable, *arguments: Any) -> Any:
    """Output and gradients of an operation; the last argument is the gradient of the output."""
    *inputs, d_output = arguments
    output, pull_back = jax.vjp(operation, *inputs)
    return output, pull_back(d_output)


def alternate(sides: dict[str, Side], rounds: int = ROUNDS) -> dict[str, Figures]:
    """Runs all sides in turn, `rounds` times after two turns that are not counted."""
    found = {name: [] for name in sides}
    for turn in range(rounds + 2):
        for name, side in sides.items():
            time.sleep(PAUSE)
            cpu, wall = time.process_time(), time.perf_counter()
            side.run()
            if turn >= 2:
                found[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {name: Figures(*(statistics.median(x) for x in zip(*turns, strict=True))) for name, turns in found.items()}


def table(title: str, sides: dict[str, Side], figures: dict[str, Figures]) -> None:
    """Prints each side, and how many times more it takes than the first one, which is ours."""
    ours = next(iter(sides))
    print(title)
    for name, side in sides.items():
        line = f"  {name:24s} {1e3 * figures[name].cpu:9.1f} CPU ms  {1e3 * figures[name].wall:9.1f} ms"
        if side.temporary is not None:
            line += f"  {side.temporary / 2**20:9.1f} MiB"
        if name != ours:
            line += f"   {figures[name].cpu / figures[ours].cpu:5.2f} x the CPU time of {ours}"
            line += f", {figures[name].wall / figures[ours].wall:5.2f} x the time"
            if side.temporary is not None:
                line += f", {side.temporary / sides[ours].temporary:5.1f} x the memory"
        print(line)
