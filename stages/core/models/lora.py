"""LoRA on the U-Net through peft (Hu et al. 2021), saved in the keys that diffusers loads."""

from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from stages.core.models.unet import check_targets
from stages.core.safetensors_io import canonicalise

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"


def add_lora(unet: Any, *, rank: int, alpha: float, dropout: float, targets: list[str], seed: int) -> None:
    """Freeze the U-Net and add trainable LoRA factors, initialised from `seed`; B is zero, so nothing changes yet."""
    check_targets(unet, targets)
    unet.requires_grad_(False)
    # peft draws A from torch's global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = LoraConfig  # alpha may be a fraction, which its annotation does not say
        config = build(
            r=rank, lora_alpha=alpha, lora_dropout=dropout, init_lora_weights=True, target_modules=targets
        )
        unet.add_adapter(config)


def lora_state(unet: nn.Module) -> dict[str, Tensor]:
    """The LoRA factors in peft's keys."""
    return get_peft_model_state_dict(unet)


def set_lora_state(unet: nn.Module, state: dict[str, Tensor]) -> None:
    """Overwrite the LoRA factors; `state` as `lora_state` gave it."""
    set_peft_model_state_dict(unet, state)


def save_lora(unet: Any, folder: Path) -> Path:
    """Write the factors as `load_lora_weights` reads them, scaled by alpha / rank in the file's adapter config."""
    state = convert_state_dict_to_diffusers(lora_state(unet))
    StableDiffusionPipeline.save_lora_weights(
        folder,
        unet_lora_layers=state,
        weight_name=WEIGHTS_NAME,
        safe_serialization=True,
        unet_lora_adapter_metadata=_plain(unet.peft_config["default"].to_dict()),
    )
    canonicalise(folder / WEIGHTS_NAME)
    return folder / WEIGHTS_NAME


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """peft's settings with sets sorted: their order differs between processes."""
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def load_lora(unet: Any, folder: Path) -> None:
    """Attach the factors that `save_lora` wrote to a bare U-Net."""
    unet.load_lora_adapter(folder, weight_name=WEIGHTS_NAME, prefix="unet")


def merge_lora(unet: Any) -> None:
    """Fold the factors into the weights and remove the adapter: a plain U-Net again."""
    unet.fuse_lora()
    unet.unload_lora()
