"""`python -m k3jax.train` that tells, on the pipe of `$TOLD_PIPE`, of each batch as the loop takes it.

A line is `<step> <sha256 of the batch>`, written before the loop gets the batch: whoever reads it can act within that
step. Nothing else of the program is changed.
"""

import os
import runpy

from k3jax.data import packing

iterate = packing.Batches.iterate


class Told:
    """A stream of batches, counted from the step after `first`."""

    def __init__(self, stream, first: int):
        self.stream, self.step, self.close = stream, first, stream.close

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self.stream)
        self.step += 1
        os.write(int(os.environ["TOLD_PIPE"]), f"{self.step} {packing.stream_hash([batch])}\n".encode())
        return batch


def told(self, *first):
    """Only training says where it starts."""
    stream = iterate(self, *first)
    return Told(stream, *first) if first else stream


packing.Batches.iterate = told
runpy.run_module("k3jax.train", run_name="__main__", alter_sys=True)
