"""A sequence in unequal pieces: summaries combine to the states and gradients of one pass."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close
from kda_cases import FUSED, PER_TOKEN, VALUE_HEADS, VALUE_WIDTH, WIDTH, Case, answered, random_inputs
from kda_oracle import kda as oracle

from pallas_kernels.kda import context, kda

LENGTH = 83
BORDERS = {1: [0, 83], 2: [0, 30, 83], 3: [0, 1, 48, 83], 8: [0, 16, 17, 20, 40, 41, 64, 82, 83]}
OPTIONS = {"lower_bound": -5.0, **FUSED}
# Documents across borders, one that ends at a border, a piece of padding alone (16..17), padding beside a border.
ROWS = [
    [(3, 35), (8, 13), (0, 4), (5, 12), (6, 19)],
    [(0, 2), (1, 14), (0, 6), (1, 40), (2, 21)],
    [(4, 83)],
]
SEGMENT_IDS = np.stack([np.concatenate([np.full(n, i) for i, n in row]) for row in ROWS]).astype(np.int32)


@functools.cache
def whole(packed) -> Case:
    """The float64 recurrence over the whole sequence."""
    inputs = random_inputs(LENGTH, batch=len(ROWS), seed=10, raw=True)
    return answered(inputs, segment_ids=SEGMENT_IDS if packed else None, **OPTIONS)


def left_ids(start):
    """Document of the last token before `start`, row by row."""
    before = [ids[:start][ids[:start] != 0] for ids in SEGMENT_IDS]
    return np.int32([ids[-1] if ids.size else 0 for ids in before])


def in_pieces(inputs, borders, packed):
    """What devices would do: summaries first, the states before all pieces from those, then each piece from its own."""
    pieces = []
    for start, end in itertools.pairwise(borders):
        piece = inputs | {name: inputs[name][:, start:end] for name in PER_TOKEN}
        documents = {"segment_ids": SEGMENT_IDS[:, start:end], "left_segment_id": left_ids(start)} if packed else {}
        pieces.append((piece, documents))
    summaries = []
    for piece, documents in pieces[:-1]:
        arrays = {name: x for name, x in piece.items() if name not in ("query", "initial_state")}
        summaries.append(context.summarize(**arrays, **documents, **OPTIONS))
    prefixes = jax.tree.map(lambda *x: jnp.stack(x), *summaries) if summaries else None
    states = [inputs["initial_state"]]
    if prefixes is not None:
        prefixes = jax.lax.associative_scan(context.combine, prefixes)
        for n in range(len(summaries)):
            states.append(context.leave(states[0], jax.tree.map(lambda x, n=n: x[n], prefixes)))
    outputs = []
    for (piece, documents), state in zip(pieces, states, strict=True):
        if packed:
            state = context.enter(state, **documents)
        ids = documents.get("segment_ids")
        output, state = kda(**(piece | {"initial_state": state}), segment_ids=ids, implementation="xla", **OPTIONS)
        outputs.append(output)
    return jnp.concatenate(outputs, 1), state


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_pieces_are_one_pass(count, packed):
    case = whole(packed)

    @jax.jit
    def run(inputs):
        results, pull_back = jax.vjp(lambda inputs: in_pieces(inputs, BORDERS[count], packed), inputs)
        return *results, pull_back((case.d_output, case.d_state))[0]

    output, state, gradients = run(case.inputs)
    assert_close(output, case.output, 1e-6, "output")
    assert_close(state, case.state, 1e-6, "state")
    for name, gradient in gradients.items():
        assert_close(gradient, case.gradients[name], 1e-6, name)


@pytest.mark.parametrize("state_every", [1, 3])
def test_gates_and_states_kept(state_every):
    """The unbounded gate, and states for some chunks only: what leaves is the float64 recurrence's final state."""
    inputs = whole(False).inputs
    case = answered(inputs, **FUSED)
    names = [name for name in inputs if name not in ("query", "initial_state")]

    @jax.jit
    def run(inputs):
        def final(inputs):
            arrays = {name: inputs[name] for name in names}
            return context.leave(inputs["initial_state"], context.summarize(**arrays, **FUSED, state_every=state_every))

        state, pull_back = jax.vjp(final, inputs)
        return state, pull_back(case.d_state)[0]

    state, gradients = run(inputs)
    assert_close(state, case.state, 1e-6, "state")
    expected = oracle(inputs, np.zeros_like(case.d_output), case.d_state, **FUSED)[2]
    for name in [*names, "initial_state"]:
        assert_close(gradients[name], expected[name], 2e-6, name)


