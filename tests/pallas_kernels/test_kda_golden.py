"""Both implementations of kda against the published recurrence in float64: outputs, final states, every gradient."""

from functools import partial

import jax
import numpy as np
import pytest
from golden_files import assert_close, golden, manifest

from pallas_kernels.kda import kda

FORWARD, GRADIENT = 1e-5, 2e-5  # max|difference| / max|expected|
IMPLEMENTATIONS = ["xla", "reference"]
CORE = [
    "kda_core_T200", "kda_core_basic", "kda_core_gva", "kda_core_h0",
    "kda_core_scale1", "kda_core_strong", "kda_core_vstrong",
]  # fmt: skip
BOUND = {"kda_fused_lowerbound": -5.0, "kda_fused_softplus": None, "kda_fused_softplus_strong": None}
# Names of kda's arguments -> names in the files.
NAMES = {"query": "q", "key": "k", "value": "v", "log_decay": "g", "beta": "beta", "initial_state": "h0"}
FUSED_NAMES = NAMES | {"log_decay": "graw", "beta": "betaraw", "a_log": "A_log", "dt_bias": "dt_bias"}


def assert_matches(arrays, names, segment_ids=None, **options):
    """Runs kda on the file's inputs and compares both outputs and the gradients of sum(o do) + sum(ht dht)."""
    inputs = {name: arrays[ours] for name, ours in names.items() if ours in arrays}

    @jax.jit
    def run(inputs, d_output, d_state):
        call = partial(kda, segment_ids=segment_ids, **options)
        (output, state), pull_back = jax.vjp(lambda inputs: call(**inputs), inputs)
        return output, state, pull_back((d_output, d_state))[0]

    output, state, gradients = run(inputs, arrays["do"], arrays["dht"])
    assert_close(output, arrays["o"], FORWARD, "output")
    assert_close(state, arrays["ht"], FORWARD, "final_state")
    assert gradients.keys() == inputs.keys()
    for name, gradient in gradients.items():
        assert_close(gradient, arrays["d" + names[name]], GRADIENT, f"gradient of {name}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CORE)
def test_core(name, implementation):
    arrays = golden(name)
    scale = float(arrays["scale"]) if "scale" in arrays else None
    assert_matches(arrays, NAMES, scale=scale, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", BOUND)
def test_fused(name, implementation):
    """Normalisation, gate and sigmoid inside; a_log and dt_bias have gradients too."""
    arrays = golden(name)
    bounded = not manifest()[name]["conventions"]["gate"].startswith("softplus")
    assert bounded == (BOUND[name] is not None)
    for ours in ("dt_bias", "ddt_bias"):
        arrays[ours] = arrays[ours].reshape(2, 16)
    options = {"lower_bound": BOUND[name], "normalize_qk": True, "beta_is_logit": True}
    assert_matches(arrays, FUSED_NAMES, implementation=implementation, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_documents_of_unequal_length(implementation):
    """Each document of the file alone, with its own first state: one to a row, the rest of the row is padding."""
    arrays = golden("kda_varlen")
    ends = arrays.pop("cu_seqlens")
    lengths = np.diff(ends)
    assert list(lengths) == [5, 64, 1, 40]
    segment_ids = (np.arange(lengths.max())[None] < lengths[:, None]).astype(np.int32)

    def one_to_a_row(x):
        rows = np.zeros((len(lengths), lengths.max(), *x.shape[2:]), x.dtype)
        for row, start, length in zip(rows, ends, lengths, strict=False):
            row[:length] = x[0, start : start + length]
        return rows

    per_token = {name: one_to_a_row(x) for name, x in arrays.items() if name not in ("h0", "dh0", "ht", "dht")}
    assert_matches(arrays | per_token, NAMES, segment_ids, implementation=implementation)
