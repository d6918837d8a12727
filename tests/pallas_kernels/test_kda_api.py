"""What kda promises besides its numbers: shapes, dtypes, lengths, memory, the size of the program."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close
from jax.extend.core import jaxprs_in_params
from kda_cases import IMPLEMENTATIONS
from kda_oracle import kda as oracle

from pallas_kernels import select
from pallas_kernels.kda import kda

BATCH, LENGTH, HEADS, VALUE_HEADS, WIDTH, VALUE_WIDTH = 2, 40, 2, 4, 6, 5
LAYER = {"lower_bound": -5.0, "normalize_qk": True, "beta_is_logit": True}


def arrays(length=LENGTH, dtype=np.float32):
    """Inputs of a layer: raw gates and logits."""
    rng = np.random.default_rng(0)
    shapes = {
        "query": (BATCH, length, HEADS, WIDTH), "key": (BATCH, length, HEADS, WIDTH),
        "value": (BATCH, length, VALUE_HEADS, VALUE_WIDTH), "log_decay": (BATCH, length, VALUE_HEADS, WIDTH),
        "beta": (BATCH, length, VALUE_HEADS), "a_log": (VALUE_HEADS,), "dt_bias": (VALUE_HEADS, WIDTH),
        "initial_state": (BATCH, VALUE_HEADS, WIDTH, VALUE_WIDTH),
    }  # fmt: skip
    kept = "a_log", "dt_bias", "initial_state"
    return {name: rng.normal(size=s).astype(np.float32 if name in kept else dtype) for name, s in shapes.items()}


@functools.partial(jax.jit, static_argnames=("state_every", "implementation"))
def results(inputs, d_output, d_state, state_every=1, implementation="xla"):
    """output, final state, gradients."""
    call = functools.partial(kda, state_every=state_every, implementation=implementation, **LAYER)
    (output, state), pull_back = jax.vjp(lambda inputs: call(**inputs), inputs)
    return output, state, pull_back((d_output, d_state))[0]


def probes(inputs):
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=inputs[n].shape).astype(inputs[n].dtype) for n in ("value", "initial_state"))


WRONG = {
    "query": ((2, 40, 12), r"query has shape \(2, 40, 12\), expected \[B, T, H, K\]"),
    "key": ((2, 40, 4, 6), r"key has shape \(2, 40, 4, 6\), expected \(2, 40, 2, 6\)"),
    "value": ((2, 40, 3, 5), r"multiple of query's: value has shape \(2, 40, 3, 5\), query \(2, 40, 2, 6\)"),
    "log_decay": ((2, 40, 4), r"log_decay has shape \(2, 40, 4\), expected \(2, 40, 4, 6\)"),
    "beta": ((2, 40, 2), r"beta has shape \(2, 40, 2\), expected \(2, 40, 4\)"),
    "a_log": ((2,), r"a_log has shape \(2,\), expected \(4,\)"),
    "dt_bias": ((4,), r"dt_bias has shape \(4,\), expected \(4, 6\)"),
    "initial_state": ((2, 4, 5, 6), r"initial_state has shape \(2, 4, 5, 6\), expected \(2, 4, 6, 5\)"),
    "segment_ids": ((40,), r"segment_ids has shape \(40,\), expected \(2, 40\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_are_named(name):
    shape, message = WRONG[name]
    inputs = arrays() | {name: np.zeros(shape, np.int32 if name == "segment_ids" else np.float32)}
    with pytest.raises(ValueError, match=message):
        kda(**inputs)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lower_bound": 5.0}, "lower_bound is 5.0, expected a negative log decay"),
        ({"a_log": None}, "the gate, which needs a_log"),
        ({"a_log": None, "dt_bias": None, "lower_bound": -5.0}, "the gate, which needs a_log"),
        ({"state_every": 0}, "state_every is 0"),
        ({"segment_ids": np.ones((BATCH, LENGTH), np.float32)}, "segment_ids are float32, expected integers"),
        ({"implementation": "fast"}, "unknown implementation 'fast'; there are: gpu, xla, reference, products"),
        ({"query": np.zeros((BATCH, LENGTH, 0, WIDTH))}, "at least one head"),
    ],
)
def test_wrong_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        kda(**(arrays() | changes))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_no_tokens(implementation):
    inputs = arrays(0)
    output, state, gradients = results(inputs, *probes(inputs), implementation=implementation)
    assert output.shape == (BATCH, 0, VALUE_HEADS, VALUE_WIDTH)
    np.testing.assert_array_equal(state, inputs["initial_state"])
    np.testing.assert_array_equal(gradients["initial_state"], probes(inputs)[1])
    assert (gradients["a_log"] == 0).all() and (gradients["dt_bias"] == 0).all()


def test_final_state_goes_on():
    """Two parts, the second from the final state of the first, are the whole."""
    inputs = arrays()
    call = jax.jit(functools.partial(kda, **LAYER))
    output, state = call(**inputs)
    parts = []
    for tokens in (slice(0, 23), slice(23, None)):
        sequences = {n: inputs[n][:, tokens] for n in ("query", "key", "value", "log_decay", "beta")}
        part, inputs["initial_state"] = call(**(inputs | sequences))
        parts.append(part)
    assert_close(np.concatenate(parts, 1), output, 1e-6, "output")
    assert_close(inputs["initial_state"], state, 1e-6, "state")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision(implementation):
    """Outputs and gradients have their inputs' dtypes; sums are fp32, so that little but the last rounding is lost."""
    half = {n: x if n == "a_log" else x.astype(jnp.bfloat16) for n, x in arrays().items()}
    single = {name: x.astype(np.float32) for name, x in half.items()}
    d_output, d_state = probes(half)
    d_state = d_state.astype(np.float32)
    output, state, gradients = results(half, d_output, d_state, implementation=implementation)
    assert output.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    assert all(gradients[name].dtype == half[name].dtype for name in half)
    expected = oracle(single, d_output.astype(np.float32), d_state, **LAYER)

    def relative_rms(actual, wanted):
        actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
        return np.sqrt(np.mean((actual - wanted) ** 2) / np.mean(wanted**2))

    assert relative_rms(output, expected[0]) < 5e-3
    assert_close(state, expected[1], 1e-5, "state")
    for name, gradient in gradients.items():
        assert relative_rms(gradient, expected[2][name]) < 5e-3, name


