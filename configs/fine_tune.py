"""Fine-tuning of published weights: the model is what the folder's config.json says.

    python -m k3jax.train --config=configs/fine_tune.py:FOLDER --workdir=runs/tuned \
        --config.data.source=answers.jsonl --config.train.epochs=2 [--config.optim.frozen=embed,lm_head,*.router]

FOLDER holds Kimi-Linear or K3 in Hugging Face's layout. Its tokenizer (tokenizer.json, or tiktoken.model) is used where
there is one. Learning rate and length are those of a first try, not of a published recipe.
"""

import dataclasses
import json
from pathlib import Path

from ml_collections import ConfigDict

from k3jax.config import ConfigError
from k3jax.hf.config import from_hf

from . import base


def get_config(folder: str = "") -> ConfigDict:
    """The run config for one folder. Raises ConfigError if it holds no readable config.json."""
    file = Path(folder) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config=configs/fine_tune.py:FOLDER: {file} cannot be read: {error}") from error
    config = base.get_config()
    config.name = Path(folder).name
    config.init_from = folder
    config.model = ConfigDict(dataclasses.asdict(from_hf(values, str(file))))
    tokenizers = (Path(folder) / name for name in ("tokenizer.json", "tiktoken.model"))
    config.data.tokenizer = next((str(path) for path in tokenizers if path.exists()), "bytes")
    config.data.update(seq_len=1_024)
    config.optim.update(learning_rate=1e-4, warmup_steps=0)
    config.memory.policy = "recompute_all"
    return config
