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
from stages.core.headers import refuse_bomb


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """An upright sRGB picture and what was done to make it one."""

    picture: Image.Image  # mode RGB
    repairs: tuple[str, ...]


def decode(path: Path, *, background: tuple[int, int, int], max_pixels: int) -> Decoded:
    """Decode a picture once: upright, sRGB, on `background` where it is transparent.

    Raises PictureError with a reason code: unreadable, truncated, too_many_pixels, animated, bad_profile.
    """
    repairs: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture = Image.open(path)
            refuse_bomb(path, picture.size, max_pixels)
            if getattr(picture, "n_frames", 1) > 1:
                raise PictureError(
                    "animated", f"{path} has several frames", remedy="save one frame as a picture"
                )
            picture.load()
    except PictureError:
        raise
    except UnidentifiedImageError as error:
        raise PictureError("unreadable", f"{path} is not a picture", remedy="replace or remove it") from error
    except Exception as error:  # Pillow's decoders raise what their formats make them raise
        raise PictureError(
            "truncated", f"{path} cannot be decoded ({error})", remedy="get the file again, or remove it"
        ) from error
    upright = ImageOps.exif_transpose(picture)
    if picture.getexif().get(0x0112, 1) not in (0, 1):
        repairs.append("rotated_by_exif")
    profile = picture.info.get("icc_profile")
    alpha = _alpha(upright)
    colour = _to_srgb(path, upright, profile, repairs)
    if alpha is not None:
        canvas = Image.new("RGB", colour.size, background)
        canvas.paste(colour, mask=alpha)
        colour = canvas
        repairs.append("alpha_on_background")
    return Decoded(picture=colour, repairs=tuple(repairs))


def _alpha(picture: Image.Image) -> Image.Image | None:
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        alpha = picture.convert("RGBA").getchannel("A")
        return None if alpha.getextrema() == (255, 255) else alpha
    return None


def _to_srgb(path: Path, picture: Image.Image, profile: bytes | None, repairs: list[str]) -> Image.Image:
    """Colours as sRGB. 16-bit greys are scaled; other modes without a profile are read as Pillow reads them."""
    if picture.mode.startswith("I"):
        repairs.append("depth_16_to_8")
        grey = np.asarray(picture, dtype=np.float64) / 257.0
        picture = Image.fromarray(np.rint(grey.clip(0, 255)).astype(np.uint8))
    if picture.mode == "F":
        raise PictureError(
            "float_pixels", f"{path} has floating-point pixels", remedy="save it as 8-bit or 16-bit"
        )
    if profile and picture.mode in ("RGB", "RGBA", "L", "LA", "CMYK"):
        base = (
            picture.convert("RGB")
            if picture.mode == "RGBA"
            else picture.convert("L")
            if picture.mode == "LA"
            else picture
        )
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if "sRGB" in ImageCms.getProfileDescription(source):
                return base.convert("RGB")
            converted = ImageCms.profileToProfile(
                base,
                source,
                ImageCms.createProfile("sRGB"),
                ImageCms.Intent.RELATIVE_COLORIMETRIC,
                outputMode="RGB",
            )
        except ImageCms.PyCMSError as error:
            raise PictureError(
                "bad_profile",
                f"{path} has a colour profile that cannot be used ({error})",
                remedy="convert it to sRGB in a picture editor",
            ) from error
        repairs.append("profile_to_srgb")
        assert converted is not None
        return converted
    if picture.mode == "CMYK":
        raise PictureError(
            "cmyk_without_profile", f"{path} is CMYK without a profile", remedy="convert it to sRGB"
        )
    if picture.mode in ("RGB", "RGBX"):
        return picture.convert("RGB")
    return picture.convert("RGBA").convert("RGB")


def fit(picture: Image.Image, bucket: Bucket) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Resize to cover the bucket, then cut its centre: uint8 [3, H, W], and the crop (left, top, right, bottom)
    in pixels of the upright source."""
    height, width = bucket
    scale = max(width / picture.width, height / picture.height)
    left = (picture.width - width / scale) / 2
    top = (picture.height - height / scale) / 2
    box = (left, top, left + width / scale, top + height / scale)
    # One resampling step from the cropped box: no intermediate rounding.
    resized = picture.resize((width, height), Image.Resampling.LANCZOS, box=box, reducing_gap=None)
    pixels_CHW = torch.from_numpy(np.array(resized, dtype=np.uint8)).permute(2, 0, 1).contiguous()
    crop = (round(box[0]), round(box[1]), round(box[2]), round(box[3]))
    return pixels_CHW, crop
