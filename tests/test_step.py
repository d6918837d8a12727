"""train_step: every tensor moves, normalisation by targets (O19), counts (O09), skipped steps, program size."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
from jax.sharding import PartitionSpec as P
from steps import batch, keeping_gradients, layout_of, run_config, setup

from k3jax import config as configs
from k3jax.model import parameters
from k3jax.model.loss import cross_entropy
from k3jax.optim import make_optimizer
from k3jax.parallel import make_mesh
from k3jax.step import TrainState, abstract_decoder, clipped, init_state, make_gradients, make_train_step, next_bias

ONE_LAYER = sizes.model(layers=1, dense_layers=0, attn_res_block=None, mla_layers=(1,), embed=8)


@pytest.fixture(scope="module")
def small():
    return setup(run_config())


def test_every_tensor_moves(small):
    """Three steps with a learning rate; layer 1's mix, which nothing reads, gets a gradient of exactly 0."""
    decoder, _, step, first = small
    state = first
    for at in range(3):
        state, _ = step(state, batch(at))
    unread = {f"blocks.0.head.0.attention_res.{name}" for name in ("norm.weight", "query")}
    still = {path for path, value in state.params.items() if np.array_equal(value, first.params[path])}
    assert still == unread and unread < set(state.params)
    assert not np.array_equal(state.router_bias, first.router_bias)
    np.testing.assert_allclose(state.router_bias.mean(axis=-1), 0, atol=1e-6)
    bound = state.to_decoder(decoder)
    np.testing.assert_array_equal(bound.router_bias(), state.router_bias)
    np.testing.assert_array_equal(bound.lm_head[...], state.params["lm_head"])


def test_loss_is_per_target(small):
    """O19: rows with 1 and 3 targets count as 4 targets, and padding beside them changes nothing."""
    _, _, step, state = small
    both = batch()
    mask = jnp.zeros_like(both["loss_mask"]).at[0, 5].set(True).at[1, 2:5].set(True)
    both["loss_mask"] = mask
    _, metrics = step(state, both)
    assert metrics["targets"] == 4
    parts = []
    for row in range(2):
        other = dict(both, loss_mask=mask & (jnp.arange(2) == row)[:, None])
        parts.append(step(state, other)[1])
    expected = (parts[0]["loss"] * 1 + parts[1]["loss"] * 3) / 4
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    assert abs(float(metrics["loss"] - (parts[0]["loss"] + parts[1]["loss"]) / 2)) > 1e-4
    empty, nothing = step(state, dict(both, loss_mask=jnp.zeros_like(mask)))
    assert nothing["loss"] == 0 and np.isfinite(nothing["grad_norm"]) and empty.step == 1


def test_arithmetic_probe():
    """O19: token losses [4] and [1, 1, 1] give 1.75, by the sums that cross_entropy returns."""

    # One-hot hidden states and a head of logits chosen so that -log softmax is 4 and 1.
    def logit(loss):
        return np.log(np.exp(-loss) / (1 - np.exp(-loss)))

    hidden = jnp.eye(2)[None]
    head = jnp.array([[logit(4.0), 0.0], [logit(1.0), 0.0]])
    four, one = hidden[:, :1], jnp.repeat(hidden[:, 1:], 3, axis=1)
    rows = jnp.concatenate([jnp.pad(four, ((0, 0), (0, 2), (0, 0))), one])
    mask = jnp.array([[1, 0, 0], [1, 1, 1]])
    for piece in (2**20, 2):
        total, count = cross_entropy(rows, head, jnp.zeros((2, 3), jnp.int32), mask, piece=piece)
        np.testing.assert_allclose(total / count, 1.75, rtol=1e-6)


def test_loss_pieces_agree():
    """Logits in pieces of 16 tokens (the last one short) against one softmax of all, with gradients, bf16 too."""
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, head = jax.random.normal(keys[0], (3, 13, 8)), jax.random.normal(keys[1], (8, 11))
    targets, mask = jax.random.randint(keys[2], (3, 13), 0, 11), jax.random.bernoulli(keys[3], 0.7, (3, 13))

    def plain(hidden, head):
        logs = jax.nn.log_softmax(hidden @ head)
        return -jnp.sum(jnp.where(mask, jnp.take_along_axis(logs, targets[..., None], -1)[..., 0], 0))

    def pieces(hidden, head):
        return cross_entropy(hidden, head, jnp.where(mask, targets, 10**6), mask, piece=11)[0]

    value, gradients = jax.value_and_grad(pieces, (0, 1))(hidden, head)
    expected, wanted = jax.value_and_grad(plain, (0, 1))(hidden, head)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for gradient, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(gradient, want, atol=1e-5 * float(jnp.abs(want).max()))
    narrow = pieces(hidden.astype(jnp.bfloat16), head)
    assert narrow.dtype == jnp.float32
    np.testing.assert_allclose(narrow, expected, rtol=2e-2)
    total, count = cross_entropy(hidden[:, :0], head, targets[:, :0], mask[:, :0])
    assert total == count == 0


