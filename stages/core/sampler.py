"""Everything random in training, as a function of (seed, purpose, position): a counter-based generator.

There is no state to save: a restart, another number of workers or ranks changes nothing. numpy's Philox (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011) is used because its normals are drawn by scalar code: torch's
vectorised normals differ between AVX2 and AVX-512.
"""

import hashlib
import math

import numpy as np
import torch
from numpy.random import Generator, Philox
from torch import Tensor


def stream(seed: int, purpose: str, *counters: int) -> Generator:
    """The generator of one purpose ("noise", "order", ...) at one position (up to three counters, each >= 0)."""
    if len(counters) > 3:
        raise ValueError(f"at most three counters, got {len(counters)}")
    key = int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:16], "little")
    # The lowest word counts the draws of one stream; the position takes the other three.
    words = [0, *counters, *([0] * (3 - len(counters)))]
    return Generator(Philox(key=key, counter=np.array(words, dtype=np.uint64)))


def normal(seed: int, purpose: str, *counters: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32 of `shape`, on the CPU."""
    return torch.from_numpy(stream(seed, purpose, *counters).standard_normal(shape, dtype=np.float32))


def integers(seed: int, purpose: str, *counters: int, below: int, size: int = 1) -> list[int]:
    """`size` integers in [0, below)."""
    return [int(value) for value in stream(seed, purpose, *counters).integers(0, below, size=size)]


def uniforms(seed: int, purpose: str, *counters: int, size: int = 1) -> list[float]:
    """`size` floats in [0, 1)."""
    return [float(value) for value in stream(seed, purpose, *counters).random(size)]


class BatchOrder:
    """Which items form step k: one global order, a function of (seed, epoch) alone.

    Every batch holds items of one bucket (one shape). Within an epoch each bucket is permuted and cut into batches;
    a last short batch is filled from the beginning of the bucket's permutation, so that every item is seen at least
    once an epoch and all batches have one size. The batches of all buckets are then permuted.

    buckets: the items of each bucket, as positions in the caller's list, in a fixed order.
    """

    def __init__(self, buckets: list[list[int]], *, batch_size: int, seed: int) -> None:
        if not any(buckets):
            raise ValueError("no items to order")
        self.buckets = [bucket for bucket in buckets if bucket]
        self.batch_size = batch_size
        self.seed = seed
        self.batches_per_epoch = sum(math.ceil(len(bucket) / batch_size) for bucket in self.buckets)
        self._epoch = -1
        self._batches: list[list[int]] = []

    def batch(self, step: int) -> list[int]:
        """The items of step `step` (0, 1, ...), `batch_size` of them."""
        epoch, place = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._epoch_batches(epoch)
        return self._batches[place]

    def _epoch_batches(self, epoch: int) -> list[list[int]]:
        batches: list[list[int]] = []
        for number, bucket in enumerate(self.buckets):
            order = stream(self.seed, "order", epoch, number).permutation(len(bucket))
            total = math.ceil(len(bucket) / self.batch_size) * self.batch_size
            filled = [bucket[int(order[place % len(bucket)])] for place in range(total)]
            batches += [filled[start : start + self.batch_size] for start in range(0, total, self.batch_size)]
        shuffled = stream(self.seed, "batches", epoch).permutation(len(batches))
        return [batches[int(place)] for place in shuffled]
