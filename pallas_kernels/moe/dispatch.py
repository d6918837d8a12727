"""Moving tokens to their experts and back, without capacity: every routed copy of a token is kept.

    rows[i]  = x[token(i)]                        copies sorted by expert, in token order within an expert
    y[t]     = sum over choices j of weights[t, j] * rows[slot[t, j]]

    dx[t]    = sum over choices j of drows[slot[t, j]]
    drows[i] = weights[source[i]] * dy[token(i)]
    dweights[t, j] = dot[slot[t, j]],             dot[i] = <rows[i], dy[token(i)]>

Invariant: `slot` and `source` are each other's inverse on the routed copies and out of bounds elsewhere. So every line
above is a gather (no scatter of rows, one order of summation), and what is routed nowhere reads as 0 and receives
gradient 0, whatever is stored there.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

Activation = Callable[[Array, Array], Array]  # of both branches of a gated MLP, element by element, in their dtype


class Plan(NamedTuple):
    """Where each copy went. M = T * k copies; copy t * k + j is choice j of token t.

    Attributes:
        source: [M] copy held by each row; M where the row is unused.
        slot: [T, k] row of each copy; M where it is routed nowhere.
        weights: [T, k] mixing weights, through which `combine` passes gradients.
    """

    source: UInt[Array, "M"]
    slot: UInt[Array, "T k"]
    weights: Float[Array, "T k"]


def make_plan(
    experts: Int[Array, "T k"], weights: Float[Array, "T k"], num_experts: int
) -> tuple[Plan, Int[Array, "E"]]:
    """The plan and the number of rows of each expert (int32)."""
    copies = experts.size
    # Unsigned, a negative id is a large one, and indices need no wrap-around arithmetic. As wide as it came: cut to 32
    # bits before the minimum, 2^32 would be expert 0.
    unsigned = jnp.dtype(jnp.uint64 if experts.dtype.itemsize == 8 else jnp.uint32)
    expert = experts.reshape(copies).astype(unsigned)
    expert = lax.min(expert, unsigned.type(num_experts)).astype(jnp.uint32)
    row = lax.iota(jnp.uint32, copies)
    sorted_expert, source = lax.sort((expert, row), num_keys=1, is_stable=True)
    source = jnp.where(sorted_expert < num_experts, source, copies)
    slot = jnp.full_like(source, copies).at[source].set(row, mode="drop")
    group_sizes = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    return Plan(source, slot.reshape(experts.shape), weights), group_sizes


def route(
    experts: Int[Array, "T k"], weights: Float[Array, "T k"], num_experts: int
) -> tuple[Plan, Int[Array, "E"], UInt[Array, "M"], Float[Array, "M"]]:
    """The plan, rows of each expert, and the token and fp32 weight of each row."""
    plan, group_sizes = make_plan(experts, weights, num_experts)
    return plan, group_sizes, row_tokens(plan.source, plan.slot), row_weights(plan).astype(jnp.float32)


@jax.custom_vjp
def gather_rows(x: Float[Array, "T L"], source: UInt[Array, "M"], slot: UInt[Array, "T k"]) -> Float[Array, "M L"]:
    """Row i is the token of copy source[i]; unused rows are 0."""
    return take(x, row_tokens(source, slot))


@jax.custom_vjp
def sum_rows(rows: Float[Array, "M L"], source: UInt[Array, "M"], slot: UInt[Array, "T k"]) -> Float[Array, "T L"]:
    """Token t is the sum of its rows, accumulated in fp32 at least; nothing unused is read."""
    return jnp.sum(_wide(take(rows, slot)), axis=1).astype(rows.dtype)


# Each is the other's transpose.
gather_rows.defvjp(
    lambda x, source, slot: (gather_rows(x, source, slot), (source, slot)),
    lambda maps, drows: (sum_rows(drows, *maps), None, None),
)
sum_rows.defvjp(
    lambda rows, source, slot: (sum_rows(rows, source, slot), (source, slot)),
    lambda maps, dy: (gather_rows(dy, *maps), None, None),
)


def row_weights(plan: Plan) -> Float[Array, "M"]:
    """The weight of each row; 0 for unused rows."""
    weights, slot = plan.weights.reshape(-1, 1), plan.slot.reshape(-1, 1)
    return gather_rows(weights, plan.source, slot)[:, 0]


@jax.custom_vjp
def mix_rows(rows: Float[Array, "M L"], plan: Plan) -> Float[Array, "T L"]:
    """Token t is the weighted sum of its rows, accumulated in fp32 at least; nothing unused is read."""
    copies = _wide(take(rows, plan.slot))
    weights = jnp.where(plan.slot < rows.shape[0], plan.weights, 0)
    return jnp.sum(copies * weights[:, :, None], axis=1).astype(rows.dtype)


def _mix_rows_forward(rows, plan):
    return mix_rows(rows, plan), (rows, plan)


def _mix_rows_backward(residuals, dy):
    rows, (source, slot, weights) = residuals
    dy = _wide(take(dy, row_tokens(source, slot)))
    drows = dy * take(weights.reshape(slot.size), source)[:, None]
    dweights = take(jnp.sum(_wide(rows) * dy, axis=1), slot)
    return drows.astype(rows.dtype), Plan(None, None, dweights.astype(weights.dtype))


mix_rows.defvjp(_mix_rows_forward, _mix_rows_backward)


def row_tokens(source: UInt[Array, "M"], slot: UInt[Array, "T k"]) -> UInt[Array, "M"]:
    """The token of each row; out of bounds where the row is unused."""
    return lax.div(source, jnp.full_like(source, slot.shape[1]))


def take(array: Array, index: Array) -> Array:
    """array[index] with 0 where the index is out of bounds."""
    return jnp.asarray(array).at[index].get(mode="fill", fill_value=0)


def _wide(array):
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
