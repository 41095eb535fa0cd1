"""The latent cache as later stages read it: posterior moments and text states, from safetensors shards.

<encode>/shard-00.safetensors   "<item>.mean", "<item>.logvar": float32 [C, h, w], unscaled
<encode>/text.safetensors       "<sha256 of caption>": float32 [L, D]; the empty caption is there too
<encode>/index.json             items, latent space, sha256 of each file; written last

Letters: B batch, C latent channels, h w latents, L tokens, D width.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from stages.core.models.vae import LatentSpace
from stages.core.shards import read_index, shard_name
from stages.core.store import sha256_bytes

TEXT_NAME = "text.safetensors"


def text_key(caption: str) -> str:
    """The key of a caption in `text.safetensors`: sha256 of its UTF-8 bytes."""
    return sha256_bytes(caption.encode())


@dataclass(frozen=True, kw_only=True)
class LatentItem:
    """One picture with its caption, as the index lists it."""

    id: str  # sha256 of the source file
    file_name: str
    caption: str
    split: str  # train or holdout
    bucket: tuple[int, int]  # (H, W) in pixels
    shard: int


class LatentCache:
    """All items of `folder`, checked against the index's sha256s. Raises StoreError that names a damaged file."""

    def __init__(self, folder: Path) -> None:
        index: dict[str, Any] = read_index(folder)
        self.digest: str = index["digest"]
        self.space = LatentSpace(**index["latent_space"])
        self.items = [_item(fields) for fields in index["items"]]
        self._shards: dict[int, dict[str, Tensor]] = {}
        self._folder = folder
        self._text: dict[str, Tensor] = load_file(folder / TEXT_NAME)

    def split(self, name: str) -> list[LatentItem]:
        """The items of one split, in the index's order (by id)."""
        return [item for item in self.items if item.split == name]

    def moments(self, item: LatentItem) -> tuple[Tensor, Tensor]:
        """Posterior mean and log-variance, float32 [C, h, w], unscaled."""
        if item.shard not in self._shards:
            self._shards[item.shard] = load_file(self._folder / shard_name(item.shard, ".safetensors"))
        shard = self._shards[item.shard]
        return shard[f"{item.id}.mean"], shard[f"{item.id}.logvar"]

    def sample(self, item: LatentItem, noise_Chw: Tensor) -> Tensor:
        """A draw from the item's posterior, scaled for the U-Net, float32 [C, h, w]; zero noise gives the mean."""
        mean, logvar = self.moments(item)
        return self.space.scale(mean + torch.exp(0.5 * logvar) * noise_Chw)

    def text(self, caption: str) -> Tensor:
        """The text encoder's last hidden states of `caption`, float32 [L, D]; "" is the empty caption."""
        return self._text[text_key(caption)]


def _item(fields: dict[str, Any]) -> LatentItem:
    """An item from its JSON, where the bucket is a list."""
    plain: dict[str, Any] = {**fields, "bucket": tuple(fields["bucket"])}
    return LatentItem(**plain)
