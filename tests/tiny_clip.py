"""A CLIP small enough for tests: random weights, a real folder."""

from pathlib import Path
from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from stages.core.store import write_json
from tests.tiny import TEXT_LIMIT


def make_tiny_clip(folder: Path, base: Path) -> Path:
    """A random CLIPModel folder for 32x32 pictures, with the tokenizer of the diffusers folder `base`."""
    tokenizer = CLIPTokenizer.from_pretrained(base / "tokenizer")
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    end = tokenizer.eos_token_id
    text: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": TEXT_LIMIT}
    text |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": end, "pad_token_id": end}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(
            CLIPConfig(
                text_config=tower | text,
                vision_config=tower | {"image_size": 32, "patch_size": 8},
                projection_dim=16,
            )
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(
        folder / "preprocessor_config.json", {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.2, 0.1]}
    )
    return folder
