"""The activation manager: what the backward pass finds saved."""
