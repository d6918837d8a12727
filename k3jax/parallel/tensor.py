"""Work on the same tokens shared over `tensor`: heads, inner widths and the vocabulary lie apart. In `per_device`.

    enter(x) = x                 backward: the sum of all devices' gradients
    leave(x) = sum over devices  backward: the gradient as it is

Around them every array of tokens, and its gradient, is the same on all devices of the axis; between them each device
computes with its own heads or columns, and what leaves is a sum over these. A parameter that lies whole and is used
between the two enters like an activation. Invariant: gradients of what lies whole are whole, so that nothing is summed
over `tensor` anywhere else. Outside `per_device`, and on an axis of size 1, these are the identity.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.parallel.mesh import local_size

AXIS = "tensor"


def enter(x: Array) -> Array:
    """What every device holds, on the way into its own part of the work."""
    return _enter(x) if local_size(AXIS) > 1 else x


def leave(x: Array) -> Array:
    """The sum of what the devices have made of their parts."""
    return _leave(x) if local_size(AXIS) > 1 else x


@jax.custom_vjp
def _enter(x: Array) -> Array:
    return x


@jax.custom_vjp
def _leave(x: Array) -> Array:
    return lax.psum(x, AXIS)


_enter.defvjp(lambda x: (x, None), lambda _, gradient: (lax.psum(gradient, AXIS),))
_leave.defvjp(lambda x: (lax.psum(x, AXIS), None), lambda _, gradient: (gradient,))


def mean(x: Array) -> Array:
    """Mean over the devices, without gradient."""
    return lax.pmean(lax.stop_gradient(x), AXIS) if local_size(AXIS) > 1 else x


def look_up(table: Array, ids: Array, dtype: jnp.dtype) -> Array:
    """Rows of a table whose rows lie apart: table [vocab / devices, D], ids [...] -> [..., D] in dtype.

    An id outside the vocabulary gives NaN.
    """
    if local_size(AXIS) == 1:
        return jnp.take(table, ids, axis=0).astype(dtype)
    vocab = table.shape[0] * local_size(AXIS)
    own = ids - lax.axis_index(AXIS) * table.shape[0]
    own = jnp.where((own >= 0) & (own < table.shape[0]), own, table.shape[0])
    rows = leave(table.at[own].get(mode="fill", fill_value=0).astype(dtype))
    return jnp.where(((ids >= 0) & (ids < vocab))[..., None], rows, jnp.nan)


def log_sum_exp(logits: Array) -> Array:
    """Of the last axis, which lies apart: [..., vocab / devices] fp32 -> [...]."""
    if local_size(AXIS) == 1:
        return jax.nn.logsumexp(logits, axis=-1)
    largest = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), AXIS)
    return largest + jnp.log(leave(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1)))


def pick(logits: Array, ids: Array) -> Array:
    """logits[..., id] of a last axis that lies apart: [..., vocab / devices], ids [...] -> [...]."""
    if local_size(AXIS) == 1:
        return jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    size = logits.shape[-1]
    own = ids - lax.axis_index(AXIS) * size
    inside = (own >= 0) & (own < size)
    chosen = jnp.take_along_axis(logits, jnp.where(inside, own, 0)[..., None], axis=-1)[..., 0]
    return leave(jnp.where(inside, chosen, 0.0))
