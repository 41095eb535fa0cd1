"""Section `train` of params.yaml, and what of it the trained weights depend on.

Here and not beside the stage: benchmarks/gpu_check.py trains without DVC, MLflow and OmegaConf.
"""

from dataclasses import asdict, dataclass
from typing import Any

from stages.core.errors import ConfigError
from stages.core.models.lora import LoraConfig, check_lora
from stages.core.training.optimizers import OptimizerConfig, check_optimizer


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Part `objective`: what the U-Net is asked for, and what counts how much."""

    prediction: str  # base | epsilon | v_prediction
    zero_terminal_snr: bool  # rescale the base's betas so that the last timestep is noise alone
    min_snr_gamma: float | None  # null: plain mean squared error
    offset_noise: float  # standard deviation of a noise that is the same all over a channel; 0: none
    timesteps: list[int]  # [first, after the last] of those that are trained on


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Part `memory`: how the same step fits into less memory, or runs faster."""

    gradient_checkpointing: bool  # recompute activations in the backward pass
    channels_last: bool  # memory layout of activations and of convolutions' weights
    attention: str  # sdpa | xformers
    compile: bool  # by torch.compile


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Part `validation`: the loss on held-out items at fixed noise."""

    every: int  # steps
    items: int  # at most this many held-out items, in the order of their ids
    bands: int  # equal ranges of timesteps, each with its own loss
    timesteps_per_band: int  # fixed timesteps in each, evenly spaced


@dataclass(frozen=True, kw_only=True)
class StoppingConfig:
    """Part `stopping`: when training ends before its last step, and which of its weights are the result."""

    patience: int | None  # validations in a row without a better one, after which it ends; null: never
    weights: str  # last | best: by the loss on held-out items
    max_loss: float  # a training loss above this is an explosion
    max_overflows: int  # steps in a row that fp16 may skip


@dataclass(frozen=True, kw_only=True)
class CheckpointsConfig:
    """Part `checkpoints`: what a killed run finds again."""

    every: int  # steps
    last: int  # how many are kept, besides the best


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Part `loader`: how batches reach the model. Changes no byte."""

    num_workers: int  # threads that make batches
    prefetch: int  # batches that are made ahead
    pin_memory: bool  # page-locked, for device cuda
    staging: str | None  # folder on a fast local disk that shards are copied to first; null: none


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """Part `samples`: pictures drawn on the way, for MLflow. Changes no byte."""

    every: int  # steps; 0: never
    prompts: list[str]
    height: int  # pixels
    width: int
    steps: int  # of the sampler
    guidance: float


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Section `train` of params.yaml."""

    method: str  # lora | full
    steps: int | None  # optimiser steps; null where epochs says how long
    epochs: int | None  # times that every item is seen; null where steps says how long
    batch_size: int  # pictures per forward
    accumulation: int  # forwards per optimiser step, over all processes
    processes: int  # that share the forwards of a step; a parameter, because sums depend on it
    learning_rate: float
    lr_schedule: str  # constant, constant_with_warmup, linear, cosine, ... as diffusers names them
    warmup: int  # steps
    max_grad_norm: float
    ema_decay: float  # 0: no average
    caption_dropout: float  # share of captions replaced by the empty one, for guidance
    mixed_precision: str  # no | fp16 | bf16; the trained weights stay float32
    log_every: int  # steps
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    lora: LoraConfig
    memory: MemoryConfig
    validation: ValidationConfig
    stopping: StoppingConfig
    checkpoints: CheckpointsConfig
    loader: LoaderConfig
    samples: SamplesConfig

    def total_steps(self, batches_per_epoch: int) -> int:
        """Optimiser steps of the whole training; an epoch's last step may reach into the next one."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return -(-self.epochs * batches_per_epoch // self.accumulation)


# As diffusers names them; piecewise_constant needs rules that there is no field for.
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")
_CONSTANT = ("constant", "constant_with_warmup")


def dependencies(cfg: TrainConfig) -> dict[str, Any]:
    """The fields that a state of training depends on: a checkpoint made under equal ones may be continued.

    The others say how long training goes on (where the learning rate does not depend on that), when it is broken off,
    which of its states is the result, and how batches get there.
    """
    fields = asdict(cfg)
    for name in ("stopping", "checkpoints", "loader", "samples"):
        del fields[name]
    if cfg.lr_schedule in _CONSTANT:
        del fields["steps"], fields["epochs"]
    if cfg.method != "lora":
        del fields["lora"]
    return fields


def check(cfg: TrainConfig, device: str, *, training: int, heldout: int, timesteps: int) -> None:
    """Raise one ConfigError that lists all settings that cannot work.

    training, heldout: numbers of items; timesteps: of the base's noise schedule.
    """
    problems = [*_numbers(cfg), *check_optimizer(cfg.optimizer, cfg.learning_rate, device)]
    problems += [
        *check_lora(cfg.lora),
        *_choices(cfg, device),
        *_timesteps(cfg, timesteps),
        *_samples(cfg.samples),
    ]
    if (cfg.steps is None) == (cfg.epochs is None):
        problems.append(
            f"train.steps is {cfg.steps} and train.epochs is {cfg.epochs}; set one of them, the other to null"
        )
    if cfg.processes > 0 and cfg.accumulation % cfg.processes:
        problems.append(
            f"train.accumulation is {cfg.accumulation}, which {cfg.processes} processes cannot share evenly; "
            "set a multiple of train.processes"
        )
    if training == 0:
        problems.append("no picture is left to train on; lower ingest.holdout_percent or add pictures")
    if heldout == 0:
        problems.append("no picture is held out, so nothing can be validated; raise ingest.holdout_percent")
    if problems:
        raise ConfigError("\n  ".join(problems), remedy="correct section train of params.yaml")


