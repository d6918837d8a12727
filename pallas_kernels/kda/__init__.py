"""Kimi Delta Attention: the recurrence and the short convolution before it."""

from pallas_kernels.kda.api import kda
from pallas_kernels.kda.short_conv import short_conv

__all__ = ["kda", "short_conv"]
