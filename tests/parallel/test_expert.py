"""Tokens that travel to experts on other devices, against all experts on one: outputs 1e-5, gradients 1e-4."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activation import situ
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of, on

from k3jax.parallel import expert
from pallas_kernels.moe import expert_layer

TOKENS, TOP_K, EXPERTS, LATENT, INNER = 40, 3, 16, 12, 20
ROUTINGS = ["uniform", "skewed", "all to one", "one device empty", "padding"]


def routing(kind, tokens=TOKENS):
    """Experts of each token, distinct within a token; EXPERTS: nowhere."""
    rng = np.random.default_rng(3)
    scores = rng.random((tokens, EXPERTS))
    if kind == "skewed":
        scores -= 0.15 * np.arange(EXPERTS)
    if kind == "all to one":
        scores[:, :TOP_K] += 2
    if kind == "one device empty":
        scores[:, 2:4] -= 2  # all that the second of eight devices holds
    chosen = np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32)
    if kind == "padding":
        chosen[5:37] = EXPERTS  # whole devices have nothing to send
    return chosen


def arguments(kind, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 6)
    x = jax.random.normal(keys[0], (TOKENS, LATENT)).astype(dtype)
    weights = jax.random.uniform(keys[1], (TOKENS, TOP_K))
    shapes = (EXPERTS, LATENT, INNER), (EXPERTS, LATENT, INNER), (EXPERTS, INNER, LATENT)
    kernels = [0.3 * jax.random.normal(key, shape) for key, shape in zip(keys[2:5], shapes, strict=True)]
    probe = jax.random.normal(keys[5], (TOKENS, LATENT))
    return x, routing(kind), weights, *(kernel.astype(dtype) for kernel in kernels), probe


def outputs_and_gradients(layer, x, experts, weights, w1, w3, w2, probe):
    """(u, gradients of tokens, weights and kernels) of a loss on all outputs."""

    def loss(x, weights, w1, w3, w2):
        u = layer(x, experts, weights, w1, w3, w2, activation=situ)
        return jnp.sum(u.astype(jnp.float32) * probe), u

    (_, u), gradients = jax.value_and_grad(loss, range(5), has_aux=True)(x, weights, w1, w3, w2)
    return u, gradients


def travelled(devices, given):
    split = P("expert")
    specs = (split,) * 7, (split, (split,) * 5)
    return on(mesh_of(expert=devices), functools.partial(outputs_and_gradients, expert.routed), *specs)(*given)


@pytest.fixture(scope="module")
def at_home():
    return functools.cache(lambda kind: jax.device_get(outputs_and_gradients(expert_layer, *arguments(kind))))


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(
    "devices", [8, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_travelling_changes_nothing(at_home, kind, devices):
    """O07: an expert that no token chose, on whatever device, gets a gradient of exactly 0."""
    (u, gradients), (wanted, of_wanted) = travelled(devices, arguments(kind)), at_home(kind)
    assert_close(u, wanted, 1e-5)
    assert_close(gradients, of_wanted, 1e-4)
    unused = np.setdiff1d(np.arange(EXPERTS), routing(kind))
    assert unused.size == {"uniform": 0, "all to one": 13, "one device empty": 2}.get(kind, unused.size)
    for kernel in gradients[2:]:
        assert not kernel[unused].any()
    if kind == "padding":
        assert not u[5:37].any() and not gradients[0][5:37].any()


def test_what_is_routed_nowhere_may_hold_anything():
    x, experts, *rest = arguments("padding")
    spoiled = np.asarray(x).copy()
    spoiled[5:37] = np.nan
    clean = travelled(8, (x, experts, *rest))
    found = travelled(8, (spoiled, experts, *rest))
    assert_close(found, clean, 0)


def test_bf16(at_home):
    u, gradients = travelled(8, arguments("skewed", jnp.bfloat16))
    wanted, of_wanted = at_home("skewed")
    for ours, theirs in zip((u, *gradients), (wanted, *of_wanted), strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.sqrt(np.square(ours - theirs).mean()) <= 1e-2 * np.sqrt(np.square(theirs).mean())


def test_rows_are_sent_again():
    """No row is kept for the backward pass, also where a compiler sees both passes: 3 exchanges, 2 again, 3 back."""
    split, given = P("expert"), arguments("uniform")
    run = jax.shard_map(
        functools.partial(outputs_and_gradients, expert.routed),
        mesh=mesh_of(expert=2), in_specs=(split,) * 7, out_specs=(split, (split,) * 5), check_vma=False,
    )  # fmt: skip
    text = jax.jit(run).lower(*given).compile().as_text()
    assert text.count(" all-to-all(") == 8


def trips(devices, rows=30):
    """Random counts of rows from each device to each: [from, to], with devices that send or get nothing."""
    rng = np.random.default_rng(devices)
    counts = rng.integers(0, rows // devices + 1, (devices, devices))
    counts[1] = 0
    counts[:, -1] = 0
    return counts.astype(np.int32)


@pytest.mark.parametrize("way", ["dense all_to_all", "ragged_all_to_all"])
@pytest.mark.parametrize("devices", [2, 8])
def test_exchange(monkeypatch, way, devices):
    """Every row lands where it must: against lists in Python. The ragged form runs on a stand-in for the primitive."""
    monkeypatch.setattr(expert, "EXCHANGES", {way: expert.EXCHANGES[way]})
    monkeypatch.setattr(expert.gpu, "platform", lambda: "gpu")
    monkeypatch.setattr(lax, "ragged_all_to_all", stand_in)
    counts, rows, room, width = trips(devices), 30, 40, 3
    x = np.random.default_rng(0).normal(size=(devices, rows, width)).astype(np.float32)

    def run(x, counts):
        trip = expert._trip(counts)
        there = expert.exchange(x[0], trip, room, rows)
        return there[None], expert.exchange(there, trip.reversed(), rows, rows)[None]

    there, back = on(mesh_of(expert=devices), run, (P("expert"), P()), (P("expert"), P("expert")))(x, counts)
    for device in range(devices):
        begins = np.cumsum(counts, axis=1) - counts
        found = [x[i, begins[i, device] :][: counts[i, device]] for i in range(devices)]
        wanted = np.concatenate([*found, np.zeros((room - counts[:, device].sum(), width))])
        np.testing.assert_array_equal(there[device], wanted)
        sent = counts[device].sum()
        np.testing.assert_array_equal(back[device], np.concatenate([x[device, :sent], np.zeros((rows - sent, width))]))


def stand_in(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` as its documentation has it, by gathering everything: XLA's CPU backend has none."""
    devices, mine = send_sizes.shape[0], lax.axis_index(axis_name)
    every = [lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)]
    for source in range(devices):
        rows, starts, sizes, goals = (x[source] for x in every)
        place = jnp.arange(output.shape[0]) - goals[mine]
        taken = rows[jnp.clip(starts[mine] + place, 0, rows.shape[0] - 1)]
        mine_now = (place >= 0) & (place < jnp.minimum(sizes[mine], recv_sizes[source]))
        output = jnp.where(mine_now[:, None], taken, output)
    return output


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_rows_travel_ragged_where_they_can(monkeypatch, platform):
    """Lowered for a GPU and a TPU that are not there: six ragged exchanges, three each way, and no dense one."""
    monkeypatch.setattr(expert.gpu, "platform", lambda: platform)
    monkeypatch.setattr(expert, "expert_layer", lambda x, experts, weights, *_, **__: x * weights)
    mesh = AbstractMesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(np.asarray, arguments("uniform"))]
    split = P("expert")
    mapped = jax.shard_map(
        functools.partial(outputs_and_gradients, expert.routed),
        mesh=mesh,
        in_specs=(split,) * 7,
        out_specs=(split, (split,) * 5),
        check_vma=False,
    )
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(mapped).trace(*given).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("ragged_all_to_all") >= 5 and 'all_to_all"' not in text.replace("ragged_all_to_all", "")
