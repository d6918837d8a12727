"""Kimi Delta Attention: the recurrence, its pieces on several devices, and the short convolution before it."""

from pallas_kernels.kda import context
from pallas_kernels.kda.api import kda
from pallas_kernels.kda.short_conv import short_conv

__all__ = ["context", "kda", "short_conv"]
