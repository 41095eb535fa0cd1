"""One training batch from the latent cache; everything random in it is a function of (seed, micro-batch, row).

Letters: B batch, C latent channels, h w latents, L tokens, D width.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.core.latents import LatentCache, LatentItem
from stages.core.models.schedule import NoiseSchedule
from stages.core.sampler import BatchOrder, integers, normal, uniforms


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one forward needs, on the training device."""

    items: list[LatentItem]
    noisy_BChw: Tensor
    target_BChw: Tensor
    steps_B: Tensor  # int64 timesteps
    text_BLD: Tensor


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
    ) -> None:
        self.cache = cache
        self.schedule = schedule
        self.items = cache.split("train")
        self.texts = {item.id: cache.texts(item) for item in self.items}
        self.seed = seed
        self.caption_dropout = caption_dropout
        self.device = device
        shapes = sorted({item.bucket for item in self.items})
        buckets = [[n for n, item in enumerate(self.items) if item.bucket == shape] for shape in shapes]
        self.order = BatchOrder(buckets, batch_size=batch_size, seed=seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")  # one: the order keeps its epoch
        self._ahead: tuple[int, Future[Batch]] | None = None

    def __getitem__(self, number: int) -> Batch:
        """Micro-batch `number` (0, 1, ...); the next one is made meanwhile, in a thread."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != number:
            ahead = number, self._thread.submit(self._make, number)
        batch = ahead[1].result()
        self._ahead = number + 1, self._thread.submit(self._make, number + 1)
        return batch

    def _make(self, number: int) -> Batch:
        items = [self.items[place] for place in self.order.batch(number)]
        clean, noise, text, steps = [], [], [], []
        for row, item in enumerate(items):
            shape = self.cache.shape(item)
            draw = normal(self.seed, "posterior", number, row, shape=shape)
            clean.append(self.cache.sample(item, draw, flipped=self._flipped(number, row)))
            noise.append(normal(self.seed, "noise", number, row, shape=shape))
            steps += integers(self.seed, "timestep", number, row, below=self.schedule.steps)
            dropped = uniforms(self.seed, "caption-dropout", number, row)[0] < self.caption_dropout
            text.append(self.cache.text("" if dropped else self._caption(item, number, row)))
        clean_BChw, noise_BChw = torch.stack(clean).to(self.device), torch.stack(noise).to(self.device)
        steps_B = torch.tensor(steps, device=self.device)
        return Batch(
            items=items,
            noisy_BChw=self.schedule.add_noise(clean_BChw, noise_BChw, steps_B),
            target_BChw=self.schedule.target(clean_BChw, noise_BChw, steps_B),
            steps_B=steps_B,
            text_BLD=torch.stack(text).to(self.device),
        )

    def _flipped(self, number: int, row: int) -> bool:
        return self.cache.flips and integers(self.seed, "flip", number, row, below=2)[0] == 1

    def _caption(self, item: LatentItem, number: int, row: int) -> str:
        """One of the item's texts: its captions and their shuffled variants, each as likely as the others."""
        texts = self.texts[item.id]
        if len(texts) == 1:
            return texts[0]
        return texts[integers(self.seed, "caption", number, row, below=len(texts))[0]]
