"""Which parameter goes where: whole models, names that stop a run, the printed table, AdamW by its formula."""

import dataclasses
import functools
import io
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from golden_files import assert_close
from rich.console import Console

from k3jax import config as configs
from k3jax.config import ConfigError
from k3jax.model import parameters
from k3jax.optim import ParamInfo, build, format_table, make_optimizer, partition, trainable
from k3jax.step import abstract_decoder

MODELS = "tiny", "kimi_linear_48b", pytest.param("k3_2p8t", marks=pytest.mark.slow)

# Design, section 3, by the last part of a path. Weight decay is 0.1 but for these.
ADAMW = {"embed", "lm_head", "weight", "q_conv", "k_conv", "v_conv", "a_log", "dt_bias", "query"}
NO_DECAY = {"weight", "a_log", "dt_bias", "query"}
PER_HEAD = {"q", "k", "v", "q_b", "k_b", "v_b"}


def run_config(name, **optim):
    config = configs.load(f"configs/k3.py:{name}")
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, **optim))


@functools.cache
def model(name):
    """(path -> nnx.Param, rows) of the abstract decoder."""
    variables = parameters.variables(abstract_decoder(run_config(name)))
    return variables, make_optimizer(run_config(name), variables)[2]


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_lands_where_the_design_says(name):
    variables, rows = model(name)
    assert [row.path for row in rows] == list(variables)
    for row in rows:
        last = "router" if row.path.endswith("router.weight") else row.path.split(".")[-1]
        shape = variables[row.path].get_value().shape
        assert row.group == ("adamw" if last in ADAMW else "muon"), row.path
        assert row.weight_decay == (0.0 if last in NO_DECAY else 0.1), row.path
        assert row.shape == shape and row.count * math.prod(row.block) == math.prod(shape), row.path
        expert = re.search(r"\.mlp\.w[123]$", row.path) and "blocks.0.head.0." not in row.path
        split = "per head" if last in PER_HEAD else "per expert" if expert else "whole"
        assert row.split == (split if row.group == "muon" else ""), row.path


@pytest.mark.parametrize(
    "name, path, count, block",
    [
        # Muon's matrices [in, out], counted over stacked layers and heads or experts
        ("tiny", "blocks.0.head.1.attention.q", 4, (128, 32)),
        ("tiny", "blocks.1.groups.kda.attention.v", 12, (128, 32)),
        ("tiny", "blocks.1.groups.kda.attention.o", 3, (128, 128)),
        ("tiny", "blocks.1.groups.kda.attention.f_b", 3, (32, 128)),
        ("tiny", "blocks.1.groups.kda.attention.b", 3, (128, 4)),
        ("tiny", "blocks.1.groups.mla.attention.q_b", 4, (48, 48)),
        ("tiny", "blocks.1.groups.mla.attention.k_b", 4, (32, 32)),
        ("tiny", "blocks.1.groups.mla.attention.kv_a", 1, (128, 48)),
        ("tiny", "blocks.1.groups.kda.mlp.w2", 48, (64, 64)),
        ("tiny", "blocks.1.groups.kda.mlp.shared.w1", 3, (128, 64)),
        ("tiny", "blocks.1.groups.kda.mlp.router.weight", 3, (128, 16)),
        ("tiny", "blocks.0.head.0.mlp.w2", 1, (384, 128)),
        ("kimi_linear_48b", "blocks.0.head.0.attention.k", 32, (2304, 128)),
        ("kimi_linear_48b", "blocks.0.head.0.attention.g_b", 1, (128, 4096)),
        ("kimi_linear_48b", "blocks.0.head.1.mlp.w1", 256, (2304, 1024)),
        ("kimi_linear_48b", "blocks.0.head.3.attention.q", 32, (2304, 192)),
        ("kimi_linear_48b", "blocks.0.head.3.attention.v_b", 32, (512, 128)),
        # AdamW's arrays, counted over stacked layers
        ("tiny", "embed", 1, (264, 128)),
        ("tiny", "blocks.1.groups.kda.attention.q_conv", 3, (4, 4, 32)),
        ("tiny", "blocks.1.groups.kda.mlp_res.query", 3, (128,)),
    ],
)
def test_blocks_of(name, path, count, block):
    (row,) = [row for row in model(name)[1] if row.path == path]
    assert (row.count, row.block) == (count, block)


