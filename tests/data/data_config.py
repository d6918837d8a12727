"""Data configs of the tests."""

from k3jax.config import DataConfig


def config(*source, **values) -> DataConfig:
    """Rows of 16 bytes of `source`, two in a batch; `values` are other fields."""
    defaults = {
        "weights": (), "held_out": (), "tokenizer": "bytes", "chat_template": None, "seq_len": 16, "batch_rows": 2,
        "seed": 0,
    }  # fmt: skip
    return DataConfig(source=tuple(map(str, source)), **defaults | values)
