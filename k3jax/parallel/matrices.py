"""Whole matrices out of parts: the exchange behind Muon's update of parameters that lie apart over a mesh.

A device holds parts of n matrices, the blocks [rows, cols] of one parameter (`matrix_axes`); it would work on whole
ones. Three kinds of mesh axes:

    apart     split what counts blocks (heads, experts): those here are this device's own, and stay so
    split     split rows or columns, over p = a g devices
    repeated  hold the same parts, on u devices

    slice over v of u  ->  all_to_all over a  ->  all_gather over g  ->  m = ceil(n / (a v)) whole matrices, worked on
                       <-  all_to_all over a  <-  own part           <-  and, last of all, all_gather over v

Of the split axes, so many exchange that m is as small as p allows, and of all such choices that which sends least: one
matrix alone is gathered, as to send it back would only cost. Repeated axes share the work where that is worth it
(`Exchange.cost`): it makes every exchange smaller, and where there is none it is another message. Parameters whose
blocks are alike and too few for all devices are worked on as one stack.

    sent by a device = s k r / p (2 (a - 1) / a + (v - 1)) + s m r (g - 1) / g + 8 n (p - 1) / p   bytes

with r = rows cols, k = a m blocks of a slice, s bytes per number; the last term sums squares, in fp32. n counts the
blocks here: those of the parameter over the devices of the axes `apart`.

Invariant: no device holds more than ceil(n / p) whole matrices, and so never all experts where a mesh axis splits them;
which ones it works on changes no matrix.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

MatrixAxes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Names = tuple[tuple[str, ...], ...]  # the mesh axes of each array axis, as `mesh.spec_names` gives them

# Newton-Schulz has fifteen products of about rows x rows x cols.
PRODUCTS = 15
# What a device computes while it sends one bf16 number: between 2,000 (NVLink, ICI) and 20,000 (between hosts).
FLOPS_PER_NUMBER = 8000


@dataclass(frozen=True)
class Block:
    """A kind of blocks. Those of parameters of the same kind can be stacked."""

    sizes: tuple[int, ...]  # of the array axes that make up rows and columns, the shorter side first; whole
    names: Names  # the mesh axes that split each of them
    rows: int  # how many of them make up the rows
    apart: frozenset[str]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols) of a whole block."""
        return math.prod(self.sizes[: self.rows]), math.prod(self.sizes[self.rows :])

    def size_here(self, sizes: Mapping[str, int]) -> int:
        """Numbers of a device's part; `sizes` of the mesh axes."""
        return math.prod(self.sizes) // math.prod(sizes[name] for names in self.names for name in names)