@pytest.mark.parametrize(
    "name, suffix, count, block",
    [
        # k3.md 4.3: 96 query, key and value blocks of each of 69 KDA layers, keys and values of 24 MLA layers apart
        pytest.param("k3_2p8t", "attention.q", 69 * 96, (7168, 128), marks=pytest.mark.slow),
        pytest.param("k3_2p8t", "attention.q_b", 24 * 96, (1536, 192), marks=pytest.mark.slow),
        pytest.param("k3_2p8t", "attention.k_b", 24 * 96, (512, 128), marks=pytest.mark.slow),
        pytest.param("k3_2p8t", "mlp.w1", 92 * 896, (3584, 3072), marks=pytest.mark.slow),
        ("kimi_linear_48b", "attention.q", 20 * 32, (2304, 128)),
        ("kimi_linear_48b", "mlp.w3", 26 * 256, (2304, 1024)),
    ],
)
def test_blocks_of_a_whole_model(name, suffix, count, block):
    found = [row for row in model(name)[1] if row.path.endswith(f".{suffix}") and row.block == block]
    assert sum(row.count for row in found) == count


def info(shape=(8, 2, 4), axes=("embed", "heads", "head_dim"), matrix_axes=((1,), (0,), (2,)), decay=True):
    return ParamInfo(shape, axes, matrix_axes, decay)


@pytest.mark.parametrize(
    "path, wrong, message",
    [
        ("layer.extra", info(), r"does not name layer\.extra"),
        ("layer.xq", info(), r"does not name layer\.xq"),
        ("layer.q", info(decay=False), r"layer\.q: weight_decay is False"),
        ("layer.q", info(matrix_axes=None), r"layer\.q: matrix_axes is None, the table says muon"),
        ("layer.q", info(matrix_axes=((), (0,), (1, 2))), r"layer\.q: .*counts over \(1,\)"),
        ("layer.o", info((2, 4, 8), ("heads", "head_dim", "embed"), ((0,), (1,), (2,))), r"layer\.o: .*over \(\)"),
        ("embed", info((9, 8), ("vocab", "embed"), ((), (0,), (1,))), "embed: matrix_axes .*the table says adamw"),
        ("norm.weight", info((8,), ("embed",), None), r"norm\.weight: weight_decay is True"),
        ("layer.q", info(matrix_axes=((1,), (0,), (3,))), r"layer\.q: .*do not fit shape \(8, 2, 4\)"),
    ],
)
def test_unnamed_and_contradicting_parameters_stop_the_run(path, wrong, message):
    with pytest.raises(ValueError, match=message):
        partition({"layer.k": info(), path: wrong})


def test_all_problems_are_said_at_once():
    with pytest.raises(ValueError, match=r"name x\.one, x\.two; layer\.q: "):
        partition({"x.one": info(), "layer.q": info(decay=False), "x.two": info()})


def test_make_optimizer_turns_a_stray_parameter_into_a_config_error():
    variables = dict(model("tiny")[0])
    variables["blocks.0.head.0.attention.stray"] = variables["embed"]
    with pytest.raises(ConfigError, match=r"blocks\.0\.head\.0\.attention\.stray"):
        make_optimizer(run_config("tiny"), variables)


