"""One optimiser step, and the state that it leads to.

Letters: B batch, C latent channels, h w latents.
"""

import itertools
import math
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from stages.core.batches import Batch, Batches
from stages.core.errors import TrainingError
from stages.core.latents import LatentItem
from stages.core.memory import explained
from stages.core.models.lora import add_lora
from stages.core.models.unet import (
    Ema,
    lr_scheduler,
    predict,
    set_attention,
    set_checkpointing,
    trainable,
)
from stages.core.ranks import Ranks
from stages.core.sampler import integers
from stages.core.training.checkpoints import State
from stages.core.training.config import TrainConfig
from stages.core.training.optimizers import build_optimizer

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}
CURVE: tuple[str, ...] = ("step", "loss", "learning_rate", "gradient_norm")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one micro-batch came to."""

    items: list[LatentItem]
    loss: Tensor  # scalar, on the training device


def prepare(unet: nn.Module, cfg: TrainConfig, seed: int) -> None:
    """Say what of the U-Net is trained, and how it runs; `seed` is of LoRA's start."""
    if cfg.method == "lora":
        add_lora(unet, cfg.lora, seed=seed)
    else:
        unet.requires_grad_(True)
    set_checkpointing(unet, cfg.memory.gradient_checkpointing)
    set_attention(unet, cfg.memory.attention)
    unet.train()


