"""Pictures drawn by the base and by the fine-tuned model, kept in packs so that none is drawn twice.

What these imports reach is all the code that a drawn picture depends on: its digest is part of the packs' fingerprint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stages.core.latents import LatentItem
from stages.core.models.pipeline import Painter
from stages.core.models.schedule import base_schedule
from stages.core.models.text import TextEncoder
from stages.core.models.trained import load_trained_unet, trained_schedule
from stages.core.models.unet import load_unet
from stages.core.models.vae import Vae
from stages.core.sampler import integers
from stages.core.shards import load_pt, save_pt
from stages.core.store import fingerprint


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One picture to draw; what it is drawn from is its key in the packs."""

    owner: int  # its held-out item, as a position in the list of items
    caption: str
    seed: int
    size: tuple[int, int]  # (H, W) in pixels

    @property
    def key(self) -> str:
        """A digest of caption, seed and size."""
        return fingerprint({"caption": self.caption, "seed": self.seed, "size": list(self.size)})


def plan(items: list[LatentItem], pictures: int, seed: int) -> list[Drawing]:
    """What to draw: the items' captions in turn, each in the size of its bucket.

    An item's seeds depend on the item and on how often it had its turn, not on the other items.
    """
    drawings: list[Drawing] = []
    for number in range(pictures):
        turn, owner = divmod(number, len(items))
        item = items[owner]
        own = integers(seed, "evaluate", int(item.id[:16], 16), turn, below=2**62)[0]
        drawings.append(Drawing(owner=owner, caption=item.caption, seed=own, size=item.bucket))
    return drawings


def load_model(base: Path, weights: Path | None, device: str) -> nn.Module:
    """The base's U-Net, or the fine-tuned one where `weights` (data/train/weights) is given."""
    return load_unet(base / "unet", device) if weights is None else load_trained_unet(base, weights, device)


def model_schedule(base: Path, weights: Path | None) -> dict[str, Any]:
    """The fields of the scheduler of the model that `load_model` gives for the same arguments."""
    return base_schedule(base) if weights is None else trained_schedule(base, weights)


def make_painter(base: Path, unet: nn.Module, schedule: dict[str, Any], device: str) -> Painter:
    """A painter with this U-Net, the schedule it was trained for (`model_schedule`), and the rest of the base."""
    return Painter(
        base,
        unet=unet,
        vae=Vae(base, device),
        text=TextEncoder(base, device),
        device=device,
        schedule=schedule,
    )


def read_packs(folder: Path) -> dict[str, Tensor]:
    """All pictures kept in `folder`: key -> uint8 RGB [3, H, W]."""
    kept: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.pt")):
        kept |= load_pt(path)
    return kept


def batches(drawings: list[Drawing], batch_size: int) -> list[list[Drawing]]:
    """Batches of one size each, in the order of the sizes."""
    groups = [[d for d in drawings if d.size == size] for size in sorted({d.size for d in drawings})]
    return [
        group[start : start + batch_size] for group in groups for start in range(0, len(group), batch_size)
    ]


def draw(
    painter: Painter, todo: list[list[Drawing]], folder: Path, *, steps: int, guidance: float, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """Draw batch by batch; each is a pack in `folder` before it is yielded, so a killed run loses one batch at most."""
    for batch in todo:
        pictures = painter.paint(
            [drawing.caption for drawing in batch],
            [drawing.seed for drawing in batch],
            size=batch[0].size,
            steps=steps,
            guidance=guidance,
            batch=batch_size,
        )
        pack = {drawing.key: row.clone() for drawing, row in zip(batch, pictures, strict=True)}
        save_pt(folder / f"{fingerprint({'keys': sorted(pack)})[:16]}.pt", pack)
        yield pack
