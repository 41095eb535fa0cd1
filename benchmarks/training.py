"""What the training benchmarks share: settings, U-Nets of random weights, a latent cache, and the bare loop.

Without DVC, MLflow, OmegaConf and the harness: benchmarks/gpu_check.py runs on machines that have none of them.

Letters: B batch, C latent channels, h w latents, L tokens, D width of the text states.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stages.core.batches import Batch, Batches
from stages.core.latents import FORMAT, LatentCache, picture_row, text_name
from stages.core.models.lora import LoraConfig
from stages.core.models.schedule import NoiseSchedule
from stages.core.models.unet import trainable
from stages.core.ranks import Ranks
from stages.core.safetensors_io import save_file
from stages.core.sampler import normal
from stages.core.shards import shard_name, shard_of, text_key, write_index
from stages.core.store import sha256_bytes
from stages.core.training.config import (
    CheckpointsConfig,
    LoaderConfig,
    MemoryConfig,
    ObjectiveConfig,
    SamplesConfig,
    StoppingConfig,
    TrainConfig,
    ValidationConfig,
)
from stages.core.training.optimizers import OptimizerConfig, build_optimizer
from stages.core.training.trainer import AUTOCAST, Trainer, prepare

SEED = 1
NEVER = 10**9  # steps

# Stable Diffusion 1.5's own U-Net, and a small one of the same kind.
SD15: dict[str, Any] = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
    "layers_per_block": 2,
    "down_block_types": (*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *["CrossAttnUpBlock2D"] * 3),
}
SD15_PARAMETERS = 859_520_964
TINY: dict[str, Any] = SD15 | {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
SD15_SPACE: dict[str, Any] = {"channels": 4, "downsample": 8, "scaling_factor": 0.18215, "shift_factor": 0.0}
SD15_SCHEDULE: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
}


def settings(
    method: str,
    *,
    batch_size: int,
    learning_rate: float = 1e-4,
    rank: int = 8,
    precision: str = "no",
    checkpointing: bool = False,
    compiled: bool = False,
    pinned: bool = False,
) -> TrainConfig:
    """Section `train` as params.yaml has it, with nothing but the loop: no validation, checkpoints or samples on the way."""
    return TrainConfig(
        method=method,
        steps=NEVER,
        epochs=None,
        batch_size=batch_size,
        accumulation=1,
        processes=1,
        learning_rate=learning_rate,
        lr_schedule="cosine",
        warmup=10,
        max_grad_norm=1.0,
        ema_decay=0.0,
        caption_dropout=0.1,
        mixed_precision=precision,
        log_every=1,
        objective=ObjectiveConfig(
            prediction="base",
            zero_terminal_snr=False,
            min_snr_gamma=None,
            offset_noise=0.0,
            timesteps=[0, 1000],
        ),
        optimizer=OptimizerConfig(name="adamw", beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01),
        lora=LoraConfig(
            rank=rank,
            alpha=float(rank),
            dropout=0.0,
            targets=["to_q", "to_k", "to_v", "to_out.0"],
            rslora=False,
            dora=False,
        ),
        memory=MemoryConfig(
            gradient_checkpointing=checkpointing, channels_last=False, attention="sdpa", compile=compiled
        ),
        validation=ValidationConfig(every=NEVER, items=1, bands=1, timesteps_per_band=1),
        # Random weights may begin with a large loss; the limit is not what is measured.
        stopping=StoppingConfig(patience=None, weights="last", max_loss=1e6, max_overflows=10),
        checkpoints=CheckpointsConfig(every=NEVER, last=1),
        loader=LoaderConfig(num_workers=1, prefetch=2, pin_memory=pinned, staging=None),
        samples=SamplesConfig(every=0, prompts=[], height=64, width=64, steps=1, guidance=1.0),
    )


def random_unet(config: dict[str, Any], device: str, *, seed: int = SEED) -> nn.Module:
    """A U-Net of this configuration with weights N(0, 0.02), norms of 1 and biases of 0; float32 on `device`.

    Built without its own initialisation, which takes minutes at 860 million parameters.
    """
    with torch.device("meta"):
        unet: Any = UNet2DConditionModel(**config)
    unet = unet.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, value in unet.named_parameters():
            if value.ndim > 1:
                value.normal_(std=0.02, generator=generator)
            else:
                value.fill_(1.0 if name.endswith("weight") else 0.0)
    return unet


def write_cache(
    folder: Path,
    *,
    items: int,
    size: int,
    space: dict[str, Any],
    texts: dict[str, Tensor],
    shards: int = 8,
    **fields: Any,
) -> None:
    """A latent cache as stage encode writes it, of `items` + 1 square pictures, the last one held out.

    size: side in pixels. space: the VAE's latent space. texts: caption -> states [L, D]; "" must be among them.
    The moments are random: speed does not depend on them. fields: of the index, besides the usual ones.
    """
    files: dict[str, dict[str, Tensor]] = {}
    index: list[dict[str, Any]] = []
    captions = [caption for caption in texts if caption]
    shape = (space["channels"], size // space["downsample"], size // space["downsample"])
    for number in range(items + 1):
        name = sha256_bytes(str(number).encode())
        key, shard = sha256_bytes(f"pixels {number}".encode()), shard_of(name, shards)
        row, file = picture_row(key, flipped=False), files.setdefault(shard_name(shard, ".safetensors"), {})
        file[f"{row}.mean"] = normal(SEED, "mean", number, shape=shape) / space["scaling_factor"]
        file[f"{row}.logvar"] = normal(SEED, "logvar", number, shape=shape) - 6
        index.append(
            {
                "id": name,
                "file_name": f"{number}.png",
                "captions": [captions[number % len(captions)]],
                "split": "train" if number < items else "holdout",
                "bucket": [size, size],
                "original": [size, size],
                "corner": [0, 0],
                "shard": shard,
                "key": key,
            }
        )
    for caption, states_LD in texts.items():
        key = text_key(caption)
        files.setdefault(text_name(shard_of(key, shards)), {})[f"{key}.states"] = states_LD
    for name, tensors in files.items():
        save_file(folder / name, tensors)
    limit, width = texts[""].shape
    usual = {
        "format": FORMAT,
        "items": sorted(index, key=lambda item: item["id"]),
        "shards": shards,
        "latent_space": space,
        "dtype": "float32",
        "flips": False,
        "text": {"encoders": 1, "layer": "last", "limit": limit, "width": width, "pooled": None},
        "shuffle": {"variants": 1, "separator": ", ", "keep": 0, "seed": 0},
        "vae": "none",
        "text_encoder": "none",
    }
    write_index(folder, usual | fields, list(files))


def write_sd15_cache(folder: Path, *, items: int, latents: int, tokens: int, width: int) -> None:
    """`write_cache` for Stable Diffusion 1.5's latent space. latents: side; tokens, width: of the text states."""
    texts = {name: normal(SEED, "text", n, shape=(tokens, width)) for n, name in enumerate(["", "a face"])}
    write_cache(folder, items=items, size=latents * 8, space=SD15_SPACE, texts=texts)


