"""Mixture-of-experts operations on one device: sort tokens by expert, multiply group by group, mix back.

    y = expert_layer(x, experts, weights, w1, w3, w2, activation=act)
    # y[t] = sum_j weights[t, j] * E_{experts[t, j]}(x[t]),   E_e(x) = act(x W1_e, x W3_e) W2_e

    # the same from its parts, each of use alone; all rows in between are kept for the backward pass:
    rows, group_sizes, plan = permute(x, experts, weights, num_experts=E)
    hidden = act(grouped_matmul(rows, w1, group_sizes), grouped_matmul(rows, w3, group_sizes))
    y = combine(grouped_matmul(hidden, w2, group_sizes), plan)

This is the routed part of K3's Stable LatentMoE (report, Eq 11; x is the latent there). Invariant: dropless; shapes
depend on the number of tokens only, and a choice that is routed nowhere (padding) costs no product, gives 0 and
receives gradient 0, whatever its token and its weight hold.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import select
from pallas_kernels.gpu import platform
from pallas_kernels.moe import dispatch, gpu, xla
from pallas_kernels.moe import grouped_matmul as products
from pallas_kernels.moe.dispatch import Activation, Plan

PRODUCTS = {"ragged": products.ragged, "blocked": products.blocked}
LAYERS = {"gpu": gpu.expert_layer, "ragged": xla.ragged, "blocked": xla.blocked}


def expert_layer(
    x: Float[Array, "T L"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    w1: Float[Array, "E L F"],
    w3: Float[Array, "E L F"],
    w2: Float[Array, "E F L"],
    *,
    activation: Activation,
    implementation: str | None = None,
) -> Float[Array, "T L"]:
    """Sends tokens to their experts, each a gated MLP, and mixes what comes back (k3.md 2.4: u = sum_j p_j E_j(z)).

    Nothing of the size of T * k rows is kept for the backward pass: it saves the arguments and dispatches again.

    Args:
        x: tokens [T, L].
        experts: expert of each choice [T, k], integers. An id outside [0, E) routes the choice nowhere.
        weights: mixing weight of each choice [T, k].
        w1, w3: matrices of the two branches [E, L, F], of any floating dtype.
        w2: [E, F, L], of the same.
        activation: act(gate, linear) of two arrays of one shape, element by element, in gate's dtype.
        implementation: "gpu" (Pallas kernels; sm_80 and newer, widths in 16s), "blocked" (work follows the active rows;
            for CPUs), "ragged" (`lax.ragged_dot`), or None for the best that takes the case.

    Returns:
        [T, L] in x's dtype, summed in fp32; 0 for a token routed nowhere. What is routed nowhere reaches nothing and
        gets gradient 0, whatever it holds; the gradients of an expert without tokens are exactly 0.

    Raises:
        ValueError: shapes or dtypes that do not belong together, an unknown implementation.
        NotImplementedError: the named implementation does not take this case.
    """
    _check_routing("expert_layer", x, experts, weights)
    if w1.ndim != 3 or w1.shape[1] != x.shape[1] or w3.shape != w1.shape or w2.shape != (w1.shape[0], *w1.shape[:0:-1]):
        raise ValueError(
            f"expert_layer: w1, w3 [E, {x.shape[1]}, F] and w2 [E, F, {x.shape[1]}] expected, "
            f"got {w1.shape}, {w3.shape} and {w2.shape}"
        )
    if not w1.dtype == w3.dtype == w2.dtype:
        raise ValueError(f"expert_layer: w1, w3, w2 of one dtype expected, got {w1.dtype}, {w3.dtype} and {w2.dtype}")
    if 0 in (experts.size, w1.shape[0]):
        return jnp.zeros_like(x)
    arguments = x, experts, weights, w1, w3, w2, activation
    return select.run("expert_layer", _preferred(LAYERS), implementation, *arguments)


def _preferred(implementations: dict[str, Callable]) -> dict[str, Callable]:
    """The implementations, most preferred first: on a CPU that is the one for CPUs."""
    if platform() != "cpu":
        return implementations
    return {"blocked": implementations["blocked"]} | implementations


def _check_routing(operation: str, x: Array, experts: Array, weights: Array) -> None:
    if x.ndim != 2 or experts.ndim != 2 or experts.shape[0] != x.shape[0] or weights.shape != experts.shape:
        raise ValueError(
            f"{operation}: x [T, L], experts [T, k] and weights [T, k] expected, "
            f"got {x.shape}, {experts.shape} and {weights.shape}"
        )
    if not jnp.issubdtype(experts.dtype, jnp.integer) or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"{operation}: integer experts and floating weights expected, got {experts.dtype} and {weights.dtype}"
        )


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
    _check_routing("permute", x, experts, weights)
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
    sizes = jnp.asarray(group_sizes, jnp.int32)
    return select.run("grouped_matmul", _preferred(PRODUCTS), implementation, lhs, rhs, sizes)
