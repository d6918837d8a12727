"""k3jax: a JAX/XLA training stack for Kimi-K3-like models."""

__version__ = "0.1.0"
