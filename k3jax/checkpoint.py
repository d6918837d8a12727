"""Checkpoints of a run's whole state, by Orbax, written while training goes on.

Layout: `<workdir>/checkpoints/<step>/`, one Orbax tree whose leaves are named by their path in the state
(`params/blocks.0.head.0.attention.q`, `router_bias`, ...). A save is written beside, under a name that is no step, and
gets its own name by one rename at the end; so a folder named by a step is complete, and nothing else counts.

Invariant: what is restored has the names, shapes and types of the state that asks for it, or the restore is refused
with the names that differ, before anything is cast; a complete checkpoint is deleted only after `keep` newer ones are
complete.
"""

import errno
import logging as python_logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from k3jax import distributed
from k3jax.config import ConfigError, MachineError

UNFINISHED = ocp.path.atomicity.TMP_DIR_SUFFIX  # part of the name of a save that has not come to its end


class SaveFailed(MachineError):
    """A state could not be written, after all attempts."""


class Checkpoints:
    """The checkpoints of one workdir; `keep` of them stay.

    One save at a time is written by threads in the background. A save that fails is reported and tried again, with the
    state of the day: `check()` in the loop says when, and raises MachineError after the last of `1 + len(pauses)`
    attempts. So a failure costs no memory: the state that is lost with it is an older one of the run that goes on.

    pauses: seconds before the second, third, ... attempt. report: takes a line for the user.

    Of a run's several processes all make the same calls; each writes its parts, and a failure of one is one of all. As
    clocks differ, they try again at the next `save`, and not before.
    """

    def __init__(
        self,
        workdir: str | Path,
        keep: int,
        *,
        pauses: tuple[float, ...] = (5.0, 20.0),
        report: Callable[[str], None] = logging.warning,
    ):
        self.folder = Path(workdir).absolute() / "checkpoints"
        self.report = report
        self._keep = keep
        self._pauses = pauses
        self._saver = ocp.AsyncCheckpointer(_handler())
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future] | None = None  # the save being written
        self._written: int | None = None  # the last step that this object completed
        self._failures = 0  # in a row
        self._closed = False
        self._next_attempt = 0.0  # time.monotonic
        _silence()
        with distributed.agreed("the checkpoints"):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._clean()
            except OSError as error:
                raise MachineError(f"{self.folder} cannot be written: {_cause(error)}") from error

    def steps(self) -> list[int]:
        """The complete steps, in order."""
        return distributed.told("the checkpoints", complete_steps(self.folder))

    def latest(self) -> int | None:
        """The last complete step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, wait: bool = False) -> None:
        """Starts to write a pytree of jax arrays, and returns when the state may be donated.

        Until it is written, its bytes are held in host memory (on CPU: the state's own buffers, which JAX then does not
        reuse). A save that is still being written is waited for. With `wait` it returns when this one is complete, all
        attempts included. A step left by another run is replaced. Raises MachineError after the last attempt.
        """
        self._settle()
        while step != self._written:
            early = self._next_attempt - time.monotonic() if self._failures else 0.0
            if early > 0 and not wait and distributed.count() == 1:
                return  # check() will say when
            time.sleep(max(0.0, early))
            self._start(step, state)
            if not wait:
                return
            self._settle()

    def check(self) -> bool:
        """Call it after every step: whether it is time to save again because the last save failed.

        Does not wait. Raises MachineError when the last attempt has failed.
        """
        if distributed.count() > 1:
            return False
        if self._pending is not None and self._pending[1].done():
            self._settle()
        return self._pending is None and self._failures > 0 and time.monotonic() >= self._next_attempt

    def wait(self) -> None:
        """Waits for what is being written. Raises MachineError if that was the last attempt and it failed."""
        self._settle()

    def close(self) -> None:
        """Waits for what is being written and ends the threads. Raises MachineError if the last save failed.

        Closing once more does nothing.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._settle()
        finally:
            self._background.shutdown()
            self._saver.close()
        if self._failures:
            raise SaveFailed(f"{self.folder}: the last save failed and was not tried again; {self._resort()}")

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step, shaped and placed as `like` (arrays or ShapeDtypeStructs). Raises ConfigError.

        A leaf of `like` without a sharding goes to the first device. A damaged checkpoint is never passed over in
        silence for an older one: that would take back steps of the log that the user has seen, and hide a broken disk.
        """
        folder = self.folder / str(step)
        older = max((s for s in complete_steps(self.folder) if s < step), default=None)
        resort = "" if older is None else f"; to go on from step {older}, delete {folder}"
        return _read(folder, like, partial=False, resort=resort)

    def _start(self, step: int, state: Any) -> None:
        self._written, args = None, ocp.args.PyTreeSave(_by_name(state))
        try:
            with distributed.agreed("the save"):
                if step in complete_steps(self.folder):
                    self._remove(step)
                # What can fail at the start does so here: in Orbax the others would wait for minutes.
                if distributed.count() > 1 and distributed.first():
                    self.folder.mkdir(parents=True, exist_ok=True)
                    with tempfile.TemporaryFile(dir=self.folder) as probe:
                        probe.write(bytes(2**16))
            with distributed.agreed("the start of the save"):
                self._saver.save(self.folder / str(step), args=args, force=True)
        except distributed.Absent:
            raise
        except Exception as error:
            self._failed(step, error)
        else:
            self._pending = step, self._background.submit(self._finish, step)

    def _finish(self, step: int) -> None:
        """In the background: waits for the commit, then lets the oldest go."""
        self._saver.wait_until_finished()
        if not distributed.first():
            return  # what another machine shows of the folder may be a moment old
        if not (self.folder / str(step)).is_dir():
            raise OSError(errno.EIO, f"{self.folder / str(step)} is not there after its save")
        for old in complete_steps(self.folder)[: -self._keep]:
            try:
                self._remove(old)
            except OSError as error:  # no reason to call the new one lost
                self.report(f"checkpoint {self.folder / str(old)} could not be removed: {_cause(error)}")

    def _remove(self, step: int) -> None:
        if distributed.first():
            folder = self.folder / str(step)
            # First no step any more, then gone: a kill in between leaves no half of a step.
            shutil.rmtree(folder.rename(folder.with_name(f"{step}{UNFINISHED}-old")), ignore_errors=True)

    def _settle(self) -> None:
        """Waits for the save being written and notes how it ended."""
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        try:
            with distributed.agreed("the end of the save"):
                future.result()
        except distributed.Absent:
            raise
        except Exception as error:
            self._failed(step, error)
        else:
            self._failures, self._written = 0, step

    def _failed(self, step: int, error: BaseException) -> None:
        try:
            self._saver.wait_until_finished()  # parts of it may still be written
        except Exception as further:
            logging.debug("after the failure: %s", further)
        self._clean()
        self._failures += 1
        what = f"checkpoint {self.folder / str(step)} could not be written: {_cause(error)}"
        attempts = 1 + len(self._pauses)
        if self._failures >= attempts:
            self._failures = 0  # said once
            raise SaveFailed(f"{what}; {attempts} attempts; {self._resort()}") from error
        pause = self._pauses[self._failures - 1]
        self._next_attempt = time.monotonic() + pause
        when = f"in {pause:g} s" if distributed.count() == 1 else "with the next save"
        self.report(f"{what} (attempt {self._failures} of {attempts}, the next {when})")

    def _resort(self) -> str:
        latest = max(complete_steps(self.folder), default=None)
        return "no checkpoint is complete" if latest is None else f"the last complete checkpoint is of step {latest}"

    def _clean(self) -> None:
        """Removes what saves left that did not come to their end: it takes the space of the next one."""
        if distributed.first():
            for folder in self.folder.glob(f"*{UNFINISHED}*"):
                shutil.rmtree(folder, ignore_errors=True)


def complete_steps(folder: Path) -> list[int]:
    """The complete steps in a `checkpoints` folder, in order; none if there is no such folder."""
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def read_parameters(path: str | Path, like: Any) -> Any:
    """A part of a checkpoint's state, `{"params": {...}, "router_bias": ...}` for fine-tuning, placed as `like`.

    path: a workdir (its last complete step), or a folder `.../checkpoints/<step>`; nothing is written there. What the
    checkpoint holds under other top names than those of `like` is left; under the same ones, names, shapes and types
    must agree. Raises ConfigError.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise ConfigError(f"{path}: no such folder")
    if not folder.name.isdecimal() or (folder / "checkpoints").is_dir():
        steps = complete_steps(folder / "checkpoints")
        if not steps:
            raise ConfigError(f"{path} is neither a workdir with a complete checkpoint nor a folder checkpoints/<step>")
        folder = folder / "checkpoints" / str(distributed.told("the step to begin with", steps[-1]))
    return _read(folder, like, partial=True)


