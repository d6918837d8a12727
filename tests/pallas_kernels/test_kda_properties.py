"""What must hold of kda for any input (hypothesis): causality to the bit, packing, cuts, padding, repetition."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_cases import FUSED, IMPLEMENTATIONS, PER_TOKEN, VALUE_HEADS, WIDTH, answered, probes, random_inputs

from pallas_kernels.kda import kda

LENGTH = 45  # two whole chunks and a part
OPTIONS = {"lower_bound": -30.0, **FUSED}
# Every run draws the same examples; each costs milliseconds, but for the first, which compiles.
several = settings(max_examples=25, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 99)
contents = st.sampled_from([0.0, -1.0, 3.5, 30.0, -30.0, 1e4, -1e4])


@functools.partial(jax.jit, static_argnames="implementation")
def program(inputs, d_output, d_state, segment_ids, implementation):
    """output, final state, gradients."""
    call = functools.partial(kda, segment_ids=segment_ids, implementation=implementation, **OPTIONS)
    (output, state), pull_back = jax.vjp(lambda inputs: call(**inputs), inputs)
    return output, state, pull_back((d_output, d_state))[0]


def results(*arguments, implementation="xla"):
    """The same as numpy arrays."""
    return jax.tree.map(np.asarray, program(*arguments, implementation))


ONE = np.ones((1, LENGTH), np.int32)


@st.composite
def layouts(draw):
    """Segment ids of a row: runs of documents and of padding, ids in any order."""
    row = []
    ids = iter(draw(st.permutations(range(1, LENGTH + 1))))
    document = next(ids)
    while len(row) < LENGTH:
        run = draw(st.integers(1, 20))
        kind = draw(st.sampled_from(["padding", "same", "new", "new"]))
        if kind == "new":
            document = next(ids)
        row += [0 if kind == "padding" else document] * run
    return np.int32([row[:LENGTH]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@several
@given(seeds, st.integers(1, LENGTH - 1), st.dictionaries(st.sampled_from(PER_TOKEN), contents, min_size=1))
def test_the_past_does_not_see_the_future(implementation, seed, border, edits):
    """Outputs before a border, and gradients of a loss on them, keep their bits under any edit behind it."""
    inputs = random_inputs(LENGTH, seed=seed, raw=True)
    d_output, d_state = probes(inputs)
    d_output[:, border:], d_state[:] = 0, 0
    edited = {name: x.copy() for name, x in inputs.items()}
    for name, content in edits.items():
        edited[name][:, border:] = content
    one, two = (results(x, d_output, d_state, ONE, implementation=implementation) for x in (inputs, edited))
    np.testing.assert_array_equal(two[0][:, :border], one[0][:, :border])
    for name in inputs:
        a, b = one[2][name], two[2][name]
        np.testing.assert_array_equal(
            b[:, :border] if name in PER_TOKEN else b, a[:, :border] if name in PER_TOKEN else a
        )
        if name in PER_TOKEN:
            assert (a[:, border:] == 0).all() and (b[:, border:] == 0).all(), name


@several
@given(seeds, layouts())
def test_packed_is_separate(seed, segment_ids):
    """Any layout against the float64 recurrence, which runs document by document."""
    case = answered(random_inputs(LENGTH, seed=seed, raw=True), segment_ids=segment_ids, **OPTIONS)
    output, state, gradients = results(case.inputs, case.d_output, case.d_state, segment_ids)
    assert_close(output, case.output, 1e-6, "output")
    assert_close(state, case.state, 1e-6, "state")
    for name, gradient in gradients.items():
        # What a drawn layout leaves of a gradient can be much smaller than what it is summed up from.
        scale = max(np.abs(case.gradients[name]).max(), 0.1)
        assert np.abs(gradient - case.gradients[name]).max() <= 1e-5 * scale, name


@several
@given(seeds, st.lists(st.integers(0, LENGTH), max_size=4))
def test_cuts_with_a_carried_state_are_one_pass(seed, cuts):
    """Each piece alone, the rest of its row padding, from the state that the one before left."""
    inputs = random_inputs(LENGTH, seed=seed, raw=True)
    zeros = probes(inputs)
    output, state, _ = results(inputs, *zeros, ONE)
    borders, carried, total = [0, *sorted(cuts), LENGTH], inputs["initial_state"], 0
    for start, end in itertools.pairwise(borders):
        piece = np.int32([[start <= t < end for t in range(LENGTH)]])
        part, carried, _ = results(inputs | {"initial_state": carried}, *zeros, piece)
        total = total + part
    assert_close(total, output, 1e-6, "output")
    assert_close(carried, state, 1e-6, "state")


@several
@given(seeds, layouts(), st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_padding_may_hold_anything(seed, segment_ids, content):
    inputs = random_inputs(LENGTH, seed=seed, raw=True)
    d_output, d_state = probes(inputs)
    spoiled, d_spoiled = {name: x.copy() for name, x in inputs.items()}, d_output.copy()
    for x in (d_spoiled, *(spoiled[name] for name in PER_TOKEN)):
        x[segment_ids == 0] = content
    one = results(inputs, d_output, d_state, segment_ids)
    two = results(spoiled, d_spoiled, d_state, segment_ids)
    jax.tree.map(np.testing.assert_array_equal, two, one)
    padding = segment_ids == 0
    assert (two[0][padding] == 0).all() and all((two[2][name][padding] == 0).all() for name in PER_TOKEN)


def test_the_same_bits_every_time():
    """The same program run again and compiled again."""
    inputs = random_inputs(LENGTH, raw=True)
    arguments = inputs, *probes(inputs), ONE
    first = results(*arguments)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, results(*arguments), first)
    program.clear_cache()
    jax.tree.map(np.testing.assert_array_equal, results(*arguments), first)


def test_tokens_one_by_one_are_one_pass():
    """Decoding: steps of a single token with the state carried, gradients through all of them included."""
    case = answered(random_inputs(7, raw=True), lower_bound=-5.0, **FUSED)

    def steps(inputs):
        outputs, state = [], inputs["initial_state"]
        for t in range(7):
            token = inputs | {name: inputs[name][:, t : t + 1] for name in PER_TOKEN} | {"initial_state": state}
            output, state = kda(**token, lower_bound=-5.0, implementation="xla", **FUSED)
            outputs.append(output)
        return jnp.concatenate(outputs, 1), state

    @jax.jit
    def run(inputs):
        results, pull_back = jax.vjp(steps, inputs)
        return *results, pull_back((case.d_output, case.d_state))[0]

    output, state, gradients = run(case.inputs)
    assert_close(output, case.output, 1e-6, "output")
    assert_close(state, case.state, 1e-6, "state")
    for name, gradient in gradients.items():
        assert_close(gradient, case.gradients[name], 5e-6, name)


def test_the_step_of_decoding_is_no_chunk():
    """Nothing in its program has the two rows of the smallest chunk, which those of two tokens are full of."""
    texts = []
    for length in (1, 2):
        call = jax.jit(functools.partial(kda, implementation="products"))
        texts.append(call.lower(**random_inputs(length, batch=3)).as_text())
    step, chunk = (text.count(f"3x{VALUE_HEADS}x2x{WIDTH}") for text in texts)
    assert step == 0 and chunk > 0


def test_gradients_of_gradients():
    """Second derivatives are those of the recurrence; forward mode is refused in words."""
    inputs = random_inputs(20, seed=8)
    direction = random_inputs(20, seed=9)

    def slope(inputs, implementation):
        def loss(inputs):
            output, state = kda(**inputs, implementation=implementation)
            return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.sin(state))

        gradients = jax.grad(loss)(inputs)
        return sum(jnp.vdot(gradients[name], direction[name]) for name in inputs)

    second = jax.jit(jax.grad(slope), static_argnums=1)
    expected = second(inputs, "reference")
    for name, x in second(inputs, "products").items():
        assert_close(x, expected[name], 2e-5, name)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: kda(**x, implementation="xla")[0], (inputs,), (direction,))
