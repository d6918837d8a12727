"""The GPU attention: its kernels run as XLA operations against the oracle, and lowered for GPUs that are not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention
from absent_gpu import lower_for
from test_attention import NAMES, check, inputs, oracle, packed

from pallas_kernels.attention import gpu
from pallas_kernels.attention.gpu import Tile, Tiles

# Several tiles in a row of 100; a tile of queries covers several of keys, and the other way round.
WIDE, TALL = Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)
TILES = Tiles(WIDE, TALL, WIDE), Tiles(TALL, WIDE, TALL)
SCALE = 48**-0.5
TOLERANCES = (2e-6, 2e-6, 1e-5, 1e-5, 1e-5, 1e-5)


@pytest.fixture(autouse=True)
def widths(monkeypatch):
    """The oracle's arrays in widths that the kernels take."""
    for name, size in {"HEADS": 2, "OWN": 32, "SHARED": 16, "VALUE": 16}.items():
        monkeypatch.setattr(test_attention, name, size)


@functools.cache
def program(documents, tiles, scale):
    """The six arrays of NAMES from the kernels, as one program for all calls of the same shapes."""

    @jax.jit
    def call(segment_ids, *arrays):
        def attention(*arrays):
            return gpu.attention(*arrays, segment_ids if documents else None, scale, interpret=True, tiles=tiles)

        (output, row_max), pull = jax.vjp(attention, *arrays[:4])
        # row_max carries no gradient: what comes back to it must not matter.
        return output, row_max, *pull((arrays[4], jnp.ones_like(row_max)))

    return call


def run(arrays, segment_ids=None, tiles=TILES[0], scale=SCALE):
    results = program(segment_ids is not None, tiles, scale)(segment_ids, *arrays)
    return [np.asarray(a, np.float64) for a in results]


def layout(kind, length=100):
    """One document; documents that begin with tiles, then padding to the end; documents and padding anywhere."""
    if kind == "one document":
        return None, np.ones((3, length), np.int32)
    ids = packed(length)
    if kind == "on tiles":
        ids[:2] = np.repeat(np.int32([4, 9, 2, 0]), [32, 16, 32, length - 80])
    return ids, ids


def padding(array, ids):
    """The array with NaN at padding."""
    return jnp.where((ids == 0).reshape(*ids.shape, *[1] * (array.ndim - 2)), jnp.nan, array)


@pytest.mark.parametrize("kind, tiles", [("one document", 0), ("on tiles", 1), ("anywhere", 0), ("anywhere", 1)])
def test_fp32(kind, tiles):
    ids, known = layout(kind)
    arrays = inputs(100, batch=3)
    expected = oracle(*arrays, known, SCALE)
    actual = run(arrays if ids is None else [padding(a, ids) for a in arrays], ids, TILES[tiles])
    check(actual, expected, TOLERANCES)
    for array in (actual[0], *actual[2:]):
        assert (array[known == 0] == 0).all()


@pytest.mark.parametrize("kind", ["one document", "anywhere"])
def test_bf16(kind):
    """Relative rms against fp32 mathematics on the same rounded inputs, design.md section 5."""
    ids, known = layout(kind)
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in inputs(100, batch=3)]
    for name, a, e in zip(NAMES, run(arrays, ids), oracle(*arrays, known, SCALE), strict=True):
        a, e = a[e > -np.inf], e[e > -np.inf]
        error = np.sqrt(np.mean((a - e) ** 2) / np.mean(e**2))
        assert error < {"output": 5e-3, "row_max": 1e-6}.get(name, 8e-3), f"{name}: {error:.2g}"
    output, row_max = jax.eval_shape(lambda *a: gpu.attention(*a, None, SCALE, interpret=True), *arrays[:4])
    assert output.dtype == jnp.bfloat16 and row_max.dtype == jnp.float32


@pytest.mark.parametrize("kind, value", [("one document", 50.0), ("anywhere", 50.0), ("one document", 1e36)])
def test_the_past_is_bitwise_independent_of_the_future(kind, value):
    """Also of the documents of later positions, and of values that overflow once they meet a gradient."""
    border = 41
    ids, _ = layout(kind)
    later = None if ids is None else np.where(np.arange(100) < border, ids, 8).astype(np.int32)
    arrays, edited = inputs(100, batch=3), inputs(100, batch=3)
    for array, other in zip(edited, inputs(100, batch=3, seed=1), strict=True):
        array[:, border:] = (50 if array is not edited[3] else value) * other[:, border:]
    for each in (arrays, edited):
        each[4] *= 2000
        each[4][:, border:] = 0  # a loss on the prefix
    before, after = run(arrays, ids), run(edited, later)
    for name, a, b in zip(NAMES, before, after, strict=True):
        past = (slice(None),) * (2 if name == "row_max" else 1) + (slice(None, border),)
        np.testing.assert_array_equal(b[past], a[past], name)
        if name.startswith("d"):
            assert (b[:, border:] == 0).all(), name


