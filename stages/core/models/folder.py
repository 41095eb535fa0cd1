"""A diffusers pipeline folder: written from the base and the trained U-Net, read back as its user reads it.

Letters: B batch, C channels, H W pixels, h w latents.
"""

import inspect
import json
import shutil
import warnings
from pathlib import Path
from typing import Any, cast

import diffusers
import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils import logging
from safetensors import safe_open
from torch import Tensor, nn

from stages.core.errors import ParityError
from stages.core.models.pipeline import ddim
from stages.core.models.schedule import CONFIG_NAME, base_schedule
from stages.core.models.text import TextEncoder
from stages.core.models.unet import UNET_WEIGHTS, Conditions, predict, save_unet
from stages.core.models.vae import Vae
from stages.core.parity import ModelShape, Outputs, Probe
from stages.core.safetensors_io import load_weights, save_file, weights_variant
from stages.core.sampler import normal
from stages.core.store import write_json

logging.disable_progress_bar()

# The weights' file of each component that is not the U-Net, as the libraries look for it.
_NAMES = {"text_encoder": "model.safetensors", "vae": UNET_WEIGHTS}


def write_pipeline(
    folder: Path, base: Path, unet: nn.Module, schedule: dict[str, Any], dtype: torch.dtype
) -> None:
    """Write a StableDiffusionPipeline folder: `unet` (without adapters) among the base's other components.

    schedule: the scheduler that the U-Net was trained for, see `write_shared`. Text encoder, VAE and U-Net are stored in
    `dtype`, the first two under the base's own names of weights, so that every library version that reads the base reads
    this.
    """
    write_shared(folder, base, schedule)
    for name, file_name in _NAMES.items():
        config = read_config(base / name)
        if "torch_dtype" in config or "dtype" in config:
            config.pop("torch_dtype", None)
            config["dtype"] = str(dtype).removeprefix("torch.")
        write_json(folder / name / "config.json", config)
        weights = load_weights(base / name)
        cast_ = {
            key: value.to(dtype) if value.is_floating_point() else value for key, value in weights.items()
        }
        save_file(folder / name / file_name, cast_, {"format": "pt"})
    save_unet(unet, folder / "unet", dtype)


def write_shared(folder: Path, base: Path, schedule: dict[str, Any]) -> None:
    """Write what has no weights: `model_index.json`, tokenizer and scheduler.

    schedule: the fields of the scheduler that the U-Net was trained for. Where they are the base's, its files are copied
    byte by byte; else the fields are written, and the index names the class that reads them (`_readable`).
    """
    copy_component(base / "tokenizer", folder / "tokenizer")
    if schedule == base_schedule(base):
        write_index(folder, base)
        copy_component(base / "scheduler", folder / "scheduler")
        return
    fields = _readable(schedule, base_schedule(base))
    write_index(folder, base, scheduler=fields["_class_name"])
    write_json(folder / "scheduler" / CONFIG_NAME, fields)


