"""Checkpoints of a run's whole state, by Orbax.

Layout: `<workdir>/checkpoints/<step>/`. Invariant: what is restored has the names, shapes and types of the state that
asks for it, or the restore is refused with the names that differ; a step not written to its end does not count.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from k3jax.config import ConfigError


class Checkpoints:
    """The checkpoints of one workdir; `keep` of them stay."""

    def __init__(self, workdir: str | Path, keep: int):
        self.folder = Path(workdir).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        handler = ocp.StandardCheckpointHandler()  # named, so that a new process can read what is stored
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handler)

    def latest(self) -> int | None:
        """The last complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Writes a pytree of arrays and waits until it is complete."""
        self._manager.save(step, args=ocp.args.StandardSave(_by_name(state)))
        self._manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step, shaped and placed as `like` (arrays or ShapeDtypeStructs). Raises ConfigError."""
        folder = self.folder / str(step)
        try:
            metadata = self._manager.item_metadata(step)
        except Exception as error:
            raise ConfigError(f"checkpoint {folder} cannot be read: {error}") from error
        stored, wanted = _by_name(metadata), _by_name(like)
        differences = [f"{name} is missing" for name in wanted.keys() - stored.keys()]
        differences += [f"{name} is not known" for name in stored.keys() - wanted.keys()]
        for name in wanted.keys() & stored.keys():
            ours = tuple(wanted[name].shape), str(wanted[name].dtype)
            theirs = tuple(stored[name].shape), str(stored[name].dtype)
            if ours != theirs:
                differences.append(f"{name} is {theirs[1]}{list(theirs[0])}, not {ours[1]}{list(ours[0])}")
        if differences:
            shown = "; ".join(sorted(differences)[:5])
            raise ConfigError(f"checkpoint {folder} does not fit: {shown}")
        try:
            restored = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except Exception as error:
            raise ConfigError(f"checkpoint {folder} cannot be read: {error}") from error
        leaves = jax.tree_util.tree_leaves_with_path(like)
        found = [restored[_name(path)] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(like), found)

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()


def _name(path) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def _by_name(tree: Any) -> dict[str, Any]:
    """A pytree's leaves by their path, in the tree's order: names are what a round trip must not mix up.

    Leaves without elements (a model without experts has such a bias) hold nothing and cannot be stored.
    """
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if np.prod(leaf.shape)}