def test_tiles_that_no_query_looks_into_are_not_read():
    """Documents begin with tiles. The first and the last hold NaN, which is NaN in any product, even with weight 0."""
    ids = np.repeat(np.int32([[4, 9, 2]]), [32, 32, 36], axis=1).repeat(3, axis=0)
    arrays = inputs(100, batch=3)
    expected = oracle(*arrays, ids, SCALE)
    for array in arrays[:4]:
        array[:, :32] = array[:, 64:] = np.nan
    rest = np.arange(32, 64)
    actual = run(arrays, ids)
    axes = [2 if name == "row_max" else 1 for name in NAMES]
    taken = [[x.take(rest, axis) for x, axis in zip(xs, axes, strict=True)] for xs in (actual, expected)]
    check(*taken, TOLERANCES)


def test_row_max_is_exact():
    """Small integers and a scale of 1/2: every logit is exact, so the maximum must be."""
    arrays = [np.round(2 * a) for a in inputs(100, batch=3)]
    expected = oracle(*arrays, packed(100), 0.5)[1]
    call = jax.jit(lambda *a: gpu.attention(*a, packed(100), 0.5, interpret=True, tiles=TILES[0])[1])
    np.testing.assert_array_equal(call(*arrays[:4]), expected)


def test_no_tokens():
    arrays = inputs(0)
    output, row_max, *gradients = run(arrays)
    assert output.shape == arrays[3].shape and row_max.shape == (2, 2, 0)
    assert [g.shape for g in gradients] == [a.shape for a in arrays[:4]]


def shapes(length, own, shared, value, dtype, batch=1, heads=96):
    widths = (heads, own + shared), (heads, own), (shared,), (heads, value)
    arrays = [jax.ShapeDtypeStruct((batch, length, *width), dtype) for width in widths]
    return *arrays, jax.ShapeDtypeStruct((batch, length), jnp.int32)


def forward_and_gradients(*arrays, documents=True):
    output, pull = jax.vjp(lambda *a: gpu.attention(*a, arrays[4] if documents else None, 0.07)[0], *arrays[:4])
    return output, pull(output)


@pytest.mark.parametrize("card", ["A100", "H100", "B200"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("widths", [(128, 64, 128), (64, 32, 64), (32, 16, 32)])
def test_lowering(card, dtype, widths):
    text = lower_for(card, forward_and_gradients, *shapes(8192, *widths, dtype)).as_text()
    assert all(text.count(f'name = "{name}"') == 1 for name in ("mla_forward", "mla_d_keys", "mla_d_query"))


@pytest.mark.parametrize("length", [1, 64, 1000, 131072])
def test_lowering_of_lengths(length):
    for documents in (True, False):
        function = functools.partial(forward_and_gradients, documents=documents)
        lower_for("H100", function, *shapes(length, 128, 64, 128, jnp.bfloat16))


def test_no_array_of_all_pairs_and_no_transposed_copy():
    text = lower_for("H100", forward_and_gradients, *shapes(8192, 128, 64, 128, jnp.bfloat16, heads=2)).as_text()
    assert "8192x2x192" in text
    assert "8192x8192" not in text
    assert "2x8192x1" not in text  # heads before tokens


def test_what_is_refused():
    arrays = inputs(4)
    with pytest.raises(NotImplementedError, match="made for cpu"):
        gpu.attention(*arrays[:4], None, 1.0)
    query, key, shared, value = (jnp.asarray(a) for a in arrays[:4])
    call = functools.partial(gpu.attention, segment_ids=None, scale=1.0, interpret=True)
    with pytest.raises(NotImplementedError, match="not 24, 16 and 16"):
        call(query[..., 8:], key[..., 8:], shared, value)
    with pytest.raises(NotImplementedError, match="not 32, 16 and 8"):
        call(query[..., 8:], key, shared[..., 8:], value)
    with pytest.raises(NotImplementedError, match="not float32, float32, float32, bfloat16"):
        call(query, key, shared, value.astype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="float16"):
        call(*(x.astype(jnp.float16) for x in (query, key, shared, value)))
