"""Muon: momentum with every matrix block orthogonalised (Moonlight, arXiv 2502.16982; per head: K3 report).

    buf <- mu buf + g;   d = g + mu buf                                      (Nesterov)
    X = d / (|d|_F + 1e-7);   five times: A = X X^T, X <- a X + (b A + c A^2) X
    p <- (1 - lr wd) p - lr 0.2 sqrt(max(in, out)) X

per block [in, out], (a, b, c) = (3.4445, -4.7750, 2.0315), on the orientation with no more rows than columns. The
singular values of X end within about 0.68 to 1.13, so that an update has an rms of about 0.2 lr whatever the block's
shape.

Which blocks a parameter has is said by its `matrix_axes` = (batch, in, out): three tuples of axis numbers. The batch
axes (heads, experts, stacked layers) count blocks, the in and out axes are flattened to the two sides of a block. Query
kernels [embed, heads, head_dim] have ((1,), (0,), (2,)); an output kernel [heads, head_dim, embed] has
((), (0, 1), (2,)).

Invariant: the blocks are a property of the logical parameter; no mesh and no storage layout changes an update.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from k3jax.parallel.matrices import Exchange, MatrixAxes, sides

Work = Callable[[Array, Exchange | None], Array]
Spread = Callable[[Work, Mapping[str, Array], Mapping[str, MatrixAxes]], dict[str, Array]]

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
UPDATE_RMS = 0.2


class MuonState(NamedTuple):
    """count: steps done, int32. momentum: path -> fp32 array of the parameter's shape."""

    count: Array
    momentum: dict[str, Array]


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: float = 0.95,
    weight_decay: float | Mapping[str, float] = 0.1,
    batch_axes: Mapping[str, MatrixAxes],
    spread: Spread | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon over a flat dict path -> array, in the Moonlight form; the updates are final, to be added.

    Args:
        learning_rate: a number, or a function of the step. With the 0.2 scale it is AdamW's (k3.md 4.1).
        momentum: mu.
        weight_decay: wd for all paths, or by path. Decoupled: a step takes lr * wd of the parameter.
        batch_axes: `matrix_axes` of every path.
        spread: spread(work, arrays, batch_axes) gives work(x, None) of the blocks x [N, rows, cols] of every array, and
            may put whole blocks on different devices, which then work without talking (`Layout.spread`). None: all
            blocks are worked on where they are.

    Returns:
        A transformation whose update needs the parameters. Momentum and update are fp32. Its update takes `step=`, at
        which the learning rate is read; without it that is the number of updates done.

    Raises:
        ValueError: at init, a path that `batch_axes` does not name, or axes that do not fit its array.
    """

    def init(params: Mapping[str, Array]) -> MuonState:
        missing = sorted(params.keys() - batch_axes.keys())
        if missing:
            raise ValueError(f"muon: batch_axes does not name {', '.join(missing)}")
        for path, param in params.items():
            block_shape(param.shape, batch_axes[path], path)
        return MuonState(jnp.zeros([], jnp.int32), {k: jnp.zeros(p.shape, jnp.float32) for k, p in params.items()})

    def update(gradients, state: MuonState, params, *, step: Array | None = None, **_):
        rate = -rate_at(learning_rate, state.count, step)
        gradients = {path: gradient.astype(jnp.float32) for path, gradient in gradients.items()}
        buffers = {path: momentum * state.momentum[path] + gradient for path, gradient in gradients.items()}
        directions = {path: gradient + momentum * buffers[path] for path, gradient in gradients.items()}
        if spread is None:
            directions = {path: orthogonalize(x, batch_axes[path]) for path, x in directions.items()}
        else:
            directions = spread(_orthogonal, directions, batch_axes)
        updates = {}
        for path, direction in directions.items():
            decay = weight_decay[path] if isinstance(weight_decay, Mapping) else weight_decay
            _, fan_in, fan_out = block_shape(direction.shape, batch_axes[path], path)
            direction = UPDATE_RMS * math.sqrt(max(fan_in, fan_out)) * direction
            updates[path] = rate * (direction + decay * params[path] if decay else direction)
        return updates, MuonState(optax.safe_increment(state.count), buffers)

    return optax.GradientTransformationExtraArgs(init, update)


def rate_at(learning_rate: optax.ScalarOrSchedule, count: Array, step: Array | None) -> Array | float:
    """The learning rate at `step`, or at `count` (updates done) where the caller gives no step."""
    if not callable(learning_rate):
        return learning_rate
    return learning_rate(count if step is None else step)


def block_shape(shape: tuple[int, ...], matrix_axes: MatrixAxes, path: str = "array") -> tuple[int, int, int]:
    """(number of blocks, in, out) of an array.

    Raises:
        ValueError: the axes are not each axis of the shape once, or a block has no in or out axis.
    """
    batch, inside, out = matrix_axes
    if sorted((*batch, *inside, *out)) != list(range(len(shape))) or not inside or not out:
        raise ValueError(f"{path}: matrix_axes {matrix_axes} do not fit shape {shape}")
    return tuple(math.prod(shape[axis] for axis in axes) for axes in matrix_axes)


def orthogonalize(array: Array, matrix_axes: MatrixAxes, dtype: jnp.dtype | None = None) -> Array:
    """Each block of an fp32 array with its singular values brought near 1; a zero block stays 0.

    dtype: of the products; None is fp32 on CPUs and bf16 on accelerators.
    """
    blocks, fan_in, fan_out = block_shape(array.shape, matrix_axes)
    order = sum(sides(array.shape, matrix_axes), ())
    moved = lax.transpose(array, order)
    x = _orthogonal(moved.reshape(blocks, min(fan_in, fan_out), max(fan_in, fan_out)), dtype=dtype)
    back = sorted(range(array.ndim), key=order.__getitem__)
    return lax.transpose(x.reshape(moved.shape), back)


def _orthogonal(x: Array, exchange: Exchange | None = None, dtype: jnp.dtype | None = None) -> Array:
    """`orthogonalize` of blocks [N, rows, cols], or of the parts of blocks that `exchange` brings together.

    Parts are divided by the norm of their whole block before they move: they travel in `dtype`, the norm is fp32's.
    """
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    squares = jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim)), keepdims=True)
    norm = jnp.sqrt(squares if exchange is None else exchange.total(squares))
    unit = (x / (norm + 1e-7)).astype(dtype)
    done = _steps(unit) if exchange is None else exchange.on_whole(_steps, unit)
    return done.astype(x.dtype)


def _steps(x: Array) -> Array:
    return lax.scan(_newton_schulz, x, length=STEPS)[0]


def _newton_schulz(x: Array, _: None) -> tuple[Array, None]:
    """One step on x [N, rows, cols]: s -> a s + b s^3 + c s^5 for each singular value."""
    a, b, c = COEFFICIENTS
    gram = _product(x, x, 2)
    return a * x + _product(b * gram + c * _product(gram, gram, 1), x, 1), None


def _product(left: Array, right: Array, contracted: int) -> Array:
    """Batched left @ right, over right's axis `contracted`."""
    dimensions = ((2,), (contracted,)), ((0,), (0,))
    return lax.dot_general(left, right, dimensions, precision=lax.Precision.HIGHEST)
