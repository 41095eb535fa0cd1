"""Drawing pictures with the true diffusers pipeline. Letters: B batch, C latent channels, L tokens, D width."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from torch import Tensor, nn

from stages.core.models.schedule import base_schedule
from stages.core.models.text import TextEncoder
from stages.core.models.vae import Vae
from stages.core.sampler import normal


def ddim(config: dict[str, Any]) -> Any:
    """DDIM with the betas, prediction type and spacing of a scheduler_config.json, whichever sampler it is of.

    Latents are not limited to -1..1, so they are never clipped: DDIM would by default where a base's own sampler
    (Euler, PNDM) has no such setting. An offset of one step is what the pipeline sets by itself, with a long warning.
    """
    scheduler: Any = DDIMScheduler.from_config(config, clip_sample=False, steps_offset=1)
    return scheduler


class Painter:
    """The base's pipeline around a given U-Net: captions and seeds in, pictures out, always the same ones.

    The scheduler is DDIM without added noise, with the betas, spacing and prediction type of `schedule` (the fields of
    a scheduler_config.json; None: the base's own), so a picture is a function of weights, schedule, caption, seed, steps
    and guidance. Raises BaseModelError for a base with a prediction that is not known.
    """

    def __init__(
        self,
        folder: Path,
        *,
        unet: nn.Module,
        vae: Vae,
        text: TextEncoder,
        device: str,
        schedule: dict[str, Any] | None = None,
    ) -> None:
        build: Any = StableDiffusionPipeline  # its annotations demand a safety checker
        pipeline: Any = build(
            vae=vae.model,
            text_encoder=text.model,
            tokenizer=text.tokenizer,
            unet=unet,
            scheduler=ddim(base_schedule(folder) if schedule is None else schedule),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipeline.set_progress_bar_config(disable=True)
        self.pipeline = pipeline.to(device)
        self.space = vae.space
        self.text = text

    def paint(
        self,
        captions: list[str],
        seeds: list[int],
        *,
        size: tuple[int, int],
        steps: int,
        guidance: float,
        batch: int,
    ) -> Tensor:
        """One picture per caption and seed, uint8 RGB [N, 3, H, W]; `size` is (H, W) in pixels.

        Every forward has `batch` rows (the last batch is padded): a picture then does not depend on its companions.
        """
        if len(captions) != len(seeds):
            raise ValueError(f"{len(captions)} captions but {len(seeds)} seeds")
        if size[0] % self.space.downsample or size[1] % self.space.downsample:
            raise ValueError(f"size {size} is not a multiple of {self.space.downsample}, the VAE's factor")
        shape = (self.space.channels, size[0] // self.space.downsample, size[1] // self.space.downsample)
        empty_LD = self.text.encode([""])[0]
        pictures: list[Tensor] = []
        for start in range(0, len(captions), batch):
            rows = [min(start + row, len(captions) - 1) for row in range(batch)]
            text_BLD = self.text.encode([captions[row] for row in rows])
            noise = torch.stack([normal(seeds[row], "picture", shape=shape) for row in rows])
            drawn = self._draw(text_BLD, empty_LD, noise, steps=steps, guidance=guidance)
            pictures.append(drawn[: min(batch, len(captions) - start)])
        return torch.cat(pictures)

    @torch.inference_mode()
    def _draw(
        self, text_BLD: Tensor, empty_LD: Tensor, noise_BChw: Tensor, *, steps: int, guidance: float
    ) -> Tensor:
        device = self.pipeline.device
        drawn = self.pipeline(
            prompt_embeds=text_BLD.to(device),
            negative_prompt_embeds=empty_LD.expand_as(text_BLD).to(device),
            latents=noise_BChw.to(device),
            num_inference_steps=steps,
            guidance_scale=guidance,
            output_type="pt",
        ).images
        return (drawn.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
