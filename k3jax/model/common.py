"""Pieces every layer uses: parameters with their metadata, RMSNorm, the two gated activations, the dense MLP.

    RMSNorm(x) = weight * (x / sqrt(mean x^2 + eps))            statistics in fp32, cast back before the weight
    SiTU(a, c) = [b1 tanh(a / b1) sigmoid(a)] * [b2 tanh(c / b2)]     fp32 inside, |.| <= b1 b2   (k3.md 2.4)
    SwiGLU(a, c) = a sigmoid(a) * c
    MLP(x)     = W2 act(W1 x, W3 x)

Invariant: a kernel is stored [in, out] with heads split out, and says in its own metadata what each axis is
(`logical_axes`), which axes form the matrix that Muon orthogonalises (`matrix_axes` = (batch, in, out); None: AdamW)
and whether it decays. Activations have the type of their input; a weight is cast to it at use.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax.config import ModelConfig
from k3jax.parallel import tensor

MatrixAxes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class RouterBias(nnx.Variable):
    """The balancing bias of a router, [experts] fp32: state that the step updates, never a gradient."""


class Keys:
    """A stream of random keys in place of nnx.Rngs, whose traced counter makes 93 layers slow to trace."""

    def __init__(self, key: Array):
        self._key, self._count = key, 0

    def params(self) -> Array:
        """The next key."""
        self._count += 1
        return jax.random.fold_in(self._key, self._count)


def param(
    rngs: nnx.Rngs | Keys,
    shape: Sequence[int],
    logical_axes: Sequence[str],
    init: Callable[[Array, tuple[int, ...]], Array],
    *,
    matrix_axes: MatrixAxes | None = None,
    weight_decay: bool = True,
) -> nnx.Param:
    """An fp32 parameter with the metadata that sharding and the optimizer read."""
    value = init(rngs.params(), tuple(shape)).astype(jnp.float32)
    return nnx.Param(value, logical_axes=tuple(logical_axes), matrix_axes=matrix_axes, weight_decay=weight_decay)


def matrix(
    rngs: nnx.Rngs,
    config: ModelConfig,
    shape: Sequence[int],
    logical_axes: Sequence[str],
    *,
    batch: Sequence[int] = (),
    out: Sequence[int] = (-1,),
) -> nnx.Param:
    """A kernel for Muon. `batch` axes count matrices, `out` axes are their output; the rest is the input."""
    rank = len(shape)
    out = tuple(axis % rank for axis in out)
    inside = tuple(axis for axis in range(rank) if axis not in (*batch, *out))
    init = normal(config.init_std)
    return param(rngs, shape, logical_axes, init, matrix_axes=(tuple(batch), inside, out))


def normal(std: float) -> Callable[[Array, tuple[int, ...]], Array]:
    """Initialiser N(0, std^2)."""
    return lambda key, shape: std * jax.random.normal(key, shape)


def ones(key: Array, shape: tuple[int, ...]) -> Array:
    """Initialiser of norms."""
    return jnp.ones(shape)


def zeros(key: Array, shape: tuple[int, ...]) -> Array:
    """Initialiser of pseudo-queries (k3.md 2.3: uniform mixing at the start is mandatory)."""
    return jnp.zeros(shape)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis: x [..., D], weight [D] -> [..., D] in x's type."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * _last(weight, x)


def _last(weight: Array, x: Array) -> Array:
    """A [D] weight shaped to multiply x [..., D] without rank promotion."""
    return weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    """RMSNorm with a learned weight [D], no decay."""

    def __init__(self, size: int, axis: str, eps: float, rngs: nnx.Rngs):
        self.eps = eps
        self.weight = param(rngs, (size,), (axis,), ones, weight_decay=False)

    def __call__(self, x: Array) -> Array:
        """x [..., D] -> [..., D] in x's type."""
        return rms_norm(x, self.weight[...], self.eps)


def situ(gate: Array, linear: Array, beta: float, linear_beta: float | None) -> Array:
    """SiTU-GLU (K3 report Eq 12): both branches [..., F] -> [..., F] in gate's type, fp32 inside."""
    a, c = gate.astype(jnp.float32), linear.astype(jnp.float32)
    bounded = c if linear_beta is None else linear_beta * jnp.tanh(c / linear_beta)
    return (beta * jnp.tanh(a / beta) * jax.nn.sigmoid(a) * bounded).astype(gate.dtype)


def gated(config: ModelConfig, gate: Array, linear: Array) -> Array:
    """The model's gated activation, SiTU or SwiGLU, of both branches [..., F] -> [..., F]."""
    if config.activation == "situ":
        return situ(gate, linear, config.situ_beta, config.situ_linear_beta)
    return jax.nn.silu(gate) * linear


def project(x: Array, kernel: Array, contracted: int = 1) -> Array:
    """x [..., in axes] times kernel [in axes, out axes] over `contracted` axes, in x's type, fp32 accumulation."""
    kernel = kernel.astype(x.dtype)
    lead, inner = x.shape[: x.ndim - contracted], kernel.shape[:contracted]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.are_all_axes_manual:
        # As one matrix product: XLA:CPU transposes by hand for the weight gradient of anything else (2x the time).
        # Where the compiler splits arrays, the leading axes may lie apart, and joining them would move data.
        flat = jnp.dot(
            x.reshape(-1, math.prod(inner)),
            kernel.reshape(math.prod(inner), -1),
            preferred_element_type=jnp.float32,
        )
        return flat.astype(x.dtype).reshape(*lead, *kernel.shape[contracted:])
    axes = tuple(range(len(lead), x.ndim)), tuple(range(contracted))
    return jax.lax.dot_general(x, kernel, (axes, ((), ())), preferred_element_type=jnp.float32).astype(x.dtype)


class MLP(nnx.Module):
    """Gated MLP of one inner width: the dense layers and the shared experts. w1, w3 [embed, mlp], w2 [mlp, embed]."""

    def __init__(self, config: ModelConfig, inner: int, rngs: nnx.Rngs):
        self.config = config
        self.w1 = matrix(rngs, config, (config.embed, inner), ("embed", "mlp"))
        self.w3 = matrix(rngs, config, (config.embed, inner), ("embed", "mlp"))
        self.w2 = matrix(rngs, config, (inner, config.embed), ("mlp", "embed"))

    def __call__(self, x: Array) -> Array:
        """x [..., embed] -> [..., embed]."""
        x = tensor.enter(x)
        hidden = gated(self.config, project(x, self.w1[...]), project(x, self.w3[...]))
        return tensor.leave(project(hidden, self.w2[...]))
