"""short_conv with SiLU: both implementations against loops in float64, the GPU kernel in interpret mode and lowered."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absent_gpu import lower_for
from golden_files import assert_close
from test_short_conv import oracle

from pallas_kernels.kda import short_conv
from pallas_kernels.kda.short_conv import IMPLEMENTATIONS

CHANNELS = 32


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "interpreted", functools.partial(IMPLEMENTATIONS["gpu"], interpret=True))


def arrays(batch, length, channels=CHANNELS):
    """x, weight, gradients of y and tail."""
    rng = np.random.default_rng(length)
    shapes = (batch, length, channels), (4, channels), (batch, length, channels), (batch, 3, channels)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def wanted(x, weight, d_y, d_tail, ids):
    """y, tail and the gradients of x and weight, float64."""
    left, left_ids = np.zeros_like(d_tail), np.zeros(d_tail.shape[:2], np.int32)
    ids = np.ones(x.shape[:2], np.int32) if ids is None else ids
    convolved, tail, *_ = oracle(x, weight, left, d_y, d_tail, ids, left_ids)
    s = 1 / (1 + np.exp(-convolved))
    d_convolved = np.asarray(d_y, np.float64) * s * (1 + convolved * (1 - s))
    _, _, d_x, d_weight, _ = oracle(x, weight, left, d_convolved, d_tail, ids, left_ids)
    return convolved * s, tail, d_x, d_weight


@functools.partial(jax.jit, static_argnames="implementation")
def run(x, weight, d_y, d_tail, ids, implementation):
    def call(x, weight):
        return short_conv(x, weight, segment_ids=ids, silu=True, implementation=implementation)

    results, pull_back = jax.vjp(call, x, weight)
    return *results, *pull_back((d_y, d_tail))


def check(x, weight, d_y, d_tail, ids, implementation):
    """Padding holds NaN in x and the gradient of y."""
    expected = wanted(x, weight, d_y, d_tail, ids)
    if ids is not None:
        x, d_y = (np.where((ids == 0)[..., None], np.float32(np.nan), a) for a in (x, d_y))
    actual = run(x, weight, d_y, d_tail, ids, implementation)
    bounds = {"y": 2e-6, "tail": 0, "d x": 1e-5, "d weight": 1e-5}
    for a, b, (name, bound) in zip(actual, expected, bounds.items(), strict=True):
        assert_close(a, b, bound, name)
    if ids is not None:
        assert (np.asarray(actual[2])[ids == 0] == 0).all()


@pytest.mark.parametrize("implementation", ["interpreted", "xla"])
@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 67, 131])
def test_one_document(length, implementation):
    check(*arrays(2, length), None, implementation)


@pytest.mark.parametrize("implementation", ["interpreted", "xla"])
def test_documents(implementation):
    """Padding before, inside and after documents, some of one token, some across the border of a program's tokens."""
    rows = [
        [(0, 2), (3, 2), (0, 1), (3, 1), (9, 1), (4, 54), (0, 3), (4, 2), (8, 1), (0, 3)],
        [(7, 62), (0, 5), (7, 3)],
        [(0, 70)],
        [(i, 1) for i in range(1, 71)],
        [(0, 66), (2, 4)],
    ]
    ids = np.stack([np.concatenate([np.full(n, i) for i, n in row]) for row in rows]).astype(np.int32)
    check(*arrays(*ids.shape), ids, implementation)


@pytest.mark.parametrize("channels", [32, 192, 256])
def test_several_blocks_of_channels(channels):
    check(*arrays(1, 9, channels), None, "interpreted")


@pytest.mark.parametrize("implementation", ["interpreted", "xla"])
@pytest.mark.parametrize("has_ids", [False, True])
def test_bf16(has_ids, implementation):
    """Relative rms; sums are fp32."""
    given = [a.astype(ml_dtypes.bfloat16) for a in arrays(2, 150)]
    ids = np.repeat(np.int32([[3, 0, 3, 5, 6], [1, 2, 3, 4, 4]]), 30, 1) if has_ids else None
    expected = wanted(*given, ids)
    found = run(*given, ids, implementation)
    assert all(a.dtype == jnp.bfloat16 for a in found)
    for a, b, bound in zip(found, expected, (5e-3, 0, 8e-3, 2e-2), strict=True):
        error = np.asarray(a, np.float64) - b
        assert np.sqrt(np.mean(error**2) / np.mean(b**2)) <= bound


def test_refusals():
    x, weight, *_ = arrays(1, 4)
    left = x[:, :3]
    with pytest.raises(NotImplementedError, match="needs a GPU, this is made for cpu"):
        short_conv(x, weight, silu=True, implementation="gpu")
    with pytest.raises(NotImplementedError, match="is for SiLU"):
        short_conv(x, weight, implementation="interpreted")
    with pytest.raises(NotImplementedError, match="rows that nothing comes before"):
        short_conv(x, weight, left=left, silu=True, implementation="interpreted")
    with pytest.raises(NotImplementedError, match=r"a multiple of 32 channels, not shape \(1, 4, 20\)"):
        short_conv(x[..., :20], weight[:, :20], silu=True, implementation="interpreted")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("length, channels", [(1, 32), (1000, 96 * 128), (131072, 4096)])
def test_lowers_for_an_absent_gpu(length, channels, has_ids, dtype):
    """The automatic choice for such a GPU."""
    x, weight = jax.ShapeDtypeStruct((1, length, channels), dtype), jax.ShapeDtypeStruct((4, channels), dtype)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if has_ids else None

    def loss(x, weight, ids):
        return short_conv(x, weight, segment_ids=ids, silu=True)[0].astype(jnp.float32).sum()

    text = lower_for("H100", jax.grad(loss, argnums=(0, 1)), x, weight, ids).as_text()
    assert "short_conv_gradients" in text
