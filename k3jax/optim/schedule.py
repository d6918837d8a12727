"""Learning rates as functions of the step, from 0: a linear warm-up, then cosine or warm-up-stable-decay.

    t < warmup:   peak (t + 1) / warmup
    cosine:       end + (peak - end) (1 + cos(pi (t - warmup) / (steps - warmup))) / 2
    wsd:          peak until steps - decay, then linearly to end at t = steps

with end = end_fraction * peak. K3 was trained with the cosine and a warm-up over 1 % of the steps (report,
3.2). Invariant: no step of a run has a rate of 0 unless the peak is 0; at t >= steps the rate stays at end.
"""

import optax


def cosine(peak: float, steps: int, *, warmup_steps: int = 0, end_fraction: float = 0.0) -> optax.Schedule:
    """Cosine from `peak` to `end_fraction * peak`.

    Args:
        peak: highest rate.
        steps: optimizer steps of the run, warm-up included.
        warmup_steps: steps of linear warm-up; the last of them has the full rate.
        end_fraction: in [0, 1].

    Raises:
        ValueError: an argument out of range, by name.
    """
    _check(peak, steps, warmup_steps, 0, end_fraction)
    decay = optax.cosine_decay_schedule(peak, max(steps - warmup_steps, 1), end_fraction)
    return _warmed_up(peak, warmup_steps, [decay], [])


def wsd(
    peak: float, steps: int, *, warmup_steps: int = 0, decay_steps: int, end_fraction: float = 0.0
) -> optax.Schedule:
    """Constant at `peak`, then linear over the last `decay_steps` steps to `end_fraction * peak`.

    Arguments and errors as in `cosine`.
    """
    _check(peak, steps, warmup_steps, decay_steps, end_fraction)
    if not decay_steps:
        raise ValueError("learning rate: decay_steps must be 1 or more")
    parts = [optax.constant_schedule(peak), optax.linear_schedule(peak, peak * end_fraction, decay_steps)]
    return _warmed_up(peak, warmup_steps, parts, [steps - decay_steps])


def _warmed_up(peak, warmup_steps, parts, boundaries):
    if warmup_steps:
        step = peak / warmup_steps
        parts = [optax.linear_schedule(step, peak + step, warmup_steps), *parts]
        boundaries = [warmup_steps, *boundaries]
    return optax.join_schedules(parts, boundaries)


def _check(peak, steps, warmup_steps, decay_steps, end_fraction):
    if not peak >= 0:
        raise ValueError(f"learning rate: peak must be 0 or more, got {peak}")
    if steps < 1 or warmup_steps < 0 or decay_steps < 0:
        raise ValueError(
            f"learning rate: steps must be 1 or more, warmup_steps and decay_steps 0 or more, "
            f"got {steps}, {warmup_steps} and {decay_steps}"
        )
    if warmup_steps + decay_steps > steps:
        raise ValueError(
            f"learning rate: {steps} steps do not hold warmup_steps {warmup_steps} and decay_steps {decay_steps}"
        )
    if not 0 <= end_fraction <= 1:
        raise ValueError(f"learning rate: end_fraction must be in [0, 1], got {end_fraction}")
