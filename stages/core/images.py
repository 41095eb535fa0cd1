"""Pictures from files to pixels. Letters: C colour, H W pixels."""

import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor

from stages.core.buckets import Bucket
from stages.core.errors import PictureError
from stages.core.headers import FORMATS, refuse_bomb


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """An upright sRGB picture and what was done to make it one."""

    picture: Image.Image  # mode RGB
    repairs: tuple[str, ...]


def decode(path: Path, *, background: tuple[int, int, int], max_pixels: int) -> Decoded:
    """Decode a picture once: upright, sRGB, on `background` where it is transparent.

    Raises PictureError with a reason code: unreadable, truncated, too_many_pixels, animated, bad_exif, bad_profile,
    cmyk_without_profile, unsupported_pixels.
    """
    picture = _load(path, max_pixels)
    repairs: list[str] = []
    try:
        turned = picture.getexif().get(_ORIENTATION, 1) in range(2, 9)
        upright = ImageOps.exif_transpose(picture)
    except Exception as error:  # as the EXIF parsers make them raise
        raise PictureError(
            "bad_exif", f"{path} has EXIF data that cannot be read ({error})", remedy="remove its EXIF data"
        ) from error
    if turned:
        repairs.append("rotated_by_exif")
    alpha = _alpha(path, upright)
    colour = _to_srgb(path, upright, repairs)
    if alpha is not None:
        canvas = Image.new("RGB", colour.size, background)
        canvas.paste(colour, mask=alpha)
        colour = canvas
        repairs.append("alpha_on_background")
    return Decoded(picture=colour, repairs=tuple(repairs))


_ORIENTATION = 0x0112


def _load(path: Path, max_pixels: int) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as picture:
                refuse_bomb(path, picture.size, max_pixels)
                if getattr(picture, "n_frames", 1) > 1:
                    raise PictureError(
                        "animated", f"{path} has several frames", remedy="save one frame as a picture"
                    )
                picture.load()
                return picture
    except PictureError:
        raise
    except UnidentifiedImageError as error:
        raise PictureError("unreadable", f"{path} is not a picture", remedy="replace or remove it") from error
    except Exception as error:  # Pillow's decoders raise what their formats make them raise
        raise PictureError(
            "truncated", f"{path} cannot be decoded ({error})", remedy="get the file again, or remove it"
        ) from error


def _alpha(path: Path, picture: Image.Image) -> Image.Image | None:
    """The opacity, mode L; None for a picture without transparent pixels."""
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        if picture.mode.startswith("I"):  # 16-bit grey: one exact value is transparent
            opaque = np.asarray(picture) != picture.info["transparency"]
            alpha = Image.fromarray(opaque.astype(np.uint8) * 255)
        else:
            alpha = _convert(path, picture, "RGBA").getchannel("A")
        return None if alpha.getextrema() == (255, 255) else alpha
    return None


def _to_srgb(path: Path, picture: Image.Image, repairs: list[str]) -> Image.Image:
    """Colours as sRGB, alpha left out. Pictures without a profile are taken for sRGB."""
    profile: bytes | None = picture.info.get("icc_profile")
    if picture.mode.startswith("I"):
        picture = _grey_16_to_8(path, picture)
        repairs.append("depth_16_to_8")
    if picture.mode == "CMYK":
        if not profile:
            raise PictureError(
                "cmyk_without_profile", f"{path} is CMYK without a profile", remedy="convert it to sRGB"
            )
        plain = picture
    elif picture.mode in ("1", "L", "LA", "La"):
        plain = _convert(path, picture, "L") if profile else _convert(path, picture, "RGB")
    elif picture.mode in ("P", "PA", "RGB", "RGBA", "RGBX", "RGBa"):
        # By way of RGBA: a palette's transparent entry stays a colour.
        plain = _convert(path, _convert(path, picture, "RGBA"), "RGB")
    else:
        raise PictureError(
            "unsupported_pixels",
            f"{path} has pixels of mode {picture.mode}",
            remedy="save it as RGB with 8 bits a channel",
        )
    return _through_profile(path, plain, profile, repairs) if profile else plain


def _grey_16_to_8(path: Path, picture: Image.Image) -> Image.Image:
    """Rounded to nearest: 257 times an 8-bit grey is the same grey in 16 bits."""
    grey = np.asarray(picture, dtype=np.int64)
    if grey.min() < 0 or grey.max() > 65535:
        raise PictureError(
            "unsupported_pixels",
            f"{path} has greys from {grey.min()} to {grey.max()}, outside 16 bits",
            remedy="save it with 8 or 16 bits a channel",
        )
    return Image.fromarray(((grey + 128) // 257).astype(np.uint8))


def _through_profile(path: Path, plain: Image.Image, profile: bytes, repairs: list[str]) -> Image.Image:
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "sRGB" in ImageCms.getProfileDescription(source):
            return plain.convert("RGB")
        converted = ImageCms.profileToProfile(
            plain,
            source,
            ImageCms.createProfile("sRGB"),
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            outputMode="RGB",
        )
    except Exception as error:  # OSError for bytes that are no profile, PyCMSError for one of other colours
        raise PictureError(
            "bad_profile",
            f"{path} has a colour profile that cannot be used ({error})",
            remedy="convert it to sRGB in a picture editor",
        ) from error
    repairs.append("profile_to_srgb")
    assert converted is not None
    return converted


def _convert(path: Path, picture: Image.Image, mode: str) -> Image.Image:
    try:
        return picture.convert(mode)
    except ValueError as error:
        raise PictureError(
            "unsupported_pixels",
            f"{path} has pixels of mode {picture.mode}",
            remedy="save it as RGB with 8 bits a channel",
        ) from error


def fit(picture: Image.Image, bucket: Bucket) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Resize to cover the bucket, then cut its centre: uint8 [3, H, W], and the crop (left, top, right, bottom)
    in pixels of the upright source."""
    height, width = bucket
    scale = max(width / picture.width, height / picture.height)
    # Rounding may put the side that is kept whole a hair outside the picture, which Pillow refuses.
    across, down = min(width / scale, picture.width), min(height / scale, picture.height)
    left, top = (picture.width - across) / 2, (picture.height - down) / 2
    box = (left, top, min(left + across, picture.width), min(top + down, picture.height))
    # One resampling step from the cropped box: no intermediate rounding.
    resized = picture.resize((width, height), Image.Resampling.LANCZOS, box=box, reducing_gap=None)
    pixels_CHW = torch.from_numpy(np.array(resized, dtype=np.uint8)).permute(2, 0, 1).contiguous()
    crop = (round(box[0]), round(box[1]), round(box[2]), round(box[3]))
    return pixels_CHW, crop


def crop_corner(size: tuple[int, int], bucket: Bucket) -> tuple[int, int]:
    """Where the crop that `fit` makes of a picture of `size` (H, W) begins: (top, left), in pixels of the picture
    resized to cover the bucket, rounded to nearest, halves to even."""
    (height, width), (down, across) = size, bucket
    # Both sides straight from integers, not by way of fit's box: a rounded scale would turn halves either way.
    resized_height, resized_width = max(down, height * across / width), max(across, width * down / height)
    return round((resized_height - down) / 2), round((resized_width - across) / 2)
