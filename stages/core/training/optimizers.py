"""Optimisers by name, each from a library that keeps it well."""

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

OPTIMIZERS = ("adamw", "adamw8bit", "adafactor", "prodigy")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Part `optimizer` of section `train`."""

    name: str  # adamw | adamw8bit | adafactor | prodigy
    beta1: float  # unused by adafactor
    beta2: float  # unused by adafactor
    epsilon: float  # unused by adafactor
    weight_decay: float


def check_optimizer(cfg: OptimizerConfig, learning_rate: float, device: str) -> list[str]:
    """All settings that cannot work, each as one line of text.

    learning_rate: with prodigy a factor of the rate that it finds, usually 1.
    """
    problems: list[str] = []
    if cfg.name not in OPTIMIZERS:
        problems.append(f"train.optimizer.name is {cfg.name!r}; set one of {', '.join(OPTIMIZERS)}")
    if not learning_rate > 0:
        problems.append(f"train.learning_rate is {learning_rate}; set it above 0")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(cfg, name) < 1:
            problems.append(f"train.optimizer.{name} is {getattr(cfg, name)}; set it to 0 up to below 1")
    if not cfg.epsilon > 0:
        problems.append(f"train.optimizer.epsilon is {cfg.epsilon}; set it above 0")
    if not cfg.weight_decay >= 0:
        problems.append(f"train.optimizer.weight_decay is {cfg.weight_decay}; set it to 0 or more")
    if cfg.name == "adamw8bit":
        if device == "cpu":
            problems.append("train.optimizer.name is adamw8bit on a CPU; set adamw")
        elif not _installed("bitsandbytes"):
            problems.append(
                "train.optimizer.name is adamw8bit, and bitsandbytes is not installed; "
                "run `pip install bitsandbytes`, or set adamw"
            )
    return problems


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def build_optimizer(
    cfg: OptimizerConfig, parameters: Iterable[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer:
    """The optimiser over `parameters`, float32 ones.

    adamw: Loshchilov and Hutter 2019, in torch's fused form. adamw8bit: the same with states of 8 bits (Dettmers et al.
    2022), by bitsandbytes. adafactor: Shazeer and Stern 2018, in torch's form: the learning rate is the caller's, without
    momentum. prodigy: Mishchenko and Defazio 2023, by prodigyopt; it finds the rate itself, learning_rate is a factor of it.
    """
    values: list[Any] = list(parameters)
    adam: dict[str, Any] = {
        "lr": learning_rate,
        "betas": (cfg.beta1, cfg.beta2),
        "eps": cfg.epsilon,
        "weight_decay": cfg.weight_decay,
    }
    if cfg.name == "adamw":
        return torch.optim.AdamW(values, **adam, fused=True)
    if cfg.name == "adafactor":
        return torch.optim.Adafactor(values, lr=learning_rate, weight_decay=cfg.weight_decay)
    if cfg.name == "prodigy":
        from prodigyopt import Prodigy

        # Bias correction and the safeguard are what its authors advise for diffusion models.
        return Prodigy(values, **adam, use_bias_correction=True, safeguard_warmup=True)
    from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    return AdamW8bit(values, **adam)
