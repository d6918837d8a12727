"""Trains in several processes of this machine, as a cluster would on many.

    python -m k3jax.launch -n 4 [--devices=2] [--restarts=3] --config=... --workdir=... [--config.FIELD=VALUE ...]

Everything but its own flags goes to `python -m k3jax.train`, once in each process; every line of theirs begins with the
process's number. On CPUs --devices gives each process that many; GPUs that are visible are shared out evenly. Ctrl-C
and other signals go on to all processes. If one dies, or is stopped alone, the others are ended, and with --restarts
all start again from the last checkpoint. The exit code is that of the process that failed first (128 + N for signal N),
0 if none did or all stopped because they were asked to by a signal.
K3JAX_START_SECONDS, K3JAX_BARRIER_SECONDS and K3JAX_HEARTBEAT_SECONDS: k3jax/distributed.py.
"""

import contextlib
import itertools
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from k3jax import command
from k3jax.config import ConfigError
from k3jax.distributed import STOPPED

FLAGS = {
    "n": "number of processes",
    "devices": "devices of each process; CPU devices are made, others must be there",
    "restarts": "how often all processes start again after one died",
}
GRACE = 10.0  # seconds for the others to end by themselves, as after a mistake that all of them found
WITHOUT_ONE = 2.0  # seconds for what they still have to say when one is gone, which they cannot go on without
FINAL = (1, 2)  # exit codes of a run that would end the same way again
# Gloo's line for each group of devices, and the addresses behind the line in which JAX says who is gone.
NOISE = re.compile(r"connected to \d+ peer ranks|^\s+@ +0x|^\*\*\* Check failure stack trace")


def main(argv: list[str]) -> int:
    """Runs the command line `argv` (its first entry is the program) and returns the exit code."""
    return command.guarded(_launch, argv)


def _launch(argv: list[str]) -> int:
    found = command.parse_known(argv, __doc__, FLAGS, {"devices": None, "restarts": "0"})
    if found is None:
        return 0
    given, rest = found
    processes, devices, restarts = _number(given, "n", 1), _number(given, "devices", 1), _number(given, "restarts", 0)
    training = [sys.executable, "-m", "k3jax.train", *rest]
    for attempt in range(restarts + 1):
        job = _Job(training, _environments(processes, devices))
        code = job.run()
        if job.asked and code == STOPPED:
            return 0
        if not code or code in FINAL or job.asked or attempt == restarts:
            return code
        print(f"launch: restart {attempt + 1} of {restarts}", file=sys.stderr, flush=True)
    return code


def _number(given: dict[str, str | None], name: str, least: int) -> int | None:
    text = given[name]
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"--{name}={text} must be a number from {least} on")
    return int(text)


def _environments(processes: int, devices: int | None) -> list[dict[str, str]]:
    """The environment of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "K3JAX_LAUNCHER": str(os.getpid()),
        "K3JAX_PROCESSES": str(processes),
        "K3JAX_COORDINATOR": f"127.0.0.1:{port}",
        "PYTHONUNBUFFERED": "1",
    }
    if devices is not None:
        common |= {"K3JAX_DEVICES": str(devices), "JAX_NUM_CPU_DEVICES": str(devices)}
    cards, shares = _cards(), [{}] * processes
    if cards:
        if len(cards) % processes:
            raise ConfigError(
                f"-n {processes} does not divide the {len(cards)} GPUs; CUDA_VISIBLE_DEVICES chooses some"
            )
        each = len(cards) // processes
        shares = [{"CUDA_VISIBLE_DEVICES": ",".join(cards[p * each : (p + 1) * each])} for p in range(processes)]
    return [{**os.environ, **common, **shares[p], "K3JAX_PROCESS": str(p)} for p in range(processes)]


def _cards() -> list[str]:
    """The NVIDIA GPUs that processes may use, as CUDA_VISIBLE_DEVICES names them."""
    if os.environ.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:  # those behind a negative one are hidden
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), chosen.split(",")))
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


class _Job:
    """The processes of one attempt."""

    def __init__(self, arguments: list[str], environments: list[dict[str, str]]):
        self.asked = False  # whether a signal came that ends a run
        self._arguments, self._environments = arguments, environments
        self._ended: queue.Queue[tuple[int, int]] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen] = []

    def run(self) -> int:
        """The exit code of the process that failed first, once all have ended; 0 if none did."""
        before = {number: signal.signal(number, self._forward) for number in command.stop_signals()}
        try:
            for number, environment in enumerate(self._environments):
                self._begin(number, environment)
            return self._wait()
        finally:
            self._signal(signal.SIGKILL)
            for thread in self._threads:
                thread.join(timeout=5)  # something that a process left behind may hold its output open
            for number, handler in before.items():
                signal.signal(number, handler)

    def _begin(self, number: int, environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            self._arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,  # a terminal's Ctrl-C comes once, through us
        )  # fmt: skip
        self._processes.append(process)
        self._start(_print_lines, number, process.stdout, sys.stdout)
        self._start(_print_lines, number, process.stderr, sys.stderr)
        self._start(self._await, number, process)
        if self.asked:
            process.terminate()

    def _wait(self) -> int:
        failed, deadline, left = 0, None, len(self._processes)
        while left:
            try:
                process, code = self._ended.get(timeout=0.2)
            except queue.Empty:
                if deadline is not None and time.monotonic() > deadline:
                    self._signal(signal.SIGKILL)
                continue
            left -= 1
            if code and not failed:
                failed = code if code > 0 else 128 - code
                deadline = time.monotonic() + (GRACE if code > 0 else WITHOUT_ONE)
                how = f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
                how = "stopped, as it was asked to" if code == STOPPED else how
                print(f"launch: process {process} {how}", file=sys.stderr, flush=True)
        return failed

    def _forward(self, *_) -> None:
        self.asked = True
        self._signal(signal.SIGTERM)  # to a run it says the same as Ctrl-C, and Python's start has no traceback for it

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if number == signal.SIGKILL:  # and what it has started
                    os.killpg(process.pid, number)
                elif process.poll() is None:
                    process.send_signal(number)

    def _await(self, number: int, process: subprocess.Popen) -> None:
        self._ended.put((number, process.wait()))

    def _start(self, function, *arguments) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)


def _print_lines(number: int, lines: TextIO, to: TextIO) -> None:
    for line in lines:
        if not NOISE.search(line):
            with contextlib.suppress(OSError):  # nobody reads any more; the process must not block because of that
                to.write(f"[{number}] {line.rstrip(chr(10))}\n")
                to.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
