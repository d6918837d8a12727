"""mla_attention of a part of the queries with the keys of all tokens, against the whole and against dense softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention
from absent_gpu import lower_for
from golden_files import assert_close
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from test_attention import NAMES, check, inputs, layouts, packed, several

from pallas_kernels.attention import api, gpu, mla_attention, xla
from pallas_kernels.attention.gpu import Tile, Tiles

SCALE = 10**-0.5
FP32 = (2e-6, 2e-6, 1e-5, 1e-5, 1e-5, 1e-5)
AXES = [2 if name == "row_max" else 1 for name in NAMES]
WIDE, TALL = Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)
TILES = Tiles(WIDE, TALL, WIDE), Tiles(TALL, WIDE, TALL)


def dense(query, key, key_shared, value, doutput, ids, query_start, scale):
    """The six arrays of NAMES in float64, all pairs at once; segment_ids None is one document."""
    query, key, key_shared, value, doutput = (
        np.asarray(a, np.float64) for a in (query, key, key_shared, value, doutput)
    )
    own, (batch, total, heads) = key.shape[3], key.shape[:3]
    ids = np.ones((batch, total), int) if ids is None else np.asarray(ids)
    query_at = query_start + np.arange(query.shape[1])
    keys = np.concatenate([key, np.repeat(key_shared[:, :, None], heads, axis=2)], axis=3)
    seen = np.arange(total) <= query_at[:, None]
    seen = seen & (ids[:, None] == ids[:, query_at, None]) & (ids[:, None] != 0)
    seen = seen[:, None]
    logits = np.where(seen, scale * np.einsum("bthk,bshk->bhts", query, keys), -np.inf)
    row_max = logits.max(3)
    weights = np.where(seen, np.exp(logits - np.where(seen.any(3), row_max, 0)[..., None]), 0)
    weights /= np.maximum(weights.sum(3, keepdims=True), 1e-300)
    products = np.einsum("bthv,bshv->bhts", doutput, value)
    dlogits = scale * weights * (products - (weights * products).sum(3, keepdims=True))
    dkeys = np.einsum("bhts,bthk->bshk", dlogits, query)
    return (
        np.einsum("bhts,bshv->bthv", weights, value),
        row_max,
        np.einsum("bhts,bshk->bthk", dlogits, keys),
        dkeys[..., :own],
        dkeys[..., own:].sum(2),
        np.einsum("bhts,bthv->bshv", weights, doutput),
    )


@functools.cache
def program(implementation, option, documents, scale):
    """The six arrays of NAMES as one program for all calls of the same shapes; query_start may be None."""

    @jax.jit
    def call(query_start, segment_ids, *arrays):
        def attention(*arrays):
            arguments = *arrays, segment_ids if documents else None, scale
            if implementation == "xla":
                return xla.attention(*arguments, option, query_start)
            return gpu.attention(*arguments, query_start=query_start, interpret=True, tiles=option)

        (output, row_max), pull = jax.vjp(attention, *arrays[:4])
        # row_max carries no gradient: what comes back to it must not matter.
        return output, row_max, *pull((arrays[4], jnp.ones_like(row_max)))

    return call


def cut(arrays, start, length):
    """The arrays of a call for a part: queries and gradients of outputs are cut."""
    query, *others, doutput = arrays
    return query[:, start : start + length], *others, doutput[:, start : start + length]


def numbers(results):
    return [np.asarray(a, np.float64) for a in results]


def in_parts(call, arrays, segment_ids, count):
    """The results of all parts: those of queries side by side, those of keys summed."""
    length = arrays[0].shape[1] // count
    parts = [numbers(call(np.int32(i * length), segment_ids, *cut(arrays, i * length, length))) for i in range(count)]
    columns = list(zip(*parts, strict=True))
    joined = [np.concatenate(x, axis) for x, axis in zip(columns[:3], AXES, strict=False)]
    return *joined, *(sum(x) for x in columns[3:])


WHOLES = [(100, 4, 256), (100, 4, 16), (100, 4, 8), (64, 8, 256), (64, 8, 3)]


@pytest.mark.parametrize("length, count, chunk, documents", [*((*x, True) for x in WHOLES), (100, 4, 16, False)])
def test_parts_are_the_whole(length, count, chunk, documents):
    """Documents across borders; padding inside, at borders and a part of nothing else, which may hold anything."""
    ids, arrays = packed(length), inputs(length, batch=3)
    if documents:
        ids[1, 5 : 2 * length // count] = 0
        for array in arrays:
            array[ids == 0] = np.nan
    call = program("xla", chunk, documents, SCALE)
    whole, parts = numbers(call(None, ids, *arrays)), in_parts(call, arrays, ids, count)
    check(parts, whole, FP32)
    for array in (parts[0], *parts[2:]):
        assert not documents or (array[ids == 0] == 0).all()


def test_parts_of_bf16():
    """Relative rms against fp32 mathematics on the same rounded inputs, design.md section 5."""
    ids, arrays = packed(100), [jnp.asarray(a, jnp.bfloat16) for a in inputs(100, batch=3)]
    call = program("xla", 16, True, SCALE)
    expected = dense(*arrays, ids, 0, SCALE)
    for name, a, e in zip(NAMES, in_parts(call, arrays, ids, 4), expected, strict=True):
        a, e = a[e > -np.inf], e[e > -np.inf]
        error = np.sqrt(np.mean((a - e) ** 2) / np.mean(e**2))
        assert error < {"output": 5e-3, "row_max": 1e-6}.get(name, 8e-3), f"{name}: {error:.2g}"


@pytest.mark.parametrize("documents", [True, False])
def test_against_dense_softmax(documents):
    """One program for every start, which only the running program knows: at the ends and on no border of a chunk."""
    ids, arrays = packed(70)[:2] if documents else None, inputs(70)

    @jax.jit
    def call(query_start, *arrays):
        def attention(*arrays):
            return mla_attention(*arrays, segment_ids=ids, query_start=query_start)

        results, pull = jax.vjp(attention, *arrays[:4])
        return *results, *pull((arrays[4], jnp.ones_like(results[1])))

    for start in (0, 13, 41):
        part = cut(arrays, start, 29)
        check(numbers(call(start, *part)), dense(*part, ids, start, SCALE), FP32)


@several
@given(st.integers(0, 99), layouts(), st.integers(0, 47))
def test_any_layout_and_start(seed, segment_ids, start):
    """Padding and everything behind the last query holds NaN, also where a document goes on there."""
    arrays = inputs(70, batch=1, seed=seed)
    part = cut(arrays, start, 23)
    expected = dense(*part, segment_ids, start, SCALE)
    for array in part[1:4]:
        array[:, start + 23 :] = np.nan
        array[segment_ids == 0] = np.nan
    actual = numbers(program("xla", 16, True, SCALE)(np.int32(start), segment_ids, *part))
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        seen = e > -np.inf
        np.testing.assert_array_equal(a > -np.inf, seen, name)
        # Gradients of a document of one token vanish: what is left of terms of size 1 has their rounding.
        scale = max(np.abs(e[seen]).max(initial=0), 0.3)
        assert np.abs(a - np.where(seen, e, 0))[seen].max(initial=0) <= 1e-5 * scale, name


@pytest.mark.parametrize("implementation, option", [("xla", 16), ("xla", 256), ("gpu", TILES[0])])
@pytest.mark.parametrize("content", [np.nan, np.inf, 1e38])
def test_what_stands_behind_the_last_query_reaches_nothing(implementation, option, content, monkeypatch):
    """Neither outputs nor gradients, bit for bit; its own gradient is 0."""
    widths = {"HEADS": 2, "OWN": 16, "SHARED": 16, "VALUE": 16} if implementation == "gpu" else {}
    for name, size in widths.items():
        monkeypatch.setattr(test_attention, name, size)
    call = program(implementation, option, False, SCALE)
    part = cut(inputs(70), 21, 20)
    edited = [x.copy() for x in part]
    for array in edited[1:4]:
        array[:, 41:] = content
    before, after = numbers(call(np.int32(21), None, *part)), numbers(call(np.int32(21), None, *edited))
    for name, a, b in zip(NAMES, before, after, strict=True):
        np.testing.assert_array_equal(b, a, name)
        assert np.isfinite(b).all(), name
    for name, b in zip(NAMES[3:], after[3:], strict=True):
        assert (b[:, 41:] == 0).all(), name


@pytest.mark.parametrize("start, length", [(0, 25), (25, 25), (75, 25), (40, 8), (92, 8)])
@pytest.mark.parametrize("documents", [True, False])
def test_only_tiles_that_are_seen_are_computed(start, length, documents, monkeypatch):
    """Tiles forward and backward are those from the first document of a chunk of queries to its last query."""
    chunk, count, logits = 8, 0, xla._logits

    def counted(*arguments):
        def one():
            nonlocal count
            count += 1

        jax.debug.callback(one)
        return logits(*arguments)

    monkeypatch.setattr(xla, "_logits", counted)
    ids = np.repeat(np.int32([[4, 9, 2]]), [30, 40, 30], axis=1) if documents else None
    first = np.array([0, 30, 70])[np.repeat([0, 1, 2], [30, 40, 30])] if documents else np.zeros(100, int)
    expected = 0
    for at in range(start, start + length, chunk):
        last = min(at + chunk, start + length) - 1
        expected += last // chunk - first[at] // chunk + 1
    query, *rest, doutput = cut(inputs(100, batch=1), start, length)

    @jax.jit
    def call(query_start):
        output, pull = jax.vjp(lambda *a: xla.attention(*a, ids, SCALE, chunk, query_start)[0], query, *rest)
        return output, pull(doutput)

    jax.block_until_ready(call(np.int32(start)))
    jax.effects_barrier()
    assert count == 2 * expected


def test_chunks_before_the_first_document_are_not_computed():
    """They hold NaN, which would be NaN in any product, even with weight 0."""
    ids = np.repeat(np.int32([[4, 9]]), [32, 68], axis=1)
    part = cut(inputs(100, batch=1), 40, 25)
    expected = dense(*part, ids, 40, SCALE)
    for array in part[1:4]:
        array[:, :32] = np.nan
    actual = numbers(program("xla", 16, True, SCALE)(np.int32(40), ids, *part))
    check(actual, expected, FP32)
    assert all((array[:, :32] == 0).all() for array in actual[3:])


def test_devices_with_a_part_each():
    """Four devices gather keys and values; the gathering's own gradient sums what they find."""
    ids, (*arrays, doutput) = packed(100), inputs(100, batch=3)
    mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec(None, "context")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(split, split, split, split, split, split),
        out_specs=(split, jax.sharding.PartitionSpec(None, None, "context"), split, split, split, split),
        check_vma=False,
    )
    def call(ids, doutput, *arrays):
        def gathered(x):
            return jax.lax.all_gather(x, "context", axis=1, tiled=True)

        def attention(query, *others):
            start = jax.lax.axis_index("context") * query.shape[1]
            return mla_attention(query, *map(gathered, others), segment_ids=gathered(ids), query_start=start)

        results, pull = jax.vjp(attention, *arrays)
        return *results, *pull((doutput, jnp.zeros_like(results[1])))

    check(numbers(call(ids, doutput, *arrays)), dense(*arrays, doutput, ids, 0, SCALE), FP32)


