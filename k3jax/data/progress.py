"""How far the tokenising of large sources is: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

LINE_SECONDS = 10.0
QUIET_SECONDS = 2.0  # what takes no longer shows nothing


@contextlib.contextmanager
def progress(what: str, total: int, *, lines: bool) -> Iterator[Callable[[float], None]]:
    """Gives a function that is told the bytes behind; `total` are all of them (0: not known).

    On a terminal a bar on stderr once QUIET_SECONDS are over. Elsewhere, with `lines`, a line every LINE_SECONDS.
    """
    if sys.stderr.isatty():
        options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "leave": False, "delay": QUIET_SECONDS}
        with tqdm(total=total or None, desc=what, **options) as bar:
            yield bar.update
        return
    done, said = 0.0, time.monotonic()

    def advance(size: float) -> None:
        nonlocal done, said
        done += size
        if lines and time.monotonic() - said >= LINE_SECONDS:
            share = f" ({done / total:.0%})" if total else ""
            print(f"{what}: {done / 2**20:,.0f} MiB{share}", file=sys.stderr, flush=True)
            said = time.monotonic()

    yield advance