def test_make_optimizer_with_wsd_and_another_weight_decay():
    config = run_config(
        "tiny", schedule="wsd", learning_rate=2e-3, warmup_steps=4, decay_steps=100, end_fraction=0.5, weight_decay=0.3
    )
    optimizer, schedule, rows = make_optimizer(config, model("tiny")[0])
    steps = config.train.steps
    expected = {0: 5e-4, 3: 2e-3, 4: 2e-3, steps - 100: 2e-3, steps - 50: 1.5e-3, steps: 1e-3}
    assert {t: float(schedule(t)) for t in expected} == pytest.approx(expected)
    assert {row.weight_decay for row in rows} == {0.0, 0.3}
    shapes = {row.path: jax.ShapeDtypeStruct(row.shape, jnp.float32) for row in rows}
    state = jax.eval_shape(optimizer.init, shapes)
    assert set(state["muon"].momentum) == {row.path for row in rows if row.group == "muon"}
    assert set(state["adamw"].mu) == set(state["adamw"].nu) == {row.path for row in rows if row.group == "adamw"}


def printed(rows, width):
    """The printed lines, each cut into its columns."""
    file = io.StringIO()
    Console(width=width, file=file).print(format_table(rows))
    return [re.split(r"  +", line.strip()) for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [80, 200])
def test_table_has_one_whole_line_for_each_kind(name, width):
    rows = model(name)[1]
    head, *lines = printed(rows, width)
    assert head == ["parameter", "optimizer", "decay", "blocks", "block", "total"]

    def kind(path):
        place = path.split(".")
        return ".".join(["*", *place[4:]]) if place[0] == "blocks" else path

    kinds = {(kind(row.path), "x".join(map(str, row.block))) for row in rows}
    assert {(line[0], line[4]) for line in lines} == kinds and len(lines) == len(kinds)
    assert sum(int(line[3]) for line in lines) == sum(row.count for row in rows)


def test_lines_of_the_table():
    lines = printed(model("kimi_linear_48b")[1], 80)
    assert ["*.attention.q", "muon per head", "0.1", "640", "2304x128", "189 M"] in lines
    assert ["*.attention.q", "muon per head", "0.1", "224", "2304x192", "99.1 M"] in lines
    assert ["*.mlp.w1", "muon per expert", "0.1", "6656", "2304x1024", "15.7 G"] in lines
    assert ["*.attention.kv_norm.weight", "adamw", "0", "7", "512", "3.58 K"] in lines
    assert ["*.attention.a_log", "adamw", "0", "20", "32", "640"] in lines
    assert ["lm_head", "adamw", "0.1", "1", "2304x163840", "377 M"] in lines


def two_groups():
    """An optimizer over a Muon matrix, an embedding that decays and a norm that does not; momentum 0 for Muon."""
    rows = partition(
        {
            "layer.g": info((3, 5), ("embed", "heads"), ((), (0,), (1,))),
            "embed": info((4, 3), ("vocab", "embed"), None),
            "norm.weight": info((3,), ("embed",), None, decay=False),
        }
    )
    rng = np.random.default_rng(0)
    trees = [{row.path: rng.normal(size=row.shape).astype(np.float32) for row in rows} for _ in range(4)]
    return build(rows, learning_rate=lambda t: 0.01 / (t + 1)), trees


def test_adamw_equals_its_formula():
    """Three steps in float64: factors 0.9 and 0.95, eps 1e-8, bias-corrected moments, decoupled decay of 0.1."""
    optimizer, (params, *gradients) = two_groups()
    expected = {path: params[path].astype(np.float64) for path in ("embed", "norm.weight")}
    first, second = dict.fromkeys(expected, 0.0), dict.fromkeys(expected, 0.0)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for t, gradient in enumerate(gradients):
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        rate = 0.01 / (t + 1)
        for path, p in expected.items():
            g = gradient[path].astype(np.float64)
            first[path] = 0.9 * first[path] + 0.1 * g
            second[path] = 0.95 * second[path] + 0.05 * g**2
            step = first[path] / (1 - 0.9 ** (t + 1)) / (np.sqrt(second[path] / (1 - 0.95 ** (t + 1))) + 1e-8)
            expected[path] = p - rate * (step + (0.1 if path == "embed" else 0.0) * p)
    for path, p in expected.items():
        assert_close(params[path], p, 1e-6, path)
    assert state["adamw"].count == state["muon"].count == 3


