"""The latent cache: posterior moments and text states in safetensors shards, as later stages read them.

<encode>/shard-00.safetensors   "<pixel key>.mean", "<pixel key>.logvar": [C, h, w], unscaled; where flips are on, the
                                mirrored picture's as "<pixel key>.flipped.mean", "<pixel key>.flipped.logvar"
<encode>/text-00.safetensors    "<sha256 of caption>.states": [L, D]; with a second text encoder ".pooled": [P] too
<encode>/index.json             items, latent space, dtype, sha256 of each file; written last

Letters: C latent channels, h w latents, L tokens, D width of the states, P width of the pooled text.
"""

from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.core.errors import StoreError
from stages.core.models.vae import LatentSpace
from stages.core.record import BaseRecord
from stages.core.shards import check_file, open_index, shard_name, shard_of, text_key
from stages.core.shuffle import ShuffleConfig, variants
from stages.core.store import sha256_file, write_chunks

FORMAT = 3
SUFFIX = ".safetensors"


def text_name(number: int) -> str:
    """`text-00.safetensors` and so on."""
    return f"text-{number:02d}{SUFFIX}"


def picture_row(key: str, *, flipped: bool) -> str:
    """What the tensors of a picture (or of its mirror image) begin with; key: of its pixels."""
    return f"{key}.flipped" if flipped else key


@dataclass(frozen=True, kw_only=True)
class LatentItem:
    """One picture with its captions, as the index lists it."""

    id: str  # sha256 of the source file
    file_name: str
    captions: tuple[str, ...]  # one or more
    split: str  # train or holdout
    bucket: tuple[int, int]  # (H, W) in pixels
    original: tuple[int, int]  # (H, W) of the upright picture, in pixels
    corner: tuple[int, int]  # (top, left) of the crop in the resized picture, in pixels
    shard: int
    key: str  # of its pixels

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """From an index's JSON, where tuples are lists."""
        tuples = ("captions", "bucket", "original", "corner")
        plain: dict[str, Any] = fields | {name: tuple(fields[name]) for name in tuples}
        return cls(**plain)

    @property
    def caption(self) -> str:
        """The first caption: where one must stand for all."""
        return self.captions[0]

    def corner_of(self, *, flipped: bool) -> tuple[int, int]:
        """(top, left) of the crop in the resized picture, in pixels. flipped: where the mirrored picture has it."""
        if not flipped:
            return self.corner
        (height, width), (down, across), (top, left) = self.original, self.bucket, self.corner
        # The rule of core/images.py, not imported: how pictures are decoded would become a dep of training.
        resized_width = max(across, round(width * down / height))
        return top, resized_width - across - left


