"""What a run would need, worked out from shapes alone: no device, no parameter, no data."""

from k3jax.estimate.sharding import Share, draw, format_table, shares

__all__ = ["Share", "draw", "format_table", "shares"]
