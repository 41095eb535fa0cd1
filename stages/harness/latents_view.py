"""Looking at the latent cache: in plain words, and as pictures."""

from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import safe_open

from stages.core.errors import escaped
from stages.core.latents import LatentCache, LatentItem
from stages.core.models.vae import Vae
from stages.core.pixels import Pixels
from stages.core.reconstruction import choose, decoded, psnr_of, reconstruction_sheet
from stages.core.record import read_record, verified_folder
from stages.core.shards import check_file
from stages.core.sheets import png_bytes
from stages.core.space import size_text
from stages.core.store import write_atomic


def summary(cache: LatentCache) -> list[tuple[str, str]]:
    """What the index says: (what, finding); fields that an index may lack are left out."""
    index, text = cache.index, cache.index["text"]
    splits = Counter(item.split for item in cache.items)
    buckets = Counter(item.bucket for item in cache.items)
    by_split = ", ".join(f"{count} {name}" for name, count in sorted(splits.items(), reverse=True))
    by_bucket = ", ".join(f"{count} of {_bucket(bucket)}" for bucket, count in sorted(buckets.items()))
    texts = {"", *(one for item in cache.items for one in cache.texts(item))}
    computed = f", computed in {index['compute_dtype']}" if "compute_dtype" in index else ""
    found = [
        ("format", f"{index['format']}, digest {cache.digest[:12]}"),
        ("dtype", f"{index['dtype']}{computed}"),
        ("items", f"{len(cache.items)}: {by_split}" if cache.items else "none"),
        ("buckets", f"{by_bucket} (W x H)" if cache.items else "none"),
        ("mirrored", "kept too" if cache.flips else "not kept"),
        (
            "latents",
            f"{cache.space.channels} channels, downsampled by {cache.space.downsample}, "
            f"scaling factor {cache.space.scaling_factor}, shift factor {cache.space.shift_factor}",
        ),
        (
            "texts",
            f"{len(texts)} by {text['encoders']} text encoder(s), {text['layer']} hidden states, "
            f"{text['limit']} tokens x {text['width']}, "
            + (f"pooled {text['pooled']}" if text["pooled"] else "none pooled"),
        ),
    ]
    shuffle = index["shuffle"]
    if shuffle["variants"] > 1:
        found.append(
            (
                "shuffled",
                f"{shuffle['variants']} variants per caption, parts between {shuffle['separator']!r}, "
                f"the first {shuffle['keep']} kept in front, seed {shuffle['seed']}",
            )
        )
    if index.get("truncated_captions"):
        found.append(("cut", f"{index['truncated_captions']} caption(s) at {text['limit']} tokens"))
    if index.get("retried_in_float32"):
        names = ", ".join(escaped(name) for name in index["retried_in_float32"])
        found.append(("in float32", f"computed again: {names}"))
    error: dict[str, Any] = dict(index.get("error", {}))
    exact: dict[str, Any] = dict(error.pop("against_float32", {}))
    if error:
        found.append(("rounding", _errors(error)))
    if exact:
        items = exact.pop("items")
        found.append(("vs float32", f"{_errors(exact)} (of {items} pictures)"))
    return found


def files(cache: LatentCache) -> list[str]:
    """A table of the files that the index names. Raises StoreError for the first that is damaged or missing."""
    rows = [("file", "size", "tensors", "sha256")]
    for name, digest in sorted(cache.index["files"].items()):
        path = check_file(cache.folder, cache.index, name)
        with safe_open(path, framework="pt") as opened:
            rows.append((name, size_text(path.stat().st_size), str(len(opened.keys())), digest[:12]))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"{name:<{widths[0]}}  {size:>{widths[1]}}  {tensors:>{widths[2]}}  {digest}"
        for name, size, tensors, digest in rows
    ]


def keys(cache: LatentCache) -> list[str]:
    """One line per item: file, bucket, split, shard, key of the pixels, captions."""
    return [
        f"{escaped(item.file_name)}  {_bucket(item.bucket)}  {item.split}  shard {item.shard}  {item.key[:12]}  "
        + ", ".join(map(repr, item.captions))
        for item in cache.items
    ]


def reconstruct(
    cache: LatentCache, root: Path, device: str, count: int, sheet: Path
) -> list[tuple[LatentItem, float]]:
    """Decode at most `count` items (1 or more), write them under their sources to the PNG file `sheet`; each with its PSNR.

    The base and the sources are those of `root`/data. Raises DarkroomError when they and the cache do not belong
    together, or a file is damaged.
    """
    record = read_record(root / "data" / "base" / "record.json")
    cache.check_base(record)
    chosen = choose(cache.items, count)
    pixels = Pixels(root / "data" / "preprocess")
    sources = [pixels[item] for item in chosen]
    # One at a time: who only looks should need as little memory as can be.
    pictures = decoded(Vae(verified_folder(record, root, "vae"), device), cache, chosen, batch_size=1)
    write_atomic(sheet, png_bytes(reconstruction_sheet(chosen, sources, pictures)))
    return [
        (item, psnr_of(source, picture))
        for item, source, picture in zip(chosen, sources, pictures, strict=True)
    ]


def _bucket(bucket: tuple[int, int]) -> str:
    height, width = bucket
    return f"{width} x {height}"


def _errors(parts: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{name} at most {error['max']:g}, rms {error['rms']:g}" for name, error in parts.items()
    )
