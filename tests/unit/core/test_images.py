"""Decoding to exact pixels, and fitting to a bucket."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from stages.core.errors import PictureError
from stages.core.images import Decoded, crop_corner, decode, fit
from tests.unit.core.test_headers import bomb

WHITE = (255, 255, 255)
RED, GREEN, BLUE, YELLOW = (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 0)


def decoded(path: Path, background: tuple[int, int, int] = WHITE) -> Decoded:
    return decode(path, background=background, max_pixels=10**6)


def saved(root: Path, picture: Image.Image, name: str = "a.png", **options: Any) -> Path:
    picture.save(root / name, **options)
    return root / name


def pixels(picture: Image.Image) -> list[list[tuple[int, ...]]]:
    return [[picture.getpixel((x, y)) for x in range(picture.width)] for y in range(picture.height)]  # type: ignore[misc]


def grid(rows: list[list[Any]], mode: str = "RGB") -> Image.Image:
    picture = Image.new(mode, (len(rows[0]), len(rows)))
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            picture.putpixel((x, y), value)
    return picture


# What is upright: red green / blue yellow / white black (2 wide, 3 high).
UPRIGHT = [[RED, GREEN], [BLUE, YELLOW], [WHITE, (0, 0, 0)]]
# How a camera that was held otherwise stores it (EXIF 2.32, tag 0x0112: where row 0 and column 0 lie).
STORED = {
    1: UPRIGHT,
    2: [row[::-1] for row in UPRIGHT],
    3: [row[::-1] for row in UPRIGHT[::-1]],
    4: UPRIGHT[::-1],
    5: [list(column) for column in zip(*UPRIGHT, strict=True)],
    6: [list(column) for column in zip(*UPRIGHT, strict=True)][::-1],
    7: [list(column)[::-1] for column in zip(*UPRIGHT, strict=True)][::-1],
    8: [list(column)[::-1] for column in zip(*UPRIGHT, strict=True)],
}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    result = decoded(saved(tmp_path, grid(STORED[orientation]), exif=exif))
    assert pixels(result.picture) == UPRIGHT
    assert result.repairs == (() if orientation == 1 else ("rotated_by_exif",))


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_orientation_that_does_not_exist_turns_nothing_and_is_no_repair(
    tmp_path: Path, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    result = decoded(saved(tmp_path, grid(UPRIGHT), exif=exif))
    assert (pixels(result.picture), result.repairs) == (UPRIGHT, ())


def test_alpha_on_the_stated_background(tmp_path: Path) -> None:
    row = [(200, 100, 0, 255), (200, 100, 0, 0), (255, 0, 51, 51)]
    path = saved(tmp_path, grid([row], "RGBA"))
    result = decoded(path, background=(0, 10, 255))
    # 51 / 255 is a fifth: (0.2 x 255, 0.8 x 10, 0.2 x 51 + 0.8 x 255).
    assert pixels(result.picture) == [[(200, 100, 0), (0, 10, 255), (51, 8, 214)]]
    assert result.repairs == ("alpha_on_background",)


def test_opaque_alpha_is_no_repair(tmp_path: Path) -> None:
    result = decoded(saved(tmp_path, Image.new("RGBA", (2, 1), (1, 2, 3, 255))))
    assert (pixels(result.picture), result.repairs) == ([[(1, 2, 3)] * 2], ())


def test_grey_with_alpha(tmp_path: Path) -> None:
    result = decoded(saved(tmp_path, grid([[(40, 255), (40, 0)]], "LA")), background=(9, 8, 7))
    assert pixels(result.picture) == [[(40, 40, 40), (9, 8, 7)]]


def palette() -> Image.Image:
    picture = Image.new("P", (3, 1))
    picture.putpalette([255, 0, 0, 0, 128, 0, 0, 0, 255])
    for x in range(3):
        picture.putpixel((x, 0), x)
    return picture


def test_palette(tmp_path: Path) -> None:
    result = decoded(saved(tmp_path, palette()))
    assert (pixels(result.picture), result.repairs) == ([[RED, GREEN, BLUE]], ())


@pytest.mark.parametrize("transparency", [1, b"\xff\x00\xff"])
def test_palette_with_transparency(tmp_path: Path, transparency: int | bytes) -> None:
    result = decoded(saved(tmp_path, palette(), transparency=transparency), background=(9, 8, 7))
    assert pixels(result.picture) == [[RED, (9, 8, 7), BLUE]]
    assert result.repairs == ("alpha_on_background",)


def test_one_colour_transparent_in_rgb_and_grey(tmp_path: Path) -> None:
    rgb = decoded(saved(tmp_path, grid([[RED, BLUE]]), transparency=BLUE), background=(1, 2, 3))
    assert pixels(rgb.picture) == [[RED, (1, 2, 3)]]
    grey = decoded(saved(tmp_path, grid([[7, 8]], "L"), transparency=8), background=(1, 2, 3))
    assert pixels(grey.picture) == [[(7, 7, 7), (1, 2, 3)]]


def grey_16(*values: int) -> Image.Image:
    return Image.fromarray(np.array([values], dtype=np.uint16))


def test_16_bit_grey_is_rounded_to_nearest(tmp_path: Path) -> None:
    path = saved(tmp_path, grey_16(0, 128, 129, 257, 257 * 200, 257 * 200 + 129, 65535))
    assert Image.open(path).mode == "I;16"
    result = decoded(path)
    assert [pixel[0] for pixel in pixels(result.picture)[0]] == [0, 0, 1, 1, 200, 201, 255]
    assert result.repairs == ("depth_16_to_8",)


def test_16_bit_grey_with_one_transparent_value(tmp_path: Path) -> None:
    path = saved(tmp_path, grey_16(0, 257 * 9, 65535), transparency=257 * 9)
    assert "transparency" in Image.open(path).info
    result = decoded(path, background=(1, 2, 3))
    assert pixels(result.picture) == [[(0, 0, 0), (1, 2, 3), WHITE]]
    assert result.repairs == ("depth_16_to_8", "alpha_on_background")


def test_integers_outside_16_bits_are_refused_not_clipped(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray(np.array([[0, 70000]], dtype=np.int32)), "a.tif")
    with pytest.raises(PictureError, match="has greys from 0 to 70000, outside 16 bits") as caught:
        decoded(path)
    assert caught.value.reason == "unsupported_pixels"


def test_one_bit(tmp_path: Path) -> None:
    assert pixels(decoded(saved(tmp_path, grid([[0, 255]], "1"))).picture) == [[(0, 0, 0), WHITE]]


@pytest.mark.parametrize("mode", ["F", "LAB"])
def test_pixels_of_unsupported_kinds(tmp_path: Path, mode: str) -> None:
    with pytest.raises(PictureError, match=f"has pixels of mode {mode}") as caught:
        decoded(saved(tmp_path, Image.new(mode, (2, 2)), "a.tif"))
    assert caught.value.reason == "unsupported_pixels"


def test_cmyk_without_profile(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="is CMYK without a profile") as caught:
        decoded(saved(tmp_path, Image.new("CMYK", (8, 8)), "a.jpg"))
    assert caught.value.reason == "cmyk_without_profile"


def icc(name: str) -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile(name)).tobytes()  # type: ignore[arg-type]


def wide_profile() -> bytes:
    """An RGB profile that is not sRGB: sRGB's own with its red and blue primaries exchanged."""
    data = icc("sRGB").replace(b"s\0R\0G\0B", b"o\0t\0h\0r")
    return data.replace(b"rXYZ", b"tmpp").replace(b"bXYZ", b"rXYZ").replace(b"tmpp", b"bXYZ")


