"""Captions -> what the U-Net is given of them, in forwards of one number of rows (see core.moments)."""

import torch
from torch import Tensor

from stages.core.memory import explained
from stages.core.models.text import PairedTextEncoder, TextEncoder
from stages.core.rounding import kept
from stages.core.shards import text_key


def encode_captions(
    text: TextEncoder | PairedTextEncoder, captions: list[str], *, batch_size: int, keep: torch.dtype
) -> dict[str, Tensor]:
    """Up to `batch_size` captions -> for each, "<text key>.states" [L, D] in `keep`, with two encoders ".pooled" [P]
    too, and "<text key>.facts": float64 [3], the rounding error of the states (`rounding.kept`).

    Raises MachineError when the memory is too small.
    """
    padded = captions + [""] * (batch_size - len(captions))
    with explained(f"encoding {batch_size} captions", f"set encode.batch_size to {max(1, batch_size // 2)}"):
        parts = text.parts(padded)
    found: dict[str, Tensor] = {}
    for place, caption in enumerate(captions):
        key = text_key(caption)
        for part, rows in parts.items():
            found[f"{key}.{part}"], error = kept(rows[place], keep)
            if part == "states":
                found[f"{key}.facts"] = error
    return found


def unusable_texts(found: dict[str, Tensor], captions: list[str]) -> list[str]:
    """The captions for which any kept value is a NaN or an infinity."""
    return [
        caption
        for caption in captions
        if not all(
            bool(torch.isfinite(value).all())
            for name, value in found.items()
            if name.startswith(text_key(caption))
        )
    ]
