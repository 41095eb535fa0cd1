"""Headers tell format and geometry; what is no picture, or too large, is refused without decoding."""

import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from stages.core.errors import PictureError
from stages.core.headers import Header, read_header


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(path: Path, width: int, height: int) -> Path:
    """A PNG of a hundred bytes that claims any size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )
    return path


@pytest.mark.parametrize(
    ("name", "mode", "kind"),
    [("a.png", "RGBA", "PNG"), ("a.jpg", "RGB", "JPEG"), ("a.gif", "P", "GIF"), ("a.webp", "RGB", "WEBP")],
)
def test_header(tmp_path: Path, name: str, mode: str, kind: str) -> None:
    Image.new(mode, (5, 3)).save(tmp_path / name)
    assert read_header(tmp_path / name, max_pixels=15) == Header(format=kind, mode=mode, width=5, height=3)


def test_the_content_counts_not_the_suffix(tmp_path: Path) -> None:
    Image.new("RGB", (5, 3)).save(tmp_path / "a.png", format="JPEG")
    assert read_header(tmp_path / "a.png", max_pixels=15).format == "JPEG"


@pytest.mark.parametrize(
    ("data", "reason", "message"),
    [
        (b"", "zero_bytes", r"a\.png is empty"),
        (b"a caption, not a picture\n", "unreadable", r"a\.png is not a picture$"),
        (b"\x89PNG\r\n\x1a\n\0\0", "unreadable", r"a\.png is not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unreadable", r"a\.png is not a picture$"),
    ],
)
def test_what_is_no_picture(tmp_path: Path, data: bytes, reason: str, message: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(data)
    with pytest.raises(PictureError) as caught:
        read_header(path, max_pixels=10)
    assert caught.value.reason == reason
    assert caught.match(message.replace("$", r"\n"))
    assert caught.value.message.count(str(path)) == 1


def test_a_bomb_is_refused_by_our_own_limit_and_code(tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb.png", 50_000, 50_000)
    assert path.stat().st_size < 200
    with pytest.raises(PictureError, match=r"is 50000 x 50000, more than 100,000,000 pixels") as caught:
        read_header(path, max_pixels=100_000_000)
    assert caught.value.reason == "too_many_pixels"
    # Pillow's own limit (179 million) does not stand in the way of a larger parameter.
    assert read_header(path, max_pixels=2_500_000_000).width == 50_000


def test_the_limit_is_inclusive(tmp_path: Path) -> None:
    Image.new("L", (5, 3)).save(tmp_path / "a.png")
    with pytest.raises(PictureError, match="is 5 x 3, more than 14 pixels"):
        read_header(tmp_path / "a.png", max_pixels=14)
