"""One run in several processes: how they meet, agree and part.

    K3JAX_PROCESSES            how many there are; without it a run is one process
    K3JAX_PROCESS              this one's number, from 0
    K3JAX_COORDINATOR          HOST:PORT where process 0 waits for the others; JAX's own coordinator takes any free port
    K3JAX_DEVICES              devices that each must have (left out: not checked)
    K3JAX_START_SECONDS        within which all must have come (300)
    K3JAX_BARRIER_SECONDS      that they wait for each other later, where they agree on something (1800)
    K3JAX_HEARTBEAT_SECONDS    without a sign of life after which a process counts as dead (100)

`python -m k3jax.launch` sets these on one machine; launch/slurm.sh and launch/jobset.yaml on many. Process 0 writes the
log and speaks; all read the data, compute and write their parts of checkpoints.

Exit codes beside those of a run in one process: STOPPED, the run was asked to stop before its end and goes on by the
same command; CRASHED, an error that nobody foresaw, with its traceback.

Invariant: whatever one process finds wrong ends all of them; who is missing is said by number; and what a process does
depends on no other's clock or disk, only on what was agreed. In a run of one process all of this does nothing.
"""

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import re
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config import ConfigError, MachineError

CRASHED, STOPPED = 4, 75
LAST_WORDS = 5.0  # seconds that process 0, without whom the others end at once, gives them to say what was wrong


class Absent(MachineError):
    """Another process did not come or is gone: nothing that needs all of them can be done any more."""


@dataclass(frozen=True)
class Place:
    """This process among all, as the environment says."""

    processes: int
    process: int
    host: str
    port: int
    devices: int | None
    start_seconds: int
    barrier_seconds: int
    heartbeat_seconds: int


_place: Place | None = None  # where there are several processes, once they have met
_rounds = itertools.count()  # of agreement: the same in all processes, as all take part in each
_GONE = re.compile(r"gloo|nccl|coordination|connection|heartbeat|socket closed", re.IGNORECASE)


def count() -> int:
    """The number of processes."""
    return 1 if _place is None else _place.processes


def index() -> int:
    """The number of this process, from 0."""
    return 0 if _place is None else _place.process


def first() -> bool:
    """Whether this is the process that writes the log and speaks."""
    return index() == 0


def join() -> None:
    """Waits for all processes of the environment, before any device is used. Raises ConfigError and MachineError."""
    global _place
    found = read_environment()
    if found is None or _place is not None:
        return
    if os.environ.get("K3JAX_LAUNCHER"):
        _end_with(int(os.environ["K3JAX_LAUNCHER"]))
    address = _meet(found)
    # Its handler of SIGTERM would take the signal from ours.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address,
        found.processes,
        found.process,
        cluster_detection_method="deactivate",
        initialization_timeout=found.start_seconds,
        heartbeat_timeout_seconds=found.heartbeat_seconds,
        shutdown_timeout_seconds=found.barrier_seconds,
    )
    _place = found
    with agreed("their devices"):
        try:
            jax.devices()
        except RuntimeError as error:  # a broken card, a plugin that does not load
            raise MachineError(str(error).partition("\n")[0]) from error
    have = [sum(device.process_index == process for device in jax.devices()) for process in range(found.processes)]
    if found.devices is not None and (wrong := {p: n for p, n in enumerate(have) if n != found.devices}):
        told = ", ".join(f"process {process} has {number}" for process, number in wrong.items())
        raise MachineError(f"K3JAX_DEVICES={found.devices} devices are asked of each process, but {told}")


