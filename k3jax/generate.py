"""Continues a text with a trained model: one full forward pass per token over a window of the last tokens.

Invariant: window and padding have a fixed shape, so one program serves every length, and padding (segment 0) is
invisible to the model.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax import distributed
from k3jax.model.decoder import Decoder


def sample(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    tokens: int,
    window: int,
    vocab: int,
    stop: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Up to `tokens` ids that follow `prompt`; ends in front of the id `stop`.

    The model sees the last `window` tokens. Ids below `vocab` (the tokenizer's size) are drawn from
    softmax(logits / temperature); temperature 0 takes the likeliest. Raises ValueError for an empty prompt.
    """
    if not len(prompt):
        raise ValueError("prompt must hold one token or more")
    graphdef, weights = nnx.split(decoder)
    text, keys = [int(token) for token in prompt], jax.random.split(jax.random.key(seed), max(tokens, 1))
    next_token = functools.partial(_next_token, graphdef, vocab, temperature)
    if distributed.count() > 1 and tokens:
        next_token = distributed.compiled(
            _next_token, graphdef, vocab, temperature, weights, np.zeros(window, np.int32), 1, keys[0]
        )
    for key in keys[:tokens]:
        recent = np.zeros(window, np.int32)
        shown = text[-window:]
        recent[: len(shown)] = shown
        token = int(next_token(weights, recent, len(shown), key))
        if token == stop:
            break
        text.append(token)
    return text[len(prompt) :]


# Outside of `sample`, so that samples in the course of a run share one program.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _next_token(graphdef, vocab, temperature, weights, recent, length, key):
    """The id behind recent[length - 1]; recent [window], filled up behind that with anything."""
    segments = (jnp.arange(recent.shape[0]) < length).astype(jnp.int32)
    bound = nnx.merge(graphdef, weights)
    hidden, _ = bound.apply(recent[None], segments[None])
    kernel = bound.lm_head[...].astype(hidden.dtype)
    logits = jnp.dot(hidden[0, length - 1], kernel, preferred_element_type=jnp.float32)[:vocab]
    return jax.random.categorical(key, logits / temperature) if temperature else jnp.argmax(logits)
