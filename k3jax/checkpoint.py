"""Checkpoints of a run's whole state, by Orbax.

Layout: `<workdir>/checkpoints/<step>/`. Invariant: what is restored has the names, shapes and types of the state that
asks for it, or the restore is refused with the names that differ; a step not written to its end does not count.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from k3jax.config import ConfigError


class Checkpoints:
    """The checkpoints of one workdir; `keep` of them stay."""

    def __init__(self, workdir: str | Path, keep: int):
        self.folder = Path(workdir).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """The last complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Writes a pytree of arrays and waits until it is complete."""
        self._manager.save(step, args=ocp.args.StandardSave(_tree(state)))
        self._manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step, shaped and placed as `like` (arrays or ShapeDtypeStructs). Raises ConfigError."""
        metadata = self._manager.item_metadata(step)
        stored = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(metadata)}
        wanted = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(_tree(like))}
        differences = [f"{name} is missing" for name in wanted.keys() - stored.keys()]
        differences += [f"{name} is not known" for name in stored.keys() - wanted.keys()]
        for name in wanted.keys() & stored.keys():
            ours = tuple(wanted[name].shape), str(wanted[name].dtype)
            theirs = tuple(stored[name].shape), str(stored[name].dtype)
            if ours != theirs:
                differences.append(f"{name} is {theirs[1]}{list(theirs[0])}, not {ours[1]}{list(ours[0])}")
        if differences:
            shown = "; ".join(sorted(differences)[:5])
            raise ConfigError(f"checkpoint {self.folder / str(step)} does not fit: {shown}")
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(_tree(like)))
        return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(restored))

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()


def _name(path) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def _tree(state: Any) -> dict[str, Any]:
    """Any pytree as nested dicts, which is what survives a round trip by name."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
