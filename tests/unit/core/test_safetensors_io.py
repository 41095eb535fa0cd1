"""safetensors bytes depend on contents alone, and the library reads what is written."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save_file as library_save
from torch import Tensor

from stages.core.errors import BaseModelError
from stages.core.safetensors_io import canonicalise, load_weights, save_bytes, save_file, weights_variant

_MIXED: dict[str, Tensor] = {
    "a": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "b": torch.tensor([0.5, -2.0]),
    "c": torch.tensor(True),
    "d": torch.tensor([[7]], dtype=torch.int64),
    "e": torch.zeros(0, 3, dtype=torch.float16),
    "f": torch.tensor([1.5], dtype=torch.bfloat16),
    "é": torch.arange(6, dtype=torch.float64).reshape(2, 3).T,  # not contiguous
}


def test_exact_bytes() -> None:
    header = b'{"__metadata__":{"a":"1","b":"2"},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    header += b" " * (-len(header) % 8)
    expected = struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.0, -2.5)
    assert save_bytes({"x": torch.tensor([1.0, -2.5])}, {"b": "2", "a": "1"}) == expected


def test_library_reads_back_every_dtype(tmp_path: Path) -> None:
    path = tmp_path / "mixed.safetensors"
    save_file(path, _MIXED, {"format": "pt"})
    loaded = load_file(path)
    assert sorted(loaded) == sorted(_MIXED)
    for name, tensor in _MIXED.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_every_tensor_is_aligned() -> None:
    data = save_bytes(_MIXED)
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for name, entry in header.items():
        assert entry["data_offsets"][0] % _MIXED[name].element_size() == 0, name
    assert header["d"]["data_offsets"] == [0, 8]
    assert header["b"]["data_offsets"][0] < header["f"]["data_offsets"][0] < header["a"]["data_offsets"][0]


def test_a_dtype_without_a_name_is_refused_by_tensor_name() -> None:
    with pytest.raises(TypeError, match=r"tensor odd is torch\.complex64"):
        save_bytes({"odd": torch.zeros(1, dtype=torch.complex64)})


_SCRIPT = """
import sys, torch
from safetensors.torch import save_file as library_save
from pathlib import Path
from stages.core.safetensors_io import canonicalise
path = Path(sys.argv[1])
metadata = {f"key{number}": str(number) for number in range(20)}
library_save({"b": torch.ones(3), "a": torch.arange(4)}, path, metadata)
canonicalise(path)
"""


@pytest.mark.slow  # three processes that import torch
def test_canonical_over_three_processes_with_different_hash_seeds(tmp_path: Path) -> None:
    files: list[bytes] = []
    for seed in ("0", "1", "4242"):
        path = tmp_path / f"{seed}.safetensors"
        subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(path)], env={**os.environ, "PYTHONHASHSEED": seed}, check=True
        )
        files.append(path.read_bytes())
    assert files[0] == files[1] == files[2]
    with safe_open(tmp_path / "0.safetensors", framework="pt") as handle:
        assert handle.metadata() == {f"key{number}": str(number) for number in range(20)}


def test_canonicalise_keeps_contents(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    library_save({"x": torch.arange(5.0)}, path, {"format": "pt"})
    canonicalise(path)
    assert path.read_bytes() == save_bytes({"x": torch.arange(5.0)}, {"format": "pt"})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors"], None),
        (["model.fp16.safetensors"], "fp16"),
        (["model.safetensors", "model.fp16.safetensors"], None),
        (["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.non_ema.safetensors"], "fp16"),
        (["diffusion_pytorch_model-00001-of-00002.safetensors"], None),
        (["diffusion_pytorch_model-00001-of-00002.fp16.safetensors"], "fp16"),
        (["diffusion_pytorch_model.fp16-00001-of-00002.safetensors"], "fp16"),
        (["pytorch_lora_weights.safetensors"], None),
        ([], None),
    ],
)
def test_variant_of_the_names(tmp_path: Path, names: list[str], expected: str | None) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert weights_variant(tmp_path) == expected


def test_load_weights_joins_parts_and_ignores_other_variants(tmp_path: Path) -> None:
    save_file(tmp_path / "model-00001-of-00002.safetensors", {"a": torch.ones(1)})
    save_file(tmp_path / "model-00002-of-00002.safetensors", {"b": torch.ones(2)})
    save_file(tmp_path / "model.fp16.safetensors", {"c": torch.ones(3)})
    assert {name: len(value) for name, value in load_weights(tmp_path).items()} == {"a": 1, "b": 2}


def test_load_weights_without_any_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=f"{tmp_path} holds no weights"):
        load_weights(tmp_path)
