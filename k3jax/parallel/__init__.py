"""Where arrays live: the mesh and its one table, and the collectives of each axis."""

from k3jax.parallel.mesh import Layout, make_mesh, partition_spec

__all__ = ["Layout", "make_mesh", "partition_spec"]