def test_rate_is_read_at_the_run_s_step():
    """Both groups; a step given, and without one the number of updates done."""
    optimizer, (params, gradient, *_) = two_groups()
    state = optimizer.init(params)
    update = jax.jit(lambda step: optimizer.update(gradient, state, params, step=step)[0])
    own = optimizer.update(gradient, state, params)[0]
    for step in (0, 4):
        for path, value in update(jnp.int32(step)).items():
            assert_close(value, own[path] / (1 + step), 1e-6, f"{path} at {step}")


SMALL = {
    "layer.g": ParamInfo((3, 5), ("embed", "heads"), ((), (0,), (1,)), True),
    "layer.o": ParamInfo((5, 3), ("heads", "embed"), ((), (0,), (1,)), True),
    "embed": ParamInfo((4, 3), ("vocab", "embed"), None, True),
    "norm.weight": ParamInfo((3,), ("embed",), None, False),
}


def small_config_optimizer(**optim):
    """make_optimizer over SMALL with a constant rate of 0.5 after the warm-up."""
    variables = {
        path: nnx.Param(
            jnp.zeros(x.shape), logical_axes=x.logical_axes, matrix_axes=x.matrix_axes, weight_decay=x.decay
        )
        for path, x in SMALL.items()
    }
    optim = {"schedule": "wsd", "learning_rate": 0.5, "warmup_steps": 0, "decay_steps": 1, **optim}
    return make_optimizer(run_config("tiny", **optim), variables)


def draw(seed=0):
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=x.shape).astype(np.float32) for path, x in SMALL.items()}


@pytest.mark.parametrize(
    "patterns, frozen",
    [
        (("embed",), {"embed"}),
        (("layer",), {"layer.g", "layer.o"}),
        (("*.weight", "lay*.o"), {"norm.weight", "layer.o"}),
        (("layer", "embed"), {"layer.g", "layer.o", "embed"}),
    ],
)
def test_frozen_parameters_have_no_state_and_no_update(patterns, frozen):
    """Whether or not they are in the dicts; the others' updates are those of an optimizer without frozen ones."""
    optimizer, _, rows = small_config_optimizer(frozen=patterns)
    left = set(SMALL) - frozen
    assert trainable(tuple(SMALL), patterns) == left
    assert {row.path for row in rows if row.group == "frozen"} == frozen and len(rows) == len(SMALL)
    params, gradient = draw(), draw(1)
    plain = small_config_optimizer()[0]
    expected = plain.update(gradient, plain.init(params), params)[0]
    for kept in (left, set(SMALL)):
        held, given = ({path: tree[path] for path in kept} for tree in (params, gradient))
        state = optimizer.init(held)
        assert set(state["muon"].momentum) | set(state["adamw"].mu) | set(state["adamw"].nu) == left
        updates, new = optimizer.update(given, state, held, step=jnp.int32(0))
        assert jax.tree.structure(new) == jax.tree.structure(state) and set(updates) == left
        for path, update in updates.items():
            assert_close(update, expected[path], 1e-6, path)
    lines = printed(rows, 80)
    assert {line[0] for line in lines if line[1] == "frozen"} == frozen
    assert all(line[2] == "0" for line in lines if line[1] == "frozen")
    missing = {path: value for path, value in params.items() if path != min(left)}
    with pytest.raises(ValueError, match=re.escape(min(left))):
        optimizer.init(missing)


