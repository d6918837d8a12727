"""The table of cases that every implementation of kda has to pass, with right answers from outside of it.

A case is inputs, gradients of the output and of the final state, options, and the expected output, state and gradients:
from the golden files (published code, in float64), or from the float64 recurrence of kda_oracle.py.
"""

import functools
from typing import NamedTuple

import numpy as np
from golden_files import golden, manifest
from kda_oracle import kda as oracle

from pallas_kernels.kda import api, xla

# What `xla` does on accelerators, and on CPUs for wide heads: forward, too, by products of matrices.
api.IMPLEMENTATIONS["products"] = functools.partial(xla.kda, in_cache=0)
IMPLEMENTATIONS = tuple(name for name in api.IMPLEMENTATIONS if name != "gpu")  # that one has test_kda_gpu.py
PER_TOKEN = "query", "key", "value", "log_decay", "beta"
HEADS, VALUE_HEADS, WIDTH, VALUE_WIDTH = 2, 4, 6, 5
FUSED = {"normalize_qk": True, "beta_is_logit": True}
CORE = (
    "kda_core_T200", "kda_core_basic", "kda_core_gva", "kda_core_h0",
    "kda_core_scale1", "kda_core_strong", "kda_core_vstrong",
)  # fmt: skip
BOUND = {"kda_fused_lowerbound": -5.0, "kda_fused_softplus": None, "kda_fused_softplus_strong": None}
VARLEN = "kda_varlen"
# Names of kda's arguments -> names in the files.
NAMES = {"query": "q", "key": "k", "value": "v", "log_decay": "g", "beta": "beta", "initial_state": "h0"}
FUSED_NAMES = NAMES | {"log_decay": "graw", "beta": "betaraw", "a_log": "A_log", "dt_bias": "dt_bias"}
LENGTHS = (0, 1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 200, 255)


class Case(NamedTuple):
    """One call and what must come out of it."""

    inputs: dict
    d_output: np.ndarray
    d_state: np.ndarray
    options: dict
    output: np.ndarray
    state: np.ndarray
    gradients: dict


def random_inputs(
    length, batch=1, seed=0, raw=False, heads=HEADS, value_heads=VALUE_HEADS, width=WIDTH, value_width=VALUE_WIDTH
):
    """Unit keys and plain decays and betas, or with `raw` what a layer hands over; fp32."""
    rng = np.random.default_rng(seed)
    lead = batch, length
    shapes = {
        "query": (*lead, heads, width), "key": (*lead, heads, width), "value": (*lead, value_heads, value_width),
        "log_decay": (*lead, value_heads, width), "beta": (*lead, value_heads),
        "initial_state": (batch, value_heads, width, value_width),
    }  # fmt: skip
    if raw:
        shapes |= {"a_log": (value_heads,), "dt_bias": (value_heads, width)}
    inputs = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    if not raw:
        inputs["key"] /= np.linalg.norm(inputs["key"], axis=-1, keepdims=True)
        inputs["log_decay"] = -rng.exponential(0.3, shapes["log_decay"])
        inputs["beta"] = rng.uniform(0, 1, shapes["beta"])
    return {name: x.astype(np.float32) for name, x in inputs.items()}


def probes(inputs, seed=1):
    """Gradients of the output and of the final state."""
    rng = np.random.default_rng(seed)
    batch, _, heads, width = inputs["value"].shape
    state = batch, heads, inputs["key"].shape[3], width
    return tuple(rng.normal(size=s).astype(np.float32) for s in (inputs["value"].shape, state))


def answered(inputs, seed=1, **options) -> Case:
    """The case with the oracle's answers."""
    d_output, d_state = probes(inputs, seed)
    return Case(inputs, d_output, d_state, options, *oracle(inputs, d_output, d_state, **options))


def _from_file(name, names, segment_ids=None, arrays=None, **options) -> Case:
    arrays = golden(name) if arrays is None else arrays
    ours = {ours: theirs for ours, theirs in names.items() if theirs in arrays}
    inputs = {ours: arrays[theirs] for ours, theirs in ours.items()}
    gradients = {ours: arrays["d" + theirs] for ours, theirs in ours.items()}
    options |= {} if segment_ids is None else {"segment_ids": segment_ids}
    return Case(inputs, arrays["do"], arrays["dht"], options, arrays["o"], arrays["ht"], gradients)


