"""Which implementation of an operation runs.

An operation has several implementations with one signature, in order of preference. One that cannot take a case (a
shape, a device, a missing library) raises NotImplementedError; the automatic choice then goes on to the next.
Invariant: an implementation that the caller named runs or raises, it is never replaced.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

_log = logging.getLogger("pallas_kernels")


@functools.cache
def _say(operation: str, name: str, refusals: tuple[str, ...]) -> None:
    """One log line for each different choice, not one for each call."""
    _log.info("%s: %s%s", operation, name, f" ({'; '.join(refusals)})" if refusals else "")


def run(operation: str, implementations: Mapping[str, Callable], implementation: str | None, *arguments: Any) -> Any:
    """Calls the named implementation, or without a name the first that does not refuse, and logs which ran.

    Args:
        operation: name for messages.
        implementations: name -> function, most preferred first.
        implementation: a name, or None for the automatic choice.
        arguments: passed on as they are.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: the named implementation refuses, or every one does.
    """
    if implementation is not None:
        if implementation not in implementations:
            known = ", ".join(implementations)
            raise ValueError(f"{operation}: unknown implementation {implementation!r}; there are: {known}")
        result = implementations[implementation](*arguments)
        _say(operation, implementation, ())
        return result
    refusals: list[str] = []
    for name, function in implementations.items():
        try:
            result = function(*arguments)
        except NotImplementedError as error:
            refusals.append(f"{name}: {error}")
            continue
        _say(operation, name, tuple(refusals))
        return result
    raise NotImplementedError(f"{operation}: no implementation takes this case ({'; '.join(refusals)})")
