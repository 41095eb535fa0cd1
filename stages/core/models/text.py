"""The text encoder and its tokenizer. Letters: B batch, L tokens, D width."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer
from transformers.utils import logging

from stages.core.safetensors_io import weights_variant

logging.disable_progress_bar()  # "Loading weights" is over before it can be read


class TextEncoder:
    """The base's text encoder in float32 on `device`; captions become last hidden states."""

    def __init__(self, folder: Path, device: str) -> None:
        part = folder / "text_encoder"
        model: Any = CLIPTextModel.from_pretrained(
            part, dtype=torch.float32, variant=weights_variant(part), local_files_only=True
        )
        self.model = model.to(device).eval()
        self.tokenizer: Any = CLIPTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
        self.device = device
        self.limit = int(self.tokenizer.model_max_length)

    def length(self, caption: str) -> int:
        """Tokens of `caption`, its begin and end marks included, before any cut at `limit`."""
        return len(self.tokenizer(caption, truncation=False, verbose=False).input_ids)

    def ids(self, captions: list[str]) -> Tensor:
        """Token ids, int64 [B, limit], padded; a caption over the limit is cut (count first with `length`)."""
        return self.tokenizer(
            captions, padding="max_length", max_length=self.limit, truncation=True, return_tensors="pt"
        ).input_ids

    @torch.inference_mode()
    def encode(self, captions: list[str]) -> Tensor:
        """Last hidden states, float32 [B, limit, D] on the CPU."""
        return self.model(self.ids(captions).to(self.device)).last_hidden_state.float().cpu()
