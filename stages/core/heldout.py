"""The loss on held-out items, at fixed noise and timesteps: two models are asked the same questions.

An item's noise is a function of (seed, item, timestep): it stays the same when other items come or go, and
train's validation and evaluate ask the same thing.

Letters: N items, S timesteps, B batch, C latent channels, h w latents, L tokens, D width.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from stages.core.conditions import conditions_of
from stages.core.latents import LatentCache, LatentItem
from stages.core.models.schedule import NoiseSchedule
from stages.core.models.unet import predict
from stages.core.sampler import normal


def band_timesteps(steps: int, *, bands: int, per_band: int) -> list[int]:
    """`bands * per_band` ascending timesteps in [0, steps): middles of equal cells, `per_band` to a band."""
    cells = bands * per_band
    if not 1 <= cells <= steps or per_band < 1:
        raise ValueError(f"{bands} bands of {per_band} timesteps do not fit into {steps} steps")
    return [(2 * cell + 1) * steps // (2 * cells) for cell in range(cells)]


def band_labels(bands: int, steps: int) -> list[str]:
    """`0-249` and so on: the ranges of timesteps that `band_timesteps` divides [0, steps) into."""
    edges = [band * steps // bands for band in range(bands + 1)]
    return [f"{low}-{high - 1}" for low, high in pairwise(edges)]


@torch.no_grad()
def heldout_losses(
    unet: nn.Module,
    schedule: NoiseSchedule,
    cache: LatentCache,
    items: list[LatentItem],
    *,
    seed: int,
    timesteps: list[int],
    batch_size: int,
    device: str,
) -> Tensor:
    """Mean squared error of the U-Net's prediction, unweighted, float64 [N, S] on the CPU.

    The clean latent is the posterior's mean, the target is the schedule's (noise, or v). Every forward has
    `batch_size` rows of one bucket, the last batch padded, so a row's loss does not depend on the others. The
    U-Net is in evaluation mode meanwhile (no dropout) and back in its own mode afterwards.
    """
    losses = torch.zeros(len(items), len(timesteps), dtype=torch.float64)
    training = unet.training
    unet.eval()
    try:
        for bucket in sorted({item.bucket for item in items}):
            rows = [
                (place, column)
                for place, item in enumerate(items)
                if item.bucket == bucket
                for column in range(len(timesteps))
            ]
            for start in range(0, len(rows), batch_size):
                batch = rows[start : start + batch_size]
                padded = batch + batch[-1:] * (batch_size - len(batch))
                pairs = [(items[place], timesteps[column]) for place, column in padded]
                losses_B = _batch_losses(unet, schedule, cache, pairs, seed=seed, device=device)
                for (place, column), loss in zip(batch, losses_B, strict=False):
                    losses[place, column] = loss
    finally:
        unet.train(training)
    return losses


def _batch_losses(
    unet: nn.Module,
    schedule: NoiseSchedule,
    cache: LatentCache,
    pairs: list[tuple[LatentItem, int]],
    *,
    seed: int,
    device: str,
) -> Tensor:
    clean_BChw = torch.stack([cache.space.scale(cache.moments(item)[0]) for item, _ in pairs])
    noise_BChw = torch.stack(
        [
            # 64 bits of the id: 32 would let two of 10,000 pictures share their noise in 1 of 86 data sets.
            normal(seed, "heldout", int(item.id[:16], 16), t, shape=tuple(clean_BChw.shape[1:]))
            for item, t in pairs
        ]
    )
    clean_BChw, noise_BChw = clean_BChw.to(device), noise_BChw.to(device)
    shown = [item for item, _ in pairs]
    captions = [item.caption for item in shown]
    conditions = conditions_of(cache, shown, captions, [False] * len(shown), lambda value: value.to(device))
    steps_B = torch.tensor([t for _, t in pairs], device=device)
    target_BChw = schedule.target(clean_BChw, noise_BChw, steps_B)
    predicted_BChw = predict(unet, schedule.add_noise(clean_BChw, noise_BChw, steps_B), steps_B, conditions)
    return (predicted_BChw.double() - target_BChw.double()).square().mean(dim=(1, 2, 3)).cpu()
