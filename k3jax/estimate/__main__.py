"""Says what a run would need, without running it.

    python -m k3jax.estimate --config=configs/k3.py:k3_2p8t --config.mesh.fsdp=128 [--picture=FILE.png]
    python -m k3jax.estimate --show=collectives --config=configs/k3.py:tiny --config.mesh.fsdp=4 [--json=FILE.json]

The config is that of k3jax.train, with the same --config.FIELD=VALUE flags; the devices of `mesh` need not be there.
`--show=sharding` lists every kind of parameter: its logical axes, what each is split over, and the bytes of it and of
its optimizer state that one device holds; --picture draws them. `--show=collectives` compiles the train step for CPU
devices, as many as the mesh has, and lists what a device sends in it, by kind of collective and mesh axes, beside what
a formula says, message by message (the compiler joins many into one call); --json writes that down. Here mesh.data is 1
where it is left open. Exit code 2: a mistake in flags or config; 3: no such devices.
"""

import json
import sys
from pathlib import Path

from rich.console import Console

from k3jax import command
from k3jax import config as configs
from k3jax.config import ConfigError, RunConfig
from k3jax.estimate import collectives, sharding
from k3jax.parallel.mesh import abstract_mesh

SHOWN = ("sharding", "collectives")
FLAGS = {
    "config": "FILE.py[:NAME]; a path, or one of the packaged configs",
    "show": f"what to estimate: {' or '.join(SHOWN)}",
    "picture": "PNG file to draw the sharding in",
    "json": "JSON file to write the collectives to",
}


def main(argv: list[str]) -> int:
    """Runs the command line `argv` (its first entry is the program) and returns the exit code."""
    return command.guarded(_estimate, argv)


def _estimate(argv: list[str]) -> int:
    overrides, rest = command.overrides(argv)
    given = command.parse(rest, __doc__, FLAGS, {"show": "sharding", "picture": None, "json": None})
    if given is None:
        return 0
    if given["show"] not in SHOWN:
        raise ConfigError(f"--show={given['show']}: there is: {', '.join(SHOWN)}")
    picture = _file(given, "picture", ".png", "sharding")
    written = _file(given, "json", ".json", "collectives")
    config = configs.load(given["config"], overrides)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120
    title = f"{config.name} on {sharding.named(abstract_mesh(config.mesh))}"
    console.print(title)
    if given["show"] == "sharding":
        _sharding(config, title, console, picture)
    else:
        _collectives(config, console, written)
    return 0


def _file(given: dict[str, str], flag: str, suffix: str, show: str) -> Path | None:
    """The file of a flag that goes with `--show=show`, whose folder is there."""
    if not given[flag]:
        return None
    if given["show"] != show:
        raise ConfigError(f"--{flag} goes with --show={show}")
    path = Path(given[flag]).expanduser()
    if path.suffix != suffix or not path.parent.is_dir():
        raise ConfigError(f"--{flag}={path} must be a {suffix} in a folder that is there")
    return path


def _sharding(config: RunConfig, title: str, console: Console, picture: Path | None) -> None:
    _, found = sharding.shares(config)
    console.print(sharding.format_table(found))
    if picture is not None:
        picture.write_bytes(sharding.draw(found, title))
        console.print(str(picture))


def _collectives(config: RunConfig, console: Console, written: Path | None) -> None:
    found = collectives.census(config)
    for table in collectives.format_tables(found):
        console.print(table)
        console.print()
    console.print(f"compiled in {found.seconds:.0f} s")
    if written is not None:
        written.write_text(json.dumps(found.to_dict(), indent=1) + "\n")
        console.print(str(written))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
