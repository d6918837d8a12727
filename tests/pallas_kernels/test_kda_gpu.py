"""The GPU kernels of kda: their numbers in interpret mode, and that they lower for a GPU that is not there."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absent_gpu import lower_for
from kda_cases import PER_TOKEN, answered, case, oracle, random_inputs
from test_kda import assert_answers, results

from pallas_kernels.kda import api, gpu, kda

FORWARD, GRADIENT = 2e-6, 1e-5


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, "interpreted", functools.partial(gpu.kda, interpret=True))


def inputs(length, width, value_width, value_heads=2, batch=1):
    return random_inputs(length, batch, heads=1, value_heads=value_heads, width=width, value_width=value_width)


def check(wanted, **more):
    assert_answers(wanted, "interpreted", FORWARD, GRADIENT, **more)


@pytest.mark.parametrize(
    "name", ["kda_core_vstrong", "kda_fused_softplus_strong", "kda_fused_lowerbound", "kda_varlen"]
)
def test_golden(name):
    check(case(name))


@pytest.mark.parametrize("state_every", [1, 3])
def test_wide_and_grouped(state_every):
    """Unequal widths, two value heads to a key head, tokens left over, more than one chunk to a state."""
    check(answered(inputs(70, 32, 64)), state_every=state_every)


def test_decays_betas_and_equal_keys():
    arrays = inputs(49, 16, 16)
    arrays["log_decay"] = np.random.default_rng(2).choice(np.float32([0, -1e-3, -5, -1000]), arrays["log_decay"].shape)
    arrays["beta"][:, ::3], arrays["beta"][:, 1::3] = 0, 2
    arrays["key"][:, 20:] = arrays["key"][:, 20:21]
    check(answered(arrays))


def test_documents():
    """Padding before, between and after documents, one of one token; what it holds reaches nothing."""
    rows = [[(0, 3), (4, 16), (0, 2), (9, 1), (5, 13), (0, 5)], [(7, 40)], [(0, 40)]]
    segment_ids = np.stack([np.concatenate([np.full(n, i) for i, n in row]) for row in rows]).astype(np.int32)
    wanted = answered(inputs(40, 16, 16, batch=3), segment_ids=segment_ids)
    spoiled, d_output = {name: x.copy() for name, x in wanted.inputs.items()}, wanted.d_output.copy()
    for x in (d_output, *(spoiled[name] for name in PER_TOKEN)):
        x[segment_ids == 0] = np.nan
    check(wanted._replace(inputs=spoiled, d_output=d_output))


def test_bf16():
    """Relative rms of rounded operands at the published width."""
    narrow = lambda x: x.astype(ml_dtypes.bfloat16)  # noqa: E731
    arrays = inputs(200, 128, 128, value_heads=1)
    rounded = {name: narrow(arrays[name]) for name in ("query", "key", "value")}
    exact = arrays | {name: x.astype(np.float32) for name, x in rounded.items()}
    wanted = answered(exact)
    d_output = narrow(wanted.d_output)
    output, state, gradients = oracle(exact, d_output.astype(np.float32), wanted.d_state)
    found = results(arrays | rounded, d_output, wanted.d_state, implementation="interpreted")
    assert found[0].dtype == found[2]["key"].dtype == jnp.bfloat16

    def rms(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))

    assert rms(found[0], output) < 5e-3
    assert rms(found[1], state) < 5e-3
    for name, bound in dict.fromkeys(("query", "key", "value"), 8e-3).items() | {("log_decay", 2e-2), ("beta", 2e-2)}:
        assert rms(found[2][name], gradients[name]) < bound, name


def test_later_tokens_change_no_bit_of_earlier_ones():
    arrays = inputs(90, 16, 16)
    edited = {name: x.copy() for name, x in arrays.items()}
    for name in PER_TOKEN:
        edited[name][:, 37:] *= np.float32(-3 if name in ("query", "value") else 2)
    zero = np.zeros((1, 90, 2, 16), np.float32), np.zeros((1, 2, 16, 16), np.float32)
    first, second = (results(x, *zero, implementation="interpreted")[0] for x in (arrays, edited))
    np.testing.assert_array_equal(first[:, :37], second[:, :37])
    assert (np.asarray(first[:, 37:]) != np.asarray(second[:, 37:])).any()


def test_refusals():
    arrays = {name: jnp.asarray(x) for name, x in inputs(5, 16, 16).items()}
    with pytest.raises(NotImplementedError, match="needs a GPU, this is made for cpu"):
        kda(**arrays, implementation="gpu")
    odd = {name: jnp.asarray(x) for name, x in inputs(5, 24, 16).items()}
    with pytest.raises(NotImplementedError, match="not 24 and 16"):
        kda(**odd, implementation="interpreted")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("width", gpu.WIDTHS)
@pytest.mark.parametrize("value_width", gpu.WIDTHS)
def test_lowers_for_an_absent_gpu(width, value_width, dtype):
    lower(256, width, value_width, dtype)


@pytest.mark.parametrize("length", [64, 1000, 131072])
def test_lowers_for_any_length(length):
    lower(length, 128, 128, jnp.bfloat16)


def test_lowers_with_fewer_states():
    lower(1000, 128, 128, jnp.bfloat16, state_every=3)


def lower(length, width, value_width, dtype, **options):
    """Forward and backward of the automatic choice, which for such a GPU is these kernels."""
    shape = 1, length, 2
    wide, of_values = (jax.ShapeDtypeStruct((*shape, n), dtype) for n in (width, value_width))
    log_decay, beta = jax.ShapeDtypeStruct((*shape, width), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)

    def loss(*arrays):
        output, state = kda(*arrays, **options)
        return output.astype(jnp.float32).sum() + state.sum()

    text = lower_for("H100", jax.grad(loss, argnums=range(5)), wide, wide, of_values, log_decay, beta).as_text()
    for kernel in ("chunk_operands", "scan_states", "scan_gradients", "chunk_pairs", "chunk_gradients"):
        assert f"kda_{kernel}" in text
