"""The CLIP model that measures: pictures and captions -> features of length 1. Letters: B rows, D width, H W pixels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPModel, CLIPTokenizer

from stages.core.errors import BaseModelError
from stages.core.store import fingerprint, sha256_file

_SUFFIXES = (".json", ".txt", ".safetensors")


class Clip:
    """A transformers CLIPModel in float32 on `device`, with the preprocessing that its folder states."""

    def __init__(self, folder: Path, device: str, batch_size: int) -> None:
        check_clip_folder(folder)
        model: Any = CLIPModel.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
        self.model = model.to(device).eval()
        self.tokenizer: Any = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        self.device = device
        self.batch_size = batch_size  # rows of every forward, the last one padded
        self.side = int(model.config.vision_config.image_size)
        positions = int(model.config.text_config.max_position_embeddings)
        self.limit = min(int(self.tokenizer.model_max_length), positions)
        self.parameters = sum(int(value.numel()) for value in model.parameters())
        preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
        self.mean = torch.tensor(preprocessor["image_mean"]).view(1, 3, 1, 1)
        self.std = torch.tensor(preprocessor["image_std"]).view(1, 3, 1, 1)

    def pictures(self, pixels: list[Tensor]) -> Tensor:
        """uint8 RGB pictures [3, H, W] of any sizes -> features, float32 [N, D] on the CPU."""
        rows: list[Tensor] = []
        for start in range(0, len(pixels), self.batch_size):
            batch = pixels[start : start + self.batch_size]
            sized_BCHW = torch.stack([fit(picture, self.side) for picture in self._padded(batch)])
            rows.append(self._picture_batch(sized_BCHW)[: len(batch)])
        return torch.cat(rows)

    def captions(self, captions: list[str]) -> Tensor:
        """Captions -> features, float32 [N, D] on the CPU; a caption over the model's limit is cut."""
        rows: list[Tensor] = []
        for start in range(0, len(captions), self.batch_size):
            batch = captions[start : start + self.batch_size]
            rows.append(self._caption_batch(self._padded(batch))[: len(batch)])
        return torch.cat(rows)

    def _padded(self, batch: list[Any]) -> list[Any]:
        return batch + batch[-1:] * (self.batch_size - len(batch))

    @torch.inference_mode()
    def _picture_batch(self, pixels_BCHW: Tensor) -> Tensor:
        unit_BCHW = (pixels_BCHW.float() / 255 - self.mean) / self.std
        pooled_BD = self.model.vision_model(pixel_values=unit_BCHW.to(self.device)).pooler_output
        return torch.nn.functional.normalize(self.model.visual_projection(pooled_BD).float()).cpu()

    @torch.inference_mode()
    def _caption_batch(self, captions: list[str]) -> Tensor:
        tokens = self.tokenizer(
            captions, padding="max_length", max_length=self.limit, truncation=True, return_tensors="pt"
        )
        pooled_BD = self.model.text_model(
            input_ids=tokens.input_ids.to(self.device), attention_mask=tokens.attention_mask.to(self.device)
        ).pooler_output
        return torch.nn.functional.normalize(self.model.text_projection(pooled_BD).float()).cpu()


def fit(pixels_CHW: Tensor, side: int) -> Tensor:
    """CLIP's own preprocessing, uint8 [3, side, side]: shorter edge to `side` (bicubic), then the centre square."""
    height, width = int(pixels_CHW.shape[1]), int(pixels_CHW.shape[2])
    if (height, width) == (side, side):
        return pixels_CHW
    short = min(height, width)
    size = (side * width // short, side * height // short)
    resized = Image.fromarray(pixels_CHW.permute(1, 2, 0).numpy()).resize(size, Image.Resampling.BICUBIC)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    square = resized.crop((left, top, left + side, top + side))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()


def check_clip_folder(folder: Path) -> None:
    """Raises BaseModelError that names the file which a CLIP folder lacks, or the model that it holds instead."""
    for name in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise BaseModelError(
                f"{folder / name} is missing",
                remedy="evaluate.clip names a folder as transformers saves CLIPModel, CLIPTokenizer and "
                "CLIPImageProcessor",
            )
    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    if kind != "clip":
        raise BaseModelError(
            f"{folder / 'config.json'} says model_type {kind!r}",
            remedy="evaluate.clip must name a CLIPModel folder (model_type clip)",
        )
    if not list(folder.glob("*.safetensors")):
        raise BaseModelError(
            f"{folder} has no .safetensors weights",
            remedy="pickled weights can run code and are never loaded; convert them to safetensors",
        )


def clip_digest(folder: Path) -> str:
    """One sha256 over the folder's weights, settings and vocabulary; 64 hex digits."""
    paths = sorted(path for path in folder.glob("*") if path.suffix in _SUFFIXES)
    return fingerprint({path.name: sha256_file(path) for path in paths})
