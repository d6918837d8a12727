"""From what a user writes in data.source to the files that are meant.

    FILE        one file: text by its extension, .jsonl, .parquet
    FOLDER      every such file below it, hidden ones (a leading dot) and links to folders left out
    a/*/b/**    a glob: `*`, `?`, `[...]` within one name, `**` any depth; a link is followed where the glob names it

Paths are local or gs://. A file's name is its path relative to the folder, to the fixed part of the glob, or, for one
file, to its own folder; `/` between folders. Files come in the order of their names. Invariant: each file once, and
what is passed over (an unknown extension, a folder that cannot be listed) is there as a BadDocument, to be counted.
"""

import fnmatch
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from etils import epath

from k3jax.config import ConfigError, MachineError
from k3jax.data.sources import BadDocument

PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".htm", ".xml")
CODE = (".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".jl")
PLAIN = (".sh", ".sql", ".css", ".toml", ".yaml", ".yml", ".csv", ".tsv")
TEXT = frozenset(PROSE + CODE + PLAIN)
META = "meta.json"  # what makes a folder one of token shards


@dataclass(frozen=True)
class Found:
    """One file: where it is, its name (see above) and its bytes; or why it is passed over."""

    path: epath.Path
    name: str
    size: int
    bad: BadDocument | None = None


def kind(name: str) -> str | None:
    """How a file of this name is read: ".txt", ".jsonl" or ".parquet"; None if it is not. Capitals do not matter."""
    extension = PurePosixPath(name).suffix.lower()
    return ".txt" if extension in TEXT else extension if extension in (".jsonl", ".parquet") else None


def need(module: str, extra: str) -> Any:
    """The optional library `module`, which the extra brings. Raises MachineError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MachineError(f"this needs the package {package}: pip install 'k3jax[{extra}]'") from error


def as_path(field: str, spec: str) -> epath.Path:
    """The path of `spec`. Raises ConfigError that names `field` for a scheme other than gs://."""
    scheme, found, _ = spec.partition("://")
    if found and scheme != "gs":
        raise ConfigError(f"{field}: {spec} is neither a local path nor gs://")
    return epath.Path(spec) if found else epath.Path(spec).expanduser()


def ask(field: str, path: epath.Path, question: Callable[[], Any]) -> Any:
    """The answer of a storage about `path`. Raises ConfigError, or MachineError where a remote one cannot be asked."""
    try:
        return question()
    except (ConfigError, MachineError):
        raise
    except ImportError as error:
        raise MachineError(f"{path} needs the package gcsfs: pip install 'k3jax[gcs]'") from error
    except Exception as error:
        if is_remote(path):  # a client library's own errors: no login, no network
            raise MachineError(f"{field}: {path}: {type(error).__name__}: {error}") from error
        if isinstance(error, OSError | ValueError):  # a name with a NUL is a ValueError
            raise ConfigError(f"{field}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        raise


def is_remote(path: epath.Path) -> bool:
    """Whether `path` is on gs://."""
    return "://" in str(path)


def identity(path: epath.Path) -> str:
    """The same string for the same file, links followed."""
    return str(path) if is_remote(path) else os.path.realpath(path)


def read(field: str, path: epath.Path) -> bytes:
    """The bytes of a small file that must be there. Raises ConfigError that names `field` and the path."""
    if ask(field, path, path.is_dir):
        raise ConfigError(f"{field}: {path} is a folder, not a file")
    if not ask(field, path, path.exists):
        raise ConfigError(f"{field}: no file {path}")
    return ask(field, path, path.read_bytes)


def find(field: str, spec: str) -> list[Found]:
    """The files that `spec` means, by name. Raises ConfigError that names `field` where there is none."""
    path = as_path(field, spec)
    if ask(field, path, path.is_dir):
        return ask(field, path, lambda: _files(field, spec, path, ["**"]))
    if ask(field, path, path.exists):
        if kind(path.name) is None:
            known = ", ".join(sorted(TEXT | {".jsonl", ".parquet"}))
            raise ConfigError(f"{field}: {spec} has the unknown extension {path.suffix!r}; known are {known}")
        return [ask(field, path, lambda: _look(path, path.name))]
    parts = path.parts
    magic = next((place for place, part in enumerate(parts) if _is_pattern(part)), None)
    if magic is None:
        raise ConfigError(f"{field}: no file or folder {spec}")
    root = epath.Path(*parts[:magic]) if magic else epath.Path(".")
    if not ask(field, root, root.is_dir):
        raise ConfigError(f"{field}: no folder {root} for {spec}")
    return ask(field, root, lambda: _files(field, spec, root, list(parts[magic:])))


def _is_pattern(part: str) -> bool:
    return any(sign in part for sign in "*?[")


def _files(field: str, spec: str, root: epath.Path, pattern: list[str]) -> list[Found]:
    names, bad = set(), []
    for name in _expand(root, pattern, "", bad):
        names.add(name)
    if not names:
        raise ConfigError(f"{field}: {spec} matches no file")
    found, seen = [], set()
    for name in sorted(names):
        one = _look(root / name, name)
        if not one.bad and identity(one.path) in seen:  # a link: else one text could be trained on and held out
            one = Found(one.path, name, 0, BadDocument("a link to another", name))
        seen.add(identity(one.path))
        found.append(one)
    return found + [Found(root / where.where, where.where, 0, where) for where in bad]


def _expand(folder: epath.Path, pattern: list[str], inside: str, bad: list[BadDocument]) -> Iterator[str]:
    """Names (relative to where it began) of the files below `folder` that fit the pattern's parts."""

    def unreadable(_: OSError) -> None:
        bad.append(BadDocument("unreadable", inside.rstrip("/") or "."))

    head, rest = pattern[0], pattern[1:]
    # Not epath's walk on this machine: what it takes a link to a folder for depends on the Python.
    walk = folder.walk(on_error=unreadable) if is_remote(folder) else os.walk(folder, onerror=unreadable)
    _, folders, files = next(walk, (folder, [], []))
    if head == "**" and rest:
        yield from _expand(folder, rest, inside, bad)
    if not rest:
        yield from (inside + name for name in files if _fits(name, "*" if head == "**" else head))
    for name in folders:
        if head == "**" and _fits(name, "*") and not _is_link(folder / name):
            yield from _expand(folder / name, pattern, f"{inside}{name}/", bad)
        elif head != "**" and rest and _fits(name, head):
            yield from _expand(folder / name, rest, f"{inside}{name}/", bad)


def _fits(name: str, pattern: str) -> bool:
    if not name or (name.startswith(".") and not pattern.startswith(".")):
        return False
    return fnmatch.fnmatchcase(name, pattern)


def _is_link(folder: epath.Path) -> bool:
    return not is_remote(folder) and os.path.islink(folder)


def _look(path: epath.Path, name: str) -> Found:
    if kind(name) is None:
        return Found(path, name, 0, BadDocument("unknown extension", name))
    try:
        found = Found(path, name, path.stat().length)
        if not is_remote(path) and not os.path.isfile(path):  # a pipe would be waited for
            return Found(path, name, 0, BadDocument("no regular file", name))
        return found
    except OSError:
        return Found(path, name, 0, BadDocument("unreadable", name))
