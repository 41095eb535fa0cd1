"""train: fine-tune the base's U-Net on the latent cache, by LoRA factors or whole.

Reads   data/encode/, data/base/record.json and the base's U-Net and scheduler
Writes  data/train/weights/          LoRA: pytorch_lora_weights.safetensors; full: config.json and safetensors
        data/train/loss.csv          step, loss, learning rate, gradient norm
        data/train/validation.csv    step, loss on held-out items at fixed noise and timesteps
        data/train/metrics.json      first and last validation loss

Killed and started again, it continues from its last checkpoint in the store to the same bits: everything random is a
function of (seed, step), so a checkpoint is weights, optimiser, schedule, average and the curves so far.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from stages.core import determinism
from stages.core.batches import Batches
from stages.core.errors import ConfigError, TrainingError
from stages.core.heldout import heldout_losses
from stages.core.latents import LatentCache
from stages.core.models.lora import add_lora, save_lora
from stages.core.models.schedule import NoiseSchedule
from stages.core.models.unet import (
    Ema,
    load_unet,
    lr_scheduler,
    predict,
    save_unet,
    set_checkpointing,
    trainable,
)
from stages.core.record import read_record, verified_folder
from stages.core.sampler import integers
from stages.core.shards import load_pt, save_pt
from stages.core.store import file_digests, write_atomic, write_json
from stages.core.tables import csv_bytes
from stages.harness.run import Stage, stage_main


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Part `lora` of section `train`; unused with method full."""

    rank: int
    alpha: float  # the factors' product is scaled by alpha / rank
    dropout: float
    targets: list[str]  # names of the modules that get factors


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Part `adamw` of section `train`."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Part `validation` of section `train`."""

    every: int  # steps
    items: int  # at most this many held-out items, in the order of their ids
    timesteps: list[int]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Section `train` of params.yaml."""

    method: str  # lora | full
    steps: int  # optimiser steps
    batch_size: int  # pictures per forward
    accumulation: int  # forwards per optimiser step
    learning_rate: float
    lr_schedule: str  # constant, constant_with_warmup, linear, cosine, ... as diffusers names them
    warmup: int  # steps
    max_grad_norm: float
    ema_decay: float  # 0: no average
    min_snr_gamma: float | None  # null: plain mean squared error
    caption_dropout: float  # share of captions replaced by the empty one, for guidance
    mixed_precision: str  # no | fp16 | bf16; the trained weights stay float32
    gradient_checkpointing: bool
    checkpoint_every: int  # steps
    log_every: int  # steps
    adamw: OptimizerConfig
    lora: LoraConfig
    validation: ValidationConfig


# As diffusers names them; piecewise_constant needs rules that there is no field for.
_SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")


def check(cfg: TrainConfig, device: str, *, training: int, heldout: int, timesteps: int) -> None:
    """Raise one ConfigError that lists all settings that cannot work.

    training, heldout: numbers of items; timesteps: of the base's noise schedule.
    """
    problems = [*_unusable_numbers(cfg, timesteps)]
    if cfg.method not in ("lora", "full"):
        problems.append(f"train.method is {cfg.method!r}; set lora or full")
    if cfg.lr_schedule not in _SCHEDULES:
        problems.append(f"train.lr_schedule is {cfg.lr_schedule!r}; set one of {', '.join(_SCHEDULES)}")
    if cfg.lr_schedule == "constant" and cfg.warmup > 0:
        problems.append(
            f"train.warmup is {cfg.warmup}, which lr_schedule constant has none of; set constant_with_warmup, or warmup: 0"
        )
    if cfg.mixed_precision not in ("no", "fp16", "bf16"):
        problems.append(f"train.mixed_precision is {cfg.mixed_precision!r}; set no, fp16 or bf16")
    if cfg.mixed_precision == "fp16" and device == "cpu":
        problems.append("train.mixed_precision is fp16 on a CPU; set no or bf16")
    if not cfg.lora.targets:
        problems.append("train.lora.targets is empty; usual targets are to_q, to_k, to_v, to_out.0")
    if training == 0:
        problems.append("no picture is left to train on; lower ingest.holdout_percent or add pictures")
    if heldout == 0:
        problems.append("no picture is held out, so nothing can be validated; raise ingest.holdout_percent")
    if problems:
        raise ConfigError("\n  ".join(problems), remedy="correct section train of params.yaml")


def _unusable_numbers(cfg: TrainConfig, timesteps: int) -> list[str]:
    one_or_more = {
        **{name: getattr(cfg, name) for name in ("steps", "batch_size", "accumulation")},
        **{name: getattr(cfg, name) for name in ("checkpoint_every", "log_every")},
        "lora.rank": cfg.lora.rank,
        "validation.every": cfg.validation.every,
        "validation.items": cfg.validation.items,
    }
    above_zero = {
        "learning_rate": cfg.learning_rate,
        "max_grad_norm": cfg.max_grad_norm,
        "min_snr_gamma": 1.0 if cfg.min_snr_gamma is None else cfg.min_snr_gamma,
        "adamw.epsilon": cfg.adamw.epsilon,
        "lora.alpha": cfg.lora.alpha,
    }
    below_one = {
        "ema_decay": cfg.ema_decay,
        "lora.dropout": cfg.lora.dropout,
        "adamw.beta1": cfg.adamw.beta1,
        "adamw.beta2": cfg.adamw.beta2,
    }
    not_negative = {"warmup": cfg.warmup, "adamw.weight_decay": cfg.adamw.weight_decay}
    problems = [f"train.{name} is {x}; set it to 1 or more" for name, x in one_or_more.items() if x < 1]
    problems += [f"train.{name} is {x}; set it above 0" for name, x in above_zero.items() if x <= 0]
    problems += [
        f"train.{name} is {x}; set it to 0 up to below 1" for name, x in below_one.items() if not 0 <= x < 1
    ]
    problems += [f"train.{name} is {x}; set it to 0 or more" for name, x in not_negative.items() if x < 0]
    if not 0 <= cfg.caption_dropout <= 1:
        problems.append(f"train.caption_dropout is {cfg.caption_dropout}; set it to 0 to 1")
    if not cfg.validation.timesteps or not all(0 <= t < timesteps for t in cfg.validation.timesteps):
        problems.append(
            f"train.validation.timesteps is {cfg.validation.timesteps}; set one or more, each from 0 to {timesteps - 1}"
        )
    return problems


class Trainer:
    """The state that a checkpoint holds, and one step of it."""

    def __init__(self, cfg: TrainConfig, unet: nn.Module, batches: Batches, device: str) -> None:
        self.cfg = cfg
        self.batches = batches
        self.accelerator = Accelerator(
            mixed_precision=cfg.mixed_precision, gradient_accumulation_steps=1, cpu=device == "cpu"
        )
        self.parameters = trainable(unet)
        optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=cfg.learning_rate,
            betas=(cfg.adamw.beta1, cfg.adamw.beta2),
            eps=cfg.adamw.epsilon,
            weight_decay=cfg.adamw.weight_decay,
        )
        self.bare = unet
        self.unet, self.optimizer = self.accelerator.prepare(unet, optimizer)
        self.schedule = lr_scheduler(cfg.lr_schedule, optimizer, warmup=cfg.warmup, steps=cfg.steps)
        self.ema = Ema(list(self.parameters.values()), cfg.ema_decay) if cfg.ema_decay else None
        self.step = 0
        self.curve: list[dict[str, float]] = []
        self.validation: list[dict[str, float]] = []

    def advance(self) -> dict[str, float]:
        """One optimiser step over `accumulation` micro-batches. Raises TrainingError for a loss or gradient not finite."""
        cfg = self.cfg
        # For LoRA dropout alone: it draws from the global generator.
        torch.manual_seed(integers(self.batches.seed, "dropout", self.step, below=2**63)[0])
        total = 0.0
        for part in range(cfg.accumulation):
            batch = self.batches[self.step * cfg.accumulation + part]
            predicted = predict(self.unet, batch.noisy_BChw, batch.steps_B, batch.text_BLD)
            weights_B = self.batches.schedule.loss_weights(batch.steps_B, cfg.min_snr_gamma)
            losses_B = (predicted - batch.target_BChw.float()).square().mean(dim=(1, 2, 3))
            loss: Tensor = (losses_B * weights_B).mean() / cfg.accumulation
            if not math.isfinite(value := float(loss.detach())):
                names = ", ".join(item.file_name for item in batch.items)
                raise TrainingError(
                    f"the loss of step {self.step + 1} is {value}; its batch: {names}",
                    remedy="lower train.learning_rate, or use mixed_precision bf16 or no",
                )
            self.accelerator.backward(loss)
            total += value
        norm = float(self.accelerator.clip_grad_norm_(self.parameters.values(), cfg.max_grad_norm) or 0.0)
        # With fp16 such a step is skipped by the scaler, which tries smaller factors from then on.
        if not math.isfinite(norm) and not self.accelerator.scaler:
            raise TrainingError(
                f"the gradient norm of step {self.step + 1} is {norm}", remedy="lower train.learning_rate"
            )
        rate = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        if self.ema:
            self.ema.update()
        self.step += 1
        return {"step": self.step, "loss": total, "learning_rate": rate, "gradient_norm": norm}

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the U-Net holds its averaged weights (its own ones where no average is kept)."""
        return self.ema.applied() if self.ema else nullcontext()

    def state(self) -> dict[str, Any]:
        """All that `load` needs to continue to the same bits."""
        scaler = self.accelerator.scaler
        return {
            "step": self.step,
            "parameters": {name: value.detach().cpu() for name, value in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "ema": self.ema.state() if self.ema else None,
            "scaler": scaler.state_dict() if scaler else None,
            "curve": self.curve,
            "validation": self.validation,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if self.ema:
            self.ema.load(state["ema"])
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.curve, self.validation = state["step"], state["curve"], state["validation"]


def validate(trainer: Trainer, cfg: TrainConfig, stage: Stage) -> float:
    """Mean loss on held-out items at fixed noise and timesteps, with the averaged weights where they are kept."""
    batches = trainer.batches
    with trainer.averaged():
        losses = heldout_losses(
            trainer.bare,
            batches.schedule,
            batches.cache,
            batches.cache.split("holdout")[: cfg.validation.items],
            seed=stage.shared.seed,
            timesteps=cfg.validation.timesteps,
            batch_size=cfg.batch_size,
            device=stage.shared.device,
        )
    loss = float(losses.mean())
    if not math.isfinite(loss):
        raise TrainingError(
            f"the held-out loss after step {trainer.step} is {loss}", remedy="lower train.learning_rate"
        )
    return loss


def run(trainer: Trainer, cfg: TrainConfig, stage: Stage, checkpoint: Path) -> None:
    """From the trainer's step to the last one; checkpoints, curves and validation on the way."""
    # A resumed run's records hold the whole curve, not only what came after the restart.
    for row in trainer.curve:
        record_step(stage, row)
    if not trainer.validation:
        trainer.validation.append({"step": 0, "loss": validate(trainer, cfg, stage)})
    for row in trainer.validation:
        record_validation(stage, row)
    steps = range(trainer.step, cfg.steps)
    for _ in stage.progress(steps, total=cfg.steps, what=cfg.method, unit="steps", done=trainer.step):
        row = trainer.advance()
        last = trainer.step == cfg.steps
        if trainer.step % cfg.log_every == 0 or last:
            trainer.curve.append(row)
            record_step(stage, row)
        if trainer.step % cfg.validation.every == 0 or last:
            loss = validate(trainer, cfg, stage)
            trainer.validation.append({"step": trainer.step, "loss": loss})
            record_validation(stage, trainer.validation[-1])
        if trainer.step % cfg.checkpoint_every == 0 or last:
            save_pt(checkpoint, trainer.state())


_CURVE = ("step", "loss", "learning_rate", "gradient_norm")


def record_step(stage: Stage, row: dict[str, float]) -> None:
    """One point of the training curve, for MLflow."""
    stage.tracker.metrics({f"train/{name}": row[name] for name in _CURVE[1:]}, step=int(row["step"]))


def record_validation(stage: Stage, row: dict[str, float]) -> None:
    """One point of the validation curve, for MLflow."""
    stage.tracker.metrics({"train/validation_loss": row["loss"]}, step=int(row["step"]))


def save_weights(unet: nn.Module, cfg: TrainConfig, folder: Path) -> None:
    """Write what was trained, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    if cfg.method == "lora":
        save_lora(unet, folder)
    else:
        save_unet(unet, folder, torch.float32)


def train(cfg: TrainConfig, stage: Stage) -> None:
    """Load, continue from the last checkpoint if there is one, train, and write what was trained."""
    record = read_record(stage.folder("base") / "record.json")
    cache = LatentCache(stage.folder("encode"))
    cache.check_base(record)
    check(
        cfg,
        stage.shared.device,
        training=len(cache.split("train")),
        heldout=len(cache.split("holdout")),
        timesteps=int(record.components["scheduler"]["config"].get("num_train_timesteps", 1000)),
    )
    folder = verified_folder(record, stage.root, "unet", "scheduler")
    unet = load_unet(folder / "unet", stage.shared.device)
    if cfg.method == "lora":
        add_lora(unet, **vars(cfg.lora), seed=stage.shared.seed)
    else:
        unet.requires_grad_(True)
    set_checkpointing(unet, cfg.gradient_checkpointing)
    unet.train()
    batches = Batches(
        cache,
        NoiseSchedule(folder, stage.shared.device),
        batch_size=cfg.batch_size,
        seed=stage.shared.seed,
        caption_dropout=cfg.caption_dropout,
        device=stage.shared.device,
    )
    print_ = stage.fingerprint(
        config=cfg,
        seed=stage.shared.seed,
        base=record.component_digest("unet", "scheduler"),
        latents=cache.digest,
    )
    with stage.store.lock("train", print_) as store:
        checkpoint = store / "checkpoint.pt"
        trainer = Trainer(cfg, unet, batches, stage.shared.device)
        if checkpoint.is_file():
            trainer.load(load_pt(checkpoint))
            stage.say(f"continues from step {trainer.step} of {cfg.steps}")
        run(trainer, cfg, stage, checkpoint)
    with trainer.averaged():
        save_weights(unet, cfg, stage.out / "weights")

    weights = file_digests(stage.out / "weights")
    stage.tracker.tags({f"weights.{name}": digest for name, digest in weights.items()})
    first, last = trainer.validation[0]["loss"], trainer.validation[-1]["loss"]
    write_atomic(stage.out / "loss.csv", csv_bytes(trainer.curve, _CURVE))
    write_atomic(stage.out / "validation.csv", csv_bytes(trainer.validation, ("step", "loss")))
    write_json(
        stage.out / "metrics.json", {"validation_loss": {"first": first, "last": last}, "steps": cfg.steps}
    )
    stage.tracker.metrics({"train/validation_loss_first": first, "train/validation_loss_last": last})
    count = sum(value.numel() for value in trainer.parameters.values())
    stage.say(
        f"{cfg.steps} steps of {cfg.method} ({count:,} parameters) on {len(batches.items)} items: "
        f"held-out loss {first:.4f} -> {last:.4f}"
    )


if __name__ == "__main__":
    stage_main("train", TrainConfig, train, fix=determinism.apply)
