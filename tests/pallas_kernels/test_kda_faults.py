"""Inputs on which other KDA implementations went wrong, with right answers from the published equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close

from pallas_kernels.kda import kda
from pallas_kernels.kda.inputs import Inputs, Options, activate

IMPLEMENTATIONS = ["xla", "reference"]
ARGUMENTS = "query", "key", "value", "log_decay", "beta"


def slow(*case):
    """A case for the full matrix only: each is a program of its own, and compiling them is the cost."""
    return pytest.param(*case, marks=pytest.mark.slow)


@functools.partial(jax.jit, static_argnames=("implementation", "options"))
def outputs_and_gradients(inputs, d_output, d_state=None, *, implementation="xla", options=()):
    """output, final state, gradients of sum(output * d_output) + sum(state * d_state)."""
    call = functools.partial(kda, implementation=implementation, **dict(options))
    (output, state), pull_back = jax.vjp(lambda inputs: call(**inputs), inputs)
    (gradients,) = pull_back((d_output, jnp.zeros_like(state) if d_state is None else d_state))
    return output, state, gradients


def options(**names):
    """Hashable keyword arguments."""
    return tuple(names.items())


# O01: exponentials of positive differences, masked only afterwards, gave NaN gradients.


@pytest.mark.parametrize(
    "length, dtype, implementation",
    [(64, "float32", "xla"), slow(128, "float32", "xla"), (130, "float32", "xla"), (130, "bfloat16", "xla"),
     (64, "float32", "reference")],
)  # fmt: skip
def test_strong_decay_has_finite_gradients(length, dtype, implementation):
    one = np.eye(4)[:1] * np.ones((length, 1))
    inputs = {
        "query": one, "key": one, "value": np.ones((length, 1)),
        "log_decay": np.full((length, 4), -5.0), "beta": np.full(length, 0.5),
    }  # fmt: skip
    inputs = {name: x[None, :, None].astype(dtype) for name, x in inputs.items()}
    output, _, gradients = outputs_and_gradients(
        inputs, np.ones((1, length, 1, 1), dtype), implementation=implementation, options=options(scale=0.5)
    )
    assert output.dtype == dtype and all(x.dtype == dtype for x in gradients.values())

    # s_t = a s_{t-1} + 0.5, a = 0.5 e^-5; later_t = sum_{j >= t} a^{j-t}
    a, state, later = 0.5 * np.exp(-5.0), np.zeros(length + 1), np.ones(length)
    for t in range(length):
        state[t + 1] = a * state[t] + 0.5
    for t in reversed(range(length - 1)):
        later[t] = 1 + a * later[t + 1]
    expected = 0.5 * state[1:], 0.25 * later, 0.5 * a * state[:-1] * later
    actual = output[0, :, 0, 0], gradients["value"][0, :, 0, 0], gradients["log_decay"][0, :, 0, 0]
    for name, x, y in zip(("output", "d value", "d log_decay"), actual, expected, strict=True):
        assert_close(x, y, 1e-5 if dtype == "float32" else 2e-2, name)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in gradients.values())
    assert (np.asarray(gradients["log_decay"][..., 1:], np.float32) == 0).all()
    assert gradients["log_decay"][0, 0, 0, 0] == 0
    if length == 64:  # the published figures
        np.testing.assert_allclose(output[0, [0, 1, 63], 0, 0], [0.25, 0.25084224, 0.25084509], rtol=1e-6)
        np.testing.assert_allclose(gradients["value"][0, [0, 63], 0, 0], [0.25084509, 0.25], rtol=1e-6)
        figures = gradients["log_decay"][0, [1, 31, 63], 0, 0]
        np.testing.assert_allclose(figures, [8.4509e-4, 8.4795e-4, 8.4509e-4], rtol=1e-4)


# O02: the inverse of the chunk's triangular matrix blew up on equal keys without decay.


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equal_keys_without_decay(implementation):
    rng = np.random.default_rng(0)
    length, width = 128, 16
    unit = rng.normal(size=width)
    unit /= np.linalg.norm(unit)
    query, value, d_output = (rng.normal(size=(length, n)) for n in (width, 8, 8))
    inputs = {
        "query": query, "key": np.tile(unit, (length, 1)), "value": value,
        "log_decay": np.zeros((length, width)), "beta": np.ones(length),
    }  # fmt: skip
    inputs = {name: x[None, :, None].astype(np.float32) for name, x in inputs.items()}
    output, state, gradients = outputs_and_gradients(
        inputs,
        d_output[None, :, None].astype(np.float32),
        implementation=implementation,
        options=options(scale=0.25),
    )
    weight = 0.25 * (query @ unit)[:, None]
    assert_close(output[0, :, 0], weight * value, 1e-5, "output")
    assert_close(state[0, 0], np.outer(unit, value[-1]), 1e-5, "state")
    assert_close(gradients["value"][0, :, 0], weight * d_output, 1e-5, "d value")
    assert all(np.isfinite(x).all() for x in gradients.values())


# O03: later tokens changed the bits of earlier ones.

EDITS = {"query": 2.0, "key": -1.0, "value": 3.0, "log_decay": 30.0, "beta": 0.25}


def layer_inputs(length, heads, width, dtype, seed=0):
    """What a K3 layer hands over: raw gates with a bound; the last token's decay is 1."""
    rng = np.random.default_rng(seed)
    shape = (1, length, heads, width)
    inputs = {name: rng.normal(size=shape).astype(dtype) for name in ARGUMENTS[:3]}
    raw = rng.normal(size=shape).astype(np.float32)
    raw[:, -1] = -30
    return inputs | {"log_decay": raw, "beta": np.ones(shape[:3], np.float32)}