def test_srgb_profile_changes_nothing(tmp_path: Path) -> None:
    result = decoded(saved(tmp_path, grid([[RED, (12, 34, 56)]]), icc_profile=icc("sRGB")))
    assert (pixels(result.picture), result.repairs) == ([[RED, (12, 34, 56)]], ())


@pytest.mark.parametrize("kind", ["RGB", "RGBA", "P"])
def test_another_profile_is_converted_also_in_a_palette(tmp_path: Path, kind: str) -> None:
    # Red and blue exchanged, so red comes out blue.
    picture = palette() if kind == "P" else grid([[RED, GREEN, BLUE]]).convert(kind)
    result = decoded(saved(tmp_path, picture, icc_profile=wide_profile()))
    assert np.allclose(np.array(result.picture), np.array([[BLUE, GREEN, RED]]), atol=2)
    assert result.repairs == ("profile_to_srgb",)


@pytest.mark.parametrize("profile", [b"no profile at all", icc("LAB")])
def test_a_profile_that_cannot_be_used(tmp_path: Path, profile: bytes) -> None:
    path = saved(tmp_path, Image.new("RGB", (2, 2)), icc_profile=profile)
    with pytest.raises(PictureError, match="has a colour profile that cannot be used") as caught:
        decoded(path)
    assert caught.value.reason == "bad_profile"


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.tif"])
def test_several_frames(tmp_path: Path, name: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, BLUE)]
    path = saved(tmp_path, frames[0], name, save_all=True, append_images=frames[1:])
    with pytest.raises(PictureError, match="has several frames") as caught:
        decoded(path)
    assert caught.value.reason == "animated"


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.gif", "a.tif", "a.bmp"])
def test_cut_short(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, Image.effect_noise((64, 64), 80).convert("RGB"), name)
    assert decoded(path).picture.size == (64, 64)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(PictureError, match=r"(cannot be decoded|is not a picture)") as caught:
        decoded(path)
    assert caught.value.reason in ("truncated", "unreadable")


def test_text_called_png(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("hello")
    with pytest.raises(PictureError, match=r"a\.png is not a picture") as caught:
        decoded(tmp_path / "a.png")
    assert caught.value.reason == "unreadable"


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="is 50000 x 50000, more than 1,000,000 pixels") as caught:
        decoded(bomb(tmp_path / "a.png", 50_000, 50_000))
    assert caught.value.reason == "too_many_pixels"