def _end_with(launcher: int) -> None:
    """Has this process asked to stop when the launcher is gone, which no signal would tell it of."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:
        raise MachineError("the launcher is gone")


def read_environment() -> Place | None:
    """What the environment says, or None for a run of one process. Raises ConfigError."""
    if not os.environ.get("K3JAX_PROCESSES"):
        return None

    def number(name: str, least: int, default: int | None = None) -> int | None:
        text = os.environ.get(f"K3JAX_{name}", "")
        if not text and (default is not None or name == "DEVICES"):
            return default
        if not text.isdecimal() or int(text) < least:
            raise ConfigError(f"K3JAX_{name}={text} must be a number from {least} on")
        return int(text)

    processes, process = number("PROCESSES", 1), number("PROCESS", 0)
    if process >= processes:
        raise ConfigError(f"K3JAX_PROCESS={process} must be below K3JAX_PROCESSES={processes}")
    coordinator = os.environ.get("K3JAX_COORDINATOR", "")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"K3JAX_COORDINATOR={coordinator} must be HOST:PORT")
    seconds = number("START_SECONDS", 1, 300), number("BARRIER_SECONDS", 1, 1800), number("HEARTBEAT_SECONDS", 2, 100)
    return Place(processes, process, host.strip("[]"), int(port), number("DEVICES", 1), *seconds)


def _meet(place: Place) -> str:
    """All processes at one table -> the address of JAX's coordinator there.

    JAX's own start ends a process that waits in vain without saying for whom, and takes any that comes.
    """
    hello = {"process": place.process, "processes": place.processes, "jax": jax.__version__, "command": sys.argv[1:]}
    deadline = time.monotonic() + place.start_seconds
    if place.process:
        return _call(place, hello | {"who": secrets.token_hex(8)}, deadline)
    came: dict[int, str] = {}
    callers: list[socket.socket] = []
    try:
        with _listening(place) as server:
            while len(came) < place.processes - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    caller, _ = server.accept()
                except TimeoutError:
                    absent = [str(p) for p in range(1, place.processes) if p not in came]
                    raise MachineError(
                        f"process {', '.join(absent)} of {place.processes} did not come to "
                        f"{place.host}:{place.port} within {place.start_seconds} s (K3JAX_START_SECONDS)"
                    ) from None
                callers.append(caller)
                theirs = _heard(caller)
                number = theirs.get("process") if isinstance(theirs, dict) else None
                if not isinstance(number, int):  # a port scanner, a health check
                    continue
                if not 0 < number < place.processes or came.get(number, theirs["who"]) != theirs["who"]:
                    raise ConfigError(f"two processes are K3JAX_PROCESS={number}, or it is not one of them")
                came[number] = theirs["who"]  # the same one again: its first call broke
                for name in hello.keys() - {"process"}:
                    if theirs.get(name) != hello[name]:
                        raise ConfigError(
                            f"process {number} has other {name} than process 0: {theirs.get(name)}, not {hello[name]}"
                        )
        with socket.socket() as free:
            free.bind(("", 0))
            host = f"[{place.host}]" if ":" in place.host else place.host
            address = f"{host}:{free.getsockname()[1]}"
        _answer(callers, {"address": address})
        return address
    except (ConfigError, MachineError) as error:
        _answer(callers, {"error": str(error), "mistake": isinstance(error, ConfigError)})
        raise


def _listening(place: Place) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", place.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", place.port))
    except OSError as error:
        raise MachineError(f"process 0 cannot listen on port {place.port}: {error.strerror}") from error


def _heard(caller: socket.socket) -> Any:
    caller.settimeout(2)
    try:
        with caller.makefile("r", encoding="utf-8") as lines:
            return json.loads(lines.readline(2**20))
    except (OSError, ValueError):
        return None


def _answer(callers: list[socket.socket], answer: dict[str, Any]) -> None:
    for caller in callers:
        with contextlib.suppress(OSError), caller:  # one that has gone since is found by its missing heartbeat
            caller.sendall(f"{json.dumps(answer)}\n".encode())


def _call(place: Place, hello: dict[str, Any], deadline: float) -> str:
    """The answer of process 0, which may not be there yet."""
    where, answer = f"process 0 at {place.host}:{place.port}", None
    while answer is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise MachineError(f"{where} did not answer within {place.start_seconds} s (K3JAX_START_SECONDS)")
        try:
            with socket.create_connection((place.host, place.port), timeout=left) as line:
                line.sendall(f"{json.dumps(hello)}\n".encode())
                with line.makefile("r", encoding="utf-8") as lines:
                    answer = json.loads(lines.readline() or "null")
        except (OSError, ValueError):
            time.sleep(0.1)  # not there yet, or gone: asked again until the deadline
    if "error" in answer:
        raise (ConfigError if answer["mistake"] else MachineError)(answer["error"])
    return answer["address"]


@contextlib.contextmanager
def agreed(what: str) -> Iterator[None]:
    """All processes do the block; what any of them raised there, every one raises behind it.

    what: name of the block, for whoever waits there in vain.
    """
    if count() == 1:
        yield
        return
    mine = None
    try:
        yield
    except Exception as error:
        mine = error
    kind = next((kind.__name__ for kind in (ConfigError, MachineError) if isinstance(mine, kind)), None)
    told = _exchange(what, None if mine is None else [kind, f"{mine}" if kind else f"{type(mine).__name__}: {mine}"])
    if mine is not None:
        raise mine
    for process, found in enumerate(told):
        if found is not None:
            raise (ConfigError if found[0] == "ConfigError" else MachineError)(f"process {process}: {found[1]}")


def told(what: str, value: Any) -> Any:
    """The value (as JSON holds it) that process 0 gives. `what` as in `agreed`."""
    return value if count() == 1 else _exchange(what, value if first() else None)[0]


def same(what: str, value: Any) -> None:
    """Raises ConfigError unless all processes give the same value (as JSON holds it): a file may differ on one disk."""
    if count() == 1:
        return
    found = _exchange(what, hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest())
    if different := [str(process) for process, digest in enumerate(found) if digest != found[0]]:
        raise ConfigError(f"{what} of process {', '.join(different)} is not that of process 0")


def compiled(function: Any, *arguments: Any) -> Any:
    """A jitted function compiled for these arguments in all processes, before one of them runs it.

    Who comes early to a collective on CPUs gives up after 30 s, and compilations differ by more than that.
    """
    with agreed("a compiled program"):
        return function.lower(*arguments).compile()


def _exchange(what: str, mine: Any) -> list[Any]:
    """What each process gives, by number."""
    client, number, seconds = _client(), next(_rounds), _place.barrier_seconds
    key = f"k3jax/{number}"
    try:
        client.key_value_set(f"{key}/{index():09d}", json.dumps(mine))
        client.wait_at_barrier(key, 1000 * seconds)
        found = [json.loads(value) for _, value in sorted(client.key_value_dir_get(f"{key}/"))]
        if first() and number:
            client.key_value_delete(f"k3jax/{number - 1}/")  # all have read it: they are here
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise Absent(f"another process is gone, before {what}: {str(error).partition(chr(10))[0]}") from error
        absent = re.search(r"timed out task names:\s*([\d\s]*\d)", str(error))
        who = f"process {', '.join(absent[1].split())}" if absent else "another process"
        raise Absent(f"{who} did not come to {what} within {seconds} s (K3JAX_BARRIER_SECONDS)") from error
    return found


def _client() -> Any:
    """JAX's own line to the coordinator: no public function has a barrier with a time limit that names the absent."""
    from jax._src.distributed import global_state

    return global_state.client


