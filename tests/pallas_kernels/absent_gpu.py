"""Programs for a GPU that is not there: lowered with jaxlib alone, compiled to machine code with the CUDA plugin.

Lowering finds what Triton cannot express. Compiling finds what does not fit: shared memory, and registers with
XLA_FLAGS=--xla_gpu_fail_ptx_compilation_on_register_spilling=true. It needs Python 3.12, jax 0.12, jax-cuda13-plugin,
jax-cuda13-pjrt and nvidia-cuda-nvcc: no driver, no GPU.
"""

import functools
import os
import sysconfig

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from k3jax import hardware

CARDS = {"A100": ("NVIDIA A100-SXM4-80GB", 108), "H100": ("NVIDIA H100 80GB HBM3", 132), "B200": ("NVIDIA B200", 148)}


def abstract_gpu(card):
    """A context in which programs are made for one of CARDS."""
    kind, cores = CARDS[card]
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lower_for(card, function, *arguments):
    """The function lowered for one of CARDS; arguments may be jax.ShapeDtypeStruct."""
    with abstract_gpu(card):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


@functools.cache
def _topology(card):
    from jax.experimental import topologies

    # An older assembler of the system would win otherwise.
    os.environ["PATH"] = f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin:{os.environ['PATH']}"
    description = hardware.gpu_descriptions()[CARDS[card][0]]
    return topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=description)


def compile_for(card, function, *shapes):
    """The function compiled for one of CARDS, for arguments of these jax.ShapeDtypeStruct."""
    mesh = jax.sharding.Mesh(_topology(card).devices[:1], ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    with abstract_gpu(card):
        traced = jax.jit(function).trace(*shapes)
    return traced.lower(lowering_platforms=("cuda",)).compile()
