"""Attention for training MLA: output and the largest logit of each row."""

from pallas_kernels.attention.api import mla_attention

__all__ = ["mla_attention"]