class Vote:
    """Whether any process wants something: at each call of all processes the same answer.

    The answer is that of the call before, so that no device waits for it; it stays True. In a run of one process it is
    the question.
    """

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, P(mesh.axis_names))
        self._any = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
        self._pending: jax.Array | None = None
        self._decided = False

    def __call__(self, wanted: bool) -> bool:
        if count() == 1:
            return wanted
        before = self._pending
        votes = np.full(self._sharding.num_devices, wanted, np.int32)
        self._pending = self._any(jax.make_array_from_callback(votes.shape, self._sharding, votes.__getitem__))
        self._decided |= before is not None and bool(before)
        return self._decided


def lost(error: Exception) -> bool:
    """Whether an error is that of a collective whose other side is gone.

    Then it waits until the missing heartbeat has told who that is: JAX says it and ends this process.
    """
    if count() == 1 or not isinstance(error, (ValueError, RuntimeError)) or not _GONE.search(str(error)):
        return False
    seconds = _place.heartbeat_seconds
    print(f"process {index()} lost contact; within {seconds} s it is known to whom", file=sys.stderr, flush=True)
    time.sleep(seconds + 10)
    return True


def run(main: Callable[[list[str]], int], argv: list[str]) -> NoReturn:
    """main(argv), and the end of the process with its exit code. One that failed waits for no other."""
    try:
        code = main(argv)
    except Exception:
        if count() == 1:
            raise
        traceback.print_exc()
        code = CRASHED
    if count() > 1 and code not in (0, STOPPED):
        sys.stdout.flush()
        sys.stderr.flush()
        _last_words()
        os._exit(code)
    if count() > 1:
        jax.distributed.shutdown()
    sys.exit(code)


def _last_words() -> None:
    """Process 0 goes last: JAX's coordinator goes with it, and that kills the others in the middle of a sentence."""
    client, left = _client(), "k3jax/left/"
    try:
        if not first():
            client.key_value_set(f"{left}{index()}", "")
            return
        until = time.monotonic() + LAST_WORDS
        while time.monotonic() < until and len(client.key_value_dir_get(left)) < count() - 1:
            time.sleep(0.05)
    except jax.errors.JaxRuntimeError:
        return  # there is nobody to wait for