def _numbers(cfg: TrainConfig) -> list[str]:
    one_or_more = {
        **{name: getattr(cfg, name) for name in ("batch_size", "accumulation", "processes", "log_every")},
        "steps": 1 if cfg.steps is None else cfg.steps,
        "epochs": 1 if cfg.epochs is None else cfg.epochs,
        "checkpoints.every": cfg.checkpoints.every,
        "checkpoints.last": cfg.checkpoints.last,
        "stopping.patience": 1 if cfg.stopping.patience is None else cfg.stopping.patience,
        "validation.every": cfg.validation.every,
        "validation.items": cfg.validation.items,
        "validation.bands": cfg.validation.bands,
        "validation.timesteps_per_band": cfg.validation.timesteps_per_band,
        "loader.num_workers": cfg.loader.num_workers,
        "loader.prefetch": cfg.loader.prefetch,
    }
    above_zero = {
        "max_grad_norm": cfg.max_grad_norm,
        "stopping.max_loss": cfg.stopping.max_loss,
        "objective.min_snr_gamma": 1.0
        if cfg.objective.min_snr_gamma is None
        else cfg.objective.min_snr_gamma,
    }
    not_negative = {
        "warmup": cfg.warmup,
        "objective.offset_noise": cfg.objective.offset_noise,
        "stopping.max_overflows": cfg.stopping.max_overflows,
        "samples.every": cfg.samples.every,
    }
    problems = [f"train.{name} is {x}; set it to 1 or more" for name, x in one_or_more.items() if not x >= 1]
    problems += [f"train.{name} is {x}; set it above 0" for name, x in above_zero.items() if not x > 0]
    problems += [
        f"train.{name} is {x}; set it to 0 or more" for name, x in not_negative.items() if not x >= 0
    ]
    if not 0 <= cfg.ema_decay < 1:
        problems.append(f"train.ema_decay is {cfg.ema_decay}; set it to 0 up to below 1")
    if not 0 <= cfg.caption_dropout <= 1:
        problems.append(f"train.caption_dropout is {cfg.caption_dropout}; set it to 0 to 1")
    return problems


def _choices(cfg: TrainConfig, device: str) -> list[str]:
    allowed = {
        "method": (cfg.method, ("lora", "full")),
        "lr_schedule": (cfg.lr_schedule, SCHEDULES),
        "mixed_precision": (cfg.mixed_precision, ("no", "fp16", "bf16")),
        "objective.prediction": (cfg.objective.prediction, ("base", "epsilon", "v_prediction")),
        "memory.attention": (cfg.memory.attention, ("sdpa", "xformers")),
        "stopping.weights": (cfg.stopping.weights, ("last", "best")),
    }
    problems = [
        f"train.{name} is {value!r}; set one of {', '.join(choices)}"
        for name, (value, choices) in allowed.items()
        if value not in choices
    ]
    if cfg.lr_schedule == "constant" and cfg.warmup > 0:
        problems.append(
            f"train.warmup is {cfg.warmup}, which lr_schedule constant has none of; set constant_with_warmup, or warmup: 0"
        )
    if device == "cpu":
        refused = {
            "mixed_precision is fp16": cfg.mixed_precision == "fp16",
            "loader.pin_memory is true": cfg.loader.pin_memory,
            "memory.attention is xformers": cfg.memory.attention == "xformers",
        }
        remedies = ("set no or bf16", "set it to false", "set sdpa")
        problems += [
            f"train.{what} on a CPU; {remedy}"
            for (what, wrong), remedy in zip(refused.items(), remedies, strict=True)
            if wrong
        ]
    return problems


def _timesteps(cfg: TrainConfig, timesteps: int) -> list[str]:
    problems: list[str] = []
    given = cfg.objective.timesteps
    if len(given) != 2 or not 0 <= given[0] < given[1] <= timesteps:
        problems.append(
            f"train.objective.timesteps is {given}; set [first, after the last], each from 0 to {timesteps}, the first lower"
        )
    cells = cfg.validation.bands * cfg.validation.timesteps_per_band
    if cells > timesteps:
        problems.append(
            f"train.validation.bands x timesteps_per_band is {cells}, but the base has {timesteps} timesteps"
        )
    return problems


def _samples(samples: SamplesConfig) -> list[str]:
    if samples.every < 1:
        return []
    problems = [
        f"train.samples.{name} is {value}; set it to 1 or more"
        for name, value in (("height", samples.height), ("width", samples.width), ("steps", samples.steps))
        if value < 1
    ]
    if not samples.prompts:
        problems.append("train.samples.prompts is empty; give texts to draw, or set train.samples.every: 0")
    return problems
