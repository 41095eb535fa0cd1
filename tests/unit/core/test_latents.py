"""The latent cache as it is read."""

from pathlib import Path

import pytest
import torch

from stages.core.errors import StoreError
from stages.core.latents import LatentCache, text_key
from stages.core.safetensors_io import save_file
from stages.core.shards import write_index
from stages.core.store import sha256_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    items = [
        {
            "id": name * 64,
            "file_name": f"{name}.png",
            "caption": "ü",
            "split": split,
            "bucket": [8, 4],
            "shard": shard,
        }
        for name, split, shard in (("a", "train", 1), ("b", "holdout", 0), ("c", "train", 0))
    ]
    for shard in (0, 1):
        save_file(
            tmp_path / f"shard-0{shard}.safetensors",
            {
                f"{item['id']}.{part}": torch.full((4, 2, 1), value)
                for item in items
                for part, value in (("mean", 3.0), ("logvar", 2 * float(torch.log(torch.tensor(5.0)))))
                if item["shard"] == shard
            },
        )
    save_file(
        tmp_path / "text.safetensors", {text_key(""): torch.zeros(3, 2), text_key("ü"): torch.ones(3, 2)}
    )
    space = {"channels": 4, "downsample": 4, "scaling_factor": 0.5, "shift_factor": 1.0}
    names = ["shard-00.safetensors", "shard-01.safetensors", "text.safetensors"]
    write_index(tmp_path, {"items": items, "latent_space": space}, names)
    return tmp_path


def test_items_and_splits_in_the_order_of_the_index(folder: Path) -> None:
    cache = LatentCache(folder)
    assert [item.file_name for item in cache.items] == ["a.png", "b.png", "c.png"]
    assert [item.file_name for item in cache.split("train")] == ["a.png", "c.png"]
    assert [item.file_name for item in cache.split("holdout")] == ["b.png"]
    assert cache.items[0].bucket == (8, 4)


def test_a_draw_is_scaled_and_has_the_posteriors_spread(folder: Path) -> None:
    cache = LatentCache(folder)
    item = cache.items[0]
    mean, logvar = cache.moments(item)
    assert mean.shape == logvar.shape == (4, 2, 1)
    # Mean 3, deviation 5, shift 1, factor 0.5.
    assert torch.equal(cache.sample(item, torch.zeros(4, 2, 1)), torch.full((4, 2, 1), 1.0))
    assert torch.allclose(cache.sample(item, torch.full((4, 2, 1), 2.0)), torch.full((4, 2, 1), 6.0))


def test_text_is_found_by_the_sha256_of_the_caption(folder: Path) -> None:
    assert text_key("ü") == sha256_bytes(b"\xc3\xbc")
    assert float(LatentCache(folder).text("ü").sum()) == 6.0
    assert float(LatentCache(folder).text("").sum()) == 0.0


def test_digest_is_the_indexs(folder: Path) -> None:
    before = LatentCache(folder).digest
    save_file(folder / "text.safetensors", {text_key(""): torch.ones(3, 2), text_key("ü"): torch.ones(3, 2)})
    with pytest.raises(StoreError, match=r"text\.safetensors is missing or does not match its sha256"):
        LatentCache(folder)
    assert len(before) == 64
