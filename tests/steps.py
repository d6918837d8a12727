"""A train step of a small model on any mesh of the 8 CPU devices, and random batches for it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sizes

from k3jax import config as configs
from k3jax.model import parameters
from k3jax.optim import make_optimizer
from k3jax.parallel import Layout, make_mesh
from k3jax.step import abstract_decoder, init_state, make_train_step

# First states on the host: to compile how they are drawn takes a third of the time that a step takes, for every mesh.
FIRST = {}


def run_config(name="tiny", model=sizes.SMALL, accumulate=1, policy="save_all", **optim):
    config = configs.load(f"configs/k3.py:{name}")
    return dataclasses.replace(
        config,
        model=model or config.model,
        optim=dataclasses.replace(config.optim, **{"learning_rate": 1e-2, "warmup_steps": 0, **optim}),
        train=dataclasses.replace(config.train, accumulate=accumulate),
        memory=dataclasses.replace(config.memory, policy=policy),
    )


def layout_of(decoder, data=1, fsdp=1, **axes):
    """The layout of a decoder on the first devices, as many as the axes multiply to."""
    config = configs.MeshConfig(data, fsdp, **axes)
    devices = math.prod(dataclasses.astuple(config))
    return Layout.of(make_mesh(config, devices, jax.devices()[:devices]), parameters.variables(decoder))


def setup(config, data=1, fsdp=1, change=lambda optimizer: optimizer, *, born=False, **axes):
    """(decoder, layout, jitted step, first state). `change` may wrap the optimizer; born: the state is drawn split."""
    decoder = abstract_decoder(config)
    layout = layout_of(decoder, data, fsdp, **axes)
    optimizer, schedule, _ = make_optimizer(config, parameters.variables(decoder), spread=layout.spread)
    optimizer = change(optimizer)

    def create():
        return init_state(config, optimizer)

    shardings = layout.shardings(jax.eval_shape(create))
    step = jax.jit(make_train_step(config, decoder, optimizer, schedule, layout), out_shardings=(shardings, None))
    if born:
        return decoder, layout, step, jax.jit(create, out_shardings=shardings)()
    if (config, change) not in FIRST:
        FIRST[config, change] = jax.device_get(jax.jit(create)())
    return decoder, layout, step, jax.device_put(FIRST[config, change], shardings)


def keeping_gradients(optimizer):
    """The optimizer with the last gradients in its state, so that one compiled step tells all."""

    def init(params):
        return {"inner": optimizer.init(params), "gradients": jax.tree.map(jnp.zeros_like, params)}

    def update(gradients, state, params, **extra):
        updates, inner = optimizer.update(gradients, state["inner"], params, **extra)
        return updates, {"inner": inner, "gradients": gradients}

    return optax.GradientTransformationExtraArgs(init, update)


def batch(seed=0, rows=2, width=16):
    tokens = jax.random.randint(jax.random.key(seed), (rows, width + 1), 0, 200)
    ones = jnp.ones((rows, width), jnp.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": ones > 0, "segment_ids": ones}


def uneven_batch(rows=8, width=24):
    """Packed documents, padding, rows with few targets, and micro-batches without any."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 200, (rows, width + 1), dtype=np.int32)
    segments = np.sort(rng.integers(1, 4, (rows, width)), axis=1).astype(np.int32)
    segments[0, -7:] = 0
    segments[3] = 0
    mask = rng.random((rows, width)) < np.linspace(0.1, 1, rows)[:, None]
    mask[4:6] = False
    mask &= segments > 0
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask, "segment_ids": segments}
