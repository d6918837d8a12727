"""benchmarks/gpu.py runs through without a GPU, and its count of bytes is the one that is worked out here by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LENGTH, HEADS = 8192, 96
KERNELS = {
    "kda_chunk_operands", "kda_scan_states", "kda_scan_gradients", "kda_chunk_pairs", "kda_chunk_gradients",
    "mla_forward", "mla_d_keys", "mla_d_query",
    "moe_up", "moe_down", "moe_d_hidden", "moe_d_rows", "moe_d_up", "moe_d_down",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    """What it prints, without the tables."""
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu.py", "--seed", "1"], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def section(rows, name):
    return [row for row in rows if row["section"] == name]


def test_runs_through(rows):
    checked, timed = section(rows, "correctness"), section(rows, "time")
    assert len(checked) == 2 * 8 + 2 * 6 + 3 + 2 * 6 and all(row["pass"] for row in checked)
    assert all(row["relative_rms"] > 0 for row in checked)  # two programs were compared
    assert {(row["operation"], row["side"]) for row in timed if "ms" in row} == {
        (operation, side) for operation in ("kda", "mla") for side in ("gpu", "xla")
    }
    assert {row["kernel"] for row in section(rows, "traffic")} - {"all"} == KERNELS
    layers = {(row["side"], row["direction"]) for row in section(rows, "moe") if "ms" in row}
    assert layers == {(side, way) for side in ("gpu", "ragged") for way in ("forward", "forward+backward")}
    alone = {row["kernel"].split()[0] for row in section(rows, "kernel")}
    assert alone == {k for k in KERNELS if k.startswith("kda")} | {"short_conv_gradients"}


def test_bytes(rows):
    """Per token and head at K = V = 128, in bf16 with fp32 gates, chunks of 64 and a program for all value channels."""
    row, decay, number, state = 2 * 128, 4 * 128, 4, 4 * 128 * 128 // 64
    square, total, table = 2 * 64, 4 * 128 // 64, (8 + 6) * 64 * 64 * 2
    operands = (2 * row + decay + number) + (3 * row + square + total)
    scan = (3 * row + square + total + row + number) + (row + state)
    back = (3 * row + square + total + row + number) + (state // 2 + row)
    pairs = (3 * row + number + row + square + state) + (row + 2 * square + row + number)
    gradients = (2 * row + decay + number + state + state // 2 + 3 * row + 2 * square) + (2 * row + decay + 8 * number)
    forward, backward = operands + scan, operands + square + back + pairs + gradients
    assert (forward, backward) == (4376, 11588)
    assert 4 * row + decay + number + state == 2564 and 7 * row + 2 * (decay + number) + state == 3848
    # A scan reads and writes one state of each head beside.
    edges = HEADS * 2 * 4 * 128 * 128
    of = {(x["operation"], x["direction"]): x for x in section(rows, "traffic") if x["kernel"] == "all"}
    for name, tables, kernels, least in (("forward", 1, forward, 2564), ("backward", 2, backward, 3848)):
        found = of["kda", name]
        assert (found["tokens"], found["heads"]) == (LENGTH, HEADS)
        assert found["bytes_once"] == LENGTH * HEADS * kernels + edges + tables * table
        assert found["bytes_minimum"] == LENGTH * HEADS * least + edges
    # bf16 arrays, the fp32 output and d_key_shared, fp32 numbers; what all heads share, integers included, once.
    shared, borders = LENGTH * (2 * 64 + 4), 4 * (LENGTH // 128)
    mla = LENGTH * HEADS * (2 * 192 + 2 * row + decay + 2 * number) + shared + borders
    assert of["mla", "forward"]["bytes_once"] == mla


def test_bytes_of_experts(rows):
    """bf16 rows and matrices, fp32 gradients of matrices; a block has 128 rows on this card, so an expert has two."""
    tokens, experts, latent, inner = 8192, 112, 3584, 3072
    copies, matrix = 2 * tokens, experts * latent * inner
    of = {x["kernel"]: x for x in section(rows, "traffic") if x["operation"] == "moe" and x["kernel"] != "all"}
    small = 4 * (2 * copies + 3 * (copies + experts * 127) // 128)  # tokens and weights of rows, table of blocks
    assert abs(of["moe_up"]["bytes_once"] - 2 * (tokens * latent + 2 * matrix + copies * inner) - small) < 16
    again = copies * latent * (inner // 128) + 2 * matrix * 2
    assert of["moe_up"]["bytes_charged"] == 2 * (again + copies * inner)
    again = copies * latent * (inner // 128) + 2 * copies * inner * (latent // 128)
    assert of["moe_d_up"]["bytes_charged"] == 2 * again + 4 * 2 * matrix
    again = copies * inner * (latent // 256) + copies * latent * (inner // 128)
    assert of["moe_d_down"]["bytes_charged"] == 2 * again + 4 * matrix
