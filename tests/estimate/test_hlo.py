"""The reader of compiled programs: on text by hand, with bytes worked out by hand, and on small programs of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from k3jax.estimate import hlo

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}

# Two loops, 3 x 5 rounds of the inner one; a conditional; every kind, and forms of groups, once.
PROGRAM = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%inner_body (p.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %x.1 = f32[8,4]{1,0} get-tuple-element(%p.1), index=1
  %scattered = f32[4,4]{1,0} reduce-scatter(%x.1), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, \
use_global_device_ids=true, dimensions={0}, to_apply=%sum, metadata={op_name="jit(step)/inner/scatter"}
  %whole.1 = f32[8,4]{1,0} all-gather(%scattered), channel_id=2, replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %t.1 = (s32[], f32[8,4]{1,0}) tuple(%i.1, %whole.1)
}

%condition (p.2: (s32[], f32[8,4])) -> pred[] {
  %p.2 = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%outer_body (p.3: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.3 = (s32[], f32[8,4]{1,0}) parameter(0)
  %inner = (s32[], f32[8,4]{1,0}) while(%p.3), condition=%condition, body=%inner_body, \
backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}
  %x.3 = f32[8,4]{1,0} get-tuple-element(%inner), index=1
  %i.3 = s32[] get-tuple-element(%inner), index=0
  %moved = f32[8,4]{1,0} collective-permute(%x.3), channel_id=3, source_target_pairs={{0,4},{4,0},{1,5},{5,1}}
  ROOT %t.3 = (s32[], f32[8,4]{1,0}) tuple(%i.3, %moved)
}

%few (p.4: f32[8,4]) -> f32[8,4] {
  %p.4 = f32[8,4]{1,0} parameter(0)
  ROOT %alone = f32[8,4]{1,0} all-reduce(%p.4), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%sum
}

%many (p.5: f32[8,4]) -> f32[8,4] {
  %p.5 = f32[8,4]{1,0} parameter(0)
  ROOT %all = f32[8,4]{1,0} all-reduce(%p.5), channel_id=4, replica_groups=[1,8]<=[8], to_apply=%sum
}

ENTRY %main (x: f32[8,4], y: bf16[6], which: pred[]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = bf16[6]{0} parameter(1)
  %which = pred[] parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]{1,0}) tuple(%zero, %x)
  %outer = (s32[], /*index=1*/f32[8,4]{1,0}) while(%start), condition=%condition, body=%outer_body, \
backend_config={"known_trip_count":{"n":"3"}}
  %x.6 = f32[8,4]{1,0} get-tuple-element(%outer), index=1
  %chosen = f32[8,4]{1,0} conditional(%which, %x.6, %x.6), true_computation=%few, false_computation=%many
  %two = (f32[8,4]{1,0}, bf16[6]{0}) all-reduce(%chosen, %y), channel_id=5, \
replica_groups=[4,2]<=[2,2,2]T(1,2,0), to_apply=%sum, metadata={op_name="jit(step)/two" stack_frame_id=7}
  %x.7 = f32[8,4]{1,0} get-tuple-element(%two), index=0
  %gather-start = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%x.7), channel_id=6, \
replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(2,0,1)) {'b'}, dimensions={0}
  %gather-done = f32[32,4]{1,0} all-gather-done(%gather-start)
  %first = f32[1,8,4]{2,1,0} bitcast(%x.7)
  %exchanged = (f32[1,8,4]{2,1,0}, f32[1,8,4]{2,1,0}) all-to-all(%first, %first), channel_id=7, \
replica_groups={{0,3},{1,2},{4,7},{5,6}}
  ROOT %out = f32[8,4]{1,0} copy(%x.7)
}
"""


def test_every_kind_by_hand():
    """x has 8 * 4 * 4 = 128 bytes, y 12. Groups of two send a half; the gather of 4 sends 3 times its part."""
    found = {}
    for one in hlo.collectives(PROGRAM):
        found.setdefault((one.kind, hlo.axes_of(one, SIZES)), []).append((one.times, one.sent, one.name))
    assert found == {
        ("reduce-scatter", "tensor"): [(15, 128 / 2, "jit(step)/inner/scatter")],
        ("all-gather", "tensor"): [(15, 64, "")],
        ("collective-permute", "data"): [(3, 128, "")],
        ("all-reduce", "data+fsdp+tensor"): [(1, 2 * 128 * 7 / 8, "")],
        ("all-reduce", "data"): [(1, (128 + 12) * 2 / 2, "jit(step)/two")],
        ("all-gather", "data+fsdp"): [(1, 3 * 128, "")],
        ("all-to-all", hlo.UNNAMED): [(1, 2 * 128 / 2, "")],
    }


