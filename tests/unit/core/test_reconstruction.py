"""What comes out of the VAE again, and how far it is from the source."""

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from stages.core.errors import MachineError
from stages.core.latents import LatentCache, LatentItem
from stages.core.models.vae import Vae, to_uint8
from stages.core.reconstruction import choose, decoded, psnr_of, reconstruction_sheet
from stages.core.sampler import normal
from stages.core.sheets import png_bytes, sheet
from stages.core.store import sha256_bytes
from tests.latents import write_latents
from tests.tiny import make_tiny_base

# The tiny VAE with a shift, which it lacks: who forgets to scale, or to shift, gets other pictures.
SPACE = {"channels": 4, "downsample": 4, "scaling_factor": 0.6, "shift_factor": 0.5}


def item(number: int, bucket: tuple[int, int] = (16, 16)) -> LatentItem:
    return LatentItem(
        id=sha256_bytes(str(number).encode()),
        file_name=f"{number}.png",
        captions=(f"number {number}", "another caption"),
        split="train",
        bucket=bucket,
        original=bucket,
        corner=(0, 0),
        shard=number % 2,
        key=sha256_bytes(f"pixels {number}".encode()),
    )


# Every third is wide.
ITEMS = [item(number, (16, 24) if number % 3 == 2 else (16, 16)) for number in range(7)]


def mean_of(found: LatentItem) -> Tensor:
    return normal(0, "mean", ITEMS.index(found), shape=(4, found.bucket[0] // 4, found.bucket[1] // 4))


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Vae:
    made = Vae(make_tiny_base(tmp_path_factory.mktemp("base")), "cpu")
    made.space = type(made.space)(**cast(dict[str, Any], SPACE))
    return made


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> LatentCache:
    folder = tmp_path_factory.mktemp("encode")
    # A wide posterior: a draw from it would be far from the mean.
    moments = {found.id: (mean_of(found), torch.full_like(mean_of(found), 4.0)) for found in ITEMS}
    write_latents(folder, ITEMS, moments, {"": torch.zeros(3, 2)}, space=SPACE)
    return LatentCache(folder)


@pytest.mark.parametrize(
    ("length", "count", "chosen"),
    [
        (10, 4, [0, 2, 5, 7]),
        (10, 1, [0]),
        (10, 9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (3, 3, [0, 1, 2]),
        (3, 8, [0, 1, 2]),
        (3, 0, []),
        (0, 8, []),
    ],
)
def test_chosen_items_are_spread(length: int, count: int, chosen: list[int]) -> None:
    items = [item(number) for number in range(length)]
    assert choose(items, count) == [items[place] for place in chosen]


def test_decoded_are_the_means_as_the_vae_gave_them(vae: Vae, cache: LatentCache) -> None:
    found = decoded(vae, cache, ITEMS, batch_size=3)
    assert len(found) == len(ITEMS)
    for one, picture in zip(ITEMS, found, strict=True):
        assert picture.dtype == torch.uint8
        assert tuple(picture.shape) == (3, *one.bucket)
        with torch.inference_mode():
            expected = to_uint8(vae.model.decode(mean_of(one)[None]).sample)[0]
        # Scaled and unscaled again, in batches: a value may be rounded to its neighbour.
        assert int((picture.int() - expected.int()).abs().max()) <= 1


def test_an_items_bytes_depend_neither_on_its_companions_nor_on_the_order(
    vae: Vae, cache: LatentCache
) -> None:
    together = decoded(vae, cache, ITEMS, batch_size=3)
    backwards = decoded(vae, cache, ITEMS[::-1], batch_size=3)
    alone = [decoded(vae, cache, [one], batch_size=3)[0] for one in ITEMS]
    for one, two, three in zip(together, backwards[::-1], alone, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    twice = decoded(vae, cache, [ITEMS[4], ITEMS[1], ITEMS[4]], batch_size=2)
    assert torch.equal(twice[0], twice[2])
    assert decoded(vae, cache, [], batch_size=3) == []


def test_every_forward_has_the_same_number_of_rows_of_one_bucket(
    vae: Vae, cache: LatentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    decode = Vae.decode

    def watched(self: Vae, scaled_BChw: Tensor) -> Tensor:
        shapes.append(tuple(scaled_BChw.shape))
        return decode(self, scaled_BChw)

    monkeypatch.setattr(Vae, "decode", watched)
    decoded(vae, cache, ITEMS, batch_size=4)  # five square ones, two wide ones
    assert sorted(shapes) == [(4, 4, 4, 4), (4, 4, 4, 4), (4, 4, 4, 6)]


def test_too_little_memory_is_explained(
    vae: Vae, cache: LatentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Vae, scaled_BChw: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Vae, "decode", full)
    with pytest.raises(
        MachineError, match="decoding 5 pictures of 24 x 16 needs more memory than there is"
    ) as raised:
        decoded(vae, cache, [ITEMS[2]], batch_size=5)
    assert raised.value.remedy == (
        "set encode.sheet to 0, or encode.tile to a smaller tile; with `latents inspect` use --items 0"
    )


def plain(value: int) -> Tensor:
    return torch.full((3, 2, 2), value, dtype=torch.uint8)


def test_psnr() -> None:
    assert psnr_of(plain(7), plain(7)) == 100.0
    assert psnr_of(plain(0), plain(255)) == 0.0
    assert psnr_of(plain(255), plain(0)) == 0.0
    assert psnr_of(plain(100), plain(105)) == pytest.approx(20 * math.log10(255 / 5))
    one = plain(100)
    one[1, 0, 1] = 106  # one value of twelve is off by 6: MSE 3
    assert psnr_of(one, plain(100)) == pytest.approx(10 * math.log10(255**2 / 3))


def test_psnr_of_two_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pictures of \(1, 3, 1, 1\) and \(1, 3, 2, 2\)"):
        psnr_of(plain(0), torch.zeros(3, 1, 1, dtype=torch.uint8))


def test_the_sheet_has_sources_above_and_names_decibels_and_captions_below() -> None:
    sources, pictures = [plain(100), plain(0)], [plain(105), plain(0)]
    found = reconstruction_sheet(ITEMS[:2], sources, pictures)
    expected = sheet(
        [("source", sources), ("decoded", pictures)], ["0.png 34.2 dB: number 0", "1.png 100.0 dB: number 1"]
    )
    assert png_bytes(found) == png_bytes(expected)
    swapped = sheet(
        [("source", pictures), ("decoded", sources)], ["0.png 34.2 dB: number 0", "1.png 100.0 dB: number 1"]
    )
    assert png_bytes(found) != png_bytes(swapped)
