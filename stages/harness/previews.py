"""Pictures that a model in training draws on the way: for MLflow, never for an out, so that this code retrains nothing."""

from pathlib import Path
from typing import Any

from stages.core.errors import ConfigError
from stages.core.latents import LatentCache
from stages.core.models.pipeline import Painter
from stages.core.models.text import TextEncoder
from stages.core.models.vae import Vae
from stages.core.sampler import integers
from stages.core.sheets import png_bytes, sheet
from stages.core.store import write_atomic
from stages.core.training.config import SamplesConfig
from stages.core.training.trainer import Trainer
from stages.harness.run import Stage


def check_samples(cfg: SamplesConfig, base: Path, cache: LatentCache) -> None:
    """Raise ConfigError, before the first step, for what could not be drawn as it is asked for."""
    factor = cache.space.downsample
    problems = [
        f"train.samples.{name} is {value}; set a multiple of {factor}, the VAE's factor"
        for name, value in (("height", cfg.height), ("width", cfg.width))
        if value % factor
    ]
    if cache.has_pooled:
        problems.append("a base with two text encoders cannot be drawn with yet; set train.samples.every: 0")
    else:
        text = TextEncoder(base, "cpu")
        problems += [
            f"train.samples.prompts: {prompt!r} has {text.length(prompt)} tokens, the text encoder reads {text.limit}"
            for prompt in cfg.prompts
            if text.length(prompt) > text.limit
        ]
    if problems:
        raise ConfigError("\n  ".join(problems), remedy="correct section train of params.yaml")


def draw_samples(
    cfg: SamplesConfig, trainer: Trainer, base: Path, schedule: dict[str, Any], stage: Stage, folder: Path
) -> None:
    """Draw each prompt, always from the same noise, with the averaged weights where they are kept, and record the sheet.

    folder: where the sheet is kept, of this training alone.
    VAE and text encoder are loaded for this and let go again: training has no use for their memory.
    """
    device = trainer.team.device
    painter = Painter(
        base,
        unet=trainer.bare,
        vae=Vae(base, device),
        text=TextEncoder(base, device),
        device=device,
        schedule=schedule,
    )
    seeds = [
        integers(stage.shared.seed, "sample", place, below=2**62)[0] for place in range(len(cfg.prompts))
    ]
    trainer.bare.eval()
    try:
        with trainer.averaged():
            pictures = painter.paint(
                cfg.prompts,
                seeds,
                size=(cfg.height, cfg.width),
                steps=cfg.steps,
                guidance=cfg.guidance,
                batch=min(len(cfg.prompts), trainer.cfg.batch_size),
            )
    finally:
        trainer.bare.train()
    path = folder / f"samples-{trainer.step:08d}.png"
    image = sheet([(f"step {trainer.step}", list(pictures))], cfg.prompts)
    write_atomic(path, png_bytes(image))
    stage.tracker.image("train/samples", path, step=trainer.step)
    stage.say(f"drew {len(cfg.prompts)} picture(s): see {path}")
