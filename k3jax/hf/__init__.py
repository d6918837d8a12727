"""Hugging Face folders: `load` one into a Decoder, `save` a Decoder as one. Nothing else knows their words."""

from k3jax.hf.read import load
from k3jax.hf.write import save

__all__ = ["load", "save"]
