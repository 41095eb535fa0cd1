"""The VAE behind three functions. Letters: B batch, C latent channels, H W pixels, h w latents."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from stages.core.errors import ConfigError
from stages.core.safetensors_io import weights_variant


@dataclass(frozen=True, kw_only=True)
class LatentSpace:
    """How latents relate to pixels and to the U-Net; read from the VAE's own configuration, never assumed."""

    channels: int
    downsample: int  # H / h
    scaling_factor: float
    shift_factor: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From the fields of a VAE's config.json; what is not there has diffusers' defaults."""
        return cls(
            channels=config.get("latent_channels", 4),
            downsample=2 ** (len(config["block_out_channels"]) - 1),
            scaling_factor=float(config.get("scaling_factor", 0.18215)),
            shift_factor=float(config.get("shift_factor") or 0.0),
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def scale(self, raw_BChw: Tensor) -> Tensor:
        """VAE latents -> what the U-Net sees (about unit variance)."""
        return (raw_BChw - self.shift_factor) * self.scaling_factor

    def unscale(self, scaled_BChw: Tensor) -> Tensor:
        """The inverse of `scale`."""
        return scaled_BChw / self.scaling_factor + self.shift_factor


class Vae:
    """The base's autoencoder on `device`.

    dtype: what it computes in. tile: None, or the side in pixels (a multiple of `4 * downsample`) above which pictures
    are encoded and decoded in overlapping tiles, blended over a quarter of a tile: less memory, and not quite the same
    values, because a tile's norms and attention do not see the whole picture.
    """

    def __init__(
        self, folder: Path, device: str, *, dtype: torch.dtype = torch.float32, tile: int | None = None
    ) -> None:
        part = folder / "vae"
        model: Any = AutoencoderKL.from_pretrained(
            part, dtype=dtype, variant=weights_variant(part), local_files_only=True
        )
        self.model = model.to(device).eval()
        self.dtype = dtype
        self.device = device
        self.space = LatentSpace.of(model.config)
        if tile is not None:
            if tile < 1 or tile % (4 * self.space.downsample):
                # A quarter of a tile must be whole latents, or neighbours would not meet.
                raise ConfigError(
                    f"encode.tile is {tile}", remedy=f"set a multiple of {4 * self.space.downsample}, or null"
                )
            self.model.enable_tiling()
            self.model.tile_sample_min_size = tile
            self.model.tile_latent_min_size = tile // self.space.downsample

    @torch.inference_mode()
    def moments(self, pixels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 RGB [B, 3, H, W] -> posterior mean and log-variance, unscaled float32 [B, C, h, w] on the CPU."""
        if pixels_BCHW.dtype != torch.uint8:
            raise TypeError(f"expected uint8 pixels, got {pixels_BCHW.dtype}")
        if pixels_BCHW.shape[2] % self.space.downsample or pixels_BCHW.shape[3] % self.space.downsample:
            # The convolutions would drop the last rows and columns without a word.
            raise ValueError(
                f"{tuple(pixels_BCHW.shape)}: sizes must be multiples of {self.space.downsample}"
            )
        unit_BCHW = pixels_BCHW.to(self.device).float() / 127.5 - 1.0
        posterior = self.model.encode(unit_BCHW.to(self.dtype)).latent_dist
        return posterior.mean.float().cpu(), posterior.logvar.float().cpu()

    @torch.inference_mode()
    def decode(self, scaled_BChw: Tensor) -> Tensor:
        """Scaled latents, float32 [B, C, h, w] -> uint8 RGB [B, 3, H, W] on the CPU, rounded to nearest."""
        raw = self.space.unscale(scaled_BChw.to(self.device).float())
        return to_uint8(self.model.decode(raw.to(self.dtype)).sample.float())


def to_uint8(unit_BCHW: Tensor) -> Tensor:
    """float pixels in [-1, 1] (clamped) -> uint8 0..255 on the CPU, rounded to nearest."""
    return ((unit_BCHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
