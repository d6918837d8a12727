"""Devices to compile for that are not there, or are only pretended: nothing is run on them.

    cpu     N devices of this process, which JAX pretends to have; their number is fixed when its backend starts
    cuda    hosts x GPUs of a kind that nobody here need own: a deviceless topology of the CUDA plugin, which holds
            descriptions of A100, H100, H200, B200, GB200 and GB300

Invariant: what cannot be had is one line of MachineError that says what is missing.
"""

import importlib.util
import mmap
import re
from pathlib import Path

import jax
from jax.experimental import topologies

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
    known = _descriptions()
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


def _descriptions() -> dict[str, str]:
    """Name of a GPU -> its description, as they stand as text in the plugin's shared object."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = [] if spec is None else spec.submodule_search_locations
    files = (Path(folder) / "xla_cuda13" / "xla_cuda_plugin.so" for folder in folders)
    path = next((path for path in files if path.exists()), None)
    if path is None:
        raise MachineError(f"CUDA without its devices needs {CUDA}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        texts = re.findall(rb"(?:^|\x00)([^\x00]*gpu_device_info \{[^\x00]+)", content)
    named = ((re.search(r'device_description_str: "([^"]+)"', text), text) for text in map(bytes.decode, texts))
    return {match[1]: text for match, text in named if match}
