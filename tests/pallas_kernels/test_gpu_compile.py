"""The GPU kernels compiled to machine code for GPUs that are not there: they fit, and keep to their registers."""

import subprocess
import sys
from pathlib import Path

import pytest
from absent_gpu import CARDS

from k3jax import hardware

HERE = Path(__file__).parent
# Rows: five kernels of KDA at 6 pairs of widths in 2 dtypes, three of MLA at 3 widths in bf16, one of short_conv at 3
# widths in 2 dtypes, six of MoE at 5 pairs of widths in 2 dtypes; then 5 at 3 in 2, 3 at 3 in fp32.
MODES = {"spills": ([], 5 * 6 * 2 + 3 * 3 + 3 * 2 + 6 * 5 * 2), "fits": (["--fits"], 5 * 3 * 2 + 3 * 3)}


@pytest.mark.slow
@pytest.mark.skipif(hardware.cuda_plugin() is None, reason="needs jax-cuda13-plugin and its companions")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("card", CARDS)
def test_compiles(card, mode):
    """No register spilled up to 128 wide, those of MLA in fp32 excepted; the others fit into the shared memory."""
    options, number = MODES[mode]
    run = subprocess.run(
        [sys.executable, HERE / "compile_kernels.py", card, *options], capture_output=True, text=True,
        env={"PYTHONPATH": f"{HERE.parents[1]}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    rows = [line for line in run.stdout.splitlines() if line.startswith("| `")]
    print(run.stdout)
    assert len(rows) == number, run.stderr[-2000:]
    assert not [row for row in rows if not row.endswith("| ok |")]
