"""What the U-Net is told of cached items: their texts, and for SDXL their sizes and crops.

Letters: B batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stages.core.latents import LatentCache, LatentItem
from stages.core.models.unet import Conditions


def size_ids(items: list[LatentItem], flips: list[bool]) -> Tensor:
    """SDXL's size and crop conditioning, float32 [B, 6]: original height and width, the crop's top and left, and the
    bucket's height and width, in pixels (Podell et al., "SDXL", 2023, section 2.2).

    flips: which of the items are seen mirrored.
    """
    rows = [
        [*item.original, *item.corner_of(flipped=flipped), *item.bucket]
        for item, flipped in zip(items, flips, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float32)


def conditions_of(
    cache: LatentCache,
    items: list[LatentItem],
    texts: list[str],
    flips: list[bool],
    send: Callable[[Tensor], Tensor],
) -> Conditions:
    """The conditions of B rows: item, text and whether it is mirrored. send: puts a tensor on the U-Net's device."""
    text_BLD = send(torch.stack([cache.text(text) for text in texts]))
    if not cache.has_pooled:
        return Conditions(text_BLD)
    pooled_BP = send(torch.stack([cache.pooled(text) for text in texts]))
    return Conditions(text_BLD, pooled_BP, send(size_ids(items, flips)))
