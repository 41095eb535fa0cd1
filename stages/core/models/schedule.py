"""The noise schedule of the base: how noise is added, and what the U-Net is asked to predict."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor


class NoiseSchedule:
    """The base's own schedule (betas, zero-terminal SNR, prediction type), read from its scheduler folder."""

    def __init__(self, folder: Path, device: str) -> None:
        self._scheduler: Any = DDPMScheduler.from_pretrained(folder / "scheduler", local_files_only=True)
        self.prediction: str = self._scheduler.config.prediction_type
        self.steps = int(self._scheduler.config.num_train_timesteps)
        if self.prediction not in ("epsilon", "v_prediction"):
            raise ValueError(f"prediction type {self.prediction!r} is not supported")
        self.alphas_cumprod: Tensor = self._scheduler.alphas_cumprod.to(device)

    def add_noise(self, clean_BChw: Tensor, noise_BChw: Tensor, steps_B: Tensor) -> Tensor:
        """x_t = sqrt(a) x_0 + sqrt(1 - a) e, with a the cumulative alpha at each timestep (DDPM, Ho et al. 2020, eq. 4)."""
        return self._scheduler.add_noise(clean_BChw, noise_BChw, steps_B)

    def target(self, clean_BChw: Tensor, noise_BChw: Tensor, steps_B: Tensor) -> Tensor:
        """What the U-Net should predict: the noise e, or v = sqrt(a) e - sqrt(1 - a) x_0 (Salimans and Ho 2022)."""
        if self.prediction == "epsilon":
            return noise_BChw
        return self._scheduler.get_velocity(clean_BChw, noise_BChw, steps_B)

    def snr(self, steps_B: Tensor) -> Tensor:
        """Signal-to-noise ratio a / (1 - a), float32 [B]; 0 at the last step of a zero-terminal schedule."""
        alphas = self.alphas_cumprod[steps_B]
        return alphas / (1 - alphas)

    def loss_weights(self, steps_B: Tensor, min_snr_gamma: float | None) -> Tensor:
        """Min-SNR-gamma weights (Hang et al. 2023), float32 [B]; ones when gamma is None.

        epsilon: min(snr, gamma) / snr; v: min(snr, gamma) / (snr + 1). At snr = 0 the epsilon form has the limit 1.
        """
        if min_snr_gamma is None:
            return torch.ones_like(steps_B, dtype=torch.float32)
        snr = self.snr(steps_B)
        clipped = snr.clamp(max=min_snr_gamma)
        if self.prediction == "epsilon":
            return torch.where(snr == 0, torch.ones_like(snr), clipped / snr)
        return clipped / (snr + 1)
