"""What the VAE makes of kept latents again, beside the pictures that they were made of.

Letters: B batch, C channels, H W pixels, h w latents.
"""

import torch
from PIL import Image
from torch import Tensor

from stages.core.latents import LatentCache, LatentItem
from stages.core.memory import explained
from stages.core.models.vae import Vae
from stages.core.moments import grouped
from stages.core.psnr import psnr
from stages.core.sheets import sheet


def choose(items: list[LatentItem], count: int) -> list[LatentItem]:
    """At most `count` items, evenly spread over the list, in its order; the first is always among them."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def decoded(vae: Vae, cache: LatentCache, items: list[LatentItem], batch_size: int) -> list[Tensor]:
    """The pictures that `vae` makes of the items' posterior means, uint8 RGB [3, H, W], in the order of `items`.

    Every forward has `batch_size` rows of one bucket, the last ones repeated where too few are left: an item's bytes do
    not depend on the others. Raises StoreError as the cache does, and MachineError when the memory is too small.
    """
    latents = [cache.space.scale(cache.moments(item)[0]) for item in items]
    found: dict[str, Tensor] = {}
    for group in grouped(((str(place), latent) for place, latent in enumerate(latents)), batch_size):
        padded_BChw = torch.stack(
            [latent for _, latent in group] + [group[-1][1]] * (batch_size - len(group))
        )
        height, width = (side * cache.space.downsample for side in padded_BChw.shape[2:])
        with explained(
            f"decoding {batch_size} pictures of {width} x {height}",
            "set encode.sheet to 0, or encode.tile to a smaller tile; with `latents inspect` use --items 0",
        ):
            pictures_BCHW = vae.decode(padded_BChw)
        found |= {name: picture for (name, _), picture in zip(group, pictures_BCHW, strict=False)}
    return [found[str(place)] for place in range(len(items))]


def psnr_of(source_CHW: Tensor, picture_CHW: Tensor) -> float:
    """`core.psnr` of one picture [3, H, W] and its source."""
    return psnr(picture_CHW[None], source_CHW[None])


def reconstruction_sheet(
    items: list[LatentItem], sources: list[Tensor], pictures: list[Tensor]
) -> Image.Image:
    """The sources above, what `decoded` gave below; under each column the file's name, the PSNR and the caption."""
    captions = [
        f"{item.file_name} {psnr_of(source, picture):.1f} dB: {item.caption}"
        for item, source, picture in zip(items, sources, pictures, strict=True)
    ]
    return sheet([("source", sources), ("decoded", pictures)], captions)
