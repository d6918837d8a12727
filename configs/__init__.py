"""What a run is. A config is a Python function that returns a ConfigDict; `k3jax.config` checks it."""
