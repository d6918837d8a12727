"""What a run would need, worked out from shapes alone: no accelerator, no parameter, no data."""

from k3jax.estimate.collectives import Census, census
from k3jax.estimate.sharding import Share, draw, format_table, shares

__all__ = ["Census", "Share", "census", "draw", "format_table", "shares"]
