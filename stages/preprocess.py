"""preprocess: pictures -> uint8 tensors in buckets, each decoded once.

Reads   <source>/**, data/ingest/manifest.parquet, data/ingest/summary.json
Writes  data/preprocess/shard-00.pt ...   uint8 RGB, [N, 3, H, W] for each size; items by hash prefix
        data/preprocess/items.parquet     one row per source file: status, reason, repairs, bucket, crop
        data/preprocess/index.json        the items, the number of shards, the sha256 of each; written last

Upright by EXIF, sRGB, alpha on the stated background, resized to cover the bucket and cut at the centre. Letters:
H W pixels.
"""

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from stages.core import determinism
from stages.core.buckets import Bucket, BucketConfig, make_buckets, nearest_bucket
from stages.core.errors import ConfigError, PictureError, SourceError
from stages.core.images import crop_corner, decode, fit
from stages.core.manifest import ITEMS, Row, check_limit, read_rows, write_table
from stages.core.shards import (
    PIXELS_FORMAT,
    load_pt,
    pixel_key,
    pt_bytes,
    shard_name,
    shard_of,
    stacked,
    write_index,
)
from stages.core.store import sha256_file, write_atomic
from stages.harness.run import Stage, stage_main

Entry = dict[str, Any]  # one item in a pack: pixels and facts, or the reason why not


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """Section `preprocess` of params.yaml."""

    buckets: BucketConfig
    background: list[int]  # RGB 0..255 under transparent pixels
    allow_upscale: bool  # whether a picture smaller than its bucket is enlarged, or else quarantined
    max_pixels: int  # as ingest's; checked again because headers can lie
    max_quarantined_percent: int  # the stage fails when more pictures than this cannot be used
    shards: int  # number of shards; items go by hash prefix


def check(cfg: PreprocessConfig) -> None:
    """Raise one ConfigError that lists all settings that cannot work (the buckets' own are checked with them)."""
    problems: list[str] = []
    if len(cfg.background) != 3 or not all(0 <= value <= 255 for value in cfg.background):
        problems.append(f"preprocess.background is {cfg.background}; give red, green, blue, each 0 to 255")
    if cfg.shards < 1:
        problems.append(f"preprocess.shards is {cfg.shards}; set it to 1 or more")
    if cfg.max_pixels < 1:
        problems.append(f"preprocess.max_pixels is {cfg.max_pixels}; set it to 1 or more")
    if not 0 <= cfg.max_quarantined_percent <= 100:
        problems.append(
            f"preprocess.max_quarantined_percent is {cfg.max_quarantined_percent}; set it to 0 to 100"
        )
    if problems:
        raise ConfigError("\n  ".join(problems), remedy="correct section preprocess of params.yaml")


def process(path: Path, cfg: PreprocessConfig, buckets: list[Bucket]) -> Entry:
    """Decode and fit one picture. A picture that cannot be used gives {"reason", "detail"} instead of pixels."""
    try:
        red, green, blue = cfg.background
        decoded = decode(path, background=(red, green, blue), max_pixels=cfg.max_pixels)
        picture, repairs = decoded.picture, list(decoded.repairs)
        original = (picture.height, picture.width)
        bucket = nearest_bucket(original, buckets)
        if picture.height < bucket[0] or picture.width < bucket[1]:
            if not cfg.allow_upscale:
                raise PictureError(
                    "too_small",
                    f"{path} is {picture.width} x {picture.height}, its bucket {bucket[1]} x {bucket[0]}",
                    remedy="use a larger picture, or set preprocess.allow_upscale: true",
                )
            repairs.append("upscaled")
        pixels_CHW, crop = fit(picture, bucket)
    except PictureError as error:
        return {"reason": error.reason, "detail": error.detail(path)}
    facts = {
        "bucket": list(bucket),
        "original": list(original),
        "corner": list(crop_corner(original, bucket)),
        "crop": list(crop),
        "repairs": repairs,
    }
    return {"pixels": pixels_CHW, "key": pixel_key(pixels_CHW), **facts}


def unpack_row(row: Row, entry: Entry) -> Row:
    """The item's row for items.parquet: the manifest's facts and what decoding told."""
    if "pixels" not in entry:
        return row | {"status": "quarantined", "reason": entry["reason"], "detail": entry["detail"]}
    left, top, right, bottom = entry["crop"]
    return row | {
        "repairs": " ".join(entry["repairs"]),
        "bucket_height": entry["bucket"][0],
        "bucket_width": entry["bucket"][1],
        "crop_left": left,
        "crop_top": top,
        "crop_right": right,
        "crop_bottom": bottom,
    }


