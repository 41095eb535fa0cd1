"""The base's text encoders and their tokenizers: one (Stable Diffusion 1 and 2) or two (SDXL).

Letters: B batch, L tokens, D width of the states, P width of the pooled text.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
from transformers.utils import logging

from stages.core.safetensors_io import weights_variant

logging.disable_progress_bar()  # "Loading weights" is over before it can be read


class TextEncoder:
    """The base's text encoder in float32 on `device`; captions become last hidden states."""

    encoders, layer, pooled = 1, "last", 0

    def __init__(self, folder: Path, device: str) -> None:
        self.model = _load_model(folder / "text_encoder", CLIPTextModel, device)
        self.tokenizer = _load_tokenizer(folder / "tokenizer")
        self.device = device
        self.limit = int(self.tokenizer.model_max_length)
        self.width = int(self.model.config.hidden_size)

    def length(self, caption: str) -> int:
        """Tokens of `caption`, its begin and end marks included, before any cut at `limit`."""
        return _length(self.tokenizer, caption)

    def ids(self, captions: list[str]) -> Tensor:
        """Token ids, int64 [B, limit], padded; a caption over the limit is cut (count first with `length`)."""
        return _ids(self.tokenizer, captions, self.limit)

    @torch.inference_mode()
    def encode(self, captions: list[str]) -> Tensor:
        """Last hidden states, float32 [B, limit, D] on the CPU."""
        return self.model(self.ids(captions).to(self.device)).last_hidden_state.float().cpu()

    def parts(self, captions: list[str]) -> dict[str, Tensor]:
        """All that the U-Net is given of the captions: {"states": float32 [B, limit, D]}, on the CPU."""
        return {"states": self.encode(captions)}


class PairedTextEncoder:
    """SDXL's two text encoders in float32 on `device`.

    The states are the penultimate hidden states of both, before any final norm, side by side; the pooled text is the
    second encoder's projection (Podell et al., "SDXL", 2023, section 2.1; as diffusers' pipeline reads them).
    """

    encoders, layer = 2, "penultimate"

    def __init__(self, folder: Path, device: str) -> None:
        self.models = [
            _load_model(folder / "text_encoder", CLIPTextModel, device),
            _load_model(folder / "text_encoder_2", CLIPTextModelWithProjection, device),
        ]
        self.tokenizers = [_load_tokenizer(folder / name) for name in ("tokenizer", "tokenizer_2")]
        self.device = device
        self.limit = min(int(tokenizer.model_max_length) for tokenizer in self.tokenizers)
        self.width = sum(int(model.config.hidden_size) for model in self.models)
        self.pooled = int(self.models[1].config.projection_dim)

    def length(self, caption: str) -> int:
        """Tokens of `caption` by the tokenizer that needs more, marks included, before any cut at `limit`."""
        return max(_length(tokenizer, caption) for tokenizer in self.tokenizers)

    @torch.inference_mode()
    def parts(self, captions: list[str]) -> dict[str, Tensor]:
        """{"states": float32 [B, limit, D], "pooled": float32 [B, P]} on the CPU."""
        outputs = [
            model(_ids(tokenizer, captions, self.limit).to(self.device), output_hidden_states=True)
            for model, tokenizer in zip(self.models, self.tokenizers, strict=True)
        ]
        states_BLD = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        return {"states": states_BLD.float().cpu(), "pooled": outputs[1].text_embeds.float().cpu()}


def load_text(folder: Path, device: str) -> TextEncoder | PairedTextEncoder:
    """The text encoder of the base in `folder`, or its two."""
    paired = (folder / "text_encoder_2").is_dir()
    return PairedTextEncoder(folder, device) if paired else TextEncoder(folder, device)


def _load_model(part: Path, kind: Any, device: str) -> Any:
    model: Any = kind.from_pretrained(
        part, dtype=torch.float32, variant=weights_variant(part), local_files_only=True
    )
    return model.to(device).eval()


def _load_tokenizer(part: Path) -> Any:
    tokenizer: Any = CLIPTokenizer.from_pretrained(part, local_files_only=True)
    return tokenizer


def _length(tokenizer: Any, caption: str) -> int:
    return len(tokenizer(caption, truncation=False, verbose=False).input_ids)


def _ids(tokenizer: Any, captions: list[str], limit: int) -> Tensor:
    return tokenizer(
        captions, padding="max_length", max_length=limit, truncation=True, return_tensors="pt"
    ).input_ids
