"""Prepared pictures as later stages read them from data/preprocess."""

from pathlib import Path
from typing import Any

from torch import Tensor

from stages.core.errors import StoreError
from stages.core.latents import LatentItem
from stages.core.shards import (
    PIXELS_FORMAT,
    check_file,
    load_pt,
    open_index,
    pixel_key,
    shard_name,
    unstacked,
)


class Pixels:
    """The pictures of `folder`, in memory-mapped shards; each shard's sha256 is checked when it is first needed."""

    def __init__(self, folder: Path) -> None:
        """Read the index. Raises StoreError that names it when it is missing, damaged, or of another format."""
        self.folder = folder
        self.index: dict[str, Any] = open_index(folder)
        if self.index.get("format") != PIXELS_FORMAT:
            raise StoreError(
                f"{folder} has format {self.index.get('format')}; this version reads {PIXELS_FORMAT}",
                remedy="run `dvc repro preprocess` to make it anew",
            )
        self._shards: dict[int, dict[str, Tensor]] = {}

    def __getitem__(self, item: LatentItem) -> Tensor:
        """uint8 RGB [3, H, W]. Raises StoreError when the file, or the picture in it, is not what was expected."""
        if item.shard not in self._shards:
            path = check_file(self.folder, self.index, shard_name(item.shard, ".pt"))
            self._shards[item.shard] = unstacked(load_pt(path, mmap=True))
        pixels = self._shards[item.shard].get(item.id)
        if pixels is None or pixel_key(pixels) != item.key:
            raise StoreError(
                f"{self.folder / shard_name(item.shard, '.pt')} does not hold {item.file_name} as the index has it",
                remedy="run `dvc repro --force preprocess`",
            )
        return pixels