class Trainer:
    """The U-Net in training: `advance` takes a step; `state` and `load` are all that a checkpoint needs.

    With several ranks each takes its part of a step's micro-batches; gradients are averaged over all of them, so the step
    is that of one process, apart from the order of the sums.
    """

    def __init__(
        self, cfg: TrainConfig, unet: nn.Module, batches: Batches, *, team: Ranks, steps: int
    ) -> None:
        """unet: on the training device, with what is trained requiring gradients. steps: of the whole training."""
        self.cfg = cfg
        self.batches = batches
        self.team = team
        self.device = torch.device(team.device)
        self.autocast = AUTOCAST.get(cfg.mixed_precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=cfg.mixed_precision == "fp16")
        self.bare = unet
        self.parameters = trainable(unet)
        if cfg.memory.channels_last:
            unet.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.optimizer = build_optimizer(cfg.optimizer, self.parameters.values(), cfg.learning_rate)
        self.unet: Any = torch.compile(unet) if cfg.memory.compile else unet
        if team.count > 1:
            # What ranks tell each other passes through gloo (see core.ranks); gradients on GPUs through NCCL.
            group = torch.distributed.new_group(backend="nccl") if self.device.type == "cuda" else None
            self.unet = DistributedDataParallel(self.unet, process_group=group)
        self.schedule = lr_scheduler(cfg.lr_schedule, self.optimizer, warmup=cfg.warmup, steps=steps)
        self.ema = Ema(list(self.parameters.values()), cfg.ema_decay) if cfg.ema_decay else None
        self.step = 0
        self.row = dict.fromkeys(CURVE, 0.0)  # of the last step
        self.overflows = 0  # steps in a row that fp16 has skipped
        self.waited = 0.0  # seconds spent on waiting for batches, in this process
        self._stream: Generator[Batch] | None = None

    def advance(self) -> dict[str, float]:
        """One optimiser step over `accumulation` micro-batches; returns its row of the curve.

        Raises TrainingError for a loss that is not finite or above stopping.max_loss, for a gradient that is not finite
        (with fp16: for more than stopping.max_overflows in a row); MachineError when the memory is too small.
        """
        numbers = range(self.team.number, self.cfg.accumulation, self.team.count)
        remedy = "lower train.batch_size and raise train.accumulation, or set train.memory.gradient_checkpointing: true"
        with self.team.together(), explained(f"a step with {self.cfg.batch_size} pictures a forward", remedy):
            parts = [self._micro_batch(number, len(numbers)) for number in numbers]
            norm = self._clipped_norm()
            # One wait for the device a step: here.
            *losses, norm = torch.stack([*(part.loss for part in parts), norm]).tolist()
        limit = self.cfg.stopping.max_loss
        own = [
            (loss, "" if loss <= limit else _names(part.items))
            for part, loss in zip(parts, losses, strict=True)
        ]
        told = [pair for theirs in self.team.gather(own) for pair in theirs]
        self._refuse(told, norm, ", ".join(_names(part.items) for part in parts))
        rate = float(self.schedule.get_last_lr()[0])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        if self.ema:
            self.ema.update()
        self.step += 1
        self.row = dict(
            zip(CURVE, (self.step, sum(loss for loss, _ in told) / len(told), rate, norm), strict=True)
        )
        return self.row

    def _micro_batch(self, number: int, count: int) -> Part:
        """Forward and backward of this rank's micro-batch `number` of the step; it has `count` of them."""
        batch = self._next()
        if self.cfg.method == "lora" and self.cfg.lora.dropout:
            # It draws from the global generator.
            at = self.step * self.cfg.accumulation + number
            torch.manual_seed(integers(self.batches.seed, "dropout", at, below=2**63)[0])
        last = number + self.team.count >= self.cfg.accumulation
        with nullcontext() if last or self.team.count == 1 else self.unet.no_sync():
            loss = self.loss(batch)
            self.scaler.scale(loss / count).backward()
        return Part(items=batch.items, loss=loss.detach())

    def loss(self, batch: Batch) -> Tensor:
        """The mean over the batch of each row's squared error, weighted by Min-SNR where that is asked for; a scalar."""
        noisy_BChw = batch.noisy_BChw
        if self.cfg.memory.channels_last:
            noisy_BChw = noisy_BChw.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            predicted = predict(self.unet, noisy_BChw, batch.steps_B, batch.conditions)
        weights_B = self.batches.schedule.loss_weights(batch.steps_B, self.cfg.objective.min_snr_gamma)
        losses_B = (predicted - batch.target_BChw.float()).square().mean(dim=(1, 2, 3))
        return (losses_B * weights_B).mean()

    def _next(self) -> Batch:
        if self._stream is None:
            each = self.cfg.accumulation
            mine = range(self.team.number, each, self.team.count)
            numbers = (step * each + part for step in itertools.count(self.step) for part in mine)
            loader = self.cfg.loader
            self._stream = self.batches.ahead(numbers, workers=loader.num_workers, prefetch=loader.prefetch)
        start = time.perf_counter()
        batch = next(self._stream)
        self.waited += time.perf_counter() - start
        return batch

    def _clipped_norm(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        return clip_grad_norm_(self.parameters.values(), self.cfg.max_grad_norm)

    def _refuse(self, told: list[tuple[float, str]], norm: float, items: str) -> None:
        """Raise TrainingError when the step must not be taken.

        told: each micro-batch's loss, and its items where that is too large or no number. items: all of this rank's.
        """
        where = f"of step {self.step + 1}"
        for loss, names in told:
            if names:
                limit = f", above train.stopping.max_loss ({self.cfg.stopping.max_loss:g})"
                raise TrainingError(
                    f"the loss {where} is {loss:.6g}{limit if math.isfinite(loss) else ''}; its batch: {names}",
                    remedy="lower train.learning_rate, or set mixed_precision bf16 or 'no'; the last checkpoint is kept",
                )
        if math.isfinite(norm):
            self.overflows = 0
            return
        if not self.scaler.is_enabled():
            raise TrainingError(
                f"the gradient norm {where} is {norm}; its batch: {items}",
                remedy="lower train.learning_rate; the last checkpoint is kept",
            )
        # The scaler skips such a step and tries smaller factors from then on.
        self.overflows += 1
        if self.overflows > self.cfg.stopping.max_overflows:
            raise TrainingError(
                f"fp16 has overflowed in {self.overflows} steps in a row, the last {where}; its batch: {items}",
                remedy="set train.mixed_precision: bf16 or 'no', or raise train.stopping.max_overflows",
            )

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the U-Net holds its averaged weights (its own ones where no average is kept)."""
        return self.ema.applied() if self.ema else nullcontext()

    def state(self) -> State:
        """All that `load` needs to continue to the same bits. Its tensors are the trainer's own, not copies."""
        optimizer = self.optimizer.state_dict()
        tensors: dict[str, Tensor] = {
            f"parameter.{name}": value.detach() for name, value in self.parameters.items()
        }
        numbers: dict[str, dict[str, Any]] = {}
        for index, values in optimizer["state"].items():
            numbers[str(index)] = {
                key: value for key, value in values.items() if not isinstance(value, Tensor)
            }
            tensors |= {
                f"optimizer.{index}.{key}": value
                for key, value in values.items()
                if isinstance(value, Tensor)
            }
        averages, average = self.ema.state() if self.ema else ([], None)
        tensors |= {f"average.{index}": value for index, value in enumerate(averages)}
        plain = {
            "row": self.row,
            "overflows": self.overflows,
            "optimizer": {"groups": optimizer["param_groups"], "numbers": numbers},
            "schedule": self.schedule.state_dict(),
            "average": average,
            "scaler": self.scaler.state_dict(),
        }
        return State(self.step, tensors, plain)

    def load(self, state: State) -> None:
        """Continue from `state`."""
        plain, tensors = state.plain, state.tensors
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(tensors[f"parameter.{name}"])
        values: dict[int, dict[str, Any]] = {
            int(index): dict(numbers) for index, numbers in plain["optimizer"]["numbers"].items()
        }
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".", 2)
                values[int(index)][key] = value
        groups = [
            {name: tuple(x) if name == "betas" else x for name, x in group.items()}
            for group in plain["optimizer"]["groups"]
        ]
        self.optimizer.load_state_dict({"state": values, "param_groups": groups})
        self.schedule.load_state_dict(plain["schedule"])
        if self.ema:
            averages = [tensors[f"average.{index}"] for index in range(len(self.parameters))]
            self.ema.load(averages, plain["average"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(plain["scaler"])
        self.step, self.row, self.overflows = state.step, plain["row"], plain["overflows"]
        self.close()

    def close(self) -> None:
        """Stop the threads that make batches."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _names(items: list[LatentItem]) -> str:
    return ", ".join(item.file_name for item in items)