class LatentCache:
    """All items of `folder`. A file's sha256 is compared with the index when something in it is first asked for.

    Raises StoreError that names a damaged file, or what a file lacks.
    """

    def __init__(self, folder: Path, *, staging: Path | None = None) -> None:
        """staging: a folder on a faster disk that files are copied to before they are read; they stay there, by content."""
        self.index: dict[str, Any] = open_index(folder)
        if self.index.get("format") != FORMAT:
            raise StoreError(
                f"{folder} has format {self.index.get('format')}; this version reads {FORMAT}",
                remedy="run `dvc repro encode` to make it anew",
            )
        self.folder = folder
        self._staging = staging
        self._opening = Lock()
        self.digest: str = self.index["digest"]
        self.space = LatentSpace(**self.index["latent_space"])
        self.flips: bool = self.index["flips"]
        self.items = [LatentItem.of(fields) for fields in self.index["items"]]
        self._shuffle = ShuffleConfig(**self.index["shuffle"])
        self._files: dict[str, Any] = {}

    def check_base(self, record: BaseRecord) -> None:
        """Raises StoreError when the latents or the texts come from another base than `record` describes."""
        for name, digest in (("vae", record.vae_digest), ("text_encoder", record.text_digest)):
            if self.index[name] != digest:
                raise StoreError(
                    f"{self.folder} was made with another {name} than data/base/record.json describes",
                    remedy="run `dvc repro encode`; latents of one base are noise to another",
                )

    def split(self, name: str) -> list[LatentItem]:
        """The items of one split, in the index's order (by id)."""
        return [item for item in self.items if item.split == name]

    def shape(self, item: LatentItem) -> tuple[int, int, int]:
        """[C, h, w] of the item's moments."""
        height, width = item.bucket
        return self.space.channels, height // self.space.downsample, width // self.space.downsample

    def moments(self, item: LatentItem, *, flipped: bool = False) -> tuple[Tensor, Tensor]:
        """Posterior mean and log-variance, float32 [C, h, w], unscaled. flipped: of the mirrored picture."""
        row = picture_row(item.key, flipped=flipped)
        name = shard_name(item.shard, SUFFIX)
        mean, logvar = (
            self._tensor(name, f"{row}.{part}", self.shape(item), what=item.file_name)
            for part in ("mean", "logvar")
        )
        return mean, logvar

    def sample(self, item: LatentItem, noise_Chw: Tensor, *, flipped: bool = False) -> Tensor:
        """A draw from the item's posterior, scaled for the U-Net, float32 [C, h, w]; zero noise gives the mean."""
        mean, logvar = self.moments(item, flipped=flipped)
        return self.space.scale(mean + torch.exp(0.5 * logvar) * noise_Chw)

    def texts(self, item: LatentItem) -> list[str]:
        """All texts that stand for the item: each of its captions, and their shuffled variants."""
        return [text for caption in item.captions for text in variants(caption, self._shuffle)]

    def text(self, caption: str) -> Tensor:
        """The text encoder's hidden states of `caption`, float32 [L, D]; "" is the empty caption."""
        shape = (self.index["text"]["limit"], self.index["text"]["width"])
        return self._text(caption, "states", shape)

    @property
    def has_pooled(self) -> bool:
        """Whether there are pooled texts: of a second text encoder."""
        return bool(self.index["text"]["pooled"])

    def pooled(self, caption: str) -> Tensor:
        """The second text encoder's pooled output of `caption`, float32 [P]. Raises StoreError where there is none."""
        if not self.has_pooled:
            raise StoreError(
                f"{self.folder} holds no pooled text: its base has one text encoder",
                remedy="set base.source to a base of Stable Diffusion XL's kind, then run `dvc repro`",
            )
        return self._text(caption, "pooled", (self.index["text"]["pooled"],))

    def _text(self, caption: str, part: str, shape: tuple[int, ...]) -> Tensor:
        key = text_key(caption)
        name = text_name(shard_of(key, self.index["shards"]))
        return self._tensor(name, f"{key}.{part}", shape, what=f"caption {caption!r}")

    def _tensor(self, name: str, tensor: str, shape: tuple[int, ...], *, what: str) -> Tensor:
        with self._opening:  # else threads that want the same file would each hash it
            if name not in self._files:
                self._files[name] = safe_open(self._checked(name), framework="pt")
        try:
            value: Tensor = self._files[name].get_tensor(tensor)
        except SafetensorError as error:
            raise StoreError(
                f"{self.folder / name} does not hold {tensor} ({what})",
                remedy="run `dvc repro --force encode`; index and shards do not belong together",
            ) from error
        if tuple(value.shape) != shape or str(value.dtype) != f"torch.{self.index['dtype']}":
            raise StoreError(
                f"{self.folder / name}: {tensor} ({what}) is {value.dtype} {tuple(value.shape)}, "
                f"the index says {self.index['dtype']} {shape}",
                remedy="run `dvc repro --force encode`; index and shards do not belong together",
            )
        return value.float()

    def _checked(self, name: str) -> Path:
        if self._staging is None:
            return check_file(self.folder, self.index, name)
        digest: str = self.index["files"][name]
        staged = self._staging / f"{digest}{SUFFIX}"
        if not staged.is_file() or sha256_file(staged) != digest:
            with check_file(self.folder, self.index, name).open("rb") as file:
                write_chunks(staged, iter(lambda: file.read(1 << 24), b""))
        return staged
