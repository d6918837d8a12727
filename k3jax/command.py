"""What all command lines share: flags, and how a mistake ends.

    exit code 0: done    1: the run failed    2: a mistake in flags, config or input    3: the machine lacks something
              130: interrupted at once, without saving

Invariant: a user's mistake and a machine's lack are one line on stderr, never a traceback.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax
from absl import flags

from k3jax import distributed
from k3jax.config import ConfigError, MachineError


def guarded(body: Callable[[list[str]], int], argv: list[str]) -> int:
    """body(argv)'s exit code, or that of the error it ended with, printed in one line."""
    try:
        return body(argv)
    except (ConfigError, flags.Error) as error:
        return _ended(2, str(error))
    except MachineError as error:
        return _ended(3, str(error))
    except KeyboardInterrupt:
        return _ended(130, "interrupted")
    except MemoryError as error:
        return _ended(3, f"out of host memory: {error}")
    except OSError as error:
        return _ended(3, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        first = str(error).partition("\n")[0]
        if distributed.lost(error):
            return _ended(3, f"another process is gone: {first}")
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            return _ended(3, f"out of device memory: {first}; train.accumulate, memory.policy and mesh.fsdp need less")
        raise


def parse(
    argv: Sequence[str],
    about: str,
    texts: Mapping[str, str],
    defaults: Mapping[str, str | None] = MappingProxyType({}),
    positional: str | None = None,
) -> dict[str, str] | None:
    """String flags by name, or None after `--help` was printed. `--config.*` flags are the caller's.

    about: text of `--help`; texts: what each flag means; defaults: of flags that may be left out; positional: name of
    the one argument that is no flag. Raises ConfigError.
    """
    found = _given(argv, about, texts, defaults)
    if found is None:
        return None
    given, rest = found
    if positional is not None and len(rest) != 1:
        raise ConfigError(f"one {positional} is needed, got {rest or 'none'}")
    if positional is None and rest:
        raise ConfigError(f"unknown argument {rest[0]!r}")
    return given if positional is None else given | {positional: rest[0]}


def parse_known(
    argv: Sequence[str], about: str, texts: Mapping[str, str], defaults: Mapping[str, str | None]
) -> tuple[dict[str, str], list[str]] | None:
    """`parse`, and with it the arguments that `texts` does not name, in their order."""
    return _given(argv, about, texts, defaults, others=True)


def _given(argv, about, texts, defaults, others: bool = False) -> tuple[dict[str, str], list[str]] | None:
    """Flags by name and the arguments that are none; `others`: those that nobody named may be among them."""
    known = flags.FlagValues()
    for name, text in texts.items():
        flags.DEFINE_string(name, defaults.get(name), text, flag_values=known)
    flags.DEFINE_bool("help", False, "show this help", short_name="h", flag_values=known)
    rest = known(list(argv), known_only=others)[1:]
    if known.help:
        own = "\n".join(f"  --{name}: {text}" for name, text in texts.items())
        print(f"{about.strip()}\n\nFlags:\n{own}")
        return None
    for name in texts:
        if not known[name].value and name not in defaults:
            raise ConfigError(f"--{name} is missing")
    return {name: known[name].value for name in texts}, rest


def stop_signals() -> list[signal.Signals]:
    """Those that ask a program to stop: Ctrl-C, SIGTERM, and a terminal that went away unless nohup has it ignored."""
    found = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in found if signal.getsignal(number) != signal.SIG_IGN]


def overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The `--config.FIELD=VALUE` flags of a command line, for `config.load`, and what is left for `parse`."""
    found = [argument for argument in argv[1:] if argument.startswith("--config.")]
    return found, [argument for argument in argv if argument not in found]


def _ended(code: int, text: str) -> int:
    with contextlib.suppress(OSError):  # nobody reads any more: the code still tells
        print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code