def test_rate_scales_the_whole_update():
    """Rate and decay; the last match counts; 0 stands still but keeps its momentum; frozen wins."""
    entries = "*=3", "layer=0.25", "layer.o=0", "norm.weight=2.5"
    optimizer, _, rows = small_config_optimizer(rate_scale=entries, frozen=("embed",))
    factors = {"layer.g": 0.25, "layer.o": 0.0, "norm.weight": 2.5}
    params, gradient = draw(), draw(1)
    plain = small_config_optimizer()[0]
    expected, kept = plain.update(gradient, plain.init(params), params)
    updates, state = optimizer.update(gradient, optimizer.init(params), params)
    assert {path: row.rate_scale for row in rows if (path := row.path) != "embed"} == factors
    for path, factor in factors.items():
        np.testing.assert_allclose(updates[path], factor * expected[path], rtol=1e-6, err_msg=path)
    np.testing.assert_array_equal(state["muon"].momentum["layer.o"], kept["muon"].momentum["layer.o"])
    shown = {line[0]: line[1] for line in printed(rows, 80)[1:]}
    assert shown == {
        "layer.g": "muon whole x0.25",
        "layer.o": "muon whole x0",
        "embed": "frozen",
        "norm.weight": "adamw x2.5",
    }


@pytest.mark.parametrize(
    "optim, message",
    [
        ({"frozen": ("embed", "layer.x")}, r"^optim\.frozen: 'layer\.x' matches no parameter"),
        ({"frozen": ("lay",)}, r"^optim\.frozen: 'lay' matches no parameter"),
        ({"frozen": ("EMBED",)}, r"^optim\.frozen: 'EMBED' matches no parameter"),
        ({"frozen": ("layer", "*")}, r"^optim\.frozen: 'layer', '\*' leave no parameter to train"),
        ({"rate_scale": ("embed=2", "router=0.5")}, r"^optim\.rate_scale: 'router' matches no parameter"),
    ],
)
def test_patterns_that_are_mistakes(optim, message):
    with pytest.raises(ConfigError, match=message) as caught:
        small_config_optimizer(**optim)
    assert "\n" not in str(caught.value)


def test_frozen_and_scaled_table_fits_80_columns():
    config = run_config("kimi_linear_48b", frozen=("*.mlp",), rate_scale=("*=0.0125",))
    lines = printed(make_optimizer(config, model("kimi_linear_48b")[0])[2], 80)
    assert all(len(line) in (1, 6) for line in lines) and not any("…" in cell for line in lines for cell in line)
    at = lines.index(["*.attention.q", "muon per head", "0.1", "640", "2304x128", "189 M"])
    assert lines[at + 1] == ["x0.0125"]
    assert ["*.mlp.router.weight", "frozen", "0", "26", "2304x256", "15.3 M"] in lines


def test_spread_gets_every_muon_parameter():
    seen = {}

    def spread(work, arrays, matrix_axes):
        seen.update({path: (x.shape, matrix_axes[path]) for path, x in arrays.items()})
        return dict(arrays)

    optimizer, _, rows = make_optimizer(run_config("tiny"), model("tiny")[0], spread=spread)
    shapes = {row.path: jax.ShapeDtypeStruct(row.shape, jnp.float32) for row in rows}
    jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), shapes)
    assert seen == {row.path: (row.shape, row.matrix_axes) for row in rows if row.group == "muon"}


def test_groups_do_not_mix():
    optimizer, (params, gradient, *_) = two_groups()
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    updates, _ = update(gradient, state, params)
    g = gradient["layer.g"]
    rms = np.sqrt(np.mean((np.asarray(updates["layer.g"]) + 0.01 * 0.1 * params["layer.g"]) ** 2))
    assert 0.2 * 0.6 < rms / 0.01 < 0.2 * 1.2  # Muon's size, whatever the gradient's
    for factor in (1e-3, 1e3):
        scaled = update(dict(gradient, **{"layer.g": factor * g}), state, params)[0]
        assert_close(scaled["layer.g"], updates["layer.g"], 1e-4, f"gradient x {factor}")
    with pytest.raises(ValueError, match=r"norm\.weight, other"):
        optimizer.init({"layer.g": g, "embed": params["embed"], "other": g})
