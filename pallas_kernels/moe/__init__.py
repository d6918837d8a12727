"""Dropless mixture-of-experts operations: expert_layer, and its parts permute, grouped_matmul, combine."""

from pallas_kernels.moe.api import Plan, combine, expert_layer, grouped_matmul, permute

__all__ = ["Plan", "combine", "expert_layer", "grouped_matmul", "permute"]
