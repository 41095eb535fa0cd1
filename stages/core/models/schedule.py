"""The noise schedule: how noise is added, and what the U-Net is asked to predict."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from stages.core.errors import BaseModelError

CONFIG_NAME = "scheduler_config.json"
PREDICTIONS = ("epsilon", "v_prediction")


def base_schedule(base: Path) -> dict[str, Any]:
    """The fields of the base's own scheduler_config.json. Raises BaseModelError for a prediction that is not known."""
    path = base / "scheduler" / CONFIG_NAME
    config: dict[str, Any] = json.loads(path.read_text())
    if (found := config.get("prediction_type", "epsilon")) not in PREDICTIONS:
        raise BaseModelError(
            f"{path} has prediction_type {found!r}", remedy=f"use a base with {' or '.join(PREDICTIONS)}"
        )
    return config


def objective_schedule(config: dict[str, Any], *, prediction: str, zero_terminal_snr: bool) -> dict[str, Any]:
    """The schedule that is trained on: the base's `config`, with what the parameters ask for instead.

    prediction: base (as the base has it), epsilon or v_prediction. zero_terminal_snr: rescale the betas so that the last
    timestep is noise alone, and sample with trailing timesteps (Lin et al. 2023, "Common Diffusion Noise Schedules and
    Sample Steps Are Flawed", algorithm 1 and section 3.3); False leaves the base's betas. Returns a new dict; it equals
    `config` where nothing was asked for.
    """
    wanted = dict(config)
    if prediction != "base" and prediction != config.get("prediction_type", "epsilon"):
        wanted["prediction_type"] = prediction
    if zero_terminal_snr and not config.get("rescale_betas_zero_snr"):
        wanted |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return wanted


class NoiseSchedule:
    """A schedule (betas, zero-terminal SNR, prediction type) from the fields of a scheduler_config.json."""

    def __init__(self, config: dict[str, Any], device: str) -> None:
        self._scheduler: Any = DDPMScheduler.from_config(config)
        self.prediction: str = self._scheduler.config.prediction_type
        self.steps = int(self._scheduler.config.num_train_timesteps)
        self.alphas_cumprod: Tensor = self._scheduler.alphas_cumprod.to(device)

    @property
    def zero_terminal_snr(self) -> bool:
        """Whether the last timestep is noise alone."""
        return bool(self.alphas_cumprod[-1] == 0)

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

    def error_factors(self, steps_B: Tensor, prediction: str) -> Tensor:
        """What turns this schedule's squared error into that of the same guess stated as `prediction`, float64 [B].

        A guess of the noise is, with the noisy latent known, a guess of v = (e - sqrt(1 - a) x_t) / sqrt(a): its squared
        error is 1 / a times that of the noise, and the other way round a times.
        """
        alphas_B = self.alphas_cumprod[steps_B].double()
        if prediction == self.prediction:
            return torch.ones_like(alphas_B)
        return alphas_B if prediction == "epsilon" else 1 / alphas_B
