"""safetensors files whose bytes depend on their contents alone.

The library orders metadata by a hash seeded per process: three processes gave three files (sorting the dict
before is not enough). So the header is written here, after the public format description: 8 bytes of little-endian
header length, JSON, padding to 8 bytes, then the tensors' raw bytes.
"""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from stages.core.store import write_atomic

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_bytes(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The safetensors file of `tensors` (any shape, CPU or GPU), sorted by name, as bytes."""
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    blobs: list[bytes] = []
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        blob = tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(blobs)


def save_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `save_bytes` under a temporary name, then rename."""
    write_atomic(path, save_bytes(tensors, metadata))


def canonicalise(path: Path) -> None:
    """Rewrite a safetensors file that a library wrote, so that equal contents give equal bytes."""
    with safe_open(path, framework="pt") as handle:  # pyright: ignore[reportUnknownVariableType]
        metadata: dict[str, str] | None = handle.metadata()
    save_file(path, load_file(path), metadata)
