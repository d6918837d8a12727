"""Muon against golden numbers and float64 numpy; its blocks are those of the logical parameter (faults.md O11)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_files import assert_close, golden, manifest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.optim.muon import muon, orthogonalize

WHOLE = (), (0,), (1,)
PER_HEAD = (1,), (0,), (2,)


def orthogonalized(block):
    """Five Newton-Schulz steps on [rows, cols], float64, on whichever side is shorter."""
    x = np.asarray(block, np.float64)
    x = x if x.shape[0] <= x.shape[1] else x.T
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if block.shape[0] <= block.shape[1] else x.T


def scaled(block):
    return 0.2 * np.sqrt(max(block.shape)) * orthogonalized(block)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def one_update(gradient, matrix_axes):
    """The direction of a first step: learning rate 1, no decay, no momentum."""

    @jax.jit
    def run(gradient):
        optimizer = muon(1.0, momentum=0.0, weight_decay=0.0, batch_axes={"w": matrix_axes})
        params = {"w": jnp.zeros_like(gradient)}
        return -optimizer.update({"w": gradient}, optimizer.init(params), params)[0]["w"]

    return run(gradient)


@pytest.mark.parametrize("name", ["muon_wide", "muon_tall", "muon_perhead"])
def test_golden_movement(name):
    """Four steps on fixed gradients; the files hold torch's [out, in], ours is [in, out]."""
    file, hyper = golden(name), manifest()[name]["hyper"]
    optimizer = muon(hyper["lr"], momentum=hyper["momentum"], weight_decay=hyper["wd"], batch_axes={"w": WHOLE})

    @jax.jit
    def run(start, gradients):
        def step(carry, gradient):
            params, state = carry
            updates, state = optimizer.update({"w": gradient}, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params["w"]

        return jax.lax.scan(step, ({"w": start}, optimizer.init({"w": start})), gradients)[1]

    params = run(file["p0"].T, file["grads"].transpose(0, 2, 1))
    movement = np.asarray(params, np.float64) - file["p0"].T
    expected = (file["moonlight_f64"] - file["p0"]).transpose(0, 2, 1)
    for step in range(len(expected)):
        assert_close(movement[step], expected[step], 1e-5, f"{name} step {step}")


def test_golden_update_per_head():
    """Direction of every head's block: our update / our scale = the file's / its scale, over all four steps."""
    file = golden("muon_perhead")
    heads = int(file["heads"])
    steps, rows, embed = file["grads"].shape
    width = rows // heads
    optimizer = muon(1.0, weight_decay=0.0, batch_axes={"q": PER_HEAD})
    start = {"q": jnp.zeros((embed, heads, width))}

    @jax.jit
    def run(gradients):
        def step(state, gradient):
            updates, state = optimizer.update({"q": gradient}, state, start)
            return state, updates["q"]

        return jax.lax.scan(step, optimizer.init(start), gradients)[1]

    updates = run(file["grads"].reshape(steps, heads, width, embed).transpose(0, 3, 1, 2))
    ours = -np.asarray(updates) / (0.2 * max(embed, width) ** 0.5)
    ours = ours.transpose(0, 2, 3, 1).reshape(steps, rows, embed)
    expected = file["perhead_keller_update_f64"] / max(1, width / embed) ** 0.5
    assert_close(ours, expected, 1e-5, "per head")


def test_heads_of_any_scale_move_alike_on_any_mesh():
    """faults.md O11: per-head rms within [0.136, 0.227], the same with heads or the embedding in shards."""
    scales = 10.0 ** np.arange(-3, 5)
    gradient = (normal(64, 8, 16) * scales[:, None]).astype(np.float32)
    expected = np.stack([scaled(gradient[:, head]) for head in range(8)], axis=1)
    one = one_update(gradient, PER_HEAD)
    assert_close(one, expected, 1e-5, "one device")
    rms = np.sqrt(np.mean(np.square(one), axis=(0, 2)))
    assert (rms >= 0.136).all() and (rms <= 0.227).all(), rms
    whole = np.sqrt(np.mean(scaled(gradient.reshape(64, 128)).reshape(64, 8, 16) ** 2, axis=(0, 2)))
    assert whole.min() < 1e-4  # what splitting by a shard's size would give
    for devices, spec in ((1, P(None, "x")), (2, P(None, "x")), (4, P(None, "x")), (8, P(None, "x")), (4, P("x"))):
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        sharded = jax.device_put(gradient, NamedSharding(mesh, spec))
        assert_close(one_update(sharded, PER_HEAD), one, 1e-3, f"{devices} devices {spec}")


def test_storage_does_not_change_blocks():
    """Query, key and value in one array, stacked layers, and any order of axes: the update of each block alone."""
    q, k, v = (normal(12, 3, 5, seed=seed) for seed in range(3))
    alone = [one_update(x, PER_HEAD) for x in (q, k, v)]
    for x, update in zip((q, k, v), alone, strict=True):
        for head in range(3):
            assert_close(update[:, head], scaled(x[:, head]), 1e-5, f"head {head}")
    fused = one_update(np.stack((q, k, v), axis=1), ((1, 2), (0,), (3,)))
    assert_close(fused, np.stack(alone, axis=1), 5e-6, "fused")
    layers = one_update(np.stack((q, k, v)), ((0, 2), (1,), (3,)))
    assert_close(layers, np.stack(alone), 5e-6, "layers")
    moved = one_update(q.transpose(1, 2, 0), ((0,), (2,), (1,)))
    assert_close(moved, np.transpose(alone[0], (1, 2, 0)), 5e-6, "head first")


@pytest.mark.parametrize("shape, axes", [((4, 5, 12), ((), (0, 1), (2,))), ((12, 4, 5), ((), (0,), (1, 2)))])
def test_sides_of_several_axes(shape, axes):
    """Output kernels [heads, head_dim, embed] and gates [embed, heads, head_dim] are one matrix each."""
    gradient = normal(*shape)
    sides = (20, 12) if shape[-1] == 12 else (12, 20)
    assert_close(one_update(gradient, axes), scaled(gradient.reshape(sides)).reshape(shape), 1e-5, str(axes))


def test_singular_values():
    """Each follows s -> a s + b s^3 + c s^5 alone and ends within about 0.68 to 1.13 (k3.md 4.1); bf16 stays near."""
    before = np.linspace(1.0, 0.2, 8)
    after = before / np.linalg.norm(before)
    for _ in range(5):
        after = 3.4445 * after - 4.7750 * after**3 + 2.0315 * after**5
    assert after.min() > 0.67 and after.max() < 1.14
    for rows, cols in ((8, 40), (40, 8), (8, 8)):
        left, right = (np.linalg.qr(normal(side, side, seed=side).astype(np.float64))[0] for side in (rows, cols))
        matrix = ((left[:, :8] * before) @ right[:8]).astype(np.float32)
        expected = (left[:, :8] * after) @ right[:8]
        for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.15)):
            x = jax.jit(lambda x, dtype=dtype: orthogonalize(x, WHOLE, dtype))(matrix)
            assert x.dtype == jnp.float32
            assert_close(x, expected, tolerance, f"{rows} x {cols} {dtype.__name__}")