@pytest.mark.parametrize(
    "length, width, dtype, implementation",
    [(22, 128, "bfloat16", "xla"), slow(17, 128, "bfloat16", "xla"), slow(33, 16, "bfloat16", "xla"),
     slow(65, 16, "bfloat16", "xla"), (70, 16, "float32", "xla"), slow(22, 128, "float32", "xla"),
     (22, 16, "float32", "reference")],
)  # fmt: skip
def test_later_tokens_change_no_bit(length, width, dtype, implementation):
    heads = 4 if width == 128 else 2
    inputs = layer_inputs(length, heads, width, dtype)
    inputs["a_log"], inputs["dt_bias"] = np.zeros(heads, np.float32), np.zeros((heads, width), np.float32)
    probe = np.random.default_rng(1).normal(size=inputs["value"].shape).astype(dtype)
    probe[:, -1] = 0
    settings = options(lower_bound=-5.0, normalize_qk=True)
    run = functools.partial(outputs_and_gradients, implementation=implementation, options=settings)
    output, state, gradients = run(inputs, probe)
    for name, change in EDITS.items():
        edited = dict(inputs, **{name: inputs[name].copy()})
        edited[name][:, -1] = edited[name][:, -1] * change if name == "beta" else change
        other_output, other_state, other_gradients = run(edited, probe)
        assert (other_output != output).any() or (other_state != state).any(), name
        np.testing.assert_array_equal(other_output[:, :-1], output[:, :-1], err_msg=name)
        for of in ARGUMENTS:
            np.testing.assert_array_equal(other_gradients[of][:, :-1], gradients[of][:, :-1], err_msg=(name, of))
            assert (np.asarray(other_gradients[of][:, -1], np.float32) == 0).all(), (name, of)
        for of in ("a_log", "dt_bias"):
            np.testing.assert_array_equal(other_gradients[of], gradients[of], err_msg=(name, of))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_three_tokens_by_hand(implementation):
    """Correcting before decaying would give o_2 = [2.34, -0.92]."""
    inputs = {
        "query": [[1, 0], [0, 1], [1, 1]], "key": [[1, 0], [0.6, 0.8], [0, 1]], "value": [[1, 2], [3, -1], [0, 4]],
        "log_decay": np.log([[1, 1], [0.5, 0.25], [0.8, 0.5]]), "beta": [0.5, 1, 0.25],
    }  # fmt: skip
    inputs = {name: np.asarray(x, np.float32)[None, :, None].repeat(2, 0) for name, x in inputs.items()}
    inputs["initial_state"] = np.stack([np.zeros((1, 2, 2)), np.eye(2)[None]]).astype(np.float32)
    call = jax.jit(functools.partial(kda, scale=1.0, implementation=implementation))
    output, state = call(**inputs)
    expected = [[0.5, 1], [2.28, -1.04], [2.423, 0.386]], [[1, 1], [2.16, -0.95], [2.506, 0.32375]]
    assert_close(output[:, :, 0], expected, 1e-6, "output")
    expected = [[1.568, -0.224], [0.855, 0.61]], [[1.696, -0.32], [0.81, 0.64375]]
    assert_close(state[:, 0], expected, 1e-6, "state")


