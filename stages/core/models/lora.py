"""LoRA on the U-Net through peft (Hu et al. 2021), saved in the keys that diffusers loads.

Linear layers and convolutions W get trainable factors of rank r: W' = W + s B A. A convolution's A is a convolution of
its own kernel into r channels, its B one of kernel 1 out of them. s is alpha / r, or alpha / sqrt(r) (Kalajdzievski
2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA"). DoRA (Liu et al. 2024, "DoRA: Weight-Decomposed
Low-Rank Adaptation") also trains the norm m of each output row or channel: W' = m (W + s B A) / ||W + s B A||, where m
starts as ||W||.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig as PeftConfig
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from stages.core.errors import BaseModelError
from stages.core.models.unet import check_targets
from stages.core.safetensors_io import canonicalise

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
_USUAL = "usual targets are to_q, to_k, to_v, to_out.0"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Part `lora` of section `train`; unused with method full."""

    rank: int
    alpha: float  # the factors' product is scaled by alpha / rank, with rslora by alpha / sqrt(rank)
    dropout: float  # share of inputs that the factors do not see, in training alone
    targets: list[str]  # names of the modules that get factors: linear layers and convolutions
    rslora: bool
    dora: bool


def check_lora(config: LoraConfig) -> list[str]:
    """All settings that cannot work, one text each; [] for none. `add_lora` holds the targets against the U-Net."""
    problems: list[str] = []
    if config.rank < 1:
        problems.append(f"train.lora.rank is {config.rank}; set it to 1 or more")
    if not config.alpha > 0:  # so that NaN is refused too
        problems.append(f"train.lora.alpha is {config.alpha}; set it above 0")
    if not 0 <= config.dropout < 1:
        problems.append(f"train.lora.dropout is {config.dropout}; set it to 0 up to below 1")
    if not config.targets:
        problems.append(f"train.lora.targets is empty; {_USUAL}")
    return problems


def add_lora(unet: Any, config: LoraConfig, *, seed: int) -> None:
    """Freeze the U-Net and add trainable factors, initialised from `seed`, in float32 on the U-Net's device.

    B is zero and DoRA's m is the norm that it is divided by, so nothing changes yet, to the last bit. Raises
    BaseModelError when a target names no module, one that is neither linear nor a convolution, or, with DoRA, one with an
    output whose weights are all zero.
    """
    check_targets(unet, config.targets)
    _check_adaptable(unet, config)
    unet.requires_grad_(False)
    # peft draws A from torch's global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = PeftConfig  # alpha may be a fraction, which its annotation does not say
        settings = build(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            init_lora_weights=True,
            target_modules=config.targets,
            use_rslora=config.rslora,
            use_dora=config.dora,
        )
        unet.add_adapter(settings)


def _check_adaptable(unet: nn.Module, config: LoraConfig) -> None:
    """peft would stop half-way at a module that it knows no factors for, and divide by a norm of zero."""
    for name, module in unet.named_modules():
        target = next((one for one in config.targets if f".{name}".endswith(f".{one}")), None)
        if target is None:
            continue
        if not isinstance(module, nn.Linear | nn.Conv2d):
            what = f"module {name}" if name else "the U-Net"
            raise BaseModelError(
                f"train.lora.targets holds {target!r}, but {what} ({type(module).__name__}) is neither a linear layer"
                " nor a convolution, and gets no factors",
                remedy=f"name modules that have such weights of their own; {_USUAL}",
            )
        if config.dora and not bool(module.weight.detach().flatten(1).any(1).all()):
            raise BaseModelError(
                f"train.lora.dora divides by norms of weights, but module {name} has an output whose weights are all zero",
                remedy=f"leave {target!r} out of train.lora.targets, or set train.lora.dora to false",
            )


def lora_state(unet: nn.Module) -> dict[str, Tensor]:
    """What is trained, float32, in peft's keys: MODULE and .lora_A.weight, .lora_B.weight or (m) .lora_magnitude_vector.

    Linear: A [rank, in], B [out, rank], m [out]. Convolution: A [rank, in, k, k], B [out, rank, 1, 1], m [1, out, 1, 1].
    """
    return get_peft_model_state_dict(unet)


def set_lora_state(unet: nn.Module, state: dict[str, Tensor]) -> None:
    """Overwrite the LoRA factors; `state` as `lora_state` gave it."""
    set_peft_model_state_dict(unet, state)


def save_lora(unet: Any, folder: Path) -> Path:
    """Write the factors as `load_lora_weights` reads them, float32; the file's adapter config holds rank, alpha and method.

    Equal factors and settings give equal bytes. The dropout in the file is 0.
    """
    StableDiffusionPipeline.save_lora_weights(
        folder,
        unet_lora_layers={_diffusers_key(key): value for key, value in lora_state(unet).items()},
        weight_name=WEIGHTS_NAME,
        safe_serialization=True,
        unet_lora_adapter_metadata=_plain(unet.peft_config["default"].to_dict()),
    )
    canonicalise(folder / WEIGHTS_NAME)
    return folder / WEIGHTS_NAME


def _diffusers_key(key: str) -> str:
    """In one form for all modules.

    diffusers' own conversion knows the attention layers alone, and its loader looks at the first key of a file to tell
    peft's form from diffusers': where both are in one file, it drops all attention layers with no more than a warning.
    """
    return key.replace(".lora_A.", ".lora.down.").replace(".lora_B.", ".lora.up.")


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """peft's settings for a file.

    Sets are sorted: their order differs between processes. Without dropout: what `load_lora_weights` attaches is in
    training mode, in a pipeline that is not, so dropout would go on in its user's pictures.
    """
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return plain | {"lora_dropout": 0.0}


def load_lora(unet: Any, folder: Path) -> None:
    """Attach the factors that `save_lora` wrote to a bare U-Net."""
    unet.load_lora_adapter(folder, weight_name=WEIGHTS_NAME, prefix="unet")


def merge_lora(unet: Any) -> None:
    """Fold the factors into the weights and remove the adapter: a plain U-Net again.

    Its output is the attached one's but for rounding: within 5e-6 of outputs up to 5, measured for every method on linear
    layers, convolutions and both.
    """
    unet.fuse_lora()
    unet.unload_lora()
