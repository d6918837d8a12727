"""Experts apart over `expert`, each on the device that is its home: tokens travel. Inside `Layout.per_device`.

    rows, sorted by expert and so by home  --forth-->  rows of a device's own experts, by source, then expert
    each row through its expert            --back--->  rows as they were sorted;  u[t] = sum of its rows

A row is one of the k copies of a token; its weight travels with it and is applied before the experts' second product,
so that the weight's gradient comes back from there (pallas_kernels/moe/xla.py). Where the backend has
`ragged_all_to_all` only rows that are there travel; elsewhere a dense `all_to_all` of equal buffers does the same.

Invariant: dropless. The buffers hold whatever can come: a device sends at most T * min(k, own experts) rows to another.
Nothing per row is kept for the backward pass, which sends the rows again.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.parallel.mesh import local_size
from pallas_kernels import gpu, select
from pallas_kernels.moe import dispatch, expert_layer

AXIS = "expert"


class Trip(NamedTuple):
    """Rows on their way from home to home, [devices] int32 each: counts, and offsets in the arrays of both ends.

    Attributes:
        start: where the rows for each device begin here.
        sent: how many there are.
        landing: where they begin there.
        received: rows that come from each device.
        arrival: where they begin here.
        back_landing: where they began there, for the way back.
    """

    start: Array
    sent: Array
    landing: Array
    received: Array
    arrival: Array
    back_landing: Array

    def reversed(self) -> "Trip":
        """The way back."""
        return Trip(self.arrival, self.received, self.back_landing, self.sent, self.start, self.landing)


def routed(
    x: Array, experts: Array, weights: Array, w1: Array, w3: Array, w2: Array, activation: dispatch.Activation
) -> Array:
    """`expert_layer` with the experts of all devices: w1, w3, w2 are this device's, `experts` numbers all of them."""
    if local_size(AXIS) == 1:
        return expert_layer(x, experts, weights, w1, w3, w2, activation=activation)

    def travelled(x: Array, experts: Array, weights: Array, *kernels: Array) -> Array:
        devices, own = local_size(AXIS), kernels[0].shape[0]
        plan, sizes = dispatch.make_plan(experts, weights, devices * own)
        every = lax.all_gather(sizes.reshape(devices, own), AXIS)  # [from, to, expert]
        trip = _trip(every.sum(axis=2))
        pair = x.shape[0] * min(experts.shape[1], own)
        room = devices * pair
        rows = dispatch.gather_rows(x, plan.source, plan.slot)
        there = exchange(rows, trip, room, pair)
        weight = exchange(dispatch.row_weights(plan)[:, None], trip, room, pair)
        home = _experts_of_rows(every[:, lax.axis_index(AXIS)], room)
        out = expert_layer(there, home[:, None], weight, *kernels, activation=activation)
        back = exchange(out, trip.reversed(), rows.shape[0], pair)
        return dispatch.sum_rows(back, plan.source, plan.slot)

    return _keeping_arguments_only(travelled)(x, experts, weights, w1, w3, w2)


def _keeping_arguments_only(function: Callable[..., Array]) -> Callable[..., Array]:
    """The function, computed again in its backward pass whatever policy is in force around it.

    `jax.checkpoint` would not do: the policy of one around it decides for what is inside.
    """
    kept = jax.custom_vjp(function)

    def backward(arguments: tuple[Array, ...], gradient: Array) -> tuple[Array, ...]:
        # Else a compiler would find that all of it was there before, and keep it.
        arguments, gradient = lax.optimization_barrier((arguments, gradient))
        return jax.vjp(function, *arguments)[1](gradient)

    kept.defvjp(lambda *arguments: (kept(*arguments), arguments), backward)
    return kept


def _trip(counts: Array) -> Trip:
    """counts [from, to] of all devices -> this one's trip."""
    mine = lax.axis_index(AXIS)
    before_to = jnp.cumsum(counts, axis=1) - counts  # rows of a sender for earlier devices
    before_from = jnp.cumsum(counts, axis=0) - counts  # rows for a receiver from earlier devices
    return Trip(
        before_to[mine],
        counts[mine],
        before_from[mine],
        counts[:, mine],
        before_from[:, mine],
        before_to[:, mine],
    )


def _experts_of_rows(sizes: Array, room: int) -> Array:
    """sizes [from, own expert] of the rows received -> own expert of each row; the number of experts where none is."""
    own = sizes.shape[1]
    ends = jnp.cumsum(sizes.reshape(-1))
    group = jnp.searchsorted(ends, jnp.arange(room, dtype=ends.dtype), side="right")
    return jnp.where(group < sizes.size, group % own, own).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def exchange(rows: Array, trip: Trip, room: int, pair: int) -> Array:
    """Sends rows [M,L] as `trip` says -> [room,L], 0 where nothing has come. Its transpose is the way back.

    pair: rows that one device sends to another at most.
    """
    return select.run("expert exchange", EXCHANGES, None, rows, trip, room, pair)


def _exchange_forward(rows: Array, trip: Trip, room: int, pair: int) -> tuple[Array, tuple]:
    return exchange(rows, trip, room, pair), (trip, rows.shape[0])


def _exchange_backward(_: int, pair: int, residuals: tuple, gradient: Array) -> tuple:
    trip, sent = residuals
    return exchange(gradient, trip.reversed(), sent, pair), None


exchange.defvjp(_exchange_forward, _exchange_backward)


def _ragged(rows: Array, trip: Trip, room: int, pair: int) -> Array:
    if gpu.platform() == "cpu":
        raise NotImplementedError("XLA's CPU backend has no ragged_all_to_all")
    empty = jnp.zeros((room, *rows.shape[1:]), rows.dtype)
    return lax.ragged_all_to_all(rows, empty, trip.start, trip.sent, trip.landing, trip.received, axis_name=AXIS)


def _dense(rows: Array, trip: Trip, room: int, pair: int) -> Array:
    """The same by buffers of `pair` rows from each device to each."""
    place = jnp.arange(pair, dtype=jnp.int32)[None]
    source = jnp.where(place < trip.sent[:, None], trip.start[:, None] + place, rows.shape[0])
    received = lax.all_to_all(dispatch.take(rows, source), AXIS, 0, 0)
    goal = jnp.where(place < trip.received[:, None], trip.arrival[:, None] + place, room)
    empty = jnp.zeros((room, *rows.shape[1:]), rows.dtype)
    return empty.at[goal.reshape(-1)].set(received.reshape(-1, *rows.shape[1:]), mode="drop")


EXCHANGES = {"ragged_all_to_all": _ragged, "dense all_to_all": _dense}  # most preferred first
