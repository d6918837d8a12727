"""Learning rates against the formulas in plain Python, at every step of short runs."""

import math

import jax
import numpy as np
import pytest

from k3jax.optim.schedule import cosine, wsd


def rates(schedule, steps):
    return np.asarray(jax.jit(jax.vmap(schedule))(np.arange(steps)), np.float64)


@pytest.mark.parametrize("warmup, end", [(0, 0.0), (4, 0.1), (1, 0.0), (20, 0.0)])
def test_cosine(warmup, end):
    peak, steps = 3e-3, 20

    def expected(t):
        if t < warmup:
            return peak * (t + 1) / warmup
        done = min((t - warmup) / max(steps - warmup, 1), 1.0)
        return peak * (end + (1 - end) * (1 + math.cos(math.pi * done)) / 2)

    actual = rates(cosine(peak, steps, warmup_steps=warmup, end_fraction=end), steps + 5)
    np.testing.assert_allclose(actual, [expected(t) for t in range(steps + 5)], rtol=1e-5, atol=1e-9)
    assert (actual[:steps] > 0).all()
    assert actual.max() == pytest.approx(peak) and actual[-1] == pytest.approx(peak * end, abs=1e-9)


@pytest.mark.parametrize("warmup, decay, end", [(0, 5, 0.0), (4, 6, 0.1), (14, 6, 0.0), (0, 20, 0.25)])
def test_wsd(warmup, decay, end):
    peak, steps = 2e-2, 20

    def expected(t):
        if t < warmup:
            return peak * (t + 1) / warmup
        done = min(max(t - (steps - decay), 0) / decay, 1.0)
        return peak * (1 - done * (1 - end))

    actual = rates(wsd(peak, steps, warmup_steps=warmup, decay_steps=decay, end_fraction=end), steps + 5)
    np.testing.assert_allclose(actual, [expected(t) for t in range(steps + 5)], rtol=1e-5, atol=1e-9)
    assert (actual[:steps] > 0).all()


def test_values_by_hand():
    """Peak 1, ten steps, two of warm-up: a half at the middle of the cosine, a half two steps before wsd ends."""
    schedule = cosine(1.0, 10, warmup_steps=2)
    assert [float(schedule(t)) for t in (0, 1, 2, 6, 10, 99)] == pytest.approx([0.5, 1, 1, 0.5, 0, 0], abs=1e-7)
    schedule = wsd(1.0, 10, warmup_steps=2, decay_steps=4)
    assert [float(schedule(t)) for t in (0, 1, 5, 6, 7, 8, 10, 99)] == pytest.approx([0.5, 1, 1, 1, 0.75, 0.5, 0, 0])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"peak": -1.0}, "peak"),
        ({"peak": math.nan}, "peak"),
        ({"steps": 0}, "steps must be 1 or more"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_steps": 11}, "10 steps do not hold warmup_steps 11"),
        ({"end_fraction": 1.5}, "end_fraction"),
        ({"end_fraction": -0.5}, "end_fraction"),
        ({"decay_steps": 0}, "decay_steps must be 1 or more"),
        ({"decay_steps": 7, "warmup_steps": 4}, "decay_steps 7"),
    ],
)
def test_bad_arguments_by_name(arguments, message):
    schedule = wsd if "decay_steps" in arguments else cosine
    with pytest.raises(ValueError, match=f"^learning rate: .*{message}"):
        schedule(**{"peak": 1.0, "steps": 10, **arguments})
