"""Are the GPU kernels right? Each case against fp32 mathematics, on random inputs that a seed makes.

KDA is compared with its recurrence token by token (`implementation="reference"`), MLA with a softmax over all pairs,
the convolution with its XLA form, in fp32 on the same rounded inputs. Documents come with padding, whose inputs and
gradients are NaN for the kernels. Memory that the kernels do not write shows: before each run, what the device gives
out is filled with NaN; Pallas' interpreter fills every output with NaN itself. Bounds are design's: bf16 by relative
rms, fp32 by the largest error over the largest number.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import mla_attention
from pallas_kernels.kda import kda, short_conv

BATCH = 2
FORWARD = {"bfloat16": 5e-3, "float32": 1e-5}
GRADIENT = {"bfloat16": 8e-3, "float32": 2e-5}
GRADIENT_OF_MLA = {"bfloat16": 8e-3, "float32": 5e-5}
GATES = {"d_log_decay", "d_beta", "d_weight"}  # 2e-2 in bf16
KDA_NAMES = "query", "key", "value", "log_decay", "beta", "initial_state"
MLA_NAMES = "query", "key", "key_shared", "value"


class Case(NamedTuple):
    """One way through the kernels; widths are (K, V) of kda, (own, shared, value) of mla, (D,) of conv."""

    operation: str
    dtype: str
    widths: tuple[int, ...]
    documents: bool
    tokens: int
    heads: int
    state_every: int = 1

    @property
    def name(self) -> str:
        """As it is printed."""
        more = [f"state_every={self.state_every}"] if self.state_every > 1 else []
        layout = "documents" if self.documents else "one document"
        return " ".join([self.operation, self.dtype, "x".join(map(str, self.widths)), layout, *more])


def documents(tokens: int) -> np.ndarray:
    """Segment ids [B,T]: rows with padding before, between and behind documents, one of one token."""
    cuts = np.array([0, 0.04, 0.3, 0.32, 0.6, 0.9, 1]) * tokens
    row = np.repeat([0, 3, 0, 7, 9, 0], np.diff(cuts.astype(int)))
    row[int(cuts[2])] = 5
    return np.stack([row, np.roll(row, tokens // 3) * (np.arange(tokens) >= tokens // 3)]).astype(np.int32)


def kda_inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Arrays by name, fp32; two value heads to a key head."""
    (width, value_width), shape = case.widths, (BATCH, case.tokens)
    heads = 2 * case.heads
    draw = lambda *s: rng.normal(size=s).astype(np.float32)  # noqa: E731
    query, key = (draw(*shape, case.heads, width) for _ in range(2))
    arrays = {
        "query": query / np.linalg.norm(query, axis=-1, keepdims=True),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": draw(*shape, heads, value_width),
        "log_decay": -5 / (1 + np.exp(-draw(*shape, heads, width))),
        "beta": 1 / (1 + np.exp(-draw(*shape, heads))),
        "initial_state": draw(BATCH, heads, width, value_width),
        "d_output": draw(*shape, heads, value_width),
        "d_state": draw(BATCH, heads, width, value_width),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def mla_inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Arrays by name, fp32."""
    (own, shared, value), shape = case.widths, (BATCH, case.tokens)
    widths = {
        "query": (case.heads, own + shared), "key": (case.heads, own), "key_shared": (shared,),
        "value": (case.heads, value), "d_output": (case.heads, value),
    }  # fmt: skip
    return {name: rng.normal(size=(*shape, *s)).astype(np.float32) for name, s in widths.items()}


def conv_inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Arrays by name, fp32."""
    shape, channels = (BATCH, case.tokens), case.heads * case.widths[0]
    shapes = {"x": (*shape, channels), "weight": (4, channels), "d_output": (*shape, channels)}
    return {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def run_kda(arrays: dict[str, Any], segment_ids: Any, state_every: int, implementation: str) -> dict[str, Any]:
    """Output, final state, gradients."""
    options = {"segment_ids": segment_ids, "state_every": state_every, "implementation": implementation}
    inputs = {name: arrays[name] for name in KDA_NAMES}
    (output, state), pull_back = jax.vjp(lambda inputs: kda(**inputs, **options), inputs)
    (gradients,) = pull_back((arrays["d_output"], arrays["d_state"]))
    return {"output": output, "final_state": state} | {f"d_{name}": x for name, x in gradients.items()}


def run_mla(attention: Callable, arrays: dict[str, Any], segment_ids: Any) -> dict[str, Any]:
    """Output, row maxima, gradients."""
    (output, row_max), pull_back = jax.vjp(
        lambda *inputs: attention(*inputs, segment_ids=segment_ids), *(arrays[name] for name in MLA_NAMES)
    )
    gradients = pull_back((arrays["d_output"], jnp.ones_like(row_max)))  # what comes back to row_max must not matter
    names = [f"d_{name}" for name in MLA_NAMES]
    return {"output": output, "row_max": row_max} | dict(zip(names, gradients, strict=True))


def run_conv(arrays: dict[str, Any], segment_ids: Any, implementation: str) -> dict[str, Any]:
    """Output, gradients."""
    options = {"segment_ids": segment_ids, "silu": True, "implementation": implementation}
    output, pull_back = jax.vjp(lambda *inputs: short_conv(*inputs, **options)[0], arrays["x"], arrays["weight"])
    return dict(zip(("output", "d_x", "d_weight"), (output, *pull_back(arrays["d_output"])), strict=True))


def all_pairs(query, key, key_shared, value, segment_ids):
    """The attention of one document or of segments, from a matrix of all pairs in fp32."""
    einsum = functools.partial(jnp.einsum, precision="highest")
    own, tokens = key.shape[3], key.shape[1]
    logits = einsum("bthk,bshk->bhts", query[..., :own], key) + einsum("bthk,bsk->bhts", query[..., own:], key_shared)
    seen = np.tri(tokens, dtype=bool)[None, None]
    if segment_ids is not None:
        ids = segment_ids[:, None]
        seen = seen & (ids[..., None] == ids[:, :, None]) & (ids[..., None] != 0)
    logits = jnp.where(seen, query.shape[3] ** -0.5 * logits, -jnp.inf)
    row_max = jax.lax.stop_gradient(logits.max(axis=-1))
    weights = jnp.exp(logits - jnp.where(row_max > -jnp.inf, row_max, 0)[..., None])
    total = weights.sum(axis=-1, keepdims=True)
    output = einsum("bhts,bshv->bthv", weights / jnp.where(total > 0, total, 1), value)
    return output, row_max


def programs(case: Case) -> tuple[Callable, Callable]:
    """The kernels and the reference, as functions of (arrays, segment_ids)."""
    if case.operation == "kda":
        return tuple(
            functools.partial(run_kda, state_every=case.state_every, implementation=name)
            for name in ("gpu", "reference")
        )
    if case.operation == "conv":
        return tuple(functools.partial(run_conv, implementation=name) for name in ("gpu", "xla"))
    ours = functools.partial(mla_attention, implementation="gpu")
    return functools.partial(run_mla, ours), functools.partial(run_mla, all_pairs)


def inputs(case: Case, seed: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array | None]:
    """Arrays for the kernels, the same in fp32 for the reference, segment ids."""
    rng = np.random.default_rng((seed, *case.name.encode()))
    arrays = {"kda": kda_inputs, "mla": mla_inputs, "conv": conv_inputs}[case.operation](case, rng)
    rounded = {"query", "key", "value", "d_output"} if case.operation == "kda" else arrays.keys()
    arrays = {name: jnp.asarray(x, case.dtype if name in rounded else "float32") for name, x in arrays.items()}
    exact = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    if not case.documents:
        return arrays, exact, None
    ids = documents(case.tokens)
    for name in arrays.keys() - {"initial_state", "d_state", "weight"}:
        padding = (ids == 0).reshape(*ids.shape, *[1] * (arrays[name].ndim - 2))
        arrays[name] = jnp.where(padding, jnp.nan, arrays[name])
    return arrays, exact, jnp.asarray(ids)


def poison() -> None:
    """Fills half of the device's free memory with NaN and gives it back; later programs get those bytes first."""
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    held = []
    while free > 2**24:
        free //= 2
        held.append(jnp.full((free // 2**21, 2**18), jnp.nan, jnp.float32))
    jax.block_until_ready(held)


def errors(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Relative rms error, and the largest error over the largest number; infinite where one is not finite."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    finite = np.isfinite(wanted)
    if not (found[~finite] == wanted[~finite]).all() or not np.isfinite(found[finite]).all():
        return np.inf, np.inf
    difference, wanted = found[finite] - wanted[finite], wanted[finite]
    rms = np.sqrt(np.mean(difference**2) / np.mean(wanted**2))
    return float(rms), float(np.abs(difference).max() / np.abs(wanted).max())


def row(case: str, dtype: str, tensor: str, found: np.ndarray, wanted: np.ndarray, bound: float) -> dict[str, Any]:
    """What is printed of one tensor; the bound is of the relative rms in bf16, else of the largest error."""
    rms, largest = errors(found, wanted)
    narrow = dtype == "bfloat16"
    return {
        "section": "correctness",
        "case": case,
        "tensor": tensor,
        "relative_rms": float(f"{rms:.3g}") if np.isfinite(rms) else "not finite",
        "max_error": float(f"{largest:.3g}") if np.isfinite(largest) else "not finite",
        "bound": bound,
        "bound_of": "relative_rms" if narrow else "max_error",
        "pass": (rms if narrow else largest) <= bound,
    }


def check(case: Case, seed: int, ours: Callable, reference: Callable) -> list[dict[str, Any]]:
    """Runs the two compiled programs of a case: a row for each tensor."""
    arrays, exact, ids = inputs(case, seed)
    wanted = jax.device_get(reference(exact, ids))
    poison()
    found = jax.device_get(ours(arrays, ids))
    rows = []
    for name, x in found.items():
        gradient = GRADIENT_OF_MLA if case.operation == "mla" else GRADIENT
        bound = (gradient if name.startswith("d_") else FORWARD)[case.dtype]
        bound = 2e-2 if case.dtype == "bfloat16" and name in GATES else bound
        rows.append(row(case.name, case.dtype, name, x, wanted[name], bound))
    return rows
