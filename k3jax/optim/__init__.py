"""The optimizer: per-head Muon and AdamW, their schedules, and the table of which parameter goes where."""

from collections.abc import Mapping

import optax
from flax import nnx

from k3jax.config import ConfigError, RunConfig
from k3jax.optim.muon import muon
from k3jax.optim.partition import ParamInfo, Row, build, format_table, partition
from k3jax.optim.schedule import cosine, wsd

__all__ = [
    "ParamInfo",
    "Row",
    "build",
    "cosine",
    "format_table",
    "make_optimizer",
    "make_schedule",
    "muon",
    "partition",
    "wsd",
]


def make_schedule(config: RunConfig) -> optax.Schedule:
    """The run's learning rate as a function of the step, from 0."""
    c, steps = config.optim, config.train.steps
    shared = {"warmup_steps": c.warmup_steps, "end_fraction": c.end_fraction}
    if c.schedule == "wsd":
        return wsd(c.learning_rate, steps, decay_steps=c.decay_steps, **shared)
    return cosine(c.learning_rate, steps, **shared)


def make_optimizer(
    config: RunConfig, parameters: Mapping[str, nnx.Param]
) -> tuple[optax.GradientTransformation, optax.Schedule, tuple[Row, ...]]:
    """The run's optimizer over a flat dict path -> array, its schedule, and the table of what goes where.

    parameters: path -> nnx.Param with metadata (`model.parameters.variables` of the decoder, abstract or not).
    """
    infos = {
        path: ParamInfo(
            tuple(variable.get_value().shape),
            variable.get_metadata("logical_axes"),
            variable.get_metadata("matrix_axes"),
            variable.get_metadata("weight_decay"),
        )
        for path, variable in parameters.items()
    }
    try:
        rows = partition(infos, config.optim.weight_decay)
        schedule = make_schedule(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return build(rows, learning_rate=schedule, momentum=config.optim.momentum), schedule, rows