def test_gradients_of_many_add_up_in_fp32():
    """bf16: one token 512 times, and a head in 64 pieces. Sums in bf16 would stop at 256, and lose 1 % to rounding."""
    model = sizes.model(layers=1, dense_layers=0, attn_res_block=None, mla_layers=(1,), embed=8)
    config = run_config(model=model)
    rows = {name: jnp.broadcast_to(x[:, :1], (2, 256)) for name, x in batch().items()}
    found = []
    for dtype in ("float32", "bfloat16"):
        one = dataclasses.replace(config, train=dataclasses.replace(config.train, dtype=dtype))
        decoder, layout, _, state = setup(one)
        found.append(jax.jit(make_gradients(one, decoder, layout))(state.params, state.router_bias, rows)[3])
    for path in ("embed", "lm_head"):
        exact = np.asarray(found[0][path])
        assert np.linalg.norm(found[1][path] - exact) < 0.02 * np.linalg.norm(exact), path
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, head = jax.random.normal(keys[0], (4, 256, 16)), jax.random.normal(keys[1], (16, 8))
    targets = jax.random.randint(keys[2], (4, 256), 0, 8)

    def gradient(hidden, piece):
        return jax.grad(lambda head: cross_entropy(hidden, head, targets, targets >= 0, piece=piece)[0])(head)

    exact, narrow = gradient(hidden, 2**20), gradient(hidden.astype(jnp.bfloat16), 128)
    assert narrow.dtype == jnp.float32
    assert np.linalg.norm(narrow - exact) < 4e-3 * np.linalg.norm(exact)


def test_running_mean_of_the_bias():
    """One bin for all tokens of an expert: estimates -0.7995 ... by hand, a quarter of them in the mean."""
    config = sizes.model(moe={"routed_experts": 4, "top_k": 1, "balancing_ema": 0.75}).moe
    histogram = np.zeros((1, 4, 1000), np.int32)
    histogram[0, range(4), [100, 300, 500, 700]] = 8
    stats = types.SimpleNamespace(histogram=jnp.asarray(histogram), tokens=jnp.int32(8))
    bias, mean = next_bias(config, jnp.zeros((1, 4)), jnp.full((1, 4), 0.4), stats)
    expected = 0.75 * 0.4 + 0.25 * np.array([-0.7995, -0.3995, 0.0005, 0.4005])
    np.testing.assert_allclose(mean[0], expected, atol=1e-6)
    np.testing.assert_allclose(bias[0], expected - expected.mean(), atol=1e-6)


@pytest.mark.parametrize("balancing", ["sign", "none"])
def test_scanned_group_without_histogram(balancing):
    """Kimi-Linear's balancing has no histogram: its 0 bins go through the scan of a group too."""
    model = sizes.model(
        layers=5, attn_res_block=None, mla_layers=(5,), embed=16, mlp=16,
        moe={"routed_experts": 4, "top_k": 2, "balancing": balancing},
    )  # fmt: skip
    decoder, layout, _, state = setup(run_config(model=model))
    assert decoder.plans[0].groups == 1
    _, _, stats, _ = jax.eval_shape(make_gradients(run_config(model=model), decoder, layout),
                                    state.params, state.router_bias, batch())  # fmt: skip
    assert stats.histogram.shape == (4, 4, 0) and stats.expert_load.shape == (4, 4)


def test_not_finite_is_skipped(small):
    """Parameters, momentum and bias stay; the step and the count go on."""
    _, _, step, state = small
    broken = dataclasses.replace(
        state, params={**state.params, "lm_head": state.params["lm_head"].at[0, 0].set(jnp.nan)}
    )
    after, metrics = step(broken, batch())
    assert after.step == 1 and metrics["skipped_steps"] == 1 == after.counters["skipped_steps"]
    before = dataclasses.replace(broken, step=after.step, counters=after.counters)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old, new)
    after, metrics = step(dataclasses.replace(after, params=state.params), batch())
    assert after.step == 2 and metrics["skipped_steps"] == 1 and np.isfinite(metrics["loss"])


