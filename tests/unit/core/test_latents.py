"""The latent cache as it is read, and what it refuses to give."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.core.errors import StoreError
from stages.core.images import crop_corner
from stages.core.latents import LatentCache, LatentItem, text_name
from stages.core.record import BaseRecord
from stages.core.safetensors_io import save_file
from stages.core.shards import shard_of, text_key, write_index
from stages.core.shuffle import ShuffleConfig, variants
from stages.core.store import fingerprint, sha256_bytes
from tests.latents import item_fields, write_latents

SPACE = {"channels": 4, "downsample": 4, "scaling_factor": 0.5, "shift_factor": 1.0}
KEYS = {name: sha256_bytes(name.encode()) for name in "abc"}
ITEMS = [
    LatentItem(
        id=name * 64,
        file_name=f"{name}.png",
        captions=("ü", "red, ball, grass") if name == "c" else ("ü",),
        split=split,
        bucket=(8, 4),
        original=(16, 12),
        corner=(0, 1),
        shard=shard,
        key=KEYS[name],
    )
    for name, split, shard in (("a", "train", 1), ("b", "holdout", 0), ("c", "train", 0))
]


def filled(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean `value`, deviation 5."""
    return torch.full((4, 2, 1), value), torch.full((4, 2, 1), 2 * math.log(5.0))


def write(folder: Path, **fields: Any) -> Path:
    texts = {"": torch.zeros(3, 2), "ü": torch.ones(3, 2), "red, ball, grass": torch.full((3, 2), 2.0)}
    arguments: dict[str, Any] = {"space": SPACE} | fields
    write_latents(folder, ITEMS, {item.id: filled(3.0) for item in ITEMS}, texts, **arguments)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path)


def test_items_and_splits_in_the_order_of_the_index(folder: Path) -> None:
    cache = LatentCache(folder)
    assert cache.items == ITEMS
    assert [item.file_name for item in cache.split("train")] == ["a.png", "c.png"]
    assert [item.file_name for item in cache.split("holdout")] == ["b.png"]
    assert [item.caption for item in cache.items] == ["ü", "ü", "ü"]


def test_an_item_from_json_has_tuples() -> None:
    fields = item_fields(ITEMS[2])
    assert fields == {
        "id": "c" * 64,
        "file_name": "c.png",
        "captions": ["ü", "red, ball, grass"],
        "split": "train",
        "bucket": [8, 4],
        "original": [16, 12],
        "corner": [0, 1],
        "shard": 0,
        "key": KEYS["c"],
    }
    assert LatentItem.of(fields) == ITEMS[2]
    assert hash(LatentItem.of(fields)) == hash(ITEMS[2])  # a list would have none


@pytest.mark.parametrize(
    ("original", "bucket", "corner", "mirrored"),
    [
        ((60, 100), (64, 64), (0, 21), (0, 22)),  # 106.67 wide, 107 - 64 - 21
        ((72, 90), (64, 64), (0, 8), (0, 8)),  # 80 wide
        ((100, 60), (64, 64), (21, 0), (21, 0)),  # 64 wide: nothing goes at the sides
        ((64, 64), (64, 64), (0, 0), (0, 0)),
        ((120, 300), (60, 80), (0, 10), (0, 60)),  # 150 wide; not the centre
    ],
)
def test_corner_of_the_mirrored_picture(
    original: tuple[int, int], bucket: tuple[int, int], corner: tuple[int, int], mirrored: tuple[int, int]
) -> None:
    item = replace(ITEMS[0], original=original, bucket=bucket, corner=corner)
    assert item.corner_of(flipped=False) == corner
    assert item.corner_of(flipped=True) == mirrored
    assert replace(item, corner=mirrored).corner_of(flipped=True) == corner


def test_a_crop_at_the_centre_stays_there_when_mirrored() -> None:
    """To the pixel that rounding moves it: the item resizes as core/images.py does."""
    for width in range(1, 400):
        for height in (1, 47, 64, 99):
            corner = crop_corner((height, width), (64, 48))
            item = replace(ITEMS[0], original=(height, width), bucket=(64, 48), corner=corner)
            top, left = item.corner_of(flipped=True)
            assert top == corner[0]
            assert left >= 0
            assert abs(left - corner[1]) <= 1


def test_a_draw_is_scaled_and_has_the_posteriors_spread(folder: Path) -> None:
    cache = LatentCache(folder)
    mean, logvar = cache.moments(ITEMS[0])
    assert tuple(mean.shape) == tuple(logvar.shape) == cache.shape(ITEMS[0]) == (4, 2, 1)
    # Mean 3, deviation 5, shift 1, factor 0.5.
    assert torch.equal(cache.sample(ITEMS[0], torch.zeros(4, 2, 1)), torch.full((4, 2, 1), 1.0))
    assert torch.allclose(cache.sample(ITEMS[0], torch.full((4, 2, 1), 2.0)), torch.full((4, 2, 1), 6.0))


def test_mirrored_pictures_have_their_own_moments(tmp_path: Path) -> None:
    cache = LatentCache(write(tmp_path, flipped={item.id: filled(7.0) for item in ITEMS}))
    assert cache.flips
    assert float(cache.moments(ITEMS[1])[0][0, 0, 0]) == 3.0
    assert float(cache.moments(ITEMS[1], flipped=True)[0][0, 0, 0]) == 7.0
    assert torch.equal(cache.sample(ITEMS[1], torch.zeros(4, 2, 1), flipped=True), torch.full((4, 2, 1), 3.0))


