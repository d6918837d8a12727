"""expert_layer against a loop over experts in float64, what it keeps and what memory it takes."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from activation import situ
from golden_files import assert_close
from jax.extend.core import jaxprs_in_params

from pallas_kernels.moe import expert_layer

LATENT, INNER = 6, 10
IMPLEMENTATIONS = ["blocked", "ragged"]


def oracle(x, ids, weights, w1, w3, w2, dy):
    """Output and the gradients of x, weights, w1, w3, w2, an expert at a time, the derivatives of SiTU by hand."""
    x, weights, w1, w3, w2, dy = (np.asarray(a, np.float64) for a in (x, weights, w1, w3, w2, dy))
    y, dx, dweights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights)
    stacks = [np.zeros_like(w) for w in (w1, w3, w2)]
    for e in range(len(w1)):
        token, choice = np.nonzero(ids == e)
        if not len(token):
            continue
        rows, p, d_out = x[token], weights[token, choice][:, None], dy[token]
        a, c = rows @ w1[e], rows @ w3[e]
        s, ta, tc = 1 / (1 + np.exp(-a)), np.tanh(a / 4), np.tanh(c / 25)
        gate, linear = 4 * ta * s, 25 * tc
        d_gate, d_linear = (1 - ta**2) * s + 4 * ta * s * (1 - s), 1 - tc**2
        out = gate * linear @ w2[e]
        d_hidden = p * d_out @ w2[e].T
        da, dc = d_hidden * linear * d_gate, d_hidden * gate * d_linear
        np.add.at(y, token, p * out)
        np.add.at(dx, token, da @ w1[e].T + dc @ w3[e].T)
        dweights[token, choice] = (out * d_out).sum(1)
        for stack, term in zip(stacks, (rows.T @ da, rows.T @ dc, (p * gate * linear).T @ d_out), strict=True):
            stack[e] = term
    return y, dx, dweights, *stacks


def routing(kind, rng, tokens, experts, k):
    """Ids [tokens,k]; a tenth of the choices, and some whole tokens, go nowhere."""
    if kind == "uniform":
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k]
    elif kind == "skewed":
        ids = np.minimum(rng.geometric(0.3, (tokens, k)) - 1, experts - 1)
    else:
        ids = np.full((tokens, k), {"one": experts - 2, "none": experts}[kind])
    ids[rng.random(ids.shape) < 0.1] = experts
    ids[[0, tokens // 2]] = experts + 5
    ids[-1] = -1
    return ids.astype(np.int32)


def draw(rng, tokens, experts, k):
    shapes = (tokens, LATENT), (tokens, k), *[(experts, LATENT, INNER)] * 2, (experts, INNER, LATENT), (tokens, LATENT)
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


@functools.partial(jax.jit, static_argnums=0)
def run(implementation, ids, x, weights, w1, w3, w2, dy):
    """Output and gradients, as the oracle's."""

    def layer(x, weights, w1, w3, w2):
        return expert_layer(x, ids, weights, w1, w3, w2, activation=situ, implementation=implementation)

    y, pull_back = jax.vjp(layer, x, weights, w1, w3, w2)
    return y, *pull_back(dy)


NAMES = "y", "dx", "dweights", "dw1", "dw3", "dw2"