def test_padding_leaves_the_bias_alone(small):
    """Rows of padding change neither loss, gradient norm nor the next router bias."""
    _, _, step, state = small
    whole = batch()

    # The second row is padding in both; in one it holds other tokens and asks for targets' sake.
    def padded(content):
        filled = {name: array.at[1].set(False) for name, array in whole.items() if array.dtype == bool}
        filled["segment_ids"] = whole["segment_ids"].at[1].set(0)
        return dict(filled, tokens=whole["tokens"].at[1].set(content), targets=whole["targets"].at[1].set(content))

    one, metrics = step(state, padded(0))
    two, other = step(state, padded(77))
    assert metrics["targets"] == 16
    np.testing.assert_allclose(metrics["loss"], other["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], other["grad_norm"], rtol=1e-5)
    np.testing.assert_array_equal(one.router_bias, two.router_bias)


def test_packed_rows_are_separate_documents():
    """Three documents in one row, or each alone in a row: loss, counts and every gradient of the whole step (1e-5)."""
    lengths, width = (7, 18, 11), 36
    _, _, step, state = setup(run_config(clip_norm=None), change=keeping_gradients)
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 200, n + 1, dtype=np.int32) for n in lengths]
    empty = {"tokens": np.int32, "targets": np.int32, "loss_mask": bool, "segment_ids": np.int32}
    packed, apart = ({name: np.zeros((3, width), kind) for name, kind in empty.items()} for _ in range(2))
    at = 0
    for place, document in enumerate(documents):
        n = len(document) - 1
        for rows, row, start in ((packed, 1, at), (apart, place, 0)):
            here = slice(start, start + n)
            rows["tokens"][row, here], rows["targets"][row, here] = document[:-1], document[1:]
            rows["loss_mask"][row, here], rows["segment_ids"][row, here] = True, place + 1
        at += n
    (one, metrics), (two, other) = step(state, packed), step(state, apart)
    assert metrics["targets"] == other["targets"] == sum(lengths)
    np.testing.assert_allclose(metrics["loss"], other["loss"], rtol=1e-6)
    np.testing.assert_array_equal(metrics["health"]["expert_load"], other["health"]["expert_load"])
    np.testing.assert_allclose(one.router_bias, two.router_bias, atol=4e-3)
    largest = max(float(jnp.abs(g).max()) for g in one.opt_state["gradients"].values())
    for path, gradient in one.opt_state["gradients"].items():
        scale = max(float(jnp.abs(gradient).max()), 1e-6 * largest)
        np.testing.assert_allclose(two.opt_state["gradients"][path], gradient, atol=1e-5 * scale, err_msg=path)


@pytest.mark.parametrize("policy", ["save_all", "recompute_all"])
@pytest.mark.parametrize("balancing", ["sign", "quantile"])
def test_counts_do_not_know_the_policy(policy, balancing):
    """O09: six tokens, three experts, top-2: loads [6, 4, 2] whatever is computed twice; 18 histogram entries."""
    model = sizes.model(
        layers=1, dense_layers=0, attn_res_block=None, mla_layers=(1,), embed=8,
        moe={"routed_experts": 3, "top_k": 2, "balancing": balancing},
    )  # fmt: skip
    config = run_config(model=model, policy=policy)
    decoder, layout, step, state = setup(config)
    # Expert 0 by its bias; the second choice by the sign of the token's embedding, which reaches the router alone.
    direction = jnp.where(jnp.arange(8) % 2 == 0, 1.0, -1.0)
    place = "blocks.0.tail.0" if decoder.plans[0].tail else "blocks.0.head.0"
    params = dict(state.params)
    params["embed"] = params["embed"].at[0].set(direction).at[1].set(-direction)
    params[f"{place}.attention.o"] = jnp.zeros_like(params[f"{place}.attention.o"])
    params[f"{place}.mlp.router.weight"] = jnp.stack([jnp.zeros(8), direction, -direction], axis=1)
    bias = jnp.array([[2.0, -1.0, -1.0]])
    state = dataclasses.replace(state, params=params, router_bias=bias, bias_ema=bias)
    ones = np.ones((1, 6), np.int32)
    rows = {"tokens": np.array([[0, 1, 0, 0, 1, 0]]), "targets": ones, "loss_mask": ones > 0, "segment_ids": ones}
    if balancing == "sign":
        after, metrics = step(state, rows)
        np.testing.assert_array_equal(metrics["health"]["expert_load"], [[6, 4, 2]])
        np.testing.assert_allclose(after.router_bias - bias, [[-1e-3, 0, 1e-3]], atol=1e-6)
    else:
        stats = jax.jit(make_gradients(config, decoder, layout))(params, bias, rows)[2]
        np.testing.assert_array_equal(stats.expert_load, [[6, 4, 2]])
        np.testing.assert_array_equal(stats.histogram.sum(axis=-1), [[6, 6, 6]])


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (1, 2), (1, 4), (2, 2)])
def test_one_norm_over_all_devices(data, fsdp):
    """O12: two experts with gradients [2, 4] and [6, 8]; then a dense scalar 0.1 that every device holds."""
    mesh = make_mesh(configs.MeshConfig(data, fsdp), data * fsdp, jax.devices()[: data * fsdp])
    spread, whole = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("fsdp"), P()))
    experts = jax.device_put(jnp.array([2.0, 4.0, 6.0, 8.0]), spread)
    run = jax.jit(lambda gradients: clipped(gradients, jnp.float32(1), 1.0))
    scaled, norm = run({"experts": experts})
    np.testing.assert_allclose(norm, 10.9544512, rtol=1e-6)
    np.testing.assert_allclose(scaled["experts"], 0.0912871 * np.array([2, 4, 6, 8]), rtol=1e-5)
    scaled, norm = run({"experts": experts, "dense": jax.device_put(jnp.float32(0.1), whole)})
    np.testing.assert_allclose(norm, 10.9549076, rtol=1e-6)
    np.testing.assert_allclose(scaled["dense"], 0.1 / 10.9549076, rtol=1e-5)


