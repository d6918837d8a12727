"""Array operations of Kimi-K3-like models: arrays in, arrays out; nothing here knows the k3jax package."""
