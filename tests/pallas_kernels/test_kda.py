"""Every implementation of kda on every case of the table: outputs, final states, every gradient."""

import functools

import jax
import numpy as np
import pytest
from golden_files import assert_close
from kda_cases import BUILD, IMPLEMENTATIONS, PER_TOKEN, SEGMENT_IDS, case

from pallas_kernels.kda import kda

FORWARD, GRADIENT = 1e-6, 5e-6  # max|difference| / max|expected|


@functools.partial(jax.jit, static_argnames=("implementation", "options"))
def results(inputs, d_output, d_state, segment_ids=None, *, implementation, options=()):
    """output, final state, gradients."""
    call = functools.partial(kda, segment_ids=segment_ids, implementation=implementation, **dict(options))
    (output, state), pull_back = jax.vjp(lambda inputs: call(**inputs), inputs)
    return output, state, pull_back((d_output, d_state))[0]


def assert_right(name, implementation, **more):
    """The body of every test of the table."""
    assert_answers(case(name), implementation, FORWARD, GRADIENT, **more)


def assert_answers(wanted, implementation, forward, gradient_bound, **more):
    """Whether an implementation gives the answers of a Case, within these bounds and with 0 at padding."""
    inputs, d_output, d_state, options, expected_output, expected_state, expected_gradients = wanted
    options = options | more
    segment_ids = options.pop("segment_ids", None)
    options = tuple(options.items())
    output, state, gradients = results(
        inputs, d_output, d_state, segment_ids, implementation=implementation, options=options
    )
    assert_close(output, expected_output, forward, "output")
    assert_close(state, expected_state, forward, "final_state")
    assert gradients.keys() == expected_gradients.keys()
    for argument, gradient in gradients.items():
        assert_close(gradient, expected_gradients[argument], gradient_bound, f"gradient of {argument}")
    if segment_ids is not None:
        assert (np.asarray(output)[segment_ids == 0] == 0).all()
        assert all((np.asarray(gradients[x])[segment_ids == 0] == 0).all() for x in PER_TOKEN)


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case(name, implementation):
    assert_right(name, implementation)


@pytest.mark.parametrize("state_every", [2, 100])
def test_states_kept_do_not_change_results(state_every):
    """A state for every 2 chunks, some left over, and one for all of them."""
    assert_right("documents, bounded gate", "xla", state_every=state_every)


def test_a_row_of_padding_hands_its_state_on():
    inputs, d_output, d_state, options, *_ = case("documents, bounded gate")
    options = {name: x for name, x in options.items() if name != "segment_ids"}
    for implementation in IMPLEMENTATIONS:
        _, state, gradients = results(
            inputs, d_output, d_state, SEGMENT_IDS, implementation=implementation, options=tuple(options.items())
        )
        np.testing.assert_array_equal(state[2], inputs["initial_state"][2])
        np.testing.assert_array_equal(gradients["initial_state"][2], d_state[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap(implementation):
    """Rows mapped over, each a batch of one with its own documents; gates are shared, their gradients add up."""
    name = "documents, bounded gate"
    inputs, d_output, d_state, options, output, state, gradients = case(name)
    options = {name: x for name, x in options.items() if name != "segment_ids"}
    of_all = "a_log", "dt_bias"

    @jax.jit
    def run(inputs, *rest):
        def row(inputs, d_output, d_state, segment_ids):
            call = functools.partial(kda, segment_ids=segment_ids, implementation=implementation, **options)
            results, pull_back = jax.vjp(lambda inputs: call(**inputs), inputs)
            return *results, pull_back((d_output, d_state))[0]

        axes = {name: None if name in of_all else 0 for name in inputs}
        return jax.vmap(row, in_axes=(axes, 0, 0, 0))(inputs, *rest)

    split = {name: x if name in of_all else x[:, None] for name, x in inputs.items()}
    found = run(split, d_output[:, None], d_state[:, None], SEGMENT_IDS[:, None])
    assert_close(found[0][:, 0], output, FORWARD, "output")
    assert_close(found[1][:, 0], state, FORWARD, "state")
    for name, gradient in found[2].items():
        gradient = np.asarray(gradient, np.float64)
        assert_close(gradient.sum(0) if name in of_all else gradient[:, 0], gradients[name], GRADIENT, name)
