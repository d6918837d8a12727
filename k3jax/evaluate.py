"""Held-out loss of a state: summed loss over all targets of some batches, divided once.

Invariant: reads the state and changes nothing; the router bias is the one in training, and no count leaves this file.
"""

from collections.abc import Callable, Iterable

import jax

from k3jax import distributed
from k3jax.config import RunConfig
from k3jax.model.decoder import Decoder
from k3jax.parallel import Layout
from k3jax.step import Batch, TrainState, make_loss


def make_evaluate(
    config: RunConfig, decoder: Decoder, layout: Layout
) -> Callable[[TrainState, Iterable[Batch]], float]:
    """A function (state, batches) -> mean loss in nats per target. `decoder` is abstract, all batches of one shape."""
    loss_of, program = jax.jit(make_loss(config, decoder, layout)), None

    def evaluate(state: TrainState, batches: Iterable[Batch]) -> float:
        nonlocal program
        total = targets = 0.0
        for batch in batches:
            arguments = state.params, state.router_bias, layout.place(batch)
            program = program or distributed.compiled(loss_of, *arguments)
            loss, count = program(*arguments)
            total, targets = total + float(loss), targets + float(count)
        return total / targets if targets else float("nan")

    return evaluate
