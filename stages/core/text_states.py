"""Captions -> what the U-Net is given of them, in forwards of one number of rows (see core.moments)."""

import torch

from stages.core.memory import explained
from stages.core.models.text import PairedTextEncoder, TextEncoder
from stages.core.rounding import kept
from stages.core.rows import Rows
from stages.core.shards import text_key


def encode_captions(
    text: TextEncoder | PairedTextEncoder, captions: list[str], *, batch_size: int, keep: torch.dtype
) -> Rows:
    """Up to `batch_size` captions -> for each a row called by its text key: "states" [N, L, D] in `keep`, with two
    encoders "pooled" [N, P] too, and "facts": float64 [N, 3], the rounding error of the states (`rounding.kept`).

    Raises MachineError when the memory is too small.
    """
    padded = captions + [""] * (batch_size - len(captions))
    with explained(f"encoding {batch_size} captions", f"set encode.batch_size to {max(1, batch_size // 2)}"):
        given = {part: value[: len(captions)] for part, value in text.parts(padded).items()}
    rounded = {part: kept(value, keep) for part, value in given.items()}
    parts = {part: value for part, (value, _) in rounded.items()}
    return Rows([text_key(caption) for caption in captions], parts | {"facts": rounded["states"][1]})
