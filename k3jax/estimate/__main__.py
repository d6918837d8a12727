"""Says what a run would need, without running it.

    python -m k3jax.estimate --config=configs/k3.py:k3_2p8t --config.mesh.fsdp=128 [--picture=FILE.png]

The config is that of k3jax.train, with the same --config.FIELD=VALUE flags; the devices of `mesh` need not be there.
`--show=sharding` lists every kind of parameter: its logical axes, what each is split over, and the bytes of it and of
its optimizer state that one device holds; --picture draws them. Exit code 2: a mistake in flags or config.
"""

import sys
from pathlib import Path

from rich.console import Console

from k3jax import command
from k3jax import config as configs
from k3jax.config import ConfigError
from k3jax.estimate import sharding

FLAGS = {
    "config": "FILE.py[:NAME]; a path, or one of the packaged configs",
    "show": "what to estimate: sharding",
    "picture": "PNG file to draw it in",
}


def main(argv: list[str]) -> int:
    """Runs the command line `argv` (its first entry is the program) and returns the exit code."""
    return command.guarded(_estimate, argv)


def _estimate(argv: list[str]) -> int:
    overrides, rest = command.overrides(argv)
    given = command.parse(rest, __doc__, FLAGS, {"show": "sharding", "picture": None})
    if given is None:
        return 0
    if given["show"] != "sharding":
        raise ConfigError(f"--show={given['show']}: there is: sharding")
    picture = Path(given["picture"]).expanduser() if given["picture"] else None
    if picture is not None and (picture.suffix != ".png" or not picture.parent.is_dir()):
        raise ConfigError(f"--picture={picture} must be a .png in a folder that is there")
    config = configs.load(given["config"], overrides)
    mesh, found = sharding.shares(config)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120
    console.print(f"{config.name} on {sharding.named(mesh)}")
    console.print(sharding.format_table(found))
    if picture is not None:
        picture.write_bytes(sharding.draw(found, f"{config.name} on {sharding.named(mesh)}"))
        console.print(str(picture))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
