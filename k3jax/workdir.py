"""The folder of a run: who may train in it, and whether what lies there is this run.

    config.json      the run's config; rewritten by a resumed run, of which only the fields of RESUMABLE may differ
    data.json        fingerprint of each data source, the tokenizer and the split, wherever their files lie
    metrics.jsonl    one line per step (k3jax/metrics)
    checkpoints/     complete states by step (k3jax/checkpoint.py)
    .lock            held by the process that trains here; its content names that process

Invariant: a run found there is continued as it was or not at all: with another config, other data, or without the
checkpoints its log speaks of, it is refused in one line before anything is written. One process trains in a folder at
a time. A kill at any moment leaves each file whole, the old one or the new one.
"""

import errno
import fcntl
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from absl import logging

from k3jax.checkpoint import complete_steps
from k3jax.config import ConfigError, MachineError

# Fields that a resumed run may change, and groups of them: they alter no number of the steps already taken.
RESUMABLE = (
    "name",
    "train.steps",
    "train.epochs",
    "train.max_skipped",
    "train.accumulate",
    "eval.",
    "sample.",
    "log.",
    "profile.",
    "debug.",
    "checkpoint.",
    "mesh.",
    "memory.",
    # Paths of what data.json knows by its content, and of weights that are only read before the first step.
    "data.source",
    "data.held_out",
    "data.tokenizer",
    "data.chat_template",
    "init_from",
)
OF_THE_MACHINE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ESTALE,
)
NO_LOCKS_THERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Workdir:
    """A workdir, locked for this process until `close()` (or the end of the process, however it ends).

    Opening it creates the folder and its lock, and holds `config` (nested plain values, `RunConfig.to_dict()`) against
    the run found there. Then `check_data`, then `begin`, which is the first to write. Raises ConfigError, and
    MachineError where the folder cannot be written.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any]):
        self.folder = Path(folder)
        self._config = json.loads(json.dumps(config))  # as a file holds it: lists for tuples
        self._data: dict[str, str] | None = None
        self._lock = _locked(self.folder)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def check_data(self, fingerprints: Mapping[str, str]) -> None:
        """Refuses data other than those the run found here was trained on, by name. Call it before `begin`."""
        ours, file = dict(fingerprints), self.folder / "data.json"
        theirs = _read(file) if self._steps or self._logged else None
        if theirs is None:
            if self._steps:
                raise ConfigError(f"{file} is missing: it cannot be told whether the data are the same; {self._anew}")
        else:
            changed = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
            told = [f"{name} is new" for name in sorted(ours.keys() - theirs.keys())]
            told += [f"{name} is gone" for name in sorted(theirs.keys() - ours.keys())]
            told += [f"{name} has changed" for name in changed]
            if told:
                raise ConfigError(f"the data are not those of the run in {self.folder}: {_listed(told)}; {self._anew}")
        self._data = ours

    def begin(self) -> None:
        """Writes data.json (after `check_data`) and then config.json, whose presence says that a run has begun."""
        try:
            if self._data is not None:
                _write(self.folder / "data.json", self._data)
            _write(self.folder / "config.json", self._config)
        except OSError as error:
            raise MachineError(f"{self.folder} cannot be written: {os.strerror(error.errno)}") from error

    def close(self) -> None:
        """Lets other processes in."""
        self._lock.close()

    def __enter__(self) -> "Workdir":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _anew(self) -> str:
        return f"to start anew give another --workdir, or delete {self.folder}"

    def _check(self) -> None:
        file, checkpoints = self.folder / "config.json", self.folder / "checkpoints"
        self._steps = steps = complete_steps(checkpoints)
        self._logged = logged = _last_step(self.folder / "metrics.jsonl")
        theirs = _read(file)
        if theirs is None:
            if steps or logged:
                raise ConfigError(f"{file} is missing, but a run is there; {self._anew}")
            return
        found = [entry for entry in differences(theirs, self._config) if not _resumable(entry[0])]
        if found and (steps or logged):
            changed = _listed([f"{name}: {old!r} -> {new!r}" for name, old, new in found])
            raise ConfigError(f"{file} is of another run: {changed}; give another --workdir, or the values it has")
        group = theirs.get("checkpoint")
        every = group.get("every") if isinstance(group, dict) else None
        every = every if isinstance(every, int) else self._config["checkpoint"]["every"]
        # A run killed early has steps in its log and no checkpoint yet; it starts again from step 0. Later than that
        # the checkpoints were there once: going on would take all steps anew and rewrite the log without a word.
        if logged and (not checkpoints.is_dir() or (not steps and logged > 2 * every)):
            raise ConfigError(f"{checkpoints} has no checkpoint, but metrics.jsonl has {logged} steps; {self._anew}")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, old value, new value) of what differs in two nested dicts; a missing value is None."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if {type(a), type(b)} in ({dict}, {dict, type(None)}):
            found += differences(a or {}, b or {}, f"{prefix}{name}.")
        elif a != b:
            found.append((prefix + name, a, b))
    return found


def _resumable(name: str) -> bool:
    return any(name.startswith(entry) if entry.endswith(".") else name == entry for entry in RESUMABLE)


def _listed(entries: list[str], most: int = 8) -> str:
    more = f"; and {len(entries) - most} more" if len(entries) > most else ""
    return "; ".join(entries[:most]) + more


def _locked(folder: Path) -> TextIO:
    """Creates the folder and takes its lock: an advisory one of the system, which ends with the process."""
    if "://" in str(folder) or re.match(r"[a-z0-9]{2,}:/", str(folder)):
        raise ConfigError(f"--workdir={folder}: a run's folder is a local path; copy checkpoints where they shall stay")
    if any(sign in str(folder.absolute()) for sign in "[]*?"):
        raise ConfigError(f"--workdir={folder}: the library that writes checkpoints cannot read them below [ ] * or ?")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+", encoding="utf-8", errors="replace")  # noqa: SIM115, held open
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        why = os.strerror(number).lower() if number else str(error)
        kind = MachineError if number in OF_THE_MACHINE else ConfigError
        raise kind(f"--workdir={folder} cannot be written: {why}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS_THERE:
            file.seek(0)
            holder = " ".join(file.read(200).split()) or "another process"
            file.close()
            raise ConfigError(f"--workdir={folder} is in use: {holder} trains there") from error
        logging.warning("%s: no locks on this file system, so see to it that one process trains there", folder)
    try:
        file.truncate(0)  # in append mode every write goes to the end
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except OSError as error:
        raise MachineError(f"--workdir={folder} cannot be written: {os.strerror(error.errno).lower()}") from error
    return file


def _read(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if there is no such file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no object")
    return found


def _write(file: Path, content: Mapping[str, Any]) -> None:
    beside = file.with_name(f".{file.name}.new")
    with open(beside, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(content, indent=1) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(beside, file)


def _last_step(file: Path) -> int:
    """The last step in a metrics.jsonl, 0 if there is none. Lines that a kill cut are passed over."""
    try:
        with open(file, "rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 2**20))
            lines = stream.read().splitlines()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            continue
    return 0
