"""The experts of an MoE layer as one operation: tokens in, mixed outputs out, nothing of T * k rows kept.

With X the rows of an expert (tokens that chose it), p their weights, and dU the gradient of their tokens' outputs:

    A = X W1;  C = X W3;  H = act(A, C);  Y = (p H) W2;          u[t] = sum of the rows of token t
    dP = dU W2^T;   dp = <H, dP>;   (dA, dC) = act'(A, C)^T (p dP)
    dX = dA W1^T + dC W3^T;   dW1 = X^T dA;   dW3 = X^T dC;   dW2 = (p H)^T dU

p is applied before W2 (K3 report; k3.md 2.4), so dp needs H and dP, which the backward pass has at hand, and never the
experts' outputs. Invariant: residuals are the arguments: tokens before dispatch, routing, weights. Rows are gathered
and A, C, H computed again in the backward pass.

`blocked` does all of it a block of rows at a time (blocks.py); the one array of T * k rows, besides the rows' numbers,
holds Y or dX. It is for CPUs. `ragged` is the same mathematics by `lax.ragged_dot` on all rows, for TPUs and GPUs that
our kernels do not take.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.moe import dispatch
from pallas_kernels.moe.blocks import LANES, Block, for_each_block, of_groups, product, put_groups, transposed
from pallas_kernels.moe.dispatch import Activation
from pallas_kernels.moe.grouped_matmul import ragged as ragged_product


def ragged(
    x: Float[Array, "T L"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    w1: Float[Array, "E L F"],
    w3: Float[Array, "E L F"],
    w2: Float[Array, "E F L"],
    activation: Activation,
) -> Float[Array, "T L"]:
    """Three products over all rows, computed again in the backward pass."""

    @jax.checkpoint
    def mixed(x, weights, *matrices):
        w1, w3, w2 = (w.astype(x.dtype) for w in matrices)
        plan, sizes = dispatch.make_plan(experts, weights, w1.shape[0])
        rows = dispatch.gather_rows(x, plan.source, plan.slot)
        hidden = activation(ragged_product(rows, w1, sizes), ragged_product(rows, w3, sizes))
        hidden = (dispatch.row_weights(plan)[:, None] * hidden).astype(x.dtype)
        return dispatch.sum_rows(ragged_product(hidden, w2, sizes), plan.source, plan.slot)

    return mixed(x, weights, w1, w3, w2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def blocked(
    x: Float[Array, "T L"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    w1: Float[Array, "E L F"],
    w3: Float[Array, "E L F"],
    w2: Float[Array, "E F L"],
    activation: Activation,
) -> Float[Array, "T L"]:
    """Block by block, all of a block in fp32."""
    plan, sizes, token, weight = dispatch.route(experts, weights, w1.shape[0])

    def body(block, matrices, out, sums):
        rows = _rows(block, x, block.take(token))
        hidden = activation(product(rows, matrices[0]), product(rows, matrices[1]))
        hidden = block.take(weight)[:, :, None] * hidden
        return block.put(out, product(hidden, matrices[2])), sums

    out = jnp.zeros((experts.size, w2.shape[2]), jnp.float32)
    out = for_each_block(sizes, experts.size, _reader(w1, w3, w2), body, out)
    return dispatch.sum_rows(out, plan.source, plan.slot).astype(x.dtype)


def _blocked_forward(x, experts, weights, w1, w3, w2, activation):
    # Everything that is kept for the backward pass, and the one place where it can be named for a memory policy.
    residuals = x, experts, weights, w1, w3, w2
    return blocked(*residuals, activation), residuals


def _blocked_backward(activation, residuals, dy):
    x, experts, weights, *matrices = residuals
    plan, sizes, token, weight = dispatch.route(experts, weights, matrices[0].shape[0])

    def body(block, matrices, carry, sums):
        d_rows, d_weight, stacks = carry
        w1, w3, w2 = matrices
        of_rows = block.take(token)
        rows, d_out = _rows(block, x, of_rows), _rows(block, dy, of_rows)
        # The barriers keep XLA from computing what is elementwise again inside each of its users.
        inner, d_hidden = lax.optimization_barrier(
            ((product(rows, w1), product(rows, w3)), product(d_out, transposed(w2)))
        )
        hidden, pull_back = jax.vjp(activation, *inner)
        p = block.take(weight)[:, :, None]
        d_weight = block.put(d_weight, jnp.sum(hidden * d_hidden, axis=2))
        # 0 in rows that are not owned, whatever an activation makes of 0, or of a matrix that no token chose.
        elementwise = (block.only(x) for x in (p * hidden, *pull_back(p * d_hidden)))
        hidden, d_gate, d_linear = lax.optimization_barrier(tuple(elementwise))
        d_rows = block.put(d_rows, product(d_gate, transposed(w1)) + product(d_linear, transposed(w3)))
        rows = transposed(rows)
        terms = product(rows, d_gate), product(rows, d_linear), product(transposed(hidden), d_out)
        return (d_rows, d_weight, stacks), tuple(map(jnp.add, sums, terms))

    def write(carry, groups, sums):
        d_rows, d_weight, stacks = carry
        return d_rows, d_weight, tuple(put_groups(a, groups, b) for a, b in zip(stacks, sums, strict=True))

    d_rows, d_weight = jnp.zeros((experts.size, x.shape[1]), jnp.float32), jnp.zeros(experts.size, jnp.float32)
    carry = d_rows, d_weight, tuple(jnp.zeros(w.shape, jnp.float32) for w in matrices)
    sums = tuple(jnp.zeros((LANES, *w.shape[1:]), jnp.float32) for w in matrices)
    d_rows, d_weight, stacks = for_each_block(sizes, experts.size, _reader(*matrices), body, carry, sums, write)
    dx = dispatch.sum_rows(d_rows, plan.source, plan.slot).astype(x.dtype)
    d_weights = dispatch.take(d_weight, plan.slot).astype(weights.dtype)
    return dx, None, d_weights, *(d.astype(w.dtype) for d, w in zip(stacks, matrices, strict=True))


blocked.defvjp(_blocked_forward, _blocked_backward)


def _rows(block: Block, x: Array, token: Array) -> Array:
    """Tokens of a block in fp32, [LANES,block,L]; 0 in rows that are not owned."""
    return block.only(dispatch.take(x, token)).astype(jnp.float32)


def _reader(*stacks: Array):
    """Reads the matrices of the lanes' experts, in fp32."""
    return lambda groups: tuple(of_groups(w, groups).astype(jnp.float32) for w in stacks)