def test_text_is_found_by_the_sha256_of_the_caption(folder: Path) -> None:
    cache = LatentCache(folder)
    assert text_key("ü") == sha256_bytes(b"\xc3\xbc")
    assert [float(cache.text(caption).sum()) for caption in ("", "ü", "red, ball, grass")] == [0.0, 6.0, 12.0]
    assert sorted(cache.index["files"]) == [
        "shard-00.safetensors", "shard-01.safetensors", *sorted({text_name(shard_of(text_key(c), 2)) for c in
        ("", "ü", "red, ball, grass")}),
    ]  # fmt: skip


def test_pooled_text_where_the_base_has_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no pooled text: its base has one text encoder"):
        LatentCache(write(tmp_path / "one")).pooled("ü")
    cache = LatentCache(write(tmp_path / "two", pooled={"ü": torch.arange(5.0)}))
    assert cache.pooled("ü").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_texts_of_an_item_are_its_captions_and_their_variants(tmp_path: Path) -> None:
    shuffle = ShuffleConfig(variants=3, separator=", ", keep=1, seed=5)
    cache = LatentCache(write(tmp_path, shuffle=shuffle.to_json()))
    assert cache.texts(ITEMS[0]) == ["ü"]
    assert cache.texts(ITEMS[2]) == ["ü", *variants("red, ball, grass", shuffle)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fewer_bits_are_read_as_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    moments = {
        item.id: (torch.full((4, 2, 1), 1.5).to(dtype), torch.zeros(4, 2, 1).to(dtype)) for item in ITEMS
    }
    texts = {"": torch.zeros(3, 2).to(dtype), "ü": torch.ones(3, 2).to(dtype)}
    write_latents(tmp_path, ITEMS, moments, texts, space=SPACE, dtype=str(dtype).removeprefix("torch."))
    mean, _ = LatentCache(tmp_path).moments(ITEMS[0])
    assert mean.dtype == torch.float32
    assert float(mean[0, 0, 0]) == 1.5
    assert LatentCache(tmp_path).text("ü").dtype == torch.float32


def read_all(cache: LatentCache) -> None:
    for item in cache.items:
        cache.moments(item)
    for caption in ("", "ü", "red, ball, grass"):
        cache.text(caption)


def test_a_flipped_bit_anywhere_is_found_when_it_is_needed(folder: Path) -> None:
    names = sorted(LatentCache(folder).index["files"])
    for name in names:
        whole = (folder / name).read_bytes()
        for place in (0, 9, len(whole) // 2, len(whole) - 1):
            spoiled = bytearray(whole)
            spoiled[place] ^= 16
            (folder / name).write_bytes(spoiled)
            with pytest.raises(StoreError, match=rf"{name} is missing or does not match its sha256"):
                read_all(LatentCache(folder))
        (folder / name).write_bytes(whole)


def test_a_flipped_bit_in_the_index_is_found(folder: Path) -> None:
    path = folder / "index.json"
    whole = path.read_bytes()
    for place in range(5, len(whole), 97):
        spoiled = bytearray(whole)
        spoiled[place] ^= 1
        path.write_bytes(spoiled)
        with pytest.raises(StoreError, match=r"index\.json does not match its own digest"):
            LatentCache(folder)


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"has format 2; this version reads 3\n  remedy: run `dvc repro encode`"
    ):
        LatentCache(write(tmp_path, format=2))


def test_latents_of_another_base_are_refused(tmp_path: Path) -> None:
    components: dict[str, dict[str, Any]] = {
        name: {"digest": name} for name in ("vae", "text_encoder", "tokenizer")
    }
    record = BaseRecord(source={}, files={}, components=components, digest="")
    right = {"vae": record.vae_digest, "text_encoder": record.text_digest}
    LatentCache(write(tmp_path / "right", **right)).check_base(record)
    for name in right:
        cache = LatentCache(write(tmp_path / name, **right | {name: fingerprint({})}))
        with pytest.raises(
            StoreError, match=f"was made with another {name} than data/base/record.json describes"
        ):
            cache.check_base(record)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"shard-01\.safetensors does not hold [0-9a-f]{64}\.mean \(a\.png\)"),
        ({"mean": torch.zeros(4, 1, 2)}, r"is torch\.float32 \(4, 1, 2\), the index says float32 \(4, 2, 1\)"),
        ({"mean": torch.zeros(4, 2, 1).half()}, r"\(a\.png\) is torch\.float16 \(4, 2, 1\), the index says float32"),
        ({"mean": torch.zeros(4, 2, 1)}, r"does not hold [0-9a-f]{64}\.logvar \(a\.png\)"),
    ],
)  # fmt: skip
def test_shards_that_do_not_hold_what_the_index_says(
    folder: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    """A digest that fits shows that nothing broke, not that the right thing was written."""
    save_file(
        folder / "shard-01.safetensors", {f"{KEYS['a']}.{part}": value for part, value in tensors.items()}
    )
    index = json.loads((folder / "index.json").read_text())
    write_index(folder, index, list(index["files"]))
    with pytest.raises(StoreError, match=message):
        LatentCache(folder).moments(ITEMS[0])


def test_a_picture_of_other_pixels_is_not_found(folder: Path) -> None:
    """The key is what the tensors are called by: another picture under the same file cannot be taken for it."""
    with pytest.raises(StoreError, match=r"does not hold [0-9a-f]{64}\.mean \(a\.png\)"):
        LatentCache(folder).moments(replace(ITEMS[0], key=sha256_bytes(b"other pixels")))


def test_a_caption_that_was_not_encoded(folder: Path) -> None:
    with pytest.raises(StoreError, match=r"does not hold [0-9a-f]{64}\.states \(caption 'green'\)"):
        LatentCache(folder).text("green")
