"""Packed rows: each document as if it were alone, padding as if it were not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close

from pallas_kernels.kda import kda
from pallas_kernels.kda.segments import DOCUMENT_START, PADDING, TOKEN, marks

HEADS, VALUE_HEADS, WIDTH, VALUE_WIDTH, LENGTH = 2, 4, 6, 5, 45
PER_TOKEN = "query", "key", "value", "log_decay", "beta"
OPTIONS = {"lower_bound": -5.0, "normalize_qk": True, "beta_is_logit": True}
# (id, tokens) one after the other: padding before, inside, between and after documents; documents that start and end
# at and beside borders of chunks; a single document; a row of padding.
ROWS = [
    [(0, 3), (4, 5), (0, 2), (4, 6), (1, 16), (9, 1), (0, 4), (7, 3), (0, 5)],
    [(1, LENGTH)],
    [(0, LENGTH)],
    [(5, 15), (6, 1), (2, 17), (0, 11), (2, 1)],
]
SEGMENT_IDS = np.stack([np.concatenate([np.full(n, i) for i, n in row]) for row in ROWS]).astype(np.int32)


@functools.cache
def arrays():
    """Inputs and output gradients, finite everywhere."""
    rng = np.random.default_rng(0)
    rows = len(ROWS)
    shapes = {
        "query": (rows, LENGTH, HEADS, WIDTH), "key": (rows, LENGTH, HEADS, WIDTH),
        "value": (rows, LENGTH, VALUE_HEADS, VALUE_WIDTH), "log_decay": (rows, LENGTH, VALUE_HEADS, WIDTH),
        "beta": (rows, LENGTH, VALUE_HEADS), "a_log": (VALUE_HEADS,), "dt_bias": (VALUE_HEADS, WIDTH),
        "initial_state": (rows, VALUE_HEADS, WIDTH, VALUE_WIDTH),
    }  # fmt: skip
    inputs = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    d_output, d_state = (rng.normal(size=shapes[name]).astype(np.float32) for name in ("value", "initial_state"))
    return inputs, d_output, d_state


def with_padding(x, content):
    """x with `content` at padding."""
    x = x.copy()
    x[SEGMENT_IDS == 0] = content
    return x


@functools.partial(jax.jit, static_argnames=("implementation", "state_every"))
def packed(inputs, d_output, d_state, segment_ids, *, implementation="xla", state_every=1):
    """output, final state, gradients."""
    call = functools.partial(
        kda, segment_ids=segment_ids, implementation=implementation, state_every=state_every, **OPTIONS
    )
    (output, state), pull_back = jax.vjp(lambda inputs: call(**inputs), inputs)
    return output, state, pull_back((d_output, d_state))[0]


def documents():
    """Row and positions of each document, its row's last document or not, first or not."""
    for row, ids in enumerate(SEGMENT_IDS):
        order = list(dict.fromkeys(ids[ids != 0]))
        for i in order:
            yield row, np.flatnonzero(ids == i), i == order[0], i == order[-1]


