"""safetensors files whose bytes depend on their contents alone.

The library orders metadata by a hash seeded per process: three processes gave three files (sorting the dict
before is not enough). So the header is written here, after the public format description: 8 bytes of little-endian
header length, JSON, padding to 8 bytes, then the tensors' raw bytes.
"""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import Buffer

from stages.core.errors import BaseModelError
from stages.core.store import write_chunks

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

# The names under which diffusers and transformers keep a component's weights, whole or in parts, with or without variant.
_WEIGHTS = re.compile(
    r"(?:model|diffusion_pytorch_model)(?:-\d+-of-\d+)?(?:\.(?P<variant>\w+))?(?:-\d+-of-\d+)?\.safetensors"
)


def chunks(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Iterator[Buffer]:
    """The safetensors file of `tensors` (any shape, CPU or GPU) piece by piece; sorted by element size, then by name.

    Wide elements come first, as the library has it, so that every tensor is aligned in the file. One tensor at a time is
    copied from a GPU. Raises TypeError that names the tensor when its dtype has no place in the format.
    """
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    offset = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"tensor {name} is {tensor.dtype}, which safetensors files here do not hold")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        if tensor.numel():
            yield tensor.view(-1).view(torch.uint8).numpy().data


def save_bytes(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """`chunks` in one piece."""
    return b"".join(chunks(tensors, metadata))


def save_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `chunks` under a temporary name, then rename."""
    write_chunks(path, chunks(tensors, metadata))


def canonicalise(path: Path) -> None:
    """Rewrite a safetensors file that a library wrote, so that equal contents give equal bytes."""
    with safe_open(path, framework="pt") as handle:  # pyright: ignore[reportUnknownVariableType]
        metadata: dict[str, str] | None = handle.metadata()
    save_file(path, load_file(path), metadata)


def weights_variant(folder: Path) -> str | None:
    """The variant (such as "fp16") in the names of a component's weights; None when the plain names are there.

    A hub repository fetched with `variant: fp16` holds nothing else, and the libraries look for plain names unless told.
    """
    found = {
        match["variant"] for path in folder.glob("*.safetensors") if (match := _WEIGHTS.fullmatch(path.name))
    }
    return None if None in found or not found else min(filter(None, found))


def load_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of one component's folder, whole or in parts. Raises BaseModelError when there are none."""
    variant = weights_variant(folder)
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        match = _WEIGHTS.fullmatch(path.name)
        if match and match["variant"] == variant:
            tensors |= load_file(path)
    if not tensors:
        raise BaseModelError(
            f"{folder} holds no weights", remedy="restore the folder, or run `dvc repro base`"
        )
    return tensors
