"""Where the pixels of a sheet lie."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont
from torch import Tensor

from stages.core.sheets import png_bytes, sheet, shown, wrapped

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def plain(colour: tuple[int, int, int], height: int = 64, width: int = 64) -> Tensor:
    return torch.tensor(colour, dtype=torch.uint8)[:, None, None].repeat(1, height, width)


def test_small_pictures_are_enlarged_by_a_whole_factor() -> None:
    picture = torch.arange(3 * 64 * 64, dtype=torch.int64).remainder(251).to(torch.uint8).reshape(3, 64, 64)
    found = np.asarray(shown(picture))
    assert found.shape == (128, 128, 3)
    assert np.array_equal(found[::2, ::2], picture.permute(1, 2, 0).numpy())
    assert np.array_equal(found[::2, ::2], found[1::2, 1::2])


def test_large_pictures_are_averaged_down() -> None:
    picture = torch.zeros(3, 512, 256, dtype=torch.uint8)
    picture[:, ::2] = 200
    found = np.asarray(shown(picture))
    assert found.shape == (256, 128, 3)
    assert (found == 100).all()


def test_layout() -> None:
    rows = [("base", [plain(RED), plain(GREEN)]), ("fine-tuned", [plain(BLUE), plain(RED)])]
    image = sheet(rows, ["one", "two"])
    left = 8 + int(np.ceil(ImageFont.load_default(12).getlength("fine-tuned"))) + 8
    assert image.size == (left + 2 * (128 + 8), 8 + 2 * (128 + 8) + 8 + 15)
    pixels = np.asarray(image)
    for row, column, colour in ((0, 0, RED), (0, 1, GREEN), (1, 0, BLUE), (1, 1, RED)):
        top, across = 8 + row * 136, left + column * 136
        assert (pixels[top : top + 128, across : across + 128] == colour).all()
        assert (pixels[top - 8 : top, across : across + 128] == 255).all()
    assert (pixels[8 : 8 + 128, 8 : left - 8].min(axis=2) < 128).any()  # the row's name
    assert (pixels[8 + 2 * 136 :, left : left + 128].min(axis=2) < 128).any()  # the caption


def test_pictures_of_other_shapes_are_centred() -> None:
    image = sheet([("a", [plain(RED, 64, 64), plain(GREEN, 32, 64)])], ["one", "two"])
    pixels = np.asarray(image)
    right = pixels[:, -136:-8]
    assert (right[8 + 32 : 8 + 96] == GREEN).all()
    assert (right[8 : 8 + 32] == 255).all()


def test_a_row_with_a_hole_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 captions for rows of \[1\] pictures"):
        sheet([("base", [plain(RED)])], ["one", "two"])


def test_captions_are_wrapped_and_cut() -> None:
    font = ImageFont.load_default(12)
    lines = wrapped("a small red ball on a blue table, on the left", 128, font)
    assert " ".join(lines) == "a small red ball on a blue table, on the left"
    assert all(font.getlength(line) <= 128 for line in lines)
    long = wrapped("word " * 100, 128, font)
    assert len(long) == 4
    assert long[-1].endswith("...")
    assert all(font.getlength(line) <= 128 for line in [*long, *wrapped("x" * 60, 128, font)])
    assert "".join(wrapped("x" * 60, 128, font)) == "x" * 60
    assert wrapped("", 128, font) == [""]


def test_characters_that_the_font_lacks_do_not_stop_the_sheet() -> None:
    assert sheet([("base", [plain(RED)])], ["\N{GRINNING FACE} 笑"]).width > 128


def test_png_holds_pixels_and_nothing_else() -> None:
    image = sheet([("base", [plain(RED)])], ["one"])
    data = png_bytes(image)
    assert data == png_bytes(sheet([("base", [plain(RED)])], ["one"]))
    with Image.open(io.BytesIO(data)) as read:
        assert read.info == {}
        assert np.array_equal(np.asarray(read), np.asarray(image))