@pytest.mark.parametrize("state_every, states", [(1, 8), (3, 3), (4, 2)])
def test_backward_keeps_the_inputs_and_a_state_per_group_of_chunks(state_every, states):
    """128 tokens are 8 chunks."""
    inputs = {name: jnp.asarray(x) for name, x in arrays(128).items()}
    call = functools.partial(kda, state_every=state_every, **LAYER)
    pull_back = jax.eval_shape(lambda inputs: jax.vjp(lambda inputs: call(**inputs), inputs)[1], inputs)
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull_back))
    padding = -128 % (
        16 * state_every
    )  # tokens that fill up the last group, and a mark for each token if there are any
    per_token = 4 * (2 * HEADS * WIDTH + VALUE_HEADS * (VALUE_WIDTH + WIDTH + 1) + (padding > 0))
    parameters = 4 * VALUE_HEADS * (1 + WIDTH)
    state = 4 * VALUE_HEADS * WIDTH * VALUE_WIDTH
    expected = BATCH * ((128 + padding) * per_token + (1 + states) * state) + parameters
    assert expected <= kept < expected + 64  # a few constants


def equations(jaxpr):
    """Equations of a program and of all programs inside it."""
    return sum(1 + sum(equations(inner) for inner in jaxprs_in_params(e.params)) for e in jaxpr.eqns)


def test_program_is_small_and_does_not_grow_with_the_sequence():
    """A step of a large model holds dozens of these programs, each differentiated and recomputed."""

    def loss(inputs, segment_ids):
        output, state = kda(segment_ids=segment_ids, **inputs, **LAYER)
        return output.sum() + state.sum()

    counts = []
    for length in (64, 4096):
        inputs = jax.tree.map(jnp.asarray, arrays(length))
        segment_ids = jnp.ones((BATCH, length), jnp.int32)
        counts.append([equations(jax.make_jaxpr(f)(inputs, segment_ids).jaxpr) for f in (loss, jax.grad(loss))])
    assert counts[0] == counts[1]
    assert counts[0][0] <= 190 and counts[0][1] <= 550, counts[0]


def test_selection(caplog):
    """The first that does not refuse runs and is named in the log, once; a named one is never replaced."""

    def refuses(x):
        raise NotImplementedError(f"no {x}")

    choices = {"quick": refuses, "plain": lambda x: x + 1}
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        assert select.run("an operation", choices, None, 1) == 2
        assert select.run("an operation", choices, None, 1) == 2
        assert select.run("an operation", choices, "plain", 1) == 2
    assert [r.getMessage() for r in caplog.records] == ["an operation: plain (quick: no 1)", "an operation: plain"]
    with pytest.raises(NotImplementedError, match="no 1"):
        select.run("an operation", choices, "quick", 1)
    with pytest.raises(NotImplementedError, match=r"an operation: no implementation takes this case \(quick: no 1\)"):
        select.run("an operation", {"quick": refuses}, None, 1)
