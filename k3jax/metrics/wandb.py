"""Weights & Biases: the same numbers to a server of theirs, or into a folder without a network.

Invariant: a run that stopped and goes on is one run there. W&B takes no step twice: steps that a kill made to be taken
again are bit-equal, so what it has of them stays.
"""

import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.config import MachineError
from k3jax.metrics.picture import heat_map_png

logger = logging.getLogger(__name__)


class WandbWriter:
    """Scalars as charts and matrices as pictures in `project`; W&B's own files go to `folder`/wandb.

    config: nested plain values, shown beside the run. WANDB_MODE and W&B's other variables count. If the server cannot
    be reached or nobody is logged in, the run is written offline, with a warning; `wandb sync` sends it later. Raises
    MachineError if the package is missing.
    """

    def __init__(
        self,
        project: str,
        folder: str | os.PathLike,
        resumed_step: int = 0,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
    ):
        try:
            import wandb
        except ImportError as error:
            raise MachineError("log.wandb needs the package wandb: pip install 'k3jax[wandb]'") from error
        self._wandb, folder = wandb, Path(folder)
        identity = folder / "wandb_id"  # a run that starts anew gets a new one
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = identity.read_text(encoding="utf-8").strip() if resumed_step and identity.exists() else None
            options = {"project": project, "name": name, "id": known, "resume": "allow" if known else None}
            self._run = self._started({**options, "dir": str(folder), "config": dict(config or {})})
            identity.write_text(self._run.id + "\n", encoding="utf-8")
        except OSError as error:
            raise MachineError(f"log.wandb: {folder}: {error.strerror or error}") from error

    def _started(self, options: dict[str, Any]) -> Any:
        """The run, online or offline. The package has an error of its own for each thing that can be amiss."""
        try:
            return self._wandb.init(**options)
        except Exception as error:
            reason = " ".join(str(error).split())
            logger.warning("log.wandb: %s; writing offline to %s, `wandb sync` sends it", reason, options["dir"])
        try:
            return self._wandb.init(**options, mode="offline")
        except Exception as error:
            raise MachineError(f"log.wandb: {' '.join(str(error).split())}") from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Sends the numbers of one step; it returns at once."""
        self._run.log({name: self._value(name, value, step) for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Waits until all is sent."""
        self._run.finish()

    def _value(self, name: str, value: Any, step: int) -> Any:
        array = np.asarray(value, np.float64)
        if array.ndim == 0:
            return float(array)
        from PIL import Image

        return self._wandb.Image(Image.open(io.BytesIO(heat_map_png(array, f"{name}, step {step}"))))