def _core(name):
    scale = golden(name).get("scale")
    return _from_file(name, NAMES, scale=None if scale is None else float(scale))


def _fused(name):
    arrays = golden(name)
    bounded = not manifest()[name]["conventions"]["gate"].startswith("softplus")
    assert bounded == (BOUND[name] is not None)
    for ours in ("dt_bias", "ddt_bias"):
        arrays[ours] = arrays[ours].reshape(2, 16)
    return _from_file(name, FUSED_NAMES, arrays=arrays, lower_bound=BOUND[name], **FUSED)


def _varlen():
    """Each document of the file alone, with its own first state: one to a row, the rest of the row is padding."""
    arrays = golden(VARLEN)
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
    return _from_file(VARLEN, NAMES, segment_ids, arrays | per_token)


def _decay(content):
    """A decay of `content` everywhere, or drawn anew for each channel from several."""
    inputs = random_inputs(70, seed=3)
    rng = np.random.default_rng(4)
    shape = inputs["log_decay"].shape
    inputs["log_decay"] = rng.choice(np.float32(content), shape) if np.ndim(content) else np.full(shape, content)
    inputs["log_decay"] = inputs["log_decay"].astype(np.float32)
    return answered(inputs)


def _beta(content):
    inputs = random_inputs(70, seed=5)
    inputs["beta"][:] = content
    return answered(inputs)


def _equal_keys():
    """One token over and over, written whole, hardly forgotten."""
    inputs = random_inputs(70, seed=6)
    inputs["key"][:] = inputs["key"][:, :1]
    inputs["beta"][:] = 1
    inputs["log_decay"] *= 1e-3
    return answered(inputs)


# (id, tokens) one after the other: padding before, inside, between and after documents; documents of one token, some
# that start and end at and beside borders of chunks; a single document; a row of padding.
ROWS = [
    [(0, 3), (4, 5), (0, 2), (4, 6), (1, 16), (9, 1), (0, 4), (7, 3), (0, 5)],
    [(1, 45)],
    [(0, 45)],
    [(5, 15), (6, 1), (2, 17), (0, 11), (2, 1)],
]
SEGMENT_IDS = np.stack([np.concatenate([np.full(n, i) for i, n in row]) for row in ROWS]).astype(np.int32)


def _documents(content, lower_bound):
    """Packed rows whose padding holds `content`, in the inputs and in the gradient of the output."""
    inputs = random_inputs(45, batch=len(ROWS), seed=7, raw=True)
    case = answered(inputs, segment_ids=SEGMENT_IDS, lower_bound=lower_bound, **FUSED)
    spoiled = {name: x.copy() for name, x in inputs.items()}
    d_output = case.d_output.copy()
    for x in (d_output, *(spoiled[name] for name in PER_TOKEN)):
        x[SEGMENT_IDS == 0] = content
    return case._replace(inputs=spoiled, d_output=d_output)


BUILD = {
    **{name: functools.partial(_core, name) for name in CORE},
    **{name: functools.partial(_fused, name) for name in BOUND},
    VARLEN: _varlen,
    **{
        f"{length} tokens": functools.partial(lambda n: answered(random_inputs(n, batch=2)), length)
        for length in LENGTHS
    },
    "no decay": functools.partial(_decay, 0.0),
    "strong decay": functools.partial(_decay, -50.0),
    "decays of 0 to -1000": functools.partial(_decay, [0.0, -1e-3, -5.0, -50.0, -1000.0]),
    "decays of 0 and -1000": functools.partial(_decay, [0.0, -1000.0]),
    "equal keys": _equal_keys,
    **{f"beta {beta}": functools.partial(_beta, beta) for beta in (0, 1, 2)},
    "documents, bounded gate": functools.partial(_documents, np.nan, -5.0),
    "documents, softplus gate": functools.partial(_documents, 1e30, None),
}


@functools.cache
def case(name: str) -> Case:
    """The case of that name."""
    return BUILD[name]()
