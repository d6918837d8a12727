"""KDA by chunks in plain XLA: a scan over chunks of 16 tokens, with its own backward pass.

The sequence is cut in chunks (chunk.py); the carry of the scan is the state. Inputs stay where they are and each step
cuts its piece, casts it to fp32 and applies gates, normalisation and masks to it (inputs.py), so nothing but the result
is ever as long as the sequence (only where its length is no multiple of a chunk, inputs are first copied and padded).
The backward pass scans the chunks in reverse and computes each again from the state at its start: the residuals are the
inputs and one state for every `state_every` chunks.
CPUs go forward token by token where a head's state fits their cache, measured twice as fast as small products of
matrices. A single token, as in decoding, is one step of the recurrence everywhere.

Invariants: fp32 inside whatever the inputs are; gradients in each input's dtype; a token is bitwise independent of
later ones, as long as no product overflows; exact zeros at padding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.kda import chunk, reference
from pallas_kernels.kda.inputs import SEQUENCES, Inputs, Options, activate, first_state, pad_to
from pallas_kernels.segments import keep_tokens
from pallas_kernels.slices import cut, put

CHUNK = 16  # measured best on CPUs from 8, 16 and 32, for 32 and 64 wide heads
IN_CACHE = 64 * 64  # numbers of a head's state up to which CPUs go token by token
PARAMETERS = ("a_log", "dt_bias")


def kda(inputs: Inputs, options: Options, in_cache: int = IN_CACHE) -> tuple[Array | None, Array]:
    """-> output [B,T,HV,V] in value's dtype, None without queries, and final_state [B,HV,K,V] fp32.

    CPUs go forward token by token where a head's state has up to `in_cache` numbers.
    """
    length = inputs.value.shape[1]
    if length == 1 and inputs.query is not None:  # a step of decoding: the recurrence itself is the least work
        return reference.kda(inputs, options)
    chunks = max(1, -(-length // _chunk_length(length)))
    options = options._replace(state_every=min(options.state_every, chunks))
    inputs = pad_to(inputs, (chunks + -chunks % options.state_every) * _chunk_length(length))
    output, state = _kda(inputs, options, in_cache)
    return (None if output is None else output[:, :length]), state


def _chunk_length(length: int) -> int:
    """CHUNK, or for short sequences the power of two that holds them."""
    return min(CHUNK, max(2, 1 << (length - 1).bit_length()))


def _heads_first(x: Array | None) -> Array | None:
    """[B,C,H,*] <-> [B,H,C,*]."""
    return None if x is None else lax.transpose(x, (0, 2, 1, *range(3, x.ndim)))


def _cut_inputs(inputs: Inputs, start: Array, size: int) -> Inputs:
    arrays = {name: getattr(inputs, name) for name in SEQUENCES}
    return inputs._replace(**{name: cut(x, start, size) for name, x in arrays.items() if x is not None})


def _by_heads(query: Array | None, key: Array, value: Array, log_decay: Array, beta: Array) -> tuple[Array | None, ...]:
    """What the recurrence consumes of one chunk as chunk.py wants it."""
    beta = _heads_first(lax.expand_dims(beta, (3,)))
    return _heads_first(query), _heads_first(key), _heads_first(value), log_decay, beta


def _through_chunk(piece: Inputs, options: Options, in_cache: int, state: Array) -> tuple[Array | None, Array]:
    """One chunk's output [B,C,H,V], None without queries, and the state after it."""
    prepared = activate(piece, options)

    def by_products(*arrays):
        output, state = chunk.forward(*_by_heads(*arrays[:-1]), arrays[-1])
        return _heads_first(output), state

    def by_tokens(*arrays):
        state, output = lax.scan(reference.token, arrays[-1], tuple(x.swapaxes(0, 1) for x in arrays[:-1]))
        return output.swapaxes(0, 1), state

    if prepared[0] is None or state.shape[2] * state.shape[3] > in_cache:
        return by_products(*prepared, state)
    return lax.platform_dependent(*prepared, state, cpu=by_tokens, default=by_products)


def _starts(inputs: Inputs, options: Options) -> tuple[np.ndarray, int]:
    """First tokens of the chunks as [groups, state_every], and the chunk length."""
    length = inputs.value.shape[1]
    size = _chunk_length(length)
    return np.arange(0, length, size, dtype=np.int32).reshape(-1, options.state_every), size