def test_memory_is_linear_and_programs_stay_small():
    """Four times the keys of 256 queries, four times the memory at most; no array of all pairs."""

    def gradient(query_start, ids, *arrays):
        output, pull = jax.vjp(lambda *a: mla_attention(*a, segment_ids=ids, query_start=query_start)[0], *arrays)
        return pull(output)

    def shapes(total):
        query, *rest = [jax.ShapeDtypeStruct((1, total, *x.shape[2:]), x.dtype) for x in inputs(1)[:4]]
        query = jax.ShapeDtypeStruct((1, 512, *query.shape[2:]), query.dtype)
        whole = jax.ShapeDtypeStruct((1, total), jnp.int32)
        return jax.ShapeDtypeStruct((), jnp.int32), whole, query, *rest

    def compiled(total):
        return jax.jit(gradient).lower(*shapes(total)).compile()

    small, large = compiled(1024), compiled(4096)
    assert large.memory_analysis().temp_size_in_bytes < 5 * small.memory_analysis().temp_size_in_bytes
    assert "512,4096" not in large.as_text() and "4096,512" not in large.as_text()

    def equations(jaxpr):
        return sum(1 + sum(map(equations, jaxprs_in_params(e.params))) for e in jaxpr.eqns)

    assert equations(jax.make_jaxpr(gradient)(*shapes(1024)).jaxpr) <= 320