@dataclass(frozen=True)
class Exchange:
    """The way of `blocks` blocks, held in parts, to whole ones and back. Its methods run inside `Layout.per_device`."""

    block: Block
    blocks: int  # n
    sizes: Mapping[str, int]  # of the mesh axes, by name
    exchanged: tuple[str, ...]
    gathered: tuple[str, ...]
    shared: tuple[str, ...]  # the repeated axes that share the work

    @property
    def held(self) -> int:
        """Whole blocks on a device (m), the zero ones that fill up included."""
        return -(-self.blocks // (self._size(self.exchanged) * self._size(self.shared)))

    def _size(self, names: Iterable[str]) -> int:
        return math.prod(self.sizes[name] for name in names)

    def numbers_sent(self) -> float:
        """By one device, there and back."""
        a, g, v = map(self._size, (self.exchanged, self.gathered, self.shared))
        size, slice_ = math.prod(self.block.sizes), a * self.held
        return slice_ * size / (a * g) * (2 * (a - 1) / a + v - 1) + self.held * size * (g - 1) / g

    def bytes_sent(self, itemsize: int) -> float:
        """By one device for one update, with numbers of `itemsize` bytes; a ring's share of gathers and sums."""
        parts = self._size(self.exchanged + self.gathered)
        return itemsize * self.numbers_sent() + 8 * self.blocks * (parts - 1) / parts

    def cost(self) -> float:
        """Of work and messages, in floating point operations."""
        rows, cols = self.block.shape
        return PRODUCTS * 2 * rows**2 * cols * self.held + FLOPS_PER_NUMBER * self.numbers_sent()

    def total(self, x: Array) -> Array:
        """Sum over the parts of a block."""
        names = self.exchanged + self.gathered
        return lax.psum(x, names) if names else x

    def on_whole(self, function: Callable[[Array], Array], parts: Array) -> Array:
        """Parts of function(whole blocks [m, rows, cols]), which has their shape; `parts` [n, *sizes here]."""
        return self._parts(function(self._whole(parts)))

    def _whole(self, x: Array) -> Array:
        count = self._size(self.exchanged) * self.held
        fill = count * self._size(self.shared) - self.blocks
        if fill:
            x = lax.pad(x, jnp.zeros((), x.dtype), [(0, fill, 0), *[(0, 0, 0)] * (x.ndim - 1)])
        if self.shared:
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(self.shared) * count, count)
        if self.exchanged:
            x = lax.all_to_all(x, self.exchanged, 0, 0, tiled=True)
        if self.gathered:
            x = lax.all_gather(x, self.gathered)
        x = x.reshape(*self._pieces(), self.held, *self._here())
        return lax.transpose(x, self._order()).reshape(self.held, *self.block.shape)

    def _parts(self, x: Array) -> Array:
        order, apart = self._order(), (*self._pieces(), self.held, *self._here())
        back = sorted(range(len(order)), key=order.__getitem__)
        x = lax.transpose(x.reshape([apart[axis] for axis in order]), back)
        x = x.reshape(self._size(self.gathered), -1, *self._here())
        own = lax.axis_index(self.gathered) if self.gathered else 0
        x = lax.dynamic_index_in_dim(x, own, keepdims=False) if self.gathered else x[0]
        if self.exchanged:
            x = lax.all_to_all(x, self.exchanged, 0, 0, tiled=True)
        if self.shared:
            x = lax.all_gather(x, self.shared, tiled=True)
        return x[: self.blocks]

    def _here(self) -> tuple[int, ...]:
        """A device's part of the axes of a block."""
        return tuple(size // self._size(names) for size, names in zip(self.block.sizes, self.block.names, strict=True))

    def _pieces(self) -> tuple[int, ...]:
        """The leading axes of what arrives: one for each mesh axis it comes along."""
        return tuple(self.sizes[name] for name in self.gathered + self.exchanged)

    def _order(self) -> tuple[int, ...]:
        """From (*pieces, m, *here) to m and each axis of the block behind the mesh axes that split it."""
        lead = self.gathered + self.exchanged
        axes = ((*map(lead.index, names), len(lead) + 1 + at) for at, names in enumerate(self.block.names))
        return (len(lead), *itertools.chain.from_iterable(axes))


def exchange_of(block: Block, blocks: int, sizes: Mapping[str, int]) -> Exchange:
    """The cheapest exchange of `blocks` blocks that leaves a device with as few whole ones as the split axes allow."""
    return min(exchanges(block, blocks, sizes), key=lambda way: (way.cost(), way.held, way.exchanged, way.shared))


def exchanges(block: Block, blocks: int, sizes: Mapping[str, int]) -> list[Exchange]:
    """All that are worth a thought: over any of the repeated axes, and any of the split ones that are needed."""
    used = {name for names in block.names for name in names}
    split = tuple(name for name in sizes if name in used)
    repeated = tuple(name for name in sizes if name not in used | block.apart and sizes[name] > 1)
    fewest = -(-blocks // math.prod(sizes[name] for name in split))
    found = []
    for exchanged in _subsets(split):
        if -(-blocks // math.prod(sizes[name] for name in exchanged)) == fewest:
            gathered = tuple(name for name in split if name not in exchanged)
            found += [Exchange(block, blocks, sizes, exchanged, gathered, shared) for shared in _subsets(repeated)]
    return found


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [chosen for count in range(len(names) + 1) for chosen in itertools.combinations(names, count)]


@dataclass(frozen=True)
class Stack:
    """Parameters whose blocks are worked on as one, and how."""

    paths: tuple[str, ...]
    orders: tuple[tuple[int, ...], ...]  # of each one's axes: what counts blocks, rows, columns
    exchange: Exchange


def sides(shape: Sequence[int], matrix_axes: MatrixAxes) -> MatrixAxes:
    """(batch, rows, cols): the array axes that count blocks, and those of a block's two sides, the shorter first."""
    batch, inside, out = matrix_axes
    fan_in, fan_out = (math.prod(shape[axis] for axis in axes) for axes in (inside, out))
    return (batch, inside, out) if fan_in <= fan_out else (batch, out, inside)


def block_of(shape: Sequence[int], axes: MatrixAxes, names: Names, sizes: Mapping[str, int]) -> tuple[Block, int]:
    """The kind of a parameter's blocks, and how many of them are here; `axes` as `sides` gives them."""
    batch, rows, cols = axes
    used = [tuple(name for name in entry if sizes[name] > 1) for entry in names] + [()] * (len(shape) - len(names))
    apart = [name for axis in batch for name in used[axis]]
    block = Block(
        tuple(shape[axis] for axis in (*rows, *cols)),
        tuple(used[axis] for axis in (*rows, *cols)),
        len(rows),
        frozenset(apart),
    )
    return block, math.prod(shape[axis] for axis in batch) // math.prod(sizes[name] for name in apart)


def stacks(
    shapes: Mapping[str, Sequence[int]],
    matrix_axes: Mapping[str, MatrixAxes],
    names: Mapping[str, Names],
    sizes: Mapping[str, int],
) -> list[Stack]:
    """The parameters of `shapes` in stacks; `sizes` are those of all mesh axes.

    A stack takes in parameters as long as it has no more blocks than there are devices, nor takes more room than one
    whole block or the largest part of a parameter here, which are there anyway.
    """
    kinds: dict[Block, list[tuple[list[str], list[tuple[int, ...]], list[int]]]] = {}
    axes = {path: sides(shape, matrix_axes[path]) for path, shape in sorted(shapes.items())}
    blocks = {path: block_of(shape, axes[path], names[path], sizes) for path, shape in sorted(shapes.items())}
    room = max((count * block.size_here(sizes) for block, count in blocks.values()), default=0)
    for path, (block, count) in blocks.items():
        devices = math.prod(size for name, size in sizes.items() if name not in block.apart)
        most = min(devices, max(room, math.prod(block.sizes)) // block.size_here(sizes))
        found = kinds.setdefault(block, [])
        if not found or sum(found[-1][2]) + count > most:
            found.append(([], [], []))
        for entries, entry in zip(found[-1], (path, sum(axes[path], ()), count), strict=True):
            entries.append(entry)
    return [
        Stack(tuple(paths), tuple(orders), exchange_of(block, sum(counts), sizes))
        for block, found in kinds.items()
        for paths, orders, counts in found
    ]


def on_stacks(
    work: Callable[[Array, Exchange], Array], found: Sequence[Stack], arrays: Mapping[str, Array]
) -> dict[str, Array]:
    """Each device's part of every array, with all blocks worked on: work(parts [n, *here], exchange) has their shape.

    Inside `Layout.per_device`.
    """
    done = {}
    for stack in found:
        moved = [lax.transpose(arrays[path], order) for path, order in zip(stack.paths, stack.orders, strict=True)]
        axes = len(stack.exchange.block.sizes)
        parts = [x.reshape(-1, *x.shape[x.ndim - axes :]) for x in moved]
        worked, at = work(lax.concatenate(parts, 0) if len(parts) > 1 else parts[0], stack.exchange), 0
        for path, order, x, part in zip(stack.paths, stack.orders, moved, parts, strict=True):
            own = worked[at : at + part.shape[0]] if len(parts) > 1 else worked
            done[path] = lax.transpose(own.reshape(x.shape), sorted(range(x.ndim), key=order.__getitem__))
            at += part.shape[0]
    return done