def _forward(inputs: Inputs, options: Options, in_cache: int) -> tuple[Array | None, Array, Array]:
    """-> output, final state, and the states before each group of `state_every` chunks [groups,B,H,K,V]."""
    starts, size = _starts(inputs, options)

    def one_chunk(carry: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        state, output = carry
        piece = _cut_inputs(inputs, start, size)
        part, state = _through_chunk(piece, options, in_cache, state)
        if part is not None:
            output = put(output, keep_tokens(part, piece.marks), start)
        return (state, output), None

    def one_group(carry: tuple[Array, Array], starts: Array) -> tuple[tuple[Array, Array], Array]:
        return lax.scan(one_chunk, carry, starts)[0], carry[0]

    output = None if inputs.query is None else lax.full(inputs.value.shape, 0, inputs.value.dtype)
    (state, output), states = lax.scan(one_group, (first_state(inputs), output), starts)
    return output, state, states


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _kda(inputs: Inputs, options: Options, in_cache: int) -> tuple[Array | None, Array]:
    output, state, _ = _forward(inputs, options, in_cache)
    return output, state


def _kda_forward(inputs: Inputs, options: Options, in_cache: int) -> tuple[tuple[Array, Array], tuple[Inputs, Array]]:
    output, state, states = _forward(inputs, options, in_cache)
    # Everything that is kept for the backward pass, and the one place where it can be named for a memory policy.
    residuals = inputs, states
    return (output, state), residuals


def _kda_backward(
    options: Options, in_cache: int, residuals: tuple[Inputs, Array], gradients: tuple[Array, Array]
) -> tuple[Inputs]:
    inputs, states = residuals
    d_output, d_state = gradients
    starts, size = _starts(inputs, options)
    parameters = [name for name in PARAMETERS if getattr(inputs, name) is not None]
    sequences = [name for name in SEQUENCES[:-1] if getattr(inputs, name) is not None]
    differentiable = [*sequences, *parameters]

    def states_inside(state: Array, starts: Array) -> Array:
        """The state before each chunk of a group."""
        if options.state_every == 1:
            return state[None]

        def one_chunk(state: Array, start: Array) -> tuple[Array, Array]:
            return _through_chunk(_cut_inputs(inputs, start, size), options, in_cache, state)[1], state

        return lax.scan(one_chunk, state, starts)[1]

    def one_chunk(carry: tuple[Array, dict], x: tuple[Array, Array]) -> tuple[tuple[Array, dict], None]:
        d_state, sums = carry
        start, state = x
        piece = _cut_inputs(inputs, start, size)

        def prepare(arrays: dict[str, Array]) -> tuple[Array, ...]:
            return _by_heads(*activate(piece._replace(**arrays), options))

        arrays = {name: getattr(piece, name) for name in differentiable}
        arrays |= {name: arrays[name].astype(jnp.float32) for name in parameters}
        prepared, pull_back = jax.vjp(prepare, arrays)
        d_part = None
        if d_output is not None:
            d_part = keep_tokens(cut(d_output, start, size).astype(jnp.float32), piece.marks)
        *d_prepared, d_state = chunk.backward(*prepared, state, _heads_first(d_part), d_state)
        (parts,) = pull_back(tuple(d_prepared))
        sums = {
            name: sums[name] + parts[name] if name in PARAMETERS else put(sums[name], parts[name], start)
            for name in differentiable
        }
        return (d_state, sums), None

    def one_group(carry: tuple[Array, dict], x: tuple[Array, Array]) -> tuple[tuple[Array, dict], None]:
        starts, state = x
        return lax.scan(one_chunk, carry, (starts, states_inside(state, starts)), reverse=True)[0], None

    zeros = {name: jnp.zeros_like(getattr(inputs, name)) for name in differentiable}
    zeros |= {name: zeros[name].astype(jnp.float32) for name in parameters}  # summed over all chunks
    (d_state, sums), _ = lax.scan(one_group, (d_state, zeros), (starts, states), reverse=True)
    sums |= {name: sums[name].astype(getattr(inputs, name).dtype) for name in parameters}
    if inputs.initial_state is not None:
        sums["initial_state"] = d_state.astype(inputs.initial_state.dtype)
    return (Inputs(**(dict.fromkeys(Inputs._fields) | sums)),)


_kda.defvjp(_kda_forward, _kda_backward)
