"""What `train` wrote, put back together with the base."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from stages.core.errors import StoreError
from stages.core.models.lora import WEIGHTS_NAME, load_lora, merge_lora
from stages.core.models.schedule import CONFIG_NAME, base_schedule
from stages.core.models.unet import UNET_WEIGHTS, load_unet


def is_lora(weights: Path) -> bool:
    """Whether `data/train/weights` holds LoRA factors (else a whole U-Net). Raises StoreError when it holds neither."""
    if (weights / WEIGHTS_NAME).is_file():
        return True
    if not (weights / UNET_WEIGHTS).is_file():
        raise StoreError(
            f"{weights} holds neither {WEIGHTS_NAME} nor {UNET_WEIGHTS}",
            remedy="run `dvc repro train` (or `dvc pull`) to make it",
        )
    return False


def load_trained_unet(base: Path, weights: Path, device: str) -> nn.Module:
    """The fine-tuned U-Net: the base's with the LoRA factors attached, or the whole one; float32, evaluation mode."""
    if not is_lora(weights):
        return load_unet(weights, device)
    unet = load_unet(base / "unet", device)
    load_lora(unet, weights)
    return unet.to(device).eval()


def load_plain_unet(base: Path, weights: Path, device: str) -> nn.Module:
    """As `load_trained_unet`, with LoRA factors folded into the weights: a U-Net that needs no adapter."""
    unet = load_trained_unet(base, weights, device)
    if is_lora(weights):
        merge_lora(unet)
    return unet


def trained_schedule(base: Path, weights: Path) -> dict[str, Any]:
    """The fields of the scheduler that the fine-tuned model was trained for: its own file's, else the base's."""
    path = weights / CONFIG_NAME
    return json.loads(path.read_text()) if path.is_file() else base_schedule(base)
