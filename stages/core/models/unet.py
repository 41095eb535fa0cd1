"""The U-Net: loading, predicting, and what of it is trained (all of it, or LoRA factors).

Letters: B batch, C latent channels, h w latents, L tokens, D width of the text states, P width of the pooled text.
"""

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from stages.core.errors import BaseModelError, MachineError
from stages.core.safetensors_io import save_file, weights_variant
from stages.core.store import write_json

UNET_WEIGHTS = "diffusion_pytorch_model.safetensors"


def load_unet(folder: Path, device: str) -> nn.Module:
    """The U-Net at `folder` (which holds config.json and safetensors), float32 on `device`, evaluation mode."""
    model: Any = UNet2DConditionModel.from_pretrained(
        folder, dtype=torch.float32, variant=weights_variant(folder), local_files_only=True
    )
    return model.to(device).eval()


@dataclass(frozen=True)
class Conditions:
    """What the U-Net is told besides noisy latents and timesteps."""

    text_BLD: Tensor
    pooled_BP: Tensor | None = None  # with a second text encoder alone, and so the sizes
    sizes_B6: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """As the keywords of the U-Net's forward."""
        if self.pooled_BP is None:
            return {"encoder_hidden_states": self.text_BLD}
        added = {"text_embeds": self.pooled_BP, "time_ids": self.sizes_B6}
        return {"encoder_hidden_states": self.text_BLD, "added_cond_kwargs": added}


def predict(unet: nn.Module, noisy_BChw: Tensor, steps_B: Tensor, conditions: Conditions) -> Tensor:
    """The U-Net's prediction, float32 [B, C, h, w]."""
    return unet(noisy_BChw, steps_B, **conditions.arguments()).sample.float()


def set_attention(unet: Any, name: str) -> None:
    """How attention is computed: sdpa (torch's own) or xformers. Raises MachineError when xformers cannot be used."""
    if name == "sdpa":
        return
    try:
        unet.enable_xformers_memory_efficient_attention()
    except Exception as error:  # what is missing is told by different exceptions
        raise MachineError(
            f"train.memory.attention is xformers, which cannot be used here ({error})",
            remedy="install xformers for this torch, or set sdpa",
        ) from error


def set_checkpointing(unet: Any, on: bool) -> None:
    """Recompute activations in the backward pass: less memory, about a third more time, the same result."""
    if on:
        unet.enable_gradient_checkpointing()
    else:
        unet.disable_gradient_checkpointing()


def save_unet(unet: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and canonical safetensors in `dtype`, as diffusers reads them."""
    # Written here and not by save_pretrained: that puts the path which the base was loaded from into config.json.
    config: dict[str, Any] = json.loads(unet.to_json_string())
    config.pop("_name_or_path", None)
    write_json(folder / "config.json", config)
    weights = {name: value.detach().to(dtype) for name, value in unet.state_dict().items()}
    save_file(folder / UNET_WEIGHTS, weights, {"format": "pt"})


def trainable(unet: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in the module's order."""
    return {name: value for name, value in unet.named_parameters() if value.requires_grad}


def lr_scheduler(name: str, optimizer: torch.optim.Optimizer, *, warmup: int, steps: int) -> Any:
    """A diffusers learning-rate schedule (constant, constant_with_warmup, linear, cosine, ...) over `steps`."""
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)


class Ema:
    """Exponential moving average of the trained parameters, with diffusers' warm-up of the decay."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self._model: Any = EMAModel(parameters, decay=decay, use_ema_warmup=True, power=0.75)
        self._parameters = parameters

    def update(self) -> None:
        """Take one step towards the current parameters."""
        self._model.step(self._parameters)

    @contextmanager
    def applied(self) -> Generator[None]:
        """Inside, the parameters are their average; afterwards they are what they were."""
        self._model.store(self._parameters)
        self._model.copy_to(self._parameters)
        try:
            yield
        finally:
            self._model.restore(self._parameters)

    def state(self) -> tuple[list[Tensor], dict[str, Any]]:
        """What `load` needs to continue to the same bits: the averages, in the parameters' order, and plain values."""
        plain = dict(self._model.state_dict())
        return plain.pop("shadow_params"), plain

    def load(self, averages: list[Tensor], plain: dict[str, Any]) -> None:
        """Continue from what `state` gave."""
        self._model.load_state_dict({**plain, "shadow_params": averages})
        # The state comes from disk, on the CPU.
        self._model.to(device=self._parameters[0].device)


def check_targets(unet: nn.Module, targets: list[str]) -> None:
    """Every LoRA target must name at least one module. Raises BaseModelError that names the one that does not."""
    names = [name for name, _ in unet.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise BaseModelError(
                f"train.lora.targets holds {target!r}, which no module of the U-Net is called",
                remedy="usual targets are to_q, to_k, to_v, to_out.0",
            )
