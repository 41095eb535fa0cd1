"""What `train` wrote, put back together with the base."""

from pathlib import Path

from torch import nn

from stages.core.models.lora import WEIGHTS_NAME, load_lora
from stages.core.models.unet import load_unet


def is_lora(weights: Path) -> bool:
    """Whether `data/train/weights` holds LoRA factors (else a whole U-Net)."""
    return (weights / WEIGHTS_NAME).is_file()


def load_trained_unet(base: Path, weights: Path, device: str) -> nn.Module:
    """The fine-tuned U-Net: the base's with the LoRA factors attached, or the whole one; float32, evaluation mode."""
    if not is_lora(weights):
        return load_unet(weights, device)
    unet = load_unet(base / "unet", device)
    load_lora(unet, weights)
    return unet.to(device).eval()