@pytest.mark.parametrize("implementation, option", [("xla", 256), ("gpu", None)])
def test_no_queries(implementation, option, monkeypatch):
    monkeypatch.setattr(test_attention, "OWN", 16)
    monkeypatch.setattr(test_attention, "SHARED", 16)
    monkeypatch.setattr(test_attention, "VALUE", 16)
    part = cut(inputs(4), 3, 0)
    output, row_max, *gradients = numbers(program(implementation, option, False, SCALE)(np.int32(3), None, *part))
    assert output.shape == (2, 0, 3, 16) and row_max.shape == (2, 3, 0)
    assert [g.shape for g in gradients] == [a.shape for a in part[:4]] and not any(g.any() for g in gradients)


def test_known_start_and_any_integer():
    """Python and numpy integers, and those that the program computes, in any width."""
    query, key, shared, value, _ = inputs(20)
    whole = jax.jit(mla_attention)(query, key, shared, value)
    for start in (0, 7, np.int64(7), jnp.uint8(7), jnp.int32(16)):
        at = slice(int(start), int(start) + 4)
        call = jax.jit(functools.partial(mla_attention, query_start=start))
        output, row_max = call(query[:, at], key, shared, value)
        assert_close(np.asarray(output), np.asarray(whole[0][:, at]), 2e-6, "output")
        assert_close(np.asarray(row_max), np.asarray(whole[1][:, :, at]), 2e-6, "row_max")