@pytest.mark.parametrize(
    "written, groups",
    [
        ("{{0,1,2},{5,4,3}}", [[0, 1, 2], [5, 4, 3]]),
        ("[2,3]<=[6]", [[0, 1, 2], [3, 4, 5]]),
        ("[3,2]<=[2,3]T(1,0)", [[0, 3], [1, 4], [2, 5]]),
        ("[8,2]<=[2,2,4]T(1,2,0)", [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]),
        ("[4,4]<=[2,2,4]T(1,0,2)", [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]]),
        ("mesh['a'=2,'b'=3] {'b'}", [[0, 1, 2], [3, 4, 5]]),
        ("mesh['a'=2,'b'=3] {'a'}", [[0, 3], [1, 4], [2, 5]]),
        ("mesh['a'=3,'b'=2], device_ids=([2,3]T(1,0)) {'b'}", [[0, 3], [1, 4], [2, 5]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'a','b'}", [[3, 2, 1, 0]]),
    ],
)
def test_forms_of_groups(written, groups):
    """Lists, iotas in their three forms, and named meshes, in part too; what follows them does not matter."""
    line = f"all-gather(%x), channel_id=1, replica_groups={written}, dimensions={{0}}, use_global_device_ids=true"
    text = f"ENTRY %main (x: s8[4]) -> s8[4] {{\n  %x = s8[4]{{0}} parameter(0)\n  ROOT %g = s8[12]{{0}} {line}\n}}\n"
    (one,) = hlo.collectives(text)
    np.testing.assert_array_equal(one.groups, groups)
    assert one.sent == 4 * (len(groups[0]) - 1)


def test_axes():
    """A set of axes is named only if the groups are all of it: not half of an axis, not a diagonal."""
    sizes = {"data": 2, "fsdp": 4}
    one = hlo.Collective("all-reduce", np.arange(8).reshape(2, 4), 1, 1, "")
    assert hlo.axes_of(one, sizes) == "fsdp"
    assert hlo.axes_of(one._replace(groups=np.arange(8).reshape(1, 8)), sizes) == "data+fsdp"
    assert hlo.axes_of(one._replace(groups=np.arange(8).reshape(2, 4).T), sizes) == "data"
    assert hlo.axes_of(one._replace(groups=np.arange(8).reshape(4, 2)), sizes) == hlo.UNNAMED
    assert hlo.axes_of(one._replace(groups=np.array([[0, 5], [1, 4], [2, 7], [3, 6]])), sizes) == hlo.UNNAMED
    assert hlo.axes_of(one._replace(groups=np.arange(16).reshape(4, 4)), sizes) == hlo.UNNAMED


def test_shapes():
    sizes = {"f32[2,3]{1,0}": 24, "(bf16[4]{0}, s32[], pred[3])": 15, "f8e4m3fn[5]": 5, "s4[3]": 2, "c64[2]": 16}
    assert {shape: hlo.shape_bytes(shape) for shape in sizes} == sizes
    assert hlo.shape_bytes("(f32[8,128]{1,0:T(8,128)}, /*index=1*/u32[0], token[])") == 4096


def test_asynchronous_forms():
    """A collective wrapped in a computation counts at its start and not again; so does one with a start of its own."""
    text = """\
%wrapped (p: f32[4]) -> f32[2] {
  %p = f32[4]{0} parameter(0)
  ROOT %r = f32[2]{0} reduce-scatter(%p), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%sum
}
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %b = f32[] parameter(1)
}
ENTRY main (x: f32[4]) -> f32[2] {
  x = f32[4]{0} parameter(0)
  start = ((f32[4]{0}), f32[2]{0}, u32[]) async-start(x), calls=wrapped
  done = f32[2]{0} async-done(start), calls=wrapped
  permute-start = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(x), source_target_pairs={{0,1},{1,0}}
  permute-done = f32[4]{0} collective-permute-done(permute-start)
  ROOT sum.1 = f32[2]{0} copy(done)
}
"""
    assert [(one.kind, one.sent) for one in hlo.collectives(text)] == [
        ("reduce-scatter", 8.0),
        ("collective-permute", 16.0),
    ]


def test_what_the_text_leaves_open_is_an_error():
    with pytest.raises(ValueError, match="does not say how often it runs"):
        hlo.collectives(PROGRAM.replace('{"n":"5"}', '{"m":"5"}'))
    with pytest.raises(ValueError, match="unknown form"):
        hlo.collectives(PROGRAM.replace("[1,8]<=[8]", "everybody"))
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.collectives("HloModule nothing\n")


def compiled(function):
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
    text = jax.jit(mapped).lower(jax.ShapeDtypeStruct((4, 6), jnp.float32)).compile().as_text()
    return [(one.kind, hlo.axes_of(one, mesh.shape), one.times, one.sent) for one in hlo.collectives(text)]


def test_a_sum_more_is_seen():
    """Compiled by JAX: a loop of three rounds with a gather in it, and then with one sum more."""

    def step(x, summed=False):
        def one(x, _):
            x = jnp.tanh(jax.lax.all_gather(x, "fsdp", axis=0, tiled=True))[:2] + 1
            return (jax.lax.psum(x, ("data", "tensor")) if summed else x), None

        return jax.lax.scan(one, x, length=3)[0]

    gather = ("all-gather", "fsdp", 3, 2 * 6 * 4.0)
    assert compiled(step) == [gather]
    assert sorted(compiled(lambda x: step(x, True))) == [gather, ("all-reduce", "data+tensor", 3, 2 * 48 * 3 / 4)]
