"""The optimizer: per-head Muon and AdamW, QK-Clip, schedules, and the table of which parameter goes where."""

import dataclasses
from collections.abc import Mapping

import optax
from flax import nnx

from k3jax.config import ConfigError, RunConfig
from k3jax.optim.muon import Spread, muon
from k3jax.optim.partition import ParamInfo, Row, build, format_table, partition
from k3jax.optim.patterns import rate_scales, trainable
from k3jax.optim.qk_clip import qk_clip
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
    "qk_clip",
    "trainable",
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
    config: RunConfig, parameters: Mapping[str, nnx.Param], *, spread: Spread | None = None
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule, tuple[Row, ...]]:
    """The run's optimizer over a flat dict path -> array, its schedule, and the table of what goes where.

    parameters: path -> nnx.Param with metadata (`model.parameters.variables` of the decoder, abstract or not), all of
    them; the optimizer is one over those that `optim.frozen` leaves to train (`partition.build`). spread: as in
    `muon.muon`.

    Raises:
        ConfigError: parameters that the table does not know, patterns that match none, a schedule that does not fit.
    """
    kept = trainable(tuple(parameters), config.optim.frozen)
    scales = rate_scales(tuple(parameters), config.optim.rate_scale)
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
    rows = tuple(
        dataclasses.replace(row, rate_scale=scales[row.path]) if row.path in kept else row.freeze() for row in rows
    )
    return build(rows, learning_rate=schedule, momentum=config.optim.momentum, spread=spread), schedule, rows