def test_bad_arguments():
    query, key, shared, value, _ = inputs(8)
    few = query[:, :3]
    with pytest.raises(ValueError, match=r"batch, tokens or heads differ: query \(2, 3, 3, 10\), key \(2, 8, 3, 6\)"):
        mla_attention(few, key, shared, value)
    with pytest.raises(ValueError, match=r"query_start = 6 is not in 0 \.\. 5: query \(2, 3, 3, 10\), key \(2, 8"):
        mla_attention(few, key, shared, value, query_start=6)
    with pytest.raises(ValueError, match=r"query_start = -1 is not in 0 \.\. 5"):
        mla_attention(few, key, shared, value, query_start=np.int32(-1))
    with pytest.raises(ValueError, match=r"query_start is float32\[\], expected one integer"):
        mla_attention(few, key, shared, value, query_start=1.0)
    with pytest.raises(ValueError, match=r"query_start is bool\[\], expected one integer"):
        mla_attention(few, key, shared, value, query_start=True)
    with pytest.raises(ValueError, match=r"query_start is int32\[2\], expected one integer"):
        mla_attention(few, key, shared, value, query_start=jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=r"more queries than keys: query \(2, 8, 3, 10\), key \(2, 3, 3, 6\)"):
        mla_attention(query, key[:, :3], shared[:, :3], value[:, :3], query_start=0)
    with pytest.raises(ValueError, match="batch, tokens or heads"):
        mla_attention(few, key, shared[:, :3], value, query_start=0)
    with pytest.raises(ValueError, match="batch, tokens or heads"):
        mla_attention(few[:1], key, shared, value, query_start=0)
    with pytest.raises(ValueError, match=r"segment_ids \(2, 8\) expected, got \(2, 3\)"):
        mla_attention(few, key, shared, value, segment_ids=jnp.ones((2, 3), jnp.int32), query_start=0)