def preprocess(cfg: PreprocessConfig, stage: Stage) -> None:
    """Process what the store does not hold, shard by shard; then assemble the outs from it."""
    check(cfg)
    buckets = make_buckets(cfg.buckets)
    columns = ["item_id", "file_name", "captions", "split", "status", "reason", "detail"]
    rows = read_rows(stage.folder("ingest") / "manifest.parquet", columns)
    accepted = [row for row in rows if row["status"] == "accepted"]
    by_shard: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(accepted, key=lambda row: row["item_id"]):
        by_shard[shard_of(row["item_id"], cfg.shards)].append(row)

    folder = stage.root / json.loads((stage.folder("ingest") / "summary.json").read_text())["source"]
    work = asdict(cfg) | {"max_quarantined_percent": None}
    print_ = stage.fingerprint(config=work)
    entries: dict[str, Entry] = {}
    made = 0
    with stage.store.lock("preprocess", print_) as store:
        shards = stage.progress(sorted(by_shard), total=len(by_shard), what="decoding", unit="shards")
        for number in shards:
            wanted = by_shard[number]
            pack = load_pack(store / shard_name(number, ".pt"))
            missing = [row for row in wanted if row["item_id"] not in pack]
            for row in missing:
                pack[row["item_id"]] = process(checked(folder, row), cfg, buckets)
            if missing:
                write_atomic(store / shard_name(number, ".pt"), pt_bytes(pack))
            made += len(missing)
            entries |= {row["item_id"]: pack[row["item_id"]] for row in wanted}
            pixels: dict[str, Tensor] = {
                row["item_id"]: pack[row["item_id"]]["pixels"]
                for row in wanted
                if "pixels" in pack[row["item_id"]]
            }
            write_atomic(stage.out / shard_name(number, ".pt"), pt_bytes(stacked(pixels)))

    table = [unpack_row(row, entries[row["item_id"]]) if row["status"] == "accepted" else row for row in rows]
    check_limit(table, cfg.max_quarantined_percent, what="preprocess.max_quarantined_percent")
    write_table(stage.out / "items.parquet", table, ITEMS)
    items = [
        {
            "id": row["item_id"],
            "file_name": row["file_name"],
            "captions": row["captions"],
            "split": row["split"],
            **{name: entries[row["item_id"]][name] for name in ("bucket", "original", "corner")},
            "shard": shard_of(row["item_id"], cfg.shards),
            "key": entries[row["item_id"]]["key"],
        }
        for row in sorted(accepted, key=lambda row: row["item_id"])
        if "pixels" in entries[row["item_id"]]
    ]
    if not items:
        raise SourceError(
            "no picture is left after preprocessing",
            remedy="see data/preprocess/items.parquet for the reasons",
        )
    files = [shard_name(number, ".pt") for number in sorted(by_shard)]
    fields = {
        "format": PIXELS_FORMAT,
        "items": items,
        "shards": cfg.shards,
        "dtype": "uint8",
        "layout": "RGB CHW",
    }
    write_index(stage.out, fields, files)
    report(stage, items, table, made)


def load_pack(path: Path) -> dict[str, Entry]:
    """The store's pack of one shard, or an empty one."""
    return load_pt(path) if path.is_file() else {}


def checked(folder: Path, row: Row) -> Path:
    """The picture's path, after checking that it still is the file that ingest saw."""
    path = folder / row["file_name"]
    if not path.is_file() or sha256_file(path) != row["item_id"]:
        raise SourceError(
            f"{path} is not the file that ingest saw",
            remedy="run `dvc repro` again; it was changed meanwhile",
        )
    return path


def report(stage: Stage, items: list[dict[str, Any]], table: list[Row], made: int) -> None:
    """One line, and the same numbers for MLflow."""
    quarantined = sum(row["status"] == "quarantined" for row in table)
    repaired = sum(bool(row.get("repairs")) for row in table)
    shapes = Counter(tuple(item["bucket"]) for item in items)
    stage.tracker.metrics(
        {"preprocess/items": len(items), "preprocess/decoded": made, "preprocess/quarantined": quarantined}
    )
    stage.say(
        f"{len(items)} items in {len(shapes)} bucket(s) ({made} decoded, {len(items) + quarantined - made} kept), "
        f"{repaired} repaired, {quarantined} quarantined"
    )


if __name__ == "__main__":
    stage_main("preprocess", PreprocessConfig, preprocess, fix=determinism.apply)
