"""What a picture's first bytes tell, without decoding it."""

import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from stages.core.errors import PictureError


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
            # Pillow warns of bombs by a limit of its own; ours is a parameter and is checked below.
            warnings.simplefilter("ignore")
            with Image.open(path) as picture:
                header = Header(
                    format=picture.format or "", mode=picture.mode, width=picture.width, height=picture.height
                )
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise PictureError(
            "unreadable", f"{path} is not a picture ({error})", remedy="replace or remove it"
        ) from error
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
