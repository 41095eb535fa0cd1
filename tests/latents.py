"""A latent cache by hand, for tests that read one."""

from pathlib import Path
from typing import Any

from torch import Tensor

from stages.core.latents import FORMAT, LatentItem, picture_row, text_name
from stages.core.safetensors_io import save_file
from stages.core.shards import shard_name, shard_of, text_key, write_index


def item_fields(item: LatentItem) -> dict[str, Any]:
    """The item as an index lists it."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(item).items()}


def write_latents(
    folder: Path,
    items: list[LatentItem],
    moments: dict[str, tuple[Tensor, Tensor]],
    texts: dict[str, Tensor],
    *,
    space: dict[str, Any],
    flipped: dict[str, tuple[Tensor, Tensor]] | None = None,
    pooled: dict[str, Tensor] | None = None,
    shards: int = 2,
    **fields: Any,
) -> None:
    """Write `folder` as stage encode would.

    moments, flipped: item id -> mean and log-variance [C, h, w]; texts: caption -> states [L, D], "" among them;
    pooled: caption -> [P]; fields: of the index, besides or instead of the usual ones.
    """
    files: dict[str, dict[str, Tensor]] = {}
    for item in items:
        for mirrored, rows in ((False, moments), (True, flipped or {})):
            if item.id in rows:
                row = picture_row(item.key, flipped=mirrored)
                file = files.setdefault(shard_name(item.shard, ".safetensors"), {})
                file[f"{row}.mean"], file[f"{row}.logvar"] = rows[item.id]
    for part, values in (("states", texts), ("pooled", pooled or {})):
        for caption, value in values.items():
            key = text_key(caption)
            files.setdefault(text_name(shard_of(key, shards)), {})[f"{key}.{part}"] = value
    for name, tensors in files.items():
        save_file(folder / name, tensors)
    limit, width = next(iter(texts.values())).shape
    usual = {
        "format": FORMAT,
        "items": [item_fields(item) for item in items],
        "shards": shards,
        "latent_space": space,
        "dtype": "float32",
        "flips": bool(flipped),
        "text": {
            "encoders": 2 if pooled else 1,
            "layer": "last",
            "limit": limit,
            "width": width,
            "pooled": next(iter(pooled.values())).shape[0] if pooled else None,
        },
        "shuffle": {"variants": 1, "separator": ", ", "keep": 0, "seed": 0},
        "vae": "vae",
        "text_encoder": "text",
    }
    write_index(folder, usual | fields, list(files))