def check(implementation, kind, ids, arrays):
    """Every tensor and every expert's slice against the oracle; what goes nowhere holds NaN, and gets exactly 0."""
    experts, expected = len(arrays[2]), oracle(arrays[0], ids, *arrays[1:])
    nowhere = (ids < 0) | (ids >= experts)
    arrays[1][nowhere] = np.nan
    for x in (arrays[0], arrays[5]):
        x[nowhere.all(1)] = np.nan
    actual = run(implementation, ids, *arrays)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert_close(a, e, 1e-5 if name == "y" else 1e-4, f"{kind} {name}")
    for name, a, e in zip(NAMES[3:], actual[3:], expected[3:], strict=True):
        for expert in range(experts):
            assert_close(a[expert], e[expert], 1e-4, f"{kind} {name}[{expert}]")
    empty = np.bincount(ids[~nowhere], minlength=experts) == 0
    assert all((np.asarray(a)[empty] == 0).all() for a in actual[3:])
    assert (np.asarray(actual[2])[nowhere] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("experts, k, tokens", [(8, 1, 75), (8, 2, 700), (24, 4, 200), (96, 16, 60), (896, 16, 50)])
def test_equals_a_loop_over_experts(experts, k, tokens, implementation):
    for kind in ("uniform", "skewed", "one", "none"):
        rng = np.random.default_rng(experts + k)
        ids = routing(kind, rng, tokens, experts, k)
        check(implementation, kind, ids, draw(rng, tokens, experts, k))


def check_bf16(implementation, ids, arrays):
    """Relative rms for bf16 tokens with fp32 matrices; gradients are each in the type of what they are of."""
    for i in (0, 5):
        arrays[i] = arrays[i].astype(ml_dtypes.bfloat16)
    expected = oracle(arrays[0], ids, *arrays[1:])
    actual = run(implementation, ids, *arrays)
    assert [a.dtype.name for a in actual] == ["bfloat16", "bfloat16", "float32", *["float32"] * 3]
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        error = np.asarray(a, np.float64) - e
        assert np.sqrt(np.mean(error**2) / np.mean(e**2)) < 8e-3, name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bf16(implementation):
    rng = np.random.default_rng(5)
    arrays, ids = draw(rng, 300, 6, 3), routing("uniform", rng, 300, 6, 3)
    check_bf16(implementation, ids, arrays)


def check_one_spoiled_token(implementation, ids, arrays, token):
    """A token with NaN spoils its own experts' gradients and its own output, and nothing else."""
    clean = run(implementation, ids, *arrays)
    arrays[0][token] = np.nan
    spoiled = run(implementation, ids, *arrays)
    others = np.arange(len(ids)) != token, ~np.isin(np.arange(len(arrays[2])), ids[token])
    for a, b, kept in zip(clean, spoiled, (*others[:1] * 3, *others[1:] * 3), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[kept], np.asarray(b)[kept])
    assert np.isnan(spoiled[0][token]).all() and np.isnan(np.asarray(spoiled[3])[ids[token]]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_experts_tokens_do_not_touch_the_others(implementation):
    rng = np.random.default_rng(6)
    arrays, ids = draw(rng, 40, 9, 2), routing("uniform", rng, 40, 9, 2)
    ids[7] = 3, 5
    check_one_spoiled_token(implementation, ids, arrays, 7)


def test_64_bits():
    """With x64 on, ids may be 64 bits wide; fp32 stays fp32, to the bit."""
    rng = np.random.default_rng(7)
    ids, arrays = routing("uniform", rng, 40, 5, 2), draw(rng, 40, 5, 2)
    narrow = run("blocked", ids, *arrays)
    with jax.enable_x64(True):
        wide = run("blocked", ids.astype(np.int64), *arrays)
    for a, b in zip(narrow, wide, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("used", [[2], [0, 2, 3]])
def test_matrices_that_no_token_chose(used, implementation):
    """They may hold NaN; so may what an activation makes of the rows that fill a block up."""
    rng = np.random.default_rng(9)
    arrays, ids = draw(rng, 30, 5, 2), rng.choice(np.int32(used), (30, 2))
    idle = [e for e in range(5) if e not in used]
    clean = run(implementation, ids, *arrays)
    for w in arrays[2:5]:
        w[idle] = np.nan
    spoiled = run(implementation, ids, *arrays)
    for a, b in zip(clean, spoiled, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(spoiled[3])[idle] == 0).all()


def test_an_activation_that_is_steep_at_0():
    """Its derivative at the rows that fill a block up is not finite, and reaches nothing."""
    rng = np.random.default_rng(10)
    x, weights, w1, w3, w2, _ = draw(rng, 5, 4, 1)
    layer = functools.partial(expert_layer, activation=lambda a, c: jnp.sqrt(jnp.abs(a)) * c, implementation="blocked")
    loss = lambda *matrices: layer(x, np.int32([[0], [0], [1], [0], [0]]), weights, *matrices).sum()  # noqa: E731
    gradients = jax.grad(loss, argnums=(0, 1, 2))(w1, w3, w2)  # numpy arrays, not under jit
    assert all(np.isfinite(g).all() for g in gradients) and np.abs(gradients[0][:2]).min() > 0


def test_64_bit_ids_outside_go_nowhere():
    with jax.enable_x64(True):
        ids = np.array([[2**32], [2**32 + 1], [2 - 2**32], [-1], [1]])
        x, weights, w1, w3, w2, _ = draw(np.random.default_rng(11), 5, 3, 1)
        y = expert_layer(x, ids, weights, w1, w3, w2, activation=situ)
    assert (np.asarray(y[:4]) == 0).all() and (np.asarray(y[4]) != 0).any()


def arguments(experts, tokens=512, k=4, latent=32, inner=48):
    shapes = (tokens, latent), (tokens, k), *[(experts, latent, inner)] * 2, (experts, inner, latent), (tokens, latent)
    return [jax.ShapeDtypeStruct((tokens, k), jnp.int32), *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)]


@pytest.mark.parametrize("experts", [16, 64, 896])
def test_memory(experts):
    """Below twice what comes in, goes out, and one array of T * k rows; no array of tokens by all experts' widths."""
    shapes = arguments(experts)
    program = run.lower("blocked", *shapes).compile()
    rows = 512 * 4 * 32 * 4
    size = lambda x: int(np.prod(x.shape)) * 4  # noqa: E731
    analytic = sum(map(size, shapes)) + sum(map(size, shapes[1:])) + rows
    used = program.memory_analysis()
    total = used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
    assert analytic < total < 2 * analytic
    shaped = {tuple(map(int, x.split(","))) for x in re.findall(r"\[([\d,]+)\]", program.as_text())}
    largest = max(np.prod(x) for x in shaped)
    assert largest == max(experts * 32 * 48, 512 * 4 * 32)


def check_kept(implementation, ids, arrays):
    """Between forward and backward the layer keeps its arguments and nothing else."""

    def layer(x, weights, w1, w3, w2):
        return expert_layer(x, ids, weights, w1, w3, w2, activation=situ, implementation=implementation)

    kept = sorted(x.shape for x in jax.tree.leaves(jax.vjp(layer, *arrays)[1]))
    wanted = sorted(x.shape for x in (ids, *arrays))
    assert kept == wanted


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keeps_its_arguments_only(implementation):
    ids, *arrays, _ = (jnp.zeros(x.shape, x.dtype) for x in arguments(16))
    check_kept(implementation, ids, arrays)


def equations(jaxpr) -> int:
    return sum(1 + sum(equations(sub) for sub in jaxprs_in_params(e.params)) for e in jaxpr.eqns)


def test_programs_stay_small():
    """The 93-layer train step has a budget of 80,000 equations."""
    jaxpr = jax.make_jaxpr(functools.partial(run, "blocked"))(*arguments(16)).jaxpr
    assert equations(jaxpr) <= 480


def test_no_tokens_no_experts_and_bad_shapes():
    x, ids, weights = jnp.ones((3, 4)), jnp.zeros((3, 2), jnp.int32), jnp.ones((3, 2))
    w1, w2 = jnp.ones((5, 4, 6)), jnp.ones((5, 6, 4))
    layer = functools.partial(expert_layer, activation=situ)
    assert layer(x[:0], ids[:0], weights[:0], w1, w1, w2).shape == (0, 4)
    assert (layer(x, ids, weights, w1[:0], w1[:0], w2[:0]) == 0).all()
    bad = [
        (x[0], ids, weights, w1, w1, w2), (x, ids[:2], weights, w1, w1, w2), (x, weights, weights, w1, w1, w2),
        (x, ids, weights, w1[:, :3], w1, w2), (x, ids, weights, w1, w1[:4], w2), (x, ids, weights, w1, w1, w1),
        (x, ids, weights, w1.astype(jnp.bfloat16), w1, w2),
    ]  # fmt: skip
    for case in bad:
        with pytest.raises(ValueError, match="expert_layer"):
            layer(*case)
    with pytest.raises(ValueError, match="'fast'"):
        layer(x, ids, weights, w1, w1, w2, implementation="fast")
