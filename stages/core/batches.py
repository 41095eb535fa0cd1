"""Training batches from the latent cache; everything random in one is a function of (seed, micro-batch, row).

Letters: B batch, C latent channels, h w latents, L tokens, D width.
"""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.core.conditions import conditions_of
from stages.core.latents import LatentCache, LatentItem
from stages.core.models.schedule import NoiseSchedule
from stages.core.models.unet import Conditions
from stages.core.sampler import BatchOrder, integers, normal, uniforms


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one forward needs, on the training device."""

    items: list[LatentItem]
    noisy_BChw: Tensor
    target_BChw: Tensor
    steps_B: Tensor  # int64 timesteps
    conditions: Conditions


class Batches:
    """Micro-batch number n, for any n, in any order: nothing depends on which were taken before."""

    def __init__(
        self,
        cache: LatentCache,
        schedule: NoiseSchedule,
        *,
        batch_size: int,
        seed: int,
        caption_dropout: float,
        device: str,
        offset_noise: float = 0.0,
        timesteps: tuple[int, int] | None = None,
        pin_memory: bool = False,
    ) -> None:
        """timesteps: first, and after the last, of those that are drawn; None: all of the schedule's.

        offset_noise: standard deviation of a noise that is the same all over a channel (N. Guttenberg, "Diffusion with
        Offset Noise", 2023). pin_memory: copy by way of page-locked memory, for CUDA devices.
        """
        self.cache = cache
        self.schedule = schedule
        self.items = cache.split("train")
        self.texts = {item.id: cache.texts(item) for item in self.items}
        self.seed = seed
        self.caption_dropout = caption_dropout
        self.device = device
        self.offset_noise = offset_noise
        self.timesteps = timesteps or (0, schedule.steps)
        self.pin_memory = pin_memory
        shapes = sorted({item.bucket for item in self.items})
        buckets = [[n for n, item in enumerate(self.items) if item.bucket == shape] for shape in shapes]
        self.order = BatchOrder(buckets, batch_size=batch_size, seed=seed)

    def __getitem__(self, number: int) -> Batch:
        """Micro-batch `number` (0, 1, ...)."""
        return self.make(number, self.order.batch(number))

    def largest(self) -> Batch:
        """A batch of the bucket with the most pixels: the one that needs most memory."""
        item = max(self.items, key=lambda item: item.bucket[0] * item.bucket[1])
        return self.make(0, [self.items.index(item)] * self.order.batch_size)

    def ahead(self, numbers: Iterable[int], *, workers: int, prefetch: int) -> Generator[Batch]:
        """Micro-batches `numbers`, each made before it is asked for: `prefetch` at a time, by `workers` threads.

        Threads and not processes: numpy's generator and torch's copies let go of Python's lock, and nothing must be sent.
        """
        pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
        waiting: deque[Future[Batch]] = deque()
        try:
            for number in numbers:
                # Which items they are is looked up here: the order keeps its epoch, and is of one thread.
                waiting.append(pool.submit(self.make, number, self.order.batch(number)))
                if len(waiting) > prefetch:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def make(self, number: int, places: list[int]) -> Batch:
        """Micro-batch `number`, of the items at `places`."""
        items = [self.items[place] for place in places]
        clean, noise, steps, texts, flips = [], [], [], [], []
        first, end = self.timesteps
        for row, item in enumerate(items):
            shape = self.cache.shape(item)
            flips.append(self._flipped(number, row))
            draw = normal(self.seed, "posterior", number, row, shape=shape)
            clean.append(self.cache.sample(item, draw, flipped=flips[-1]))
            noise.append(self._noise(number, row, shape))
            steps.append(first + integers(self.seed, "timestep", number, row, below=end - first)[0])
            dropped = uniforms(self.seed, "caption-dropout", number, row)[0] < self.caption_dropout
            texts.append("" if dropped else self._caption(item, number, row))
        clean_BChw, noise_BChw = self._sent(torch.stack(clean)), self._sent(torch.stack(noise))
        steps_B = self._sent(torch.tensor(steps))
        return Batch(
            items=items,
            noisy_BChw=self.schedule.add_noise(clean_BChw, noise_BChw, steps_B),
            target_BChw=self.schedule.target(clean_BChw, noise_BChw, steps_B),
            steps_B=steps_B,
            conditions=conditions_of(self.cache, items, texts, flips, self._sent),
        )

    def _sent(self, value: Tensor) -> Tensor:
        """On the training device."""
        if self.pin_memory:
            return value.pin_memory().to(self.device, non_blocking=True)
        return value.to(self.device)

    def _noise(self, number: int, row: int, shape: tuple[int, int, int]) -> Tensor:
        noise_Chw = normal(self.seed, "noise", number, row, shape=shape)
        if not self.offset_noise:
            return noise_Chw
        offset_C11 = normal(self.seed, "offset-noise", number, row, shape=(shape[0], 1, 1))
        return noise_Chw + self.offset_noise * offset_C11

    def _flipped(self, number: int, row: int) -> bool:
        return self.cache.flips and integers(self.seed, "flip", number, row, below=2)[0] == 1

    def _caption(self, item: LatentItem, number: int, row: int) -> str:
        """One of the item's texts: its captions and their shuffled variants, each as likely as the others."""
        texts = self.texts[item.id]
        if len(texts) == 1:
            return texts[0]
        return texts[integers(self.seed, "caption", number, row, below=len(texts))[0]]
