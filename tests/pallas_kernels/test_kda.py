"""Every implementation of kda on every case of the table: outputs, final states, every gradient."""

import functools

import jax
import numpy as np
import pytest
from golden_files import assert_close
from kda_cases import BUILD, SEGMENT_IDS, case

from pallas_kernels.kda import kda, xla
from pallas_kernels.kda.api import IMPLEMENTATIONS

FORWARD, GRADIENT = 1e-6, 5e-6  # max|difference| / max|expected|
PER_TOKEN = "query", "key", "value", "log_decay", "beta"


# "products" is what `xla` does on accelerators, and on CPUs for wide heads: forward, too, by products of matrices.
WAYS = [*IMPLEMENTATIONS, "products"]


@pytest.fixture
def way(request, monkeypatch):
    """The implementation to name, after arranging that it goes the way that the test is about."""
    if request.param != "products":
        return request.param
    monkeypatch.setattr(xla, "IN_CACHE", 0)
    request.addfinalizer(results.clear_cache)
    results.clear_cache()
    return "xla"


@functools.partial(jax.jit, static_argnames=("implementation", "options"))
def results(inputs, d_output, d_state, segment_ids=None, *, implementation, options=()):
    """output, final state, gradients."""
    call = functools.partial(kda, segment_ids=segment_ids, implementation=implementation, **dict(options))
    (output, state), pull_back = jax.vjp(lambda inputs: call(**inputs), inputs)
    return output, state, pull_back((d_output, d_state))[0]


def assert_right(name, implementation, **more):
    """The body of every test of the table."""
    inputs, d_output, d_state, options, expected_output, expected_state, expected_gradients = case(name)
    options = options | more
    segment_ids = options.pop("segment_ids", None)
    options = tuple(options.items())
    output, state, gradients = results(
        inputs, d_output, d_state, segment_ids, implementation=implementation, options=options
    )
    assert_close(output, expected_output, FORWARD, "output")
    assert_close(state, expected_state, FORWARD, "final_state")
    assert gradients.keys() == expected_gradients.keys()
    for argument, gradient in gradients.items():
        assert_close(gradient, expected_gradients[argument], GRADIENT, f"gradient of {argument}")
    if segment_ids is not None:
        assert (np.asarray(output)[segment_ids == 0] == 0).all()
        assert all((np.asarray(gradients[x])[segment_ids == 0] == 0).all() for x in PER_TOKEN)


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_case(name, way):
    assert_right(name, way)


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