def state_bytes(like: Any) -> int:
    """Bytes that one checkpoint of such a state takes at most."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))


def require_space(folder: str | Path, bytes_needed: int) -> None:
    """Raises MachineError if the file system of a folder, which may not exist yet, has less free space than that."""
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < bytes_needed:
        needed, free = bytes_needed / 2**30, free / 2**30
        raise MachineError(f"{folder}: checkpoints need {needed:.3g} GiB, {free:.3g} GiB are free there")


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Replicas share the writing of an array only where that saves time: each cut is a program to compile for every
    # shape and device (8 s for 40 shapes on 8 CPU devices), and on one process nothing is gained.
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=distributed.count() > 1, min_slice_bytes_for_replica_parallel=2**20
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _read(folder: Path, like: Any, partial: bool, resort: str = "") -> Any:
    _silence()
    wanted = {name: _placed(leaf) for name, leaf in _by_name(like).items()}
    with ocp.Checkpointer(_handler()) as reader:
        try:
            metadata = reader.metadata(folder).item_metadata
            if metadata is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "_METADATA")
            stored = _by_name(metadata.tree)
        except Exception as error:
            raise ConfigError(f"checkpoint {folder} is damaged: {_cause(error)}{resort}") from error
        if partial:
            tops = {name.split("/")[0] for name in wanted}
            stored = {name: leaf for name, leaf in stored.items() if name.split("/")[0] in tops}
        differences = _differences(stored, wanted)
        if differences:
            shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if differences[5:] else "")
            raise ConfigError(f"checkpoint {folder} does not fit: {shown}")
        placing = ocp.checkpoint_utils.construct_restore_args(wanted)
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=placing, partial_restore=partial)
        try:
            restored = reader.restore(folder, args=args)
        except Exception as error:
            raise ConfigError(f"checkpoint {folder} is damaged: {_cause(error)}{resort}") from error
    leaves = jax.tree_util.tree_leaves_with_path(like)
    found = [restored[_name(path)] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), found)


def _differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    found = [f"{name} is missing" for name in wanted.keys() - stored.keys()]
    found += [f"{name} is not known" for name in stored.keys() - wanted.keys()]
    for name in wanted.keys() & stored.keys():
        ours, theirs = (f"{leaf.dtype}{list(leaf.shape)}" for leaf in (wanted[name], stored[name]))
        if ours != theirs:
            found.append(f"{name} is {theirs}, not {ours}")
    return sorted(found)


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    # Without a sharding Orbax would take the one in the file, of devices that may not be there.
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _name(path) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def _by_name(tree: Any) -> dict[str, Any]:
    """A pytree's leaves by their path, in the tree's order: names are what a round trip must not mix up.

    Leaves without elements (a model without experts has such a bias) hold nothing and cannot be stored.
    """
    leaves = [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if np.prod(leaf.shape)]
    named = dict(leaves)
    if len(named) < len(leaves):
        raise ValueError("two leaves of the state have one name")
    return named


def _cause(error: BaseException) -> str:
    """What went wrong, in a few words: the system's own where it has a code, else the start of the message."""
    number = error.errno if isinstance(error, OSError) else None
    text = " ".join(str(error).split())
    told = re.search(r"os_error_code='(\d+)'", text)
    if number is None and told:
        number = int(told[1])
    if number is not None:
        return os.strerror(number).lower()
    text = text.split(" [tensorstore_spec")[0].split(" [source locations")[0]
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-200:]}"


def _silence() -> None:
    """Failures are reported here, in one line each; Orbax and its event loops would print tracebacks of their own.

    When one array cannot be read or written, Orbax closes the event loop of all, and the threads of the others then
    find it closed.
    """
    if getattr(sys.unraisablehook, "silences_orbax", False):
        return
    before = sys.unraisablehook

    def hook(found):
        if "Event loop is closed" not in str(found.exc_value):
            before(found)

    hook.silences_orbax = True
    sys.unraisablehook = hook
    python_logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)
    python_logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())