def batches_of(cfg: TrainConfig, folder: Path, device: str) -> Batches:
    """The batches of the cache at `folder`, under Stable Diffusion 1.5's schedule."""
    schedule = NoiseSchedule(SD15_SCHEDULE, device)
    return Batches(
        LatentCache(folder),
        schedule,
        batch_size=cfg.batch_size,
        seed=SEED,
        caption_dropout=cfg.caption_dropout,
        device=device,
        pin_memory=cfg.loader.pin_memory,
    )


def trainer_of(cfg: TrainConfig, unet: nn.Module, folder: Path, device: str) -> Trainer:
    """The project's own loop. unet: not yet prepared, on `device`."""
    prepare(unet, cfg, SEED)
    return Trainer(cfg, unet, batches_of(cfg, folder, device), team=Ranks(0, 1, device), steps=NEVER)


class BareLoop:
    """What anyone would write: tensors already on the device, forward, mean square, backward, clip, step, zero.

    With the optimiser, precision, checkpointing and compilation of `cfg`; nothing is logged, nothing is waited for.
    """

    def __init__(self, cfg: TrainConfig, unet: nn.Module, batches: list[Batch], device: str) -> None:
        """unet: prepared, on `device`."""
        self.batches, self.device, self.limit, self.done = batches, device.split(":")[0], cfg.max_grad_norm, 0
        self.autocast = AUTOCAST.get(cfg.mixed_precision)
        self.parameters = list(trainable(unet).values())
        self.optimizer = build_optimizer(cfg.optimizer, self.parameters, cfg.learning_rate)
        self.unet: Any = torch.compile(unet) if cfg.memory.compile else unet

    def step(self) -> None:
        """One optimiser step."""
        batch = self.batches[self.done % len(self.batches)]
        with torch.autocast(self.device, dtype=self.autocast, enabled=self.autocast is not None):
            predicted_BChw = self.unet(batch.noisy_BChw, batch.steps_B, **batch.conditions.arguments()).sample
        nn.functional.mse_loss(predicted_BChw.float(), batch.target_BChw).backward()
        nn.utils.clip_grad_norm_(self.parameters, self.limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1


def flops_of(config: dict[str, Any], cfg: TrainConfig, *, latents: int, tokens: int) -> int:
    """Multiplications and additions of forward and backward for one picture, counted on tensors without data."""
    with torch.device("meta"):
        unet: Any = UNet2DConditionModel(**config)
        noisy, steps = torch.empty(1, 4, latents, latents), torch.zeros(1, dtype=torch.int64)
        text = torch.empty(1, tokens, config["cross_attention_dim"])
    prepare(unet, replace(cfg, memory=replace(cfg.memory, gradient_checkpointing=False)), SEED)
    # Attention in the form whose products the counter sees, whatever the device.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        unet(noisy, steps, encoder_hidden_states=text).sample.square().mean().backward()
    return counter.get_total_flops()


def timed(step: Callable[[], object], count: int, device: str) -> float:
    """Seconds that one of `count` steps takes."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return (time.perf_counter() - start) / count


def resident(field: str = "VmRSS") -> int:
    """Bytes of RAM that this process holds now, or has held at most (VmHWM). Of Linux alone.

    Not getrusage's maximum: a process inherits that one from the process that started it.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(value) * 1024


def forget_peak() -> None:
    """Let VmHWM count from here, where the kernel can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
