"""Depthwise causal convolution over the last 4 tokens of a document, before KDA (and its tail, for decoding).

    y_t = sum_{j=0..3} weight[3 - j] * x_{t-j}          no bias; with `silu` SiLU of it

Without segments the taps are shifted copies. With segments each tap is gathered from the j-th token before t that is
not padding, and counts if that token is of the same document. On GPUs the backward pass with SiLU has a kernel
(gpu_short_conv.py); everything else XLA fuses into one pass over its arrays.
Invariant: padding neither receives nor contributes anything, NaN included; a token never sees another document.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels import select
from pallas_kernels.kda import gpu_short_conv
from pallas_kernels.kda.gpu_short_conv import TAPS
from pallas_kernels.segments import first_id, following, keep_tokens, previous, take


def short_conv(
    x: Float[Array, "B T C"],
    weight: Float[Array, "4 C"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    left: Float[Array, "B 3 C"] | None = None,
    left_segment_ids: Int[Array, "B 3"] | None = None,
    silu: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B 3 C"]]:
    """Convolves each channel with its own 4 weights (Kimi Linear, arXiv 2510.26692, section 4).

    Args:
        x: any T >= 0; its dtype is that of the result. Products are summed in fp32.
        weight: oldest tap first; weight[3] multiplies the current token.
        segment_ids: documents (maximal runs of equal non-zero ids); 0 is padding, which the window passes over, with
            output and gradient 0 whatever it holds.
        left: the 3 tokens before x, oldest first, 0 where there were fewer; None is 0.
        left_segment_ids: their documents, 0 where there is no token; needs `segment_ids`. None: `left` belongs to the
            row's first document.
        silu: the output is SiLU of the convolution.
        implementation: "gpu" (the backward pass is a Pallas kernel; sm_80 and newer, with `silu`, without `left`),
            "xla", or None for the best that takes the case.

    Returns:
        The output, and the tail: the last 3 tokens of the row's last document (`left` included), oldest first, 0
        where it has fewer. The tail is the next call's `left`.

    Raises:
        ValueError: a shape or an option that does not fit.
        NotImplementedError: the named implementation does not take this case.
    """
    _check(x, weight, segment_ids, left, left_segment_ids)
    arguments = x, weight, segment_ids, left, left_segment_ids, silu
    return select.run("short_conv", IMPLEMENTATIONS, implementation, *arguments)


def _gpu(
    x: Array,
    weight: Array,
    segment_ids: Array | None,
    left: Array | None,
    left_segment_ids: Array | None,
    silu: bool,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """With a kernel for the backward pass, which runs on any device with `interpret`, slowly."""
    gpu_short_conv.check(x, left, silu, interpret)
    _, tail = _convolution(x, weight, segment_ids, None, None)
    return _activated(x, weight, segment_ids, interpret), tail


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _activated(x: Array, weight: Array, segment_ids: Array | None, interpret: bool) -> Array:
    return jax.nn.silu(_convolution(x, weight, segment_ids, None, None)[0])


def _activated_forward(x: Array, weight: Array, segment_ids: Array | None, interpret: bool) -> tuple[Array, tuple]:
    residuals = x, weight, segment_ids
    return _activated(x, weight, segment_ids, interpret), residuals


def _activated_backward(interpret: bool, residuals: tuple, d_y: Array) -> tuple[Array, Array, None]:
    return *gpu_short_conv.gradients(*residuals, d_y, interpret), None


_activated.defvjp(_activated_forward, _activated_backward)


def _xla(
    x: Array,
    weight: Array,
    segment_ids: Array | None,
    left: Array | None,
    left_segment_ids: Array | None,
    silu: bool,
) -> tuple[Array, Array]:
    y, tail = _convolution(x, weight, segment_ids, left, left_segment_ids)
    return jax.nn.silu(y) if silu else y, tail


def _convolution(
    x: Array, weight: Array, segment_ids: Array | None, left: Array | None, left_segment_ids: Array | None
) -> tuple[Array, Array]:
    length = x.shape[1]
    weight = weight.astype(jnp.float32)
    if left is None:
        left = lax.full((x.shape[0], TAPS, x.shape[2]), 0, x.dtype)
        left_segment_ids = None if segment_ids is None else lax.full((x.shape[0], TAPS), 0, segment_ids.dtype)
    tokens = lax.concatenate([left.astype(x.dtype), x], 1)
    if segment_ids is None:
        taps = [lax.slice_in_dim(tokens, j, j + length, axis=1) for j in range(TAPS + 1)]
        return _weighted_sum(taps, weight).astype(x.dtype), lax.slice_in_dim(tokens, length, None, axis=1)
    if left_segment_ids is None:
        left_segment_ids = _first_document(segment_ids)
    ids = lax.concatenate([left_segment_ids.astype(segment_ids.dtype), segment_ids], 1)
    # A row of zeros at each end stands for "no such token".
    ids = lax.pad(ids, np.zeros((), ids.dtype), ((0, 0, 0), (1, 1, 0)))
    tokens = lax.pad(tokens, np.zeros((), x.dtype), ((0, 0, 0), (1, 1, 0), (0, 0, 0)))
    output = _convolve(tokens, weight, ids)
    return lax.slice_in_dim(output, 1 + TAPS, 1 + TAPS + length, axis=1), _tail(tokens, ids)


IMPLEMENTATIONS = {"gpu": _gpu, "xla": _xla}  # most preferred first


def _weighted_sum(taps: list[Array], weight: Array) -> Array:
    """sum_j weight[j] * taps[j], fp32."""
    products = []
    for j, tap in enumerate(taps):
        row = lax.expand_dims(lax.slice_in_dim(weight, j, j + 1, axis=0), (0,))
        products.append(tap.astype(jnp.float32) * row)
    return functools.reduce(lax.add, products)


def _step(ids: Array, neighbour: Array, nowhere: int) -> Array:
    """The neighbour where it is of the same document, else `nowhere`, a position with id 0."""
    same = lax.eq(take(ids, neighbour), ids)
    return lax.select(same, neighbour, lax.full_like(neighbour, nowhere))


def _steps(step: Array) -> list[Array]:
    """`step` applied 1, 2, 3 times."""
    steps = [step]
    while len(steps) < TAPS:
        steps.append(take(step, steps[-1]))
    return steps


@jax.custom_vjp
def _convolve(tokens: Array, weight: Array, ids: Array) -> Array:
    """The convolution at every row; rows 0 and -1 hold zeros and id 0."""
    return _convolve_forward(tokens, weight, ids)[0]


def _convolve_forward(tokens: Array, weight: Array, ids: Array) -> tuple[Array, tuple[Array, ...]]:
    taps = _taps(tokens, ids)
    return _weighted_sum(taps, weight).astype(tokens.dtype), (tokens, weight, ids)


def _taps(tokens: Array, ids: Array) -> list[Array]:
    steps = _steps(_step(ids, previous(ids), 0))
    return [take(tokens, step) for step in reversed(steps)] + [keep_tokens(tokens, ids)]


def _convolve_backward(residuals: tuple[Array, ...], d_output: Array) -> tuple[Array, Array, None]:
    """The transpose is the same sum over the tokens that follow: a gather too, where autodiff would scatter."""
    tokens, weight, ids = residuals
    d_output = keep_tokens(d_output, ids)
    steps = _steps(_step(ids, following(ids), ids.shape[1] - 1))
    d_tokens = _weighted_sum([take(d_output, step) for step in reversed(steps)] + [d_output], weight)
    products = [tap.astype(jnp.float32) * d_output.astype(jnp.float32) for tap in _taps(tokens, ids)]
    d_weight = jnp.stack([jnp.sum(product, axis=(0, 1)) for product in products])
    return d_tokens.astype(tokens.dtype), d_weight, None


_convolve.defvjp(_convolve_forward, _convolve_backward)


def _tail(tokens: Array, ids: Array) -> Array:
    """The last 3 tokens of the last document [B,3,C]."""
    before = previous(ids)
    last = lax.slice_in_dim(before, ids.shape[1] - 1, None, axis=1)
    step = _step(ids, before, 0)
    second = take(step, last)
    return take(tokens, lax.concatenate([take(step, second), second, last], 1))


def _first_document(segment_ids: Array) -> Array:
    """[B,3]: the id of each row's first token; of a row of padding any id that is not 0."""
    first = first_id(segment_ids)
    return lax.broadcast_in_dim(jnp.where(first == 0, 1, first), (first.shape[0], TAPS), (0,))


def _check(x, weight, segment_ids, left, left_segment_ids):
    if x.ndim != 3:
        raise ValueError(f"short_conv: x has shape {x.shape}, expected [B, T, C]")
    batch, length, channels = x.shape
    expected = {
        "weight": (weight, (TAPS + 1, channels)),
        "segment_ids": (segment_ids, (batch, length)),
        "left": (left, (batch, TAPS, channels)),
        "left_segment_ids": (left_segment_ids, (batch, TAPS)),
    }
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"short_conv: {name} has shape {array.shape}, expected {shape} beside x {x.shape}")
    for name, array in (("segment_ids", segment_ids), ("left_segment_ids", left_segment_ids)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"short_conv: {name} are {array.dtype}, expected integers")
    if left_segment_ids is not None and (segment_ids is None or left is None):
        raise ValueError("short_conv: left_segment_ids need segment_ids and left")
