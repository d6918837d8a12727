"""Parameters chosen by patterns over their paths: what stays frozen, and whose learning rate is scaled.

A pattern is that of fnmatch (`*` is any text, dots too) over a whole path, or over its beginning up to a dot: `embed`,
`blocks.0`, `*.router`, `*norm.weight`. Invariant: a pattern that chooses nothing is a mistake and stops the run.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from k3jax.config import ConfigError


def chosen(paths: Sequence[str], pattern: str, field: str) -> list[str]:
    """The paths that a pattern chooses. Raises ConfigError naming the config's `field` if there are none."""
    found = [path for path in paths if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")]
    if not found:
        raise ConfigError(f"{field}: {pattern!r} matches no parameter; parameters look like {paths[0]!r}")
    return found


def trainable(paths: Sequence[str], frozen: Sequence[str]) -> frozenset[str]:
    """The paths that no pattern of `optim.frozen` chooses.

    Raises:
        ConfigError: a pattern that chooses nothing, or nothing left to train.
    """
    left = set(paths)
    for pattern in frozen:
        left -= set(chosen(paths, pattern, "optim.frozen"))
    if not left:
        raise ConfigError(f"optim.frozen: {', '.join(map(repr, frozen))} leave no parameter to train")
    return frozenset(left)


def rate_scales(paths: Sequence[str], entries: Sequence[str]) -> dict[str, float]:
    """Factor on the learning rate by path, from `optim.rate_scale`: entries PATTERN=FACTOR, the last match counts.

    Raises:
        ConfigError: a pattern that chooses nothing.
    """
    scales = dict.fromkeys(paths, 1.0)
    for entry in entries:
        pattern, _, factor = entry.partition("=")
        scales |= dict.fromkeys(chosen(paths, pattern, "optim.rate_scale"), float(factor))
    return scales
