"""What a forward pass reports beside its result: how health travels.

Invariant: sums add, maxima max, over micro-batches and devices alike; a mean is a sum here and is divided by `tokens`
where it is shown. Nothing here carries a gradient, and no module is written to.
"""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from k3jax.parallel import tensor, totals


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stats:
    """Statistics of one forward pass over its non-padding tokens."""

    tokens: Array  # [] int32, non-padding tokens
    expert_load: Array  # [moe_layers, experts] int32, tokens sent to each expert
    histogram: Array  # [moe_layers, experts, bins] int32, required biases (model/router.py); 0 bins if unused
    max_logit: Array  # [mla_layers, heads] fp32, largest scaled logit, -inf without tokens
    gate_saturation: Array  # [kda_layers] fp32, sum over tokens of the share of saturated decay channels
    attnres_weights: Array  # [sublayers, sources] fp32, sum over tokens; the last sub-layer is the final mix

    @classmethod
    def specs(cls) -> "Stats":
        """Where the fields lie after `over_devices`: heads over `tensor`, all else on every device."""
        return cls(**{field.name: P() for field in fields(cls)}).replace(max_logit=P(None, tensor.AXIS))

    def merge(self, other: "Stats") -> "Stats":
        """Statistics of both passes together."""
        merged = jax.tree.map(jnp.add, self, other)
        return merged.replace(max_logit=jnp.maximum(self.max_logit, other.max_logit))

    def over_devices(self) -> "Stats":
        """Statistics of all tokens, from those of each device's own; heads still lie over `tensor`."""
        return totals.total(self).replace(max_logit=totals.largest(self.max_logit))

    def replace(self, **fields) -> "Stats":
        """A copy with some fields changed."""
        return type(self)(**{**self.__dict__, **fields})
