"""The meshes whose collectives are written down here, and how: NAME.jaxMINOR.json, one for each minor version of JAX.

A case is a config, a mesh and flags. `write.py` writes the files; tests/estimate/test_census.py reads them.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
WRITE = "python tests/census/write.py"
MINOR = ".".join(jax.__version__.split(".")[:2])


class Case(NamedTuple):
    """A config file and the flags of a run with it."""

    config: str
    flags: tuple[str, ...]

    @property
    def spec(self) -> str:
        return str(ROOT / self.config)


def case(config: str, *flags: str, **mesh: int) -> Case:
    sizes = {"data": 1, **mesh}
    return Case(config, (*(f"--config.mesh.{axis}={size}" for axis, size in sizes.items()), *flags))


MODELS, PROXY = "tests/census/models.py", "configs/k3.py:proxy_1b"
# What Kimi-Linear has otherwise.
LINEAR = (
    "--config.model.attn_res_block=None",
    "--config.model.activation=swiglu",
    "--config.model.kda.output_gate=low_rank",
    "--config.model.mla.q_lora=None",
    "--config.model.mla.output_gate=False",
    "--config.model.moe.latent=None",
    "--config.model.moe.balancing=sign",
    "--config.memory.policy=recompute_all",
)
QUICK = {  # on eight devices, in the default tests
    "apart_fsdp2_expert2_tensor2": case(f"{MODELS}:apart", fsdp=2, expert=2, tensor=2),
    "apart_data2_context2_tensor2": case(
        f"{MODELS}:apart", "--config.memory.policy=recompute_all", data=2, context=2, tensor=2
    ),
}
SLOW = {
    "mesh_fsdp2_expert2_tensor2": case(f"{MODELS}:mesh", fsdp=2, expert=2, tensor=2),
    "mesh_data2_context2_tensor2": case(f"{MODELS}:mesh", data=2, context=2, tensor=2),
    "mesh_fsdp2_expert2_context2": case(f"{MODELS}:mesh", fsdp=2, expert=2, context=2),
    "apart_accumulate2": case(f"{MODELS}:apart", "--config.train.accumulate=2", data=2, fsdp=2, tensor=2),
    "linear_expert2_context2_tensor2": case(f"{MODELS}:apart", *LINEAR, expert=2, context=2, tensor=2),
    "mesh_64": case(f"{MODELS}:mesh", "--config.data.batch_rows=64", data=4, fsdp=2, expert=2, context=2, tensor=2),
    "proxy_1b_512": case(PROXY, "--config.data.batch_rows=512", data=4, fsdp=8, expert=8, tensor=2),
}


def file_of(name: str) -> Path:
    """Where a case's collectives are written down for the JAX that runs."""
    return FOLDER / f"{name}.jax{MINOR}.json"


def census_of(one: Case, out: Path) -> dict:
    """The census of a case by the command line, in a process of its own; `out` is a .json file that it may use."""
    command = [sys.executable, "-m", "k3jax.estimate", "--show=collectives", f"--config={one.spec}", f"--json={out}"]
    subprocess.run([*command, *one.flags], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())
