"""Sheets: the same prompts and seeds before and after, with the real picture, as one PNG.

Pictures of any sizes are shown in equal cells: small ones enlarged by a whole factor (nearest: every pixel stays a square),
large ones averaged down (box). Captions and names are written with Pillow's built-in font, so the bytes depend on
Pillow's version, not on the machine's fonts.
"""

import io
import math

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

CELL = 128  # the aim for a cell's longer side, in pixels; below it pictures are enlarged
LARGEST = 256  # above it they are reduced
GAP = 8
_TEXT_LINES = 4
_FONT_SIZE = 12
_LINE = 15
_INK, _PAPER = (32, 32, 32), (255, 255, 255)


def sheet(rows: list[tuple[str, list[Tensor]]], captions: list[str]) -> Image.Image:
    """One column per caption, one row per name; uint8 RGB pictures [3, H, W]; captions are written underneath."""
    if not captions or any(len(pictures) != len(captions) for _, pictures in rows):
        raise ValueError(
            f"{len(captions)} captions for rows of {[len(pictures) for _, pictures in rows]} pictures"
        )
    font = ImageFont.load_default(_FONT_SIZE)
    tiles = [[shown(picture) for picture in pictures] for _, pictures in rows]
    width = max(tile.width for row in tiles for tile in row)
    height = max(tile.height for row in tiles for tile in row)
    left = GAP + math.ceil(max(font.getlength(name) for name, _ in rows)) + GAP
    texts = [wrapped(caption, width, font) for caption in captions]
    bottom = GAP + _LINE * max(len(lines) for lines in texts)
    size = (left + len(captions) * (width + GAP), GAP + len(rows) * (height + GAP) + bottom)
    image = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(image)
    for row, (name, _) in enumerate(rows):
        top = GAP + row * (height + GAP)
        draw.text((GAP, top + (height - _LINE) // 2), name, fill=_INK, font=font)
        for column, tile in enumerate(tiles[row]):
            across = left + column * (width + GAP) + (width - tile.width) // 2
            image.paste(tile, (across, top + (height - tile.height) // 2))
    for column, lines in enumerate(texts):
        for number, line in enumerate(lines):
            place = (left + column * (width + GAP), GAP + len(rows) * (height + GAP) + number * _LINE)
            draw.text(place, line, fill=_INK, font=font)
    return image


def shown(pixels_CHW: Tensor) -> Image.Image:
    """The picture at the size in which a sheet shows it."""
    image = Image.fromarray(pixels_CHW.permute(1, 2, 0).contiguous().numpy())
    longer = max(image.size)
    if longer > LARGEST:
        size = (round(image.width * LARGEST / longer), round(image.height * LARGEST / longer))
        return image.resize(size, Image.Resampling.BOX)
    factor = math.ceil(CELL / longer)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def wrapped(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """`text` in lines of at most `width` pixels, at most four; what does not fit ends in "..."."""
    lines = [""]
    for word in text.split():
        # A word wider than the cell is broken, letter by letter.
        for start, piece in enumerate(_pieces(word, width, font)):
            joined = f"{lines[-1]} {piece}" if lines[-1] and start == 0 else lines[-1] + piece
            if font.getlength(joined) <= width:
                lines[-1] = joined
            else:
                lines.append(piece)
    if len(lines) > _TEXT_LINES:
        last = lines[_TEXT_LINES - 1]
        while last and font.getlength(f"{last}...") > width:
            last = last[:-1]
        lines = [*lines[: _TEXT_LINES - 1], f"{last.rstrip()}..."]
    return lines


def _pieces(word: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    pieces = [""]
    for letter in word:
        if pieces[-1] and font.getlength(pieces[-1] + letter) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces


def png_bytes(image: Image.Image) -> bytes:
    """The PNG file, without any time or text."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