def test_learning_rate_follows_the_step():
    """A skipped step takes its learning rate with it: the rate of step s does not depend on what came before."""
    schedule = {"learning_rate": 1e-2, "warmup_steps": 4}
    _, _, step, state = setup(run_config(model=ONE_LAYER, **schedule, clip_norm=None))
    broken = dict(state.params, lm_head=state.params["lm_head"].at[0, 0].set(jnp.nan))
    skipped, metrics = step(dataclasses.replace(state, params=broken), batch())
    assert metrics["skipped_in_a_row"] == 1 and skipped.step == 1
    after, metrics = step(dataclasses.replace(skipped, params=state.params), batch())
    np.testing.assert_allclose(metrics["learning_rate"], 0.5e-2, rtol=1e-6)
    assert metrics["skipped_in_a_row"] == 0 and metrics["skipped_steps"] == 1
    # AdamW's first update is the rate times the gradient's sign, but for its eps and the decay of 0.1.
    moved = np.asarray(after.params["lm_head"] - state.params["lm_head"] * (1 - 0.1 * 0.5e-2))
    np.testing.assert_allclose(np.median(np.abs(moved)), 0.5e-2, rtol=1e-3)


def equations(jaxpr) -> int:
    """Equations of a jaxpr and of all jaxprs inside it, each use counted."""
    total = 0
    for equation in jaxpr.eqns:
        total += 1
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            total += equations(inner) if hasattr(inner, "eqns") else 0
    return total


def test_program_of_93_layers_stays_small():
    """The abstract train step of k3_2p8t: 80,000 equations at most."""
    config = configs.load("configs/k3.py:k3_2p8t")
    decoder = abstract_decoder(config)
    optimizer, schedule, table = make_optimizer(config, parameters.variables(decoder))
    state: TrainState = jax.eval_shape(lambda: init_state(config, optimizer))
    shape = config.data.batch_rows, config.data.seq_len
    ids, mask = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool)
    inputs = {"tokens": ids, "targets": ids, "loss_mask": mask, "segment_ids": ids}
    jaxpr = jax.make_jaxpr(make_train_step(config, decoder, optimizer, schedule, layout_of(decoder)))(state, inputs)
    count = equations(jaxpr.jaxpr)
    print(f"\n93-layer train step: {count:,} equations, {len(table)} parameter tensors")
    assert 10_000 < count <= 80_000


def test_every_block_has_a_scope():
    """A profile shows blocks, kinds of layers, the head and the optimizer by name, in the backward pass too."""
    config = run_config()
    decoder = abstract_decoder(config)
    layout = layout_of(decoder)
    optimizer, schedule, _ = make_optimizer(config, parameters.variables(decoder))
    state = jax.eval_shape(lambda: init_state(config, optimizer))
    step = jax.jit(make_train_step(config, decoder, optimizer, schedule, layout))
    text = step.lower(state, layout.batch_shapes(2, 16)).as_text(debug_info=True)
    for scope in (
        "block_0/kda",
        "block_0/mlp",
        "block_0/moe",
        "block_1/mla",
        "head",
        "optimizer",
        "qk_clip",
        "balancing",
    ):
        assert f"jvp({scope.split('/')[0]})" in text or scope in text, scope
    assert "transpose" in text
