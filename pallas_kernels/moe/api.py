"""Mixture-of-experts operations on one device: sort tokens by expert, multiply group by group, mix back.

    rows, group_sizes, plan = permute(x, experts, weights, num_experts=E)
    rows = grouped_matmul(activation(grouped_matmul(rows, w1, group_sizes), ...), w2, group_sizes)
    y = combine(rows, plan)          # y[t] = sum_j weights[t, j] * E_{experts[t, j]}(x[t])

This is the routed part of K3's Stable LatentMoE (report, Eq 11; x is the latent there). Invariant: dropless; shapes
depend on the number of tokens only, and a choice that is routed nowhere (padding) costs no product, gives 0 and
receives gradient 0, whatever its token and its weight hold.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import select
from pallas_kernels.moe import dispatch
from pallas_kernels.moe.dispatch import Plan
from pallas_kernels.moe.grouped_matmul import blocked, ragged

_PRODUCTS = {"blocked": blocked, "ragged": ragged}


def permute(
    x: Float[Array, "T L"], experts: Int[Array, "T k"], weights: Float[Array, "T k"], *, num_experts: int
) -> tuple[Float[Array, "T*k L"], Int[Array, "E"], Plan]:
    """Copies every token once per choice, sorted by expert.

    Args:
        x: tokens [T, L].
        experts: expert of each choice [T, k], integers. An id outside [0, num_experts) routes the choice nowhere:
            use `num_experts` for padding. The ids of one token need not differ.
        weights: mixing weight of each choice [T, k]; only `combine` uses them.
        num_experts: E, the number of experts.

    Returns:
        rows: [T * k, L], in x's dtype: expert 0's tokens in order, then expert 1's, ...; rows of choices routed
            nowhere come last, beyond `sum(group_sizes)`, and are 0.
        group_sizes: [E] int32, rows of each expert.
        plan: what `combine` needs; carries `weights`.

    Raises:
        ValueError: shapes that do not belong together, ids that are not integers.
    """
    if x.ndim != 2 or experts.ndim != 2 or experts.shape[0] != x.shape[0] or weights.shape != experts.shape:
        raise ValueError(
            f"permute: x [T, L], experts [T, k] and weights [T, k] expected, "
            f"got {x.shape}, {experts.shape} and {weights.shape}"
        )
    if not jnp.issubdtype(experts.dtype, jnp.integer) or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"permute: integer experts and floating weights expected, got {experts.dtype} and {weights.dtype}"
        )
    plan, group_sizes = dispatch.make_plan(experts, weights, num_experts)
    return dispatch.gather_rows(x, plan.source, plan.slot), group_sizes, plan


def combine(rows: Float[Array, "T*k L"], plan: Plan) -> Float[Array, "T L"]:
    """Weighted sum of each token's rows, summed in fp32 (k3.md 2.4: u = sum_j p_j E_j(z)).

    Args:
        rows: [T * k, L], in `permute`'s order. Rows beyond the sum of the group sizes are not read.
        plan: from `permute`. Gradients reach its weights.

    Returns:
        [T, L] in the dtype of rows; 0 for a token routed nowhere.

    Raises:
        ValueError: rows are not the plan's.
    """
    if rows.ndim != 2 or rows.shape[0] != plan.source.shape[0]:
        raise ValueError(f"combine: rows [{plan.source.shape[0]}, L] expected by the plan, got {rows.shape}")
    return dispatch.mix_rows(rows, plan)


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G K N"],
    group_sizes: Int[Array, "G"],
    *,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Multiplies consecutive groups of rows by one matrix each: group g is the next group_sizes[g] rows.

    Args:
        lhs: [M, K] rows sorted by group.
        rhs: [G, K, N] one matrix per group, in lhs's dtype.
        group_sizes: [G] int32, not negative, with a sum of at most M (not checked: they are values).
        implementation: "blocked" (work follows the active rows; for CPUs), "ragged" (`lax.ragged_dot`) or None,
            which is "blocked" where JAX's default backend is a CPU.

    Returns:
        [M, N] in lhs's dtype, accumulated in fp32. Rows beyond the sum give 0 and get gradient 0 whatever they
        hold; the gradient of an empty group's matrix is exactly 0.

    Raises:
        ValueError: shapes or dtypes that do not belong together, an unknown implementation.
    """
    if (
        (lhs.ndim, rhs.ndim, group_sizes.ndim) != (2, 3, 1)
        or lhs.shape[1] != rhs.shape[1]
        or rhs.shape[0] != group_sizes.shape[0]
    ):
        raise ValueError(
            f"grouped_matmul: lhs [M, K], rhs [G, K, N] and group_sizes [G] expected, "
            f"got {lhs.shape}, {rhs.shape} and {group_sizes.shape}"
        )
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"grouped_matmul: lhs and rhs of one dtype and integer sizes expected, "
            f"got {lhs.dtype}, {rhs.dtype} and {group_sizes.dtype}"
        )
    if 0 in (lhs.shape[0], rhs.shape[0]):
        return jnp.zeros((lhs.shape[0], rhs.shape[2]), lhs.dtype)
    preferred = ("blocked", "ragged") if jax.default_backend() == "cpu" else ("ragged", "blocked")
    products = {name: _PRODUCTS[name] for name in preferred}
    sizes = jnp.asarray(group_sizes, jnp.int32)
    return select.run("grouped_matmul", products, implementation, lhs, rhs, sizes)
