"""Packed rows: documents keep their bits whatever stands beside them (that they are right: test_kda.py)."""

import functools

import jax
import numpy as np
from kda_cases import FUSED, PER_TOKEN, SEGMENT_IDS, probes, random_inputs

from pallas_kernels.kda import kda
from pallas_kernels.segments import DOCUMENT_START, PADDING, TOKEN, first_id, marks, starts


@jax.jit
def packed(inputs, d_output, d_state, segment_ids):
    """output, final state, gradients."""
    call = functools.partial(kda, segment_ids=segment_ids, implementation="xla", lower_bound=-5.0, **FUSED)
    (output, state), pull_back = jax.vjp(lambda inputs: call(**inputs), inputs)
    return output, state, pull_back((d_output, d_state))[0]


def test_documents_and_later_tokens_change_no_bit():
    inputs = random_inputs(SEGMENT_IDS.shape[1], batch=len(SEGMENT_IDS), seed=7, raw=True)
    d_output, d_state = probes(inputs)
    d_state[:] = 0
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


def test_starts_and_first_ids_by_hand():
    ids = np.int32([[0, 0, 3, 3, 0, 3, 5, 0, 6], [1, 2, 0, 1, 1, 0, 0, 0, 0], [0] * 9])
    expected = [[0, 0, 0, 0, 0, 0, 6, 6, 8], [0, 1, 1, 3, 3, 3, 3, 3, 3], [0] * 9]
    np.testing.assert_array_equal(jax.jit(starts)(ids), expected)
    np.testing.assert_array_equal(jax.jit(first_id)(ids), [3, 1, 0])
    np.testing.assert_array_equal(first_id(ids[:, :0]), [0, 0, 0])
