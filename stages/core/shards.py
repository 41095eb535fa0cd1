"""Shards: items grouped by hash prefix, so that one new picture rewrites one shard, and an index written last.

An item's shard depends on its id and the number of shards alone, never on the other items.
"""

import io
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.core.errors import StoreError
from stages.core.store import fingerprint, sha256_bytes, sha256_file, write_atomic, write_json

PIXELS_FORMAT = 3  # of data/preprocess


def shard_of(item_id: str, shards: int) -> int:
    """Which of `shards` shards holds the item with this hex id: its first 32 bits, modulo."""
    return int(item_id[:8], 16) % shards


def shard_name(number: int, suffix: str) -> str:
    """`shard-00.pt` and so on."""
    return f"shard-{number:02d}{suffix}"


def pt_bytes(value: Any) -> bytes:
    """torch.save through memory: saved to a path, the file's name would leak into the bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def save_pt(path: Path, value: Any) -> None:
    """Write `value` (tensors, dicts, lists, numbers, strings) as `.pt`, atomically."""
    write_atomic(path, pt_bytes(value))


def load_pt(path: Path, *, mmap: bool = False) -> Any:
    """Read a `.pt` file without running any pickled code. Raises StoreError when it is damaged.

    mmap: what is not looked at is not read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise StoreError(
            f"{path} is damaged or not a plain tensor file ({type(error).__name__})",
            remedy="delete it and run `dvc repro` again; it is made anew",
        ) from error


def stacked(pixels: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Prepared pictures as a shard of data/preprocess holds them: {"ids": N item ids, "pixels": [N, 3, H, W]} for each size.

    pixels: item id -> uint8 [3, H, W]. Read 17 times as fast as a tensor for each picture (1,600 of 64 x 64, 2026-12-07).
    """
    by_size: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in sorted(pixels):
        by_size[tuple(pixels[name].shape)].append(name)
    return [
        {"ids": names, "pixels": torch.stack([pixels[name] for name in names])}
        for _, names in sorted(by_size.items())
    ]


def unstacked(sizes: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The inverse of `stacked`; the tensors are views."""
    return {name: row for size in sizes for name, row in zip(size["ids"], size["pixels"], strict=True)}


def pixel_key(pixels_CHW: Tensor) -> str:
    """The content of a prepared picture, uint8 [3, H, W]: sha256 over its shape and bytes; 64 hex digits."""
    return sha256_bytes(str(tuple(pixels_CHW.shape)).encode() + pixels_CHW.numpy().tobytes())


def text_key(caption: str) -> str:
    """The content of a caption: sha256 of its UTF-8 bytes; 64 hex digits."""
    return sha256_bytes(caption.encode())


def write_index(folder: Path, fields: dict[str, Any], files: list[str]) -> None:
    """Write `index.json` last: `fields`, the sha256 of each file, and one digest over both.

    A folder without an index is unfinished.
    """
    plain = {name: value for name, value in fields.items() if name != "digest"}
    index = {**plain, "files": {name: sha256_file(folder / name) for name in sorted(files)}}
    write_json(folder / "index.json", {**index, "digest": fingerprint(index)})


def open_index(folder: Path) -> dict[str, Any]:
    """Read `index.json` and check it alone; `check_file` checks what it names. Raises StoreError that names the file."""
    path = folder / "index.json"
    if not path.is_file():
        raise StoreError(
            f"{path} is missing: {folder} was never finished",
            remedy="run `dvc repro` (or `dvc pull`) to make it",
        )
    index: dict[str, Any] = {}
    try:
        index = json.loads(path.read_text())
        whole = index["digest"] == fingerprint({key: index[key] for key in index if key != "digest"})
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise StoreError(
            f"{path} does not match its own digest",
            remedy=f"run `dvc checkout --force {folder}`; the file was changed by hand or by a fault",
        )
    return index


def check_file(folder: Path, index: dict[str, Any], name: str) -> Path:
    """The path of a file that `index` names, after checking its sha256. Raises StoreError that names it."""
    path = folder / name
    if not path.is_file() or sha256_file(path) != index["files"].get(name):
        raise StoreError(
            f"{path} is missing or does not match its sha256 in {folder / 'index.json'}",
            remedy=f"run `dvc checkout --force {folder}`; the file was changed by hand or by a fault",
        )
    return path
