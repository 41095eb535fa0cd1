"""A training small enough for tests: its settings, its workspace, its trainer."""

from dataclasses import replace
from pathlib import Path

import torch

from stages.core.batches import Batches
from stages.core.determinism import DeterminismConfig
from stages.core.latents import LatentCache, LatentItem
from stages.core.models.lora import LoraConfig
from stages.core.models.schedule import NoiseSchedule, base_schedule, objective_schedule
from stages.core.models.unet import load_unet
from stages.core.ranks import Ranks
from stages.core.record import read_record
from stages.core.sampler import normal
from stages.core.store import Store, sha256_bytes
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
from stages.core.training.optimizers import OptimizerConfig
from stages.core.training.trainer import Trainer, prepare
from stages.harness.config import SharedConfig
from stages.harness.journal import NullJournal
from stages.harness.run import Stage
from tests.latents import write_latents
from tests.tiny import TEXT_LIMIT, XL_POOLED, XL_WIDTH, make_tiny_base, make_tiny_xl, write_record

CONFIG = TrainConfig(
    method="full",
    steps=5,
    epochs=None,
    batch_size=2,
    accumulation=1,
    processes=1,
    learning_rate=1e-3,
    lr_schedule="constant",
    warmup=0,
    max_grad_norm=1.0,
    ema_decay=0.0,
    caption_dropout=0.2,
    mixed_precision="no",
    log_every=1,
    objective=ObjectiveConfig(
        prediction="base", zero_terminal_snr=False, min_snr_gamma=None, offset_noise=0.0, timesteps=[0, 1000]
    ),
    optimizer=OptimizerConfig(name="adamw", beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01),
    lora=LoraConfig(rank=2, alpha=4.0, dropout=0.0, targets=["to_q", "to_v"], rslora=False, dora=False),
    memory=MemoryConfig(gradient_checkpointing=False, channels_last=False, attention="sdpa", compile=False),
    validation=ValidationConfig(every=2, items=2, bands=2, timesteps_per_band=1),
    stopping=StoppingConfig(patience=None, weights="last", max_loss=100.0, max_overflows=3),
    checkpoints=CheckpointsConfig(every=1, last=2),
    loader=LoaderConfig(num_workers=1, prefetch=2, pin_memory=False, staging=None),
    samples=SamplesConfig(every=0, prompts=[], height=32, width=32, steps=2, guidance=3.0),
)
# Everything at once that a checkpoint could forget.
HARD = replace(
    CONFIG,
    accumulation=2,
    ema_decay=0.9,
    objective=replace(CONFIG.objective, min_snr_gamma=5.0, offset_noise=0.1),
    memory=replace(CONFIG.memory, gradient_checkpointing=True),
    lr_schedule="cosine",
    warmup=2,
    lora=replace(CONFIG.lora, dropout=0.3),
)


def make_workspace(root: Path, *, xl: bool = False) -> Path:
    """A base, its record, and a hand-made latent cache: 5 + 2 items to train on in two buckets, 3 held out.

    xl: a base of SDXL's kind, with two text encoders.
    """
    base = (make_tiny_xl if xl else make_tiny_base)(root / "tiny-sd")
    width = XL_WIDTH if xl else 32
    record = read_record(write_record(base, root))
    items: list[LatentItem] = []
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    texts = {"": normal(0, "text", 99, shape=(TEXT_LIMIT, width))}
    for number in range(10):
        name = sha256_bytes(str(number).encode())
        bucket = (32, 48) if number in (5, 6) else (32, 32)
        shape = (4, bucket[0] // 4, bucket[1] // 4)
        moments[name] = (
            normal(0, "mean", number, shape=shape),
            normal(0, "logvar", number, shape=shape) - 4,
        )
        caption = f"picture {number}"
        texts[caption] = normal(0, "text", number, shape=(TEXT_LIMIT, width))
        item = LatentItem(
            id=name,
            file_name=f"{number}.png",
            captions=(caption,),
            split="train" if number < 7 else "holdout",
            bucket=bucket,
            original=(2 * bucket[0] + number, 3 * bucket[1]),
            corner=(0, number),
            shard=0,
            key=sha256_bytes(b"pixels" + name.encode()),
        )
        items.append(item)
    write_latents(
        root / "data" / "encode",
        sorted(items, key=lambda item: item.id),
        moments,
        texts,
        pooled={caption: normal(1, caption, shape=(XL_POOLED,)) for caption in texts} if xl else None,
        space={"channels": 4, "downsample": 4, "scaling_factor": 0.6, "shift_factor": 0.0},
        vae=record.vae_digest,
        text_encoder=record.text_digest,
    )
    return root


def stage_in(root: Path, device: str = "cpu") -> Stage:
    shared = SharedConfig(
        seed=7, device=device, runtime="native", determinism=DeterminismConfig(mode="portable", threads=1)
    )
    return Stage(name="train", root=root, shared=shared, store=Store(root / "store"), tracker=NullJournal())


def outs(root: Path) -> dict[str, bytes]:
    folder = root / "data" / "train"
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def trainer_for(root: Path, cfg: TrainConfig) -> Trainer:
    unet = load_unet(root / "tiny-sd" / "unet", "cpu")
    prepare(unet, cfg, 7)
    first, end = cfg.objective.timesteps
    schedule = objective_schedule(
        base_schedule(root / "tiny-sd"),
        prediction=cfg.objective.prediction,
        zero_terminal_snr=cfg.objective.zero_terminal_snr,
    )
    batches = Batches(
        LatentCache(root / "data" / "encode"),
        NoiseSchedule(schedule, "cpu"),
        batch_size=cfg.batch_size,
        seed=7,
        caption_dropout=cfg.caption_dropout,
        device="cpu",
        offset_noise=cfg.objective.offset_noise,
        timesteps=(first, end),
    )
    return Trainer(cfg, unet, batches, team=Ranks(0, 1), steps=cfg.steps or 1)