def _readable(schedule: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """`schedule` for a class that reads every field in which it differs from the base's: the base's class, or DDIM.

    A diffusers sampler ignores fields that it does not have without a word: PNDM, Stable Diffusion 1's own, would draw
    with the old betas where `rescale_betas_zero_snr` is asked for.
    """
    sampler = getattr(diffusers, str(schedule.get("_class_name")), None)
    known = set[str]() if sampler is None else set(inspect.signature(sampler.__init__).parameters)
    if {name for name, value in schedule.items() if value != base.get(name)} <= known:
        return schedule
    # As in `ddim`: what a base's own sampler has no setting for, and what the pipeline would set with a warning.
    return schedule | {"_class_name": "DDIMScheduler", "clip_sample": False, "steps_offset": 1}


def write_index(folder: Path, base: Path, scheduler: str | None = None) -> None:
    """Write `model_index.json`: the base's, without safety checker and the like, and without paths.

    scheduler: the diffusers class of the folder's scheduler; None: the base's.
    """
    index: dict[str, Any] = json.loads((base / "model_index.json").read_text())
    index.pop("_name_or_path", None)
    for name in ("safety_checker", "feature_extractor", "image_encoder"):
        index[name] = [None, None]
    index["requires_safety_checker"] = False
    if scheduler is not None:
        index["scheduler"] = ["diffusers", scheduler]
    write_json(folder / "model_index.json", index)


def copy_component(source: Path, target: Path) -> None:
    """Copy the files of a component without weights, byte by byte."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file():
            shutil.copyfile(path, target / path.name)


def read_config(folder: Path) -> dict[str, Any]:
    """A component's `config.json` without the path that it was once loaded from."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config.pop("_name_or_path", None)
    return config


def load_pipeline(folder: Path) -> Any:
    """The pipeline in `folder` as its user loads it, in float32 on the CPU.

    Raises ParityError when the folder's U-Net lacks a weight or holds one too many: diffusers only warns.
    """
    pipeline = _from_pretrained(folder)
    with safe_open(folder / "unet" / UNET_WEIGHTS, framework="pt") as handle:  # pyright: ignore[reportUnknownVariableType]
        stored = set(cast(list[str], handle.keys()))
    wanted = set(cast(dict[str, Tensor], pipeline.unet.state_dict()))
    if stored != wanted:
        raise ParityError(
            f"{folder / 'unet'}: missing {sorted(wanted - stored)}, unexpected {sorted(stored - wanted)}",
            remedy="the U-Net still carries an adapter, or another configuration; run `dvc repro --force export`",
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _from_pretrained(folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        # Twenty lines about the scheduler file of some bases, which is theirs and is not used as it is.
        warnings.simplefilter("ignore", FutureWarning)
        return StableDiffusionPipeline.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, **options
        )


def load_with_lora(base: Path, lora: Path) -> nn.Module:
    """The U-Net of the base's pipeline after `load_lora_weights(lora)`, as its user loads it.

    A scheduler_config.json beside the factors is for drawing; the U-Net does not depend on it.
    """
    pipeline = _from_pretrained(
        base,
        variant=weights_variant(base / "unet"),
        # Named in the index of hub models, but not fetched.
        safety_checker=None,
        feature_extractor=None,
        image_encoder=None,
        requires_safety_checker=False,
    )
    # It would warn that there are no keys for the text encoder, which is as it should be.
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        pipeline.load_lora_weights(lora)
    finally:
        logging.set_verbosity(level)
    return pipeline.unet.eval()


def model_shape(unet: Any, vae: Vae, text: TextEncoder, timesteps: int) -> ModelShape:
    """What probes must know of this model."""
    return ModelShape(
        latent_channels=vae.space.channels,
        latent_multiple=2 ** (len(unet.config.block_out_channels) - 1),
        latent_size=int(unet.config.sample_size),
        downsample=vae.space.downsample,
        text_length=text.limit,
        text_width=int(text.model.config.hidden_size),
        vocabulary=int(text.model.config.vocab_size),
        end_token=int(text.tokenizer.eos_token_id),
        timesteps=timesteps,
    )


@torch.inference_mode()
def run_torch(probe: Probe, *, text: Any, unet: nn.Module, vae: Any) -> Outputs:
    """What the parts compute in torch: hidden states, prediction, pixels, and posterior mean with log-variance."""
    return {
        "text_encoder": text(probe.ids_BL).last_hidden_state,
        "unet": run_unet(probe, unet)["unet"],
        "vae_decoder": vae.decode(probe.latents_BChw).sample,
        "vae_encoder": vae.encode(probe.pixels_BCHW).latent_dist.parameters,
    }


@torch.inference_mode()
def run_unet(probe: Probe, unet: nn.Module) -> Outputs:
    """As `run_torch`, the U-Net alone."""
    return {"unet": predict(unet, probe.noisy_BChw, probe.steps_B, Conditions(probe.text_BLD))}


@torch.inference_mode()
def draw(
    folder: Path,
    captions: list[str],
    seeds: list[int],
    *,
    size: tuple[int, int],
    steps: int,
    guidance: float,
) -> Tensor:
    """Pictures from the pipeline in `folder`, uint8 RGB [B, 3, H, W]; `size` is (H, W) in pixels.

    The noise is `Painter`'s, the sampler DDIM with the fields of the folder's own scheduler_config.json.
    """
    pipeline = load_pipeline(folder)
    pipeline.scheduler = ddim(base_schedule(folder))
    factor = 2 ** (len(pipeline.vae.config.block_out_channels) - 1)
    shape = (pipeline.unet.config.in_channels, size[0] // factor, size[1] // factor)
    drawn = pipeline(
        prompt=captions,
        negative_prompt=[""] * len(captions),
        latents=torch.stack([normal(seed, "picture", shape=shape) for seed in seeds]),
        num_inference_steps=steps,
        guidance_scale=guidance,
        output_type="pt",
    ).images
    return (drawn.clamp(0, 1) * 255).round().to(torch.uint8)
