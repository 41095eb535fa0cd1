"""What a picture's first bytes tell, without decoding it."""

import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from stages.core.errors import PictureError

# By content, whatever the name says; Pillow knows more formats, some of which start other programs to decode.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")

# Pillow refuses large pictures by a limit of its own; here the limit is a parameter, checked on the header.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True, kw_only=True)
class Header:
    """Format and geometry as the file states them."""

    format: str
    mode: str
    width: int
    height: int


def read_header(path: Path, *, max_pixels: int) -> Header:
    """Read the header. Raises PictureError with a reason code: zero_bytes, unreadable, too_many_pixels."""
    if path.stat().st_size == 0:
        raise PictureError("zero_bytes", f"{path} is empty", remedy="get the file again, or remove it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as picture:
                header = Header(
                    format=picture.format or "", mode=picture.mode, width=picture.width, height=picture.height
                )
    except UnidentifiedImageError as error:
        raise PictureError("unreadable", f"{path} is not a picture", remedy="replace or remove it") from error
    except Exception as error:  # Pillow's parsers raise what their formats make them raise
        raise PictureError(
            "unreadable", f"{path} is not a picture ({error})", remedy="replace or remove it"
        ) from error
    if not header.width or not header.height:
        raise PictureError("unreadable", f"{path} has no pixels", remedy="replace or remove it")
    refuse_bomb(path, (header.width, header.height), max_pixels)
    return header


def refuse_bomb(path: Path, size: tuple[int, int], max_pixels: int) -> None:
    """Raises PictureError too_many_pixels: a small file may unfold to gigabytes."""
    if size[0] * size[1] > max_pixels:
        raise PictureError(
            "too_many_pixels",
            f"{path} is {size[0]} x {size[1]}, more than {max_pixels:,} pixels",
            remedy="make it smaller, or raise ingest.max_pixels",
        )
