"""Run configs of the census: the models of tests/sizes.py as `--config=tests/census/models.py:NAME`."""

import dataclasses
import sys
from pathlib import Path

from k3jax import config as configs

sys.path.append(str(Path(__file__).parent.parent))

import sizes


def get_config(name: str) -> dict:
    """`tiny` with the model NAME of tests/sizes.py, in lower case."""
    values = configs.load("configs/k3.py:tiny").to_dict()
    values["name"] = name
    values["model"] = dataclasses.asdict(getattr(sizes, name.upper()))
    values["data"].update(batch_rows=8, seq_len=128)
    return values
