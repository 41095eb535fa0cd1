"""The VAE behind three functions. Letters: B batch, C latent channels, H W pixels, h w latents."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from stages.core.safetensors_io import weights_variant


@dataclass(frozen=True, kw_only=True)
class LatentSpace:
    """How latents relate to pixels and to the U-Net; read from the VAE's own configuration, never assumed."""

    channels: int
    downsample: int  # H / h
    scaling_factor: float
    shift_factor: float

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
    """The base's autoencoder in float32 on `device`."""

    def __init__(self, folder: Path, device: str) -> None:
        part = folder / "vae"
        model: Any = AutoencoderKL.from_pretrained(
            part, dtype=torch.float32, variant=weights_variant(part), local_files_only=True
        )
        self.model = model.to(device).eval()
        self.device = device
        config = model.config
        self.space = LatentSpace(
            channels=config.latent_channels,
            downsample=2 ** (len(config.block_out_channels) - 1),
            scaling_factor=float(config.scaling_factor),
            shift_factor=float(config.shift_factor or 0.0),
        )

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
        posterior = self.model.encode(unit_BCHW).latent_dist
        return posterior.mean.cpu(), posterior.logvar.cpu()

    @torch.inference_mode()
    def decode(self, scaled_BChw: Tensor) -> Tensor:
        """Scaled latents, float32 [B, C, h, w] -> uint8 RGB [B, 3, H, W] on the CPU, rounded to nearest."""
        raw = self.space.unscale(scaled_BChw.to(self.device).float())
        return to_uint8(self.model.decode(raw).sample)


def to_uint8(unit_BCHW: Tensor) -> Tensor:
    """float pixels in [-1, 1] (clamped) -> uint8 0..255 on the CPU, rounded to nearest."""
    return ((unit_BCHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
