"""The GPU kernels compiled to machine code for GPUs that are not there: they fit, and keep to their registers."""

import subprocess
import sys
from pathlib import Path

import pytest
from absent_gpu import CARDS, plugin_path

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(plugin_path() is None, reason="needs jax-cuda13-plugin and its companions")
@pytest.mark.parametrize("card", CARDS)
def test_compiles_without_spills(card):
    run = subprocess.run(
        [sys.executable, HERE / "compile_kernels.py", card], capture_output=True, text=True, cwd=HERE.parents[1],
        env={"PYTHONPATH": f"{HERE.parents[1]}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith("kda_")]
    print(run.stdout)
    assert len(lines) == 60, run.stderr[-2000:]
    assert not [line for line in lines if not line.endswith(": ok")]
