"""Functions of modules run on a mesh of CPU devices, piece by piece, and gathered again."""

import math

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax import config as configs
from k3jax.parallel import make_mesh


def mesh_of(**axes):
    """A mesh over the first devices, as many as the axes multiply to."""
    config = configs.MeshConfig(**{"data": 1, **axes})
    devices = math.prod(axes.values())
    return make_mesh(config, devices, jax.devices()[:devices])


def on(mesh, function, in_specs, out_specs):
    """`function` on every device's part, jitted, with whole host arrays in and out."""
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))

    def run(*arrays):
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs, is_leaf=lambda x: isinstance(x, P))
        return jax.device_get(mapped(*jax.device_put(arrays, tuple(shardings))))

    return run


def assert_close(found, wanted, tolerance, what=""):
    """max|found - wanted| <= tolerance * max|wanted|, for every leaf of two trees alike."""
    for (path, ours), theirs in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        difference = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)).max(initial=0.0)
        largest = np.abs(np.asarray(theirs, np.float64)).max(initial=0.0)
        assert difference <= tolerance * largest, f"{what} {jax.tree_util.keystr(path)}: {difference} of {largest}"
