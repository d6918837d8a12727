"""Held-out loss of a state: summed loss over all targets of some batches, divided once.

Invariant: reads the state and changes nothing; the router bias is the one in training, and no count leaves this file.
"""

import functools
from collections.abc import Callable, Iterable

import jax

from k3jax.config import RunConfig
from k3jax.model.decoder import Decoder
from k3jax.step import Batch, TrainState, loss_sum


def make_evaluate(config: RunConfig, decoder: Decoder) -> Callable[[TrainState, Iterable[Batch]], float]:
    """A function (state, batches) -> mean loss in nats per target. `decoder` is abstract, all batches of one shape."""
    loss_of = jax.jit(functools.partial(loss_sum, decoder, config))

    def evaluate(state: TrainState, batches: Iterable[Batch]) -> float:
        total = targets = 0.0
        for batch in batches:
            loss, (count, _) = loss_of(state.params, state.router_bias, batch)
            total, targets = total + float(loss), targets + float(count)
        return total / targets if targets else float("nan")

    return evaluate