# O05: epsilon was added to the mean of squares.


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_small_and_zero_vectors_are_normalised_by_their_sum_of_squares(implementation):
    """One token, a row per size of vector. Head 0 writes its key in column 0, head 1 reads the identity."""
    width, sizes, expected = 128, [1e-4, 1e-3, 0.0], [0.0662266, 0.0880451, 0.0]
    x = np.broadcast_to(np.reshape(sizes, (3, 1, 1, 1)), (3, 1, 2, width)).astype(np.float32)
    value = np.zeros((3, 1, 2, width), np.float32)
    value[..., 0] = 1
    inputs = {
        "query": x, "key": x, "value": value, "log_decay": np.zeros_like(x),
        "beta": np.tile(np.float32([1, 0]), (3, 1, 1)),
        "initial_state": np.tile(np.stack([np.zeros((width, width)), np.eye(width)]).astype(np.float32), (3, 1, 1, 1)),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    d_output, d_state = np.zeros_like(value), np.zeros((3, 2, width, width), np.float32)
    d_output[2, 0, 1], d_state[2, 0, :, 0] = rng.normal(size=(2, width))
    output, state, gradients = outputs_and_gradients(
        inputs, d_output, d_state, implementation=implementation, options=options(normalize_qk=True)
    )
    expected = np.tile(np.reshape(expected, (3, 1)), (1, width))
    np.testing.assert_allclose(state[:, 0, :, 0], expected, rtol=2e-6)
    np.testing.assert_allclose(output[:, 0, 1], expected * width**-0.5, rtol=2e-6)
    assert_close(gradients["key"][2, 0, 0], 1000 * d_state[2, 0, :, 0], 1e-5, "Jacobian of the key")
    assert_close(gradients["query"][2, 0, 1], 1000 * width**-0.5 * d_output[2, 0, 1], 1e-5, "Jacobian of the query")


# O06: the bounded gate taken for a clamped softplus, or the gain applied before the bias.

GATES = [  # a_log, x, dt_bias, bounded by -5, unbounded
    (0, 0, 0, -2.5, -0.693147),
    (0, 1, 0, -3.655293, -1.313262),
    (0, -1, 0, -1.344707, -0.313262),
    (0, 10, 0, -4.999773, -10.000045),
    (np.log(2), 1, 0, -4.403985, -2.626523),
    (np.log(2), -3, 0, -0.0123631, -0.0971747),
    (np.log(2), 0.5, 0.5, -4.403985, -2.626523),  # the bias outside of the gain would give -4.087872
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gates(lower_bound, implementation):
    """A head per case; nothing is written, so that the state decays by the gate alone."""
    a_log, x, dt_bias, *expected = np.asarray(GATES, np.float32).T
    heads = len(GATES)
    zeros = np.zeros((1, 1, heads, 1), np.float32)
    inputs = {
        "query": zeros, "key": zeros, "value": zeros, "log_decay": x.reshape(1, 1, heads, 1),
        "beta": zeros[..., 0], "a_log": a_log, "dt_bias": dt_bias[:, None],
        "initial_state": np.ones((1, heads, 1, 1), np.float32),
    }  # fmt: skip
    _, state = jax.jit(functools.partial(kda, lower_bound=lower_bound, implementation=implementation))(**inputs)
    np.testing.assert_allclose(np.log(state[0, :, 0, 0]), expected[lower_bound is None], rtol=5e-6)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gates_at_their_ends(lower_bound):
    """z = -1e4 and 1e4: both are finite, and so are their gradients."""
    z = np.float32([-1e4, 1e4]).reshape(1, 1, 1, 2)
    a_log, zero = np.float32([np.log(2)]), np.zeros((1, 1, 1, 2), np.float32)
    settings = Options(1.0, lower_bound, False, False, 1)

    @jax.jit
    def gate(z, a_log):
        return activate(Inputs(zero, zero, zero, z, zero[..., 0], a_log, None, None, None), settings)[3]

    log_decay, pull_back = jax.vjp(gate, z, a_log)
    d_z, d_a_log = pull_back(jnp.ones_like(log_decay))
    bounded = lower_bound is not None
    np.testing.assert_allclose(log_decay.ravel(), [0, -5 if bounded else -2e4], rtol=1e-6)
    np.testing.assert_allclose(d_z.ravel(), [0, 0 if bounded else -2], rtol=1e-6)
    np.testing.assert_allclose(d_a_log, [0 if bounded else -2e4], rtol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("lower_bound, slope", [(None, -0.5), (-5.0, -1.25)])
def test_slope_of_a_gate_at_zero(lower_bound, slope, implementation):
    """What max(x, 0) and |x| add up to has a derivative at 0 that they have not: softplus'(0) = sigmoid(0) = 1/2."""
    zero, beta = np.zeros((1, 1, 1, 2), np.float32), np.zeros((1, 1, 1), np.float32)
    a_log = np.log(np.float32([3]))

    def state_of(raw):
        options = {"a_log": a_log, "lower_bound": lower_bound, "implementation": implementation}
        return kda(zero, zero, zero, raw, beta, initial_state=np.ones((1, 1, 2, 2), np.float32), **options)[1]

    state, pull_back = jax.vjp(jax.jit(state_of), zero)
    decay = np.exp(-2.5) if lower_bound else 0.5**3  # e^(-3 ln 2)
    np.testing.assert_allclose(state, np.full((1, 1, 2, 2), decay), rtol=1e-6)
    np.testing.assert_allclose(
        pull_back(jnp.ones_like(state))[0], np.full((1, 1, 1, 2), 2 * 3 * slope * decay), rtol=1e-6
    )
