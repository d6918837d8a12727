"""Devices to compile for that are not there, or are only pretended: nothing is run on them.

    cpu     N devices of this process, which JAX pretends to have; their number is fixed when its backend starts
    cuda    hosts x GPUs of a kind that nobody here need own: a deviceless topology of the CUDA plugin, which holds
            descriptions of A100, H100, H200, B200, GB200 and GB300

Invariant: what cannot be had is one line of MachineError that says what is missing.
"""

import jax
from jax.experimental import topologies

from k3jax import hardware
from k3jax.config import MachineError

CUDA = "jax-cuda13-plugin and jax-cuda13-pjrt 0.12, which need Python 3.12"


def cpu_devices(count: int) -> list[jax.Device]:
    """`count` devices of the CPU backend, started here with that many if nothing has started it before."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # the backend runs: what it has is what there is
        pass
    try:
        devices = jax.devices("cpu")
    except RuntimeError as error:
        raise MachineError(f"JAX has no CPU backend here: {str(error).partition(chr(10))[0]}") from error
    if len(devices) < count:
        raise MachineError(f"{count} CPU devices are needed, and JAX has already started with {len(devices)}")
    return devices[:count]


def cuda_devices(hosts: int, gpus: int, kind: str = "NVIDIA H100 80GB HBM3") -> list[jax.Device]:
    """The devices of `hosts` machines of `gpus` GPUs each, none of which is there; kind: their name to CUDA."""
    if hardware.cuda_plugin() is None:
        raise MachineError(f"CUDA without its devices needs {CUDA}")
    known = hardware.gpu_descriptions()
    if kind not in known:
        raise MachineError(f"the CUDA plugin describes no {kind!r}; it describes: {', '.join(sorted(known)) or 'none'}")
    try:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=f"1x{hosts}x{gpus}", target_config=known[kind]
        )
    except Exception as error:  # plugins raise whatever they like
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise MachineError(f"no topology without devices ({CUDA}): {reason}") from error
    return list(found.devices)