def test_half_precision():
    """bf16 pieces have fp32 summaries of what the rounded arrays hold."""
    inputs = whole(False).inputs
    half = {name: jnp.asarray(x, jnp.bfloat16) if name in PER_TOKEN else x for name, x in inputs.items()}
    exact = {name: np.asarray(x, np.float32) for name, x in half.items()}
    state = answered(exact, **OPTIONS).state
    arrays = {name: x for name, x in half.items() if name not in ("query", "initial_state")}
    summary = context.summarize(**arrays, **OPTIONS)
    assert summary.state.dtype == summary.transition.dtype == jnp.float32
    assert_close(context.leave(inputs["initial_state"], summary), state, 1e-6)


def test_a_summary_by_hand():
    """Two tokens; the second is written whole and forgets half of channel 1 first."""
    key = np.float32([[1, 0], [0.6, 0.8]])[None, :, None]
    value = np.float32([[3], [5]])[None, :, None]
    log_decay = np.log(np.float32([[1, 1], [1, 0.5]]))[None, :, None]
    beta = np.float32([0.5, 1])[None, :, None]
    # First token: I - 0.5 e1 e1^T, writes 1.5 e1. Then Diag(1, 0.5), and I - k k^T with k = (0.6, 0.8), writes 5 k.
    correct = np.eye(2) - np.outer([0.6, 0.8], [0.6, 0.8])
    transition = correct @ np.diag([1, 0.5]) @ np.diag([0.5, 1])
    state = correct @ np.diag([1, 0.5]) @ [[1.5], [0]] + 5 * np.float64([[0.6], [0.8]])
    summary = context.summarize(key, value, log_decay, beta)
    assert_close(summary.transition[0, 0], transition, 1e-6, "transition")
    assert_close(summary.state[0, 0], state, 1e-6, "state")


def test_combine_is_associative_and_ordered():
    rng = np.random.default_rng(0)
    a, b, c = (
        context.Summary(
            rng.normal(size=(1, VALUE_HEADS, WIDTH, WIDTH)).astype(np.float32),
            rng.normal(size=(1, VALUE_HEADS, WIDTH, VALUE_WIDTH)).astype(np.float32),
        )
        for _ in range(3)
    )
    left = context.combine(context.combine(a, b), c)
    right = context.combine(a, context.combine(b, c))
    assert_close(left.transition, right.transition, 1e-6)
    assert_close(left.state, right.state, 1e-6)
    expected = c.transition @ (b.transition @ a.state + b.state) + c.state
    assert_close(left.state, expected, 1e-6)
    assert_close(left.transition, c.transition @ b.transition @ a.transition, 1e-6)
    start = rng.normal(size=a.state.shape).astype(np.float32)
    assert_close(context.leave(start, left), context.leave(context.leave(context.leave(start, a), b), c), 1e-6)


def test_a_document_that_begins_forgets_what_enters():
    """Exactly: rows 0 and 1 of piece 48..83 begin with new documents or hold one, row 2 goes on."""
    inputs = whole(True).inputs
    arrays = {
        n: inputs[n][:, 48:] if n in PER_TOKEN else inputs[n] for n in inputs if n not in ("query", "initial_state")
    }
    summary = context.summarize(**arrays, **OPTIONS, segment_ids=SEGMENT_IDS[:, 48:], left_segment_id=left_ids(48))
    assert (summary.transition[:2] == 0).all() and (summary.transition[2] != 0).any()
    state = np.ones((3, VALUE_HEADS, WIDTH, VALUE_WIDTH), np.float32)
    entered = context.enter(state, SEGMENT_IDS[:, 48:], left_ids(48))
    np.testing.assert_array_equal(entered[:, 0, 0, 0], [0, 1, 1])


def test_padding_and_nothing_hand_everything_on():
    inputs = whole(True).inputs
    for length in (0, 5):
        arrays = {n: inputs[n][:, :length] if n in PER_TOKEN else inputs[n] for n in inputs}
        del arrays["query"], arrays["initial_state"]
        ids = np.zeros((3, length), np.int32)
        summary = context.summarize(**arrays, **OPTIONS, segment_ids=ids, left_segment_id=np.int32([0, 7, 8]))
        np.testing.assert_array_equal(summary.transition, np.broadcast_to(np.eye(WIDTH), summary.transition.shape))
        assert (summary.state == 0).all()


def test_wrong_arguments_are_named():
    inputs = whole(True).inputs
    arrays = {n: x for n, x in inputs.items() if n not in ("query", "initial_state")}
    with pytest.raises(ValueError, match=r"summarize: dt_bias has shape \(4,\), expected \(4, 6\) beside key"):
        context.summarize(**(arrays | {"dt_bias": np.zeros(4, np.float32)}))
    with pytest.raises(ValueError, match="left_segment_id"):
        context.summarize(**arrays, left_segment_id=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"left_segment_id \(2,\)"):
        context.enter(inputs["initial_state"], SEGMENT_IDS, np.zeros(2, np.int32))
