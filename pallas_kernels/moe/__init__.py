"""Dropless mixture-of-experts operations: permute, grouped_matmul, combine."""

from pallas_kernels.moe.api import Plan, combine, grouped_matmul, permute

__all__ = ["Plan", "combine", "grouped_matmul", "permute"]
