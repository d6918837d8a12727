"""Whole matrices out of parts: Muon on meshes of every axis against float64 numpy, block by block (faults.md O11, O12).

The programs here are the optimizer's alone, with every kind of parameter.
"""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of, on
from steps import layout_of, run_config

from k3jax import config as configs
from k3jax.model import parameters
from k3jax.optim.muon import _orthogonal, muon, orthogonalize
from k3jax.parallel import Layout, matrices
from k3jax.parallel.mesh import partition_spec, spec_names
from k3jax.step import abstract_decoder, clipped

PER_HEAD = (1,), (0,), (2,)
MESHES = [{"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}]
MORE = [{"expert": 2, "context": 2, "tensor": 2}, {"data": 2, "fsdp": 4}, {"data": 8}]
MORE += [{axis: 8} for axis in ("fsdp", "expert", "tensor", "context")]
NUMBERS = re.compile(r"(?:f32|bf16)\[([\d,]+)\]")


def blocks_of(array, matrix_axes):
    """[blocks, in, out], and the way back."""
    order = sum(matrix_axes, ())
    moved = np.transpose(array, order)
    sides = [math.prod(array.shape[axis] for axis in axes) for axes in matrix_axes]
    return moved.reshape(sides), lambda x: np.transpose(x.reshape(moved.shape), np.argsort(order))


def orthogonal(array, matrix_axes):
    """Five Newton-Schulz steps on each block, float64, and the scale 0.2 sqrt(longer side)."""
    x, back = blocks_of(np.asarray(array, np.float64), matrix_axes)
    flip = x.shape[1] > x.shape[2]
    x = np.swapaxes(x, 1, 2) if flip else x
    x = x / (np.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    for _ in range(5):
        gram = x @ np.swapaxes(x, 1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return back(0.2 * math.sqrt(x.shape[2]) * (np.swapaxes(x, 1, 2) if flip else x))


def direction(layout, axes, gradients):
    """The compiled first step at learning rate 1, without decay and momentum: gradients -> (directions, state)."""
    optimizer = muon(1.0, momentum=0.0, weight_decay=0.0, batch_axes=axes, spread=layout.spread)

    def run(gradients):
        params = jax.tree.map(jnp.zeros_like, gradients)
        updates, state = optimizer.update(gradients, optimizer.init(params), params)
        return jax.tree.map(jnp.negative, updates), state

    shardings = layout.shardings(jax.eval_shape(run, gradients))
    traced = jax.jit(run, out_shardings=shardings).trace(placed(layout, gradients))
    return traced.jaxpr.jaxpr, traced.lower().compile()


def placed(layout, arrays):
    return {path: jax.device_put(x, NamedSharding(layout.mesh, layout.specs[path])) for path, x in arrays.items()}


@functools.cache
def apart():
    """(matrix_axes, gradients) of all kinds of parameters: blocks of all scales, every third one 0."""
    axes, gradients = {}, {}
    rng = np.random.default_rng(0)
    for path, variable in parameters.variables(abstract_decoder(run_config(model=sizes.APART))).items():
        if (own := variable.get_metadata("matrix_axes")) is not None:
            x, back = blocks_of(rng.normal(size=variable.get_value().shape), own)
            scales = 10.0 ** rng.uniform(-3, 4, len(x)) * (np.arange(len(x)) % 3 != 1)
            axes[path], gradients[path] = own, back(x * scales[:, None, None]).astype(np.float32)
    return axes, gradients


def equations(jaxpr):
    """All equations, those of inner jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def bytes_sent(jaxpr, sizes):
    """By one device, in all collectives of a jaxpr, and the number of those."""
    sent, count = 0.0, 0
    for equation in equations(jaxpr):
        kind = equation.primitive.name
        if kind in ("all_to_all", "all_gather", "psum", "psum_invariant"):
            names = equation.params.get("axis_name", equation.params.get("axes"))
            size = math.prod(sizes[name] for name in ((names,) if isinstance(names, str) else names))
            bytes_ = sum(out.aval.size * out.aval.dtype.itemsize for out in equation.outvars)
            sent += (2 if kind.startswith("psum") else 1) * bytes_ * (size - 1) / size
            count += 1
    return sent, count


def stacks(layout, axes, shapes):
    names = {path: spec_names(layout.specs[path]) for path in axes}
    return matrices.stacks({path: x.shape for path, x in shapes.items()}, axes, names, layout.mesh.shape)


def check(mesh, capfd):
    (axes, gradients), layout = apart(), layout_of(abstract_decoder(run_config(model=sizes.APART)), **mesh)
    jaxpr, run = direction(layout, axes, gradients)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
    directions, state = run(placed(layout, gradients))
    for path, gradient in gradients.items():
        found, expected = np.asarray(directions[path]), orthogonal(gradient, axes[path])
        for at, (ours, theirs) in enumerate(
            zip(blocks_of(found, axes[path])[0], blocks_of(expected, axes[path])[0], strict=True)
        ):
            assert_close(ours, theirs, 1e-5, f"{path} block {at}")
        sharding = NamedSharding(layout.mesh, layout.specs[path])
        assert directions[path].sharding == state.momentum[path].sharding == sharding, path
    # What the formula counts is what is sent, and the compiler adds nothing to it.
    ways, here = [stack.exchange for stack in stacks(layout, axes, gradients)], layout.mesh.shape
    sent, count = bytes_sent(jaxpr, here)
    assert sent == pytest.approx(sum(way.bytes_sent(4) for way in ways))
    text = run.as_text()
    found = re.findall(r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(", text)
    assert len(found) <= count and not {"reduce-scatter", "collective-permute"} & set(found)
    # No device holds more whole blocks than its share, and no stack takes more room than what is there anyway.
    room = max(array.addressable_shards[0].data.size for array in directions.values())
    for way in ways:
        size, split = math.prod(way.block.sizes), math.prod(way.block.sizes) // way.block.size_here(here)
        assert way.held <= -(-way.blocks // split)
        assert way.blocks * size / split <= max(room, size)
    assert largest(run) <= max(2 * room, *(way.held * math.prod(way.block.sizes) for way in ways))


def largest(run):
    """Numbers in the largest array on a device."""
    return max(math.prod(map(int, dims.split(","))) for dims in NUMBERS.findall(run.as_text()))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_kind_of_parameter(mesh, capfd):
    check(mesh, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MORE, ids=str)
def test_every_kind_of_parameter_on_every_mesh(mesh, capfd):
    check(mesh, capfd)


@pytest.mark.parametrize("mesh", [{"expert": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"tensor": 8}], ids=str)
def test_no_device_holds_all_experts(mesh):
    """Not even those of one layer: its part of them, and what fills up to whole blocks."""
    layout = layout_of(abstract_decoder(run_config(model=sizes.APART)), **mesh)
    path = "blocks.0.groups.kda.mlp.w1"
    axes, arrays = ({path: tree[path]} for tree in apart())
    run = direction(layout, axes, arrays)[1]
    assert largest(run) <= arrays[path].size / 8 < arrays[path][0].size


def ways(mesh, shape, axes, names):
    """All exchanges of one parameter, sensible or not: any split axes exchanged, any repeated ones sharing."""
    mesh_sizes = mesh.shape
    block, blocks = matrices.block_of(shape, axes, names, mesh_sizes)
    split = [name for name in mesh_sizes if any(name in entry for entry in block.names)]
    repeated = [name for name in mesh_sizes if mesh_sizes[name] > 1 and name not in {*split, *block.apart}]
    for chosen in itertools.product((True, False), repeat=len(split)):
        exchanged = tuple(name for name, here in zip(split, chosen, strict=True) if here)
        gathered = tuple(name for name in split if name not in exchanged)
        for shared in {(), tuple(repeated)}:
            yield matrices.Exchange(block, blocks, mesh_sizes, exchanged, gathered, shared)


@pytest.mark.parametrize(
    ("mesh", "shape", "axes", "spec"),
    [
        # One array axis in parts over three mesh axes, whose order is not the mesh's; 7 blocks, none divides.
        ({"fsdp": 2, "context": 2, "tensor": 2}, (7, 3, 16), ((0,), (1,), (2,)),
         P(None, None, ("tensor", "fsdp", "context"))),
        # Rows of two array axes; experts apart over `expert`, which are 3 on each device.
        ({"expert": 2, "fsdp": 2, "tensor": 2}, (6, 4, 3, 20), ((0,), (1, 2), (3,)),
         P("expert", "tensor", None, "fsdp")),
        # The inner of two array axes in parts; one block; the data axis repeats it.
        ({"data": 2, "fsdp": 2, "tensor": 2}, (24, 2, 4), ((), (1, 2), (0,)), P("fsdp", None, "tensor")),
        ({"data": 4, "tensor": 2}, (5, 4, 6), ((0,), (1,), (2,)), P(None, "tensor")),
        ({"data": 8}, (3, 4, 6), ((0,), (1,), (2,)), P()),
    ],
    ids=str,
)  # fmt: skip
def test_every_way_there_and_back(mesh, shape, axes, spec):
    """Any function of whole blocks comes back in parts: here a running sum over a block, which tells each entry."""
    mesh = mesh_of(**mesh)
    array = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    x, back = blocks_of(array, axes)
    expected = back(np.cumsum(x.reshape(len(x), -1), axis=1).reshape(x.shape))
    squares = back(np.broadcast_to(np.sum(np.square(x), axis=(1, 2), keepdims=True), x.shape))

    def sums(parts, way):
        return way.on_whole(lambda x: jnp.cumsum(x.reshape(len(x), -1), axis=1).reshape(x.shape), parts)

    def totals(parts, way):
        total = way.total(jnp.sum(jnp.square(parts), axis=tuple(range(1, parts.ndim)), keepdims=True))
        return jnp.broadcast_to(total, parts.shape)

    for way in ways(mesh, shape, axes, spec_names(spec)):
        found = [matrices.Stack(("w",), (sum(axes, ()),), way)]

        def both(part, found=found):
            return tuple(matrices.on_stacks(work, found, {"w": part})["w"] for work in (sums, totals))

        summed, total = on(mesh, both, (spec,), (spec, spec))(array)
        assert_close(summed, expected, 1e-5, str(way))
        assert_close(total, squares, 1e-6, str(way))


def test_heads_of_any_scale_on_any_mesh():
    """O11: each head's rms within [0.136, 0.227], the same wherever the embedding or the heads are in parts."""
    gradient = np.random.default_rng(0).normal(size=(64, 8, 16)) * 10.0 ** np.arange(-3, 5)[:, None]
    arrays, axes = {"q": gradient.astype(np.float32)}, {"q": PER_HEAD}
    expected, found = orthogonal(arrays["q"], PER_HEAD), []
    heads = [{"tensor": n} for n in (2, 4, 8)] + [{"fsdp": 2, "tensor": n} for n in (2, 4)]
    for mesh in [*({"fsdp": n} for n in (1, 2, 4, 8)), *heads, {"data": 2, "fsdp": 2}, {"fsdp": 2, "context": 4}]:
        mesh = mesh_of(**mesh)
        layout = Layout(mesh, {"q": partition_spec("q", (64, 8, 16), ("embed", "heads", "head_dim"), mesh.shape)})
        assert (layout.spread is None) == layout.alone == (mesh.size == 1)
        update = np.asarray(direction(layout, axes, arrays)[1](placed(layout, arrays))[0]["q"])
        for head in range(8):
            assert_close(update[:, head], expected[:, head], 1e-5, f"{mesh.shape} head {head}")
        found.append(np.sqrt(np.mean(np.square(update), axis=(0, 2))))
    assert np.min(found) >= 0.136 and np.max(found) <= 0.227
    np.testing.assert_allclose(found, np.broadcast_to(found[0], np.shape(found)), rtol=1e-3)


def test_low_precision_travels_and_norms_do_not():
    """In bf16 the parts travel as bf16 after a division by fp32's norm: what one device computes, to rounding."""
    mesh = mesh_of(fsdp=2, expert=2, tensor=2)
    shape, axes = (4, 32, 64), ((0,), (1,), (2,))
    layout = Layout(mesh, {"w": P("expert", "fsdp", "tensor")})
    array = (np.random.default_rng(2).normal(size=shape) * 10.0 ** np.arange(-4, 8, 3)[:, None, None]).astype(
        np.float32
    )
    work = functools.partial(_orthogonal, dtype=jnp.bfloat16)
    run = jax.jit(lambda arrays: layout.spread(work, arrays, {"w": axes}))
    moved = [e for e in equations(run.trace({"w": array}).jaxpr.jaxpr) if e.primitive.name == "all_to_all"]
    assert len(moved) == 2 and all(e.invars[0].aval.dtype == jnp.bfloat16 for e in moved)
    found = run(placed(layout, {"w": array}))["w"]
    assert found.dtype == jnp.float32
    one = jax.jit(lambda x: orthogonalize(x, axes, jnp.bfloat16))(array)
    assert_close(found, one, 2e-2, "bf16")


def test_stacks_are_of_one_kind_and_no_larger_than_needed():
    axes, gradients = apart()
    layout = layout_of(abstract_decoder(run_config(model=sizes.APART)), fsdp=2, expert=2, tensor=2)
    found = stacks(layout, axes, gradients)
    assert sorted(path for stack in found for path in stack.paths) == sorted(gradients)
    assert len(found) < 0.7 * len(axes)
    together = next(stack for stack in found if "blocks.0.groups.mla.mlp.shared.w2" in stack.paths)
    assert {path.rpartition(".")[2] for path in together.paths} == {"w1", "w2", "w3"}
    mesh = layout.mesh.shape
    for stack in found:
        counts = []
        for path in stack.paths:
            shape = gradients[path].shape
            names = spec_names(layout.specs[path])
            block, count = matrices.block_of(shape, matrices.sides(shape, axes[path]), names, mesh)
            assert block == stack.exchange.block
            counts.append(count)
        assert stack.exchange.blocks == sum(counts)
        assert len(counts) == 1 or sum(counts) <= (4 if stack.exchange.block.apart else 8)
    alike = {path: np.zeros((2, 8, 8), np.float32) for path in "abcdefg"}
    mesh = {"data": 2, "fsdp": 4}
    found = matrices.stacks({path: x.shape for path, x in alike.items()}, dict.fromkeys(alike, ((0,), (1,), (2,))),
                            dict.fromkeys(alike, ((), ("fsdp",), ())), mesh)  # fmt: skip
    assert ["".join(stack.paths) for stack in found] == ["ab", "cd", "ef", "g"]  # each a whole block's room


def test_plan_of_the_largest_model():
    """2.78 T parameters on 4,096 devices: whole blocks on a device, and what it sends, against all-gathers."""
    mesh = {"data": 2, "fsdp": 64, "expert": 8, "context": 1, "tensor": 4}
    shapes, axes, names = {}, {}, {}
    for path, variable in parameters.variables(abstract_decoder(configs.load("configs/k3.py:k3_2p8t"))).items():
        if (own := variable.get_metadata("matrix_axes")) is not None:
            logical, shapes[path] = variable.get_metadata("logical_axes"), variable.get_value().shape
            axes[path], names[path] = own, spec_names(partition_spec(path, shapes[path], logical, mesh))
    found = {path: stack for stack in matrices.stacks(shapes, axes, names, mesh) for path in stack.paths}
    for stack in found.values():
        way = stack.exchange
        rows, cols = way.block.shape
        split = math.prod(mesh[name] for entry in way.block.names for name in entry)
        assert way.held <= -(-way.blocks // split)
        gathered = way.blocks * rows * cols * (split - 1) / split
        assert way.numbers_sent() <= 1.01 * gathered * (1 + (way.shared != ())), stack.paths
        assert way.blocks * rows * cols / split <= 1008 * 3584 * 3072 / 256  # the largest part of a parameter

    def way_of(end):
        paths = (path for path in found if path.startswith("blocks.1.groups.") and path.endswith(end))
        return found[next(paths)].exchange

    experts, heads, output = map(way_of, ("mlp.w1", "attention.q", "attention.o"))
    # 9 layers of 896 / 8 experts; so large that both halves of `data` share the work.
    assert experts.blocks == 1008 and experts.exchanged == ("fsdp", "tensor") and experts.shared == ("data",)
    assert experts.held == 2  # of 1,008 over 512 devices
    assert heads.exchanged == ("fsdp", "expert") and heads.blocks > 512 and heads.held == 1
    assert output.blocks > 60 and output.held == 1


def test_what_repeated_axes_share():
    """Any exchange, which then is smaller; without one, large matrices: thin ones cost less than a message."""
    for rows, names, shared in ((3072, (), True), (128, (), False), (3072, ("fsdp",), True), (128, ("fsdp",), True)):
        block = matrices.Block((rows, 4096), (names, ()), 1, frozenset())
        way = matrices.exchange_of(block, 64, {"data": 2, "fsdp": 8} if names else {"data": 2})
        assert way.shared == (("data",) if shared else ())
        assert way.held == 64 / (8 if names else 1) / (2 if shared else 1)


def test_one_matrix_is_gathered():
    """To send back what every device has would only cost; and it costs less than half of an exchange of zeros."""
    block = matrices.Block((64, 128), (("fsdp",), ()), 1, frozenset())
    way = matrices.exchange_of(block, 1, {"fsdp": 8})
    assert (way.exchanged, way.gathered, way.held) == ((), ("fsdp",), 1)
    assert way.numbers_sent() == 64 * 128 * 7 / 8
    way = matrices.exchange_of(block, 2, {"fsdp": 8})
    assert (way.exchanged, way.held) == (("fsdp",), 1) and way.numbers_sent() == 64 * 128 * 2 * 7 / 8
    three = matrices.Block((64, 128), (("a", "b", "c"), ()), 1, frozenset())
    way = matrices.exchange_of(three, 3, {"a": 2, "b": 2, "c": 2})
    assert len(way.exchanged) == 2 and len(way.gathered) == 1 and way.held == 1


@pytest.mark.parametrize("mesh", [{}, {"expert": 2}, {"expert": 4}, {"data": 2, "expert": 2}], ids=str)
def test_one_norm_over_all_experts(mesh):
    """O12: two experts with gradients [2, 4] and [6, 8] on different devices; then a dense scalar 0.1, counted once."""
    mesh = mesh_of(**mesh)
    experts = np.array([[2, 4], [6, 8]] + [[0, 0]] * (mesh.shape["expert"] - 2), np.float32)
    layout = Layout(mesh, {"experts": P("expert"), "dense": P()})
    run = jax.jit(lambda gradients: clipped(gradients, jnp.float32(1), 1.0))
    scaled, norm = run(placed(layout, {"experts": experts}))
    np.testing.assert_allclose(norm, 10.9544512, rtol=1e-7)
    np.testing.assert_allclose(scaled["experts"], 0.0912871 * experts, rtol=1e-6)
    assert scaled["experts"].sharding.is_equivalent_to(NamedSharding(mesh, P("expert")), 2)
    scaled, norm = run(placed(layout, {"experts": experts, "dense": np.float32(0.1)}))
    np.testing.assert_allclose(norm, 10.9549076, rtol=1e-7)
    np.testing.assert_allclose(scaled["dense"], 0.1 / 10.9549076, rtol=1e-6)
