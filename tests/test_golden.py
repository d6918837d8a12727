"""Every golden file is asserted by a test: the map below is checked against the folder and against the tests."""

import re
from pathlib import Path

import pytest
from golden_files import FOLDER, manifest

TESTS = Path(__file__).parent
KERNELS, MODEL = "pallas_kernels/kda_cases.py", "model/test_layers_golden.py"
ASSERTED_BY = {
    **{f"kda_core_{case}": KERNELS for case in ("T200", "basic", "gva", "h0", "scale1", "strong", "vstrong")},
    **{f"kda_fused_{case}": KERNELS for case in ("lowerbound", "softplus", "softplus_strong")},
    "kda_varlen": KERNELS,
    **{f"kda_layer_{case}": MODEL for case in ("k3", "linear48b", "mask")},
    **{f"mla_{case}": MODEL for case in ("gated", "plain_noqlora")},
    **{f"layer_{case}": MODEL for case in ("kda_block_start", "mla_moe_mid")},
    **{f"moe_{case}": "model/test_moe_golden.py" for case in ("latent", "plain")},
    **{f"situ_{case}": "model/test_common.py" for case in ("k3", "nolinear")},
    **{f"qb_{case}": "model/test_router.py" for case in ("sigmoid", "logits")},
    "attnres_mix": "model/test_attn_res.py",
    **{f"muon_{case}": "optim/test_muon.py" for case in ("wide", "tall", "perhead")},
    **{name: "model/test_decoder_golden.py" for name in ("kimi_k3_tiny", "kimi_linear_tiny")},
}
# Encodings of four and eight bits come with quantisation.
NOT_YET = {"mx_normal", "mx_ties", "kimi_k3_tiny_mxfp4"}


def test_map_names_every_file():
    files = {path.stem for path in FOLDER.glob("*.npz")}
    assert files == set(manifest()) == set(ASSERTED_BY) | NOT_YET


@pytest.mark.parametrize("name", ASSERTED_BY)
def test_file_is_read_by_its_test(name):
    """The test file names it, whole or as a prefix and a case."""
    text = (TESTS / ASSERTED_BY[name]).read_text()
    assert re.search(rf'"{name}"', text), f"{ASSERTED_BY[name]} does not name {name}"