@functools.cache
def alone():
    """The same three results with each document alone: no packing, gates by the formulas, the scan in one row each.

    The short documents are filled up with tokens that write nothing and decay nothing.
    """
    found = list(documents())
    index = np.zeros((len(found), LENGTH), np.int32)
    kept = np.zeros((len(found), LENGTH), bool)
    for n, (row, positions, _, _) in enumerate(found):
        index[n, : len(positions)] = row * LENGTH + positions
        kept[n, : len(positions)] = True
    rows = np.array([row for row, *_ in found])
    first, last = (np.array([flag[i] for flag in found]) for i in (2, 3))

    def run(inputs):
        z = inputs["log_decay"] + inputs["dt_bias"][None, None]
        plain = {
            "log_decay": -5 * jax.nn.sigmoid(jnp.exp(inputs["a_log"])[None, None, :, None] * z),
            "beta": jax.nn.sigmoid(inputs["beta"]),
            "value": inputs["value"],
        }
        for name in ("query", "key"):
            x = inputs[name]
            x = x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
            plain[name] = jnp.repeat(x, VALUE_HEADS // HEADS, axis=2)
        for name, x in plain.items():
            x = x.reshape(-1, *x.shape[2:])[index]
            plain[name] = jnp.where(kept.reshape(*kept.shape, *[1] * (x.ndim - 2)), x, 0)
        start = jnp.where(first[:, None, None, None], inputs["initial_state"][rows], 0)
        output, state = kda(**plain, initial_state=start, implementation="reference")
        # Back to rows. Positions that no document holds stay 0; a row without documents keeps its state.
        packed = jnp.zeros((len(ROWS) * LENGTH, *output.shape[2:])).at[index[kept]].set(output[kept])
        state = inputs["initial_state"].at[rows[last]].set(state[last])
        return packed.reshape(len(ROWS), LENGTH, *output.shape[2:]), state

    @jax.jit
    def results(inputs, d_output, d_state):
        (output, state), pull_back = jax.vjp(run, inputs)
        return output, state, pull_back((d_output, d_state))[0]

    return results(*arrays())


@pytest.mark.parametrize("content", [np.nan, np.inf])
@pytest.mark.parametrize("implementation, state_every", [("xla", 1), ("xla", 2), ("reference", 1)])
def test_documents_are_alone_and_padding_is_skipped(implementation, state_every, content):
    """Padding holds NaN or inf, in the inputs and in the gradient of the output."""
    inputs, d_output, d_state = arrays()
    inputs = {name: with_padding(x, content) if name in PER_TOKEN else x for name, x in inputs.items()}
    output, state, gradients = packed(
        inputs,
        with_padding(d_output, content),
        d_state,
        SEGMENT_IDS,
        implementation=implementation,
        state_every=state_every,
    )
    expected_output, expected_state, expected_gradients = alone()
    assert_close(output, expected_output, 1e-5, "output")
    assert_close(state, expected_state, 1e-5, "state")
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], 2e-5, f"d {name}")
    padding = SEGMENT_IDS == 0
    assert (output[padding] == 0).all()
    assert all((gradients[name][padding] == 0).all() for name in PER_TOKEN)
    # A row of padding hands its state on.
    np.testing.assert_array_equal(state[2], inputs["initial_state"][2])
    np.testing.assert_array_equal(gradients["initial_state"][2], d_state[2])


def test_documents_and_later_tokens_change_no_bit():
    inputs, d_output, d_state = arrays()
    d_output, d_state = d_output.copy(), np.zeros_like(d_state)
    # Only document 1 of row 0 is asked for: positions 16..31, a chunk of its own, and 6 of row 3: position 15 of 0..15.
    asked = [(0, 1), (3, 6)]
    chosen = np.zeros_like(SEGMENT_IDS, bool)
    for row, i in asked:
        chosen[row] |= SEGMENT_IDS[row] == i
    d_output[~chosen] = 0
    output, _, gradients = packed(inputs, d_output, d_state, SEGMENT_IDS)
    edited = {name: x.copy() for name, x in inputs.items()}
    for name in PER_TOKEN:
        edited[name][~chosen] *= -7
    ids = SEGMENT_IDS.copy()
    ids[0, 32:] = [8] * 6 + [0] * 7  # later documents may begin and end elsewhere
    ids[3, 16:] = 0
    other_output, _, other_gradients = packed(edited, d_output, d_state, ids)
    np.testing.assert_array_equal(other_output[chosen], output[chosen])
    for name in PER_TOKEN:
        np.testing.assert_array_equal(other_gradients[name][chosen], gradients[name][chosen], err_msg=name)
        assert (gradients[name][chosen] != 0).any()
        for g in (gradients, other_gradients):
            assert (g[name][~chosen] == 0).all(), name
    assert (gradients["initial_state"] == 0).all()


def test_marks_by_hand():
    ids = np.int32([[0, 3, 3, 0, 3, 5, 0, 6], [0, 0, 0, 0, 0, 0, 0, 2], [1, 2, 3, 0, 0, 0, 0, 3], [0] * 8])
    p, t, s = PADDING, TOKEN, DOCUMENT_START
    expected = [[p, t, t, p, t, s, p, s], [p] * 7 + [t], [t, s, s, p, p, p, p, t], [p] * 8]
    np.testing.assert_array_equal(jax.jit(marks)(ids), expected)
    for end in (0, 1, 6):  # no id changes what stands before it
        np.testing.assert_array_equal(jax.jit(marks)(ids[:, :end]), np.asarray(expected)[:, :end])