class TestGpu:
    """The kernels as XLA operations, and lowered for GPUs that are not here."""

    @pytest.fixture(autouse=True)
    def widths(self, monkeypatch):
        """The arrays in widths that the kernels take."""
        for name, size in {"HEADS": 2, "OWN": 32, "SHARED": 16, "VALUE": 16}.items():
            monkeypatch.setattr(test_attention, name, size)

    @pytest.mark.parametrize("tiles, documents", [(TILES[0], True), (TILES[1], True), (TILES[0], False)])
    def test_parts_are_the_whole(self, tiles, documents):
        ids, arrays = packed(100), inputs(100, batch=3)
        if documents:
            ids[1, 5:50] = 0
            for array in arrays:
                array[ids == 0] = np.nan
        whole = numbers(program("xla", 32, documents, 48**-0.5)(None, ids, *arrays))
        parts = in_parts(program("gpu", tiles, documents, 48**-0.5), arrays, ids, 4)
        check(parts, whole, FP32)
        for array in (parts[0], *parts[2:]):
            assert not documents or (array[ids == 0] == 0).all()

    def test_parts_of_bf16(self):
        """Relative rms against fp32 mathematics on the same rounded inputs, design.md section 5."""
        ids, arrays = packed(100), [jnp.asarray(a, jnp.bfloat16) for a in inputs(100, batch=3)]
        expected = dense(*arrays, ids, 0, 48**-0.5)
        actual = in_parts(program("gpu", TILES[0], True, 48**-0.5), arrays, ids, 4)
        for name, a, e in zip(NAMES, actual, expected, strict=True):
            a, e = a[e > -np.inf], e[e > -np.inf]
            error = np.sqrt(np.mean((a - e) ** 2) / np.mean(e**2))
            assert error < {"output": 5e-3, "row_max": 1e-6}.get(name, 8e-3), f"{name}: {error:.2g}"

    @pytest.mark.parametrize("start", [0, 13, 73])
    def test_any_start(self, start):
        """On no border of a tile, and so late that the last tile of queries leaves the keys; NaN where none looks."""
        ids = np.repeat(np.int32([[4, 9, 2]]), [16, 64, 16], axis=1).repeat(3, axis=0)
        part = cut(inputs(96, batch=3), start, 23)
        expected = dense(*part, ids, start, 48**-0.5)
        for array in part[1:4]:
            array[:, start + 23 :] = np.nan
            array[:, : 16 if start > 32 else 0] = np.nan
        actual = program("gpu", TILES[0], True, 48**-0.5)(np.int32(start), ids, *part)
        check(numbers(actual), expected, FP32)

    @pytest.mark.parametrize("tile", [WIDE, TALL])
    @pytest.mark.parametrize("origin", [0, 13, 32, 90])
    def test_loops_end_where_nothing_more_is_seen(self, tile, origin):
        """The bounds of the kernels' loops against the pairs themselves, 64 queries among 160 keys."""
        seen = np.arange(160)[None] <= origin + np.arange(64)[:, None]
        tiles = seen.reshape(64 // tile.queries, tile.queries, 160 // tile.keys, tile.keys).swapaxes(1, 2)
        some, every = tiles.any((2, 3)), tiles.all((2, 3))
        for i in range(some.shape[0]):
            diagonal, end = gpu._key_tiles(jnp.int32(i), tile, jnp.int32(origin))
            assert end == some[i].sum() and every[i, :diagonal].all()
        for j in range(some.shape[1]):
            first, behind = gpu._query_tiles(jnp.int32(j), tile, jnp.int32(origin))
            assert min(first, len(some)) == len(some) - some[:, j].sum() and every[behind:, j].all()

    def test_through_the_operation(self, monkeypatch):
        """query_start reaches the implementation that is chosen; where there is no GPU that is xla."""
        monkeypatch.setitem(api.IMPLEMENTATIONS, "interpreted", functools.partial(gpu.attention, interpret=True))
        part = cut(inputs(40), 9, 20)[:4]

        def call(implementation):
            return jax.jit(functools.partial(mla_attention, query_start=9, implementation=implementation))(*part)

        for a, e in zip(call("interpreted"), call(None), strict=True):
            assert_close(np.asarray(a), np.asarray(e), 2e-6, "attention")
        with pytest.raises(NotImplementedError, match="made for cpu"):
            mla_attention(*part, query_start=9, implementation="gpu")

    @pytest.mark.parametrize("queries, keys", [(8192, 65536), (1024, 8192), (1000, 3000), (8192, 8192)])
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    def test_lowering(self, queries, keys, dtype):
        def forward_and_gradients(query_start, ids, *arrays):
            output, pull = jax.vjp(lambda *a: gpu.attention(*a, ids, 0.07, query_start=query_start)[0], *arrays)
            return output, pull(output)

        shapes = (1, queries, 8, 192), (1, keys, 8, 128), (1, keys, 64), (1, keys, 8, 128)
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        integers = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1, keys), jnp.int32)
        for ids in (integers[1], None):
            text = lower_for("H100", forward_and_gradients, integers[0], ids, *arrays).as_text()
            assert all(text.count(f'name = "{name}"') == 1 for name in ("mla_forward", "mla_d_keys", "mla_d_query"))
            assert f"{queries}x{keys}" not in text and f"{keys}x{queries}" not in text