def test_any_damage_gives_a_picture_error_that_begins_with_the_path(tmp_path: Path) -> None:
    """300 files with a few bytes changed: decoded, or refused by name, never another exception."""
    rng = random.Random(0)
    source = Image.effect_noise((24, 20), 60).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    seeds: list[bytes] = []
    for kind, options in (
        ("PNG", {}),
        ("JPEG", {"exif": exif}),
        ("WEBP", {}),
        ("GIF", {}),
        ("TIFF", {}),
        ("BMP", {}),
    ):
        file = io.BytesIO()
        source.save(file, kind, **options)
        seeds.append(file.getvalue())
    path = tmp_path / "a.png"
    outcomes = {"good": 0, "refused": 0}
    for number in range(300):
        data = bytearray(seeds[number % len(seeds)])
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(min(len(data), 300))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            assert decoded(path).picture.mode == "RGB"
            outcomes["good"] += 1
        except PictureError as error:
            outcomes["refused" if error.detail(path) == error.message[len(str(path)) + 1 :] else "odd"] += 1
    assert min(outcomes.values()) > 20


# --- fit


def test_same_size_is_the_identity() -> None:
    picture = grid(UPRIGHT)
    pixels_CHW, crop = fit(picture, (3, 2))
    assert crop == (0, 0, 2, 3)
    assert pixels_CHW.dtype == torch.uint8
    assert pixels_CHW.is_contiguous()
    assert torch.equal(pixels_CHW, torch.from_numpy(np.array(picture)).permute(2, 0, 1))


@pytest.mark.parametrize(
    ("size", "bucket", "crop"),
    [
        ((400, 200), (100, 100), (100, 0, 300, 200)),  # wide: the sides go
        ((200, 400), (100, 100), (0, 100, 200, 300)),  # high: top and bottom go
        ((300, 200), (100, 150), (0, 0, 300, 200)),  # same ratio: nothing goes
        ((100, 50), (64, 64), (25, 0, 75, 50)),  # enlarged: still the centre
    ],
)
def test_cover_and_centre_crop(size: tuple[int, int], bucket: tuple[int, int], crop: tuple[int, ...]) -> None:
    picture = Image.new("RGB", size, RED)
    picture.paste(BLUE, crop)  # what is inside the crop is blue
    pixels_CHW, found = fit(picture, bucket)
    assert found == crop
    assert pixels_CHW.shape == (3, *bucket)
    assert pixels_CHW[:, 5:-5, 5:-5].flatten(1).unique(dim=1).tolist() == [[0], [0], [255]]


def test_every_size_fits() -> None:
    """width / (width / size) is a hair more than size for a third of all sizes, which Pillow would refuse."""
    assert any(64 / (64 / size) > size for size in range(64, 400))
    for size in range(64, 400):
        pixels_CHW, crop = fit(Image.new("RGB", (size, size)), (64, 64))
        assert pixels_CHW.shape == (3, 64, 64)
        assert crop == (0, 0, size, size)


@pytest.mark.parametrize(
    ("size", "bucket", "corner"),
    [
        ((60, 100), (64, 64), (0, 21)),  # enlarged to 64 x 106.67: 21.33 goes left and right
        ((100, 60), (64, 64), (21, 0)),  # the same, upright
        ((72, 90), (64, 64), (0, 8)),  # to 64 x 80
        ((200, 400), (100, 100), (0, 50)),  # to 100 x 200
        ((400, 300), (100, 150), (50, 0)),  # to 200 x 150
        ((68, 101), (64, 64), (0, 16)),  # 15.53; from the source's corner, 16.5, rounded first it would be 15
        ((300, 309), (100, 100), (0, 2)),  # 1.5, as is
        ((300, 315), (100, 100), (0, 2)),  # 2.5
        ((64, 64), (64, 64), (0, 0)),
        ((200, 300), (100, 150), (0, 0)),  # same ratio
        ((49, 49), (64, 64), (0, 0)),
    ],
)
def test_corner_of_the_crop_in_the_resized_picture(
    size: tuple[int, int], bucket: tuple[int, int], corner: tuple[int, int]
) -> None:
    assert crop_corner(size, bucket) == corner


@pytest.mark.parametrize("bucket", [(64, 64), (64, 96), (96, 64)])
def test_the_corner_is_the_one_that_fit_cuts_at(bucket: tuple[int, int]) -> None:
    for height, width in ((50, 211), (64, 64), (77, 65), (130, 60), (131, 96), (300, 309)):
        _, (left, top, _, _) = fit(Image.new("RGB", (width, height)), bucket)
        scale = max(bucket[0] / height, bucket[1] / width)
        down, across = crop_corner((height, width), bucket)
        # Half a pixel of each picture: both were rounded.
        assert abs(down - top * scale) <= 0.5 + 0.5 * scale
        assert abs(across - left * scale) <= 0.5 + 0.5 * scale