def test_zero_gradient_and_zero_block():
    """Nothing to orthogonalise gives 0, never 0 / 0, also beside a block with a gradient; decay goes on."""
    gradient = normal(6, 3, 4) * np.array([1.0, 0.0, 1e-30], np.float32)[:, None]
    update = np.asarray(one_update(gradient, PER_HEAD))
    assert np.isfinite(update).all() and (update[:, 1] == 0).all() and np.abs(update[:, 2]).max() < 1e-20
    assert_close(update[:, 0], scaled(gradient[:, 0]), 1e-5, "head 0")
    optimizer = muon(0.5, weight_decay=0.1, batch_axes={"w": WHOLE})
    params = {"w": jnp.asarray(normal(3, 4))}
    updates, _ = optimizer.update({"w": jnp.zeros((3, 4))}, optimizer.init(params), params)
    assert_close(updates["w"], -0.05 * params["w"], 1e-6, "decay")


def test_momentum_schedule_and_decay_by_path():
    """Two steps in float64: Nesterov momentum, a rate that is a function of the step, decay only where it is named."""
    rate = [0.5, 0.125]
    gradients = [normal(5, 7, seed=seed) for seed in (1, 2)]
    optimizer = muon(
        lambda count: jnp.where(count == 0, *rate),
        momentum=0.9,
        weight_decay={"a": 0.2, "b": 0.0},
        batch_axes={"a": WHOLE, "b": WHOLE},
    )
    start = normal(5, 7)
    params = {"a": jnp.asarray(start), "b": jnp.asarray(start)}
    state = optimizer.init(params)
    expected, buffer = {name: start.astype(np.float64) for name in params}, np.zeros((5, 7))
    update = jax.jit(optimizer.update)
    for at, gradient in enumerate(gradients):
        updates, state = update({"a": gradient, "b": gradient}, state, params)
        params = optax.apply_updates(params, updates)
        buffer = 0.9 * buffer + gradient
        step = rate[at] * scaled(gradient + 0.9 * buffer)
        expected = {name: p * (1 - rate[at] * {"a": 0.2, "b": 0.0}[name]) - step for name, p in expected.items()}
    for name, p in expected.items():
        assert_close(params[name], p, 1e-5, name)
        assert_close(state.momentum[name], buffer, 1e-6, f"momentum {name}")
    assert state.count == 2


def test_rate_at_the_run_s_step():
    """A skipped step leaves the state as it was; the next rate is that of the run's step all the same."""
    optimizer = muon(lambda step: 1.0 / (1 + step), weight_decay=0.0, batch_axes={"w": WHOLE})
    params, gradient = {"w": jnp.zeros((3, 4))}, {"w": normal(3, 4)}
    state = optimizer.init(params)
    update = jax.jit(lambda step: optimizer.update(gradient, state, params, step=step))
    for step in (0, 3, 7):
        updates, new = update(jnp.int32(step))
        assert_close(updates["w"], -scaled(gradient["w"]) / (1 + step), 1e-5, f"step {step}")
        assert new.count == 1
    assert_close(optimizer.update(gradient, state, params)[0]["w"], -scaled(gradient["w"]), 1e-5, "own count")


def test_low_precision_gradients_become_fp32():
    optimizer = muon(1.0, weight_decay=0.0, batch_axes={"w": WHOLE})
    params = {"w": jnp.zeros((3, 4))}
    updates, state = optimizer.update({"w": jnp.ones((3, 4), jnp.bfloat16)}, optimizer.init(params), params)
    assert updates["w"].dtype == state.momentum["w"].dtype == jnp.float32


def test_errors_name_the_path():
    params = {"named": jnp.zeros((3, 4)), "stray.w": jnp.zeros((3, 4))}
    with pytest.raises(ValueError, match=r"stray\.w"):
        muon(1.0, batch_axes={"named": WHOLE}).init(params)
    for axes in (((0,), (1,), ()), ((), (0,), (0,)), ((), (0,), (2,)), ((), (0,), ())):
        with pytest.raises(ValueError, match=r"stray\.w.*\(3, 4\)"):
            muon(1.0, batch_axes={"named": WHOLE, "stray.w": axes}).init(params)
