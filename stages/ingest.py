"""ingest: what is in the source folder, by bytes and headers alone; nothing is decoded.

Reads   <source>/**                  pictures, and metadata.jsonl | metadata.csv | a .txt beside each picture
Writes  data/ingest/manifest.parquet one row per picture file, accepted or not, with the reason
        data/ingest/summary.json     counts, and the source's path

A picture's id is the sha256 of its bytes, and its split follows from the id: adding pictures moves none across.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from stages.core.captions import read_captions
from stages.core.errors import ConfigError, PictureError, SourceError
from stages.core.headers import read_header
from stages.core.manifest import MANIFEST, Row, check_limit, split_of, write_table
from stages.core.pictures import picture_files
from stages.core.store import fingerprint, sha256_file, write_json
from stages.harness.run import Stage, stage_main


@dataclass(frozen=True, kw_only=True)
class IngestConfig:
    """Section `ingest` of params.yaml."""

    source: str  # the folder of pictures, tracked by DVC; also a dep in dvc.yaml
    holdout_percent: int  # share of pictures kept out of training, by hash
    max_pixels: int  # a picture with more is refused before it is decoded (decompression bombs)
    max_quarantined_percent: int  # the stage fails when more pictures than this cannot be used


def check(cfg: IngestConfig) -> None:
    """Raise one ConfigError that lists all settings that cannot work."""
    problems: list[str] = []
    if not 0 <= cfg.holdout_percent < 100:
        problems.append(f"ingest.holdout_percent is {cfg.holdout_percent}; set it to 0 to 99")
    if cfg.max_pixels < 1:
        problems.append(f"ingest.max_pixels is {cfg.max_pixels}; set it to 1 or more")
    if not 0 <= cfg.max_quarantined_percent <= 100:
        problems.append(
            f"ingest.max_quarantined_percent is {cfg.max_quarantined_percent}; set it to 0 to 100"
        )
    if problems:
        raise ConfigError("\n  ".join(problems), remedy="correct section ingest of params.yaml")


def row_of(folder: Path, name: str, captions: list[str], cfg: IngestConfig) -> Row:
    """One row of the manifest, from the file's bytes and header."""
    path = folder / name
    item_id = sha256_file(path)
    row: Row = {
        "item_id": item_id,
        "file_name": name,
        "captions": captions,
        "bytes": path.stat().st_size,
        "split": split_of(item_id, cfg.holdout_percent),
        "status": "accepted",
        "reason": "",
        "detail": "",
    }
    try:
        header = read_header(path, max_pixels=cfg.max_pixels)
    except PictureError as error:
        return row | {"status": "quarantined", "reason": error.reason, "detail": error.detail(path)}
    return row | {
        "format": header.format,
        "mode": header.mode,
        "width": header.width,
        "height": header.height,
    }


def mark_duplicates(rows: list[Row]) -> None:
    """Of files with the same bytes the first by name stays. Raises SourceError when their captions or
    the order of these differ.
    """
    first: dict[str, Row] = {}
    for row in rows:
        original = first.setdefault(row["item_id"], row)
        if original is row or row["status"] != "accepted":
            continue
        if original["captions"] != row["captions"]:
            raise SourceError(
                f"{original['file_name']} and {row['file_name']} are the same picture with different captions",
                remedy="remove one of them, or give both the same captions in the same order",
            )
        row |= {"status": "duplicate", "reason": "same_bytes", "detail": f"same as {original['file_name']}"}


def ingest(cfg: IngestConfig, stage: Stage) -> None:
    """List, hash and judge every picture; fail with the list when too many cannot be used."""
    check(cfg)
    folder = stage.root / cfg.source
    names = picture_files(folder)
    captions = read_captions(folder, names)
    rows = [
        row_of(folder, name, captions[name], cfg)
        for name in stage.progress(names, total=len(names), what="hashing", unit="pictures")
    ]
    mark_duplicates(rows)
    check_limit(rows, cfg.max_quarantined_percent, what="ingest.max_quarantined_percent")
    accepted = [row for row in rows if row["status"] == "accepted"]
    counts = Counter(row["status"] for row in rows)
    splits = Counter(row["split"] for row in accepted)
    summary: dict[str, int] = {
        "pictures": len(rows),
        "accepted": counts["accepted"],
        "duplicate": counts["duplicate"],
        "quarantined": counts["quarantined"],
        "train": splits["train"],
        "holdout": splits["holdout"],
    }
    write_table(stage.out / "manifest.parquet", rows, MANIFEST)
    write_json(stage.out / "summary.json", {**summary, "source": cfg.source})
    stage.tracker.metrics({f"ingest/{name}": value for name, value in summary.items()})
    digest = fingerprint({row["file_name"]: [row["item_id"], row["captions"]] for row in rows})
    stage.tracker.dataset("pictures", digest, cfg.source, summary)
    stage.say(
        f"{len(rows)} pictures: {counts['accepted']} accepted ({splits['train']} train, {splits['holdout']} held out), "
        f"{counts['duplicate']} duplicate, {counts['quarantined']} quarantined"
    )


if __name__ == "__main__":
    stage_main("ingest", IngestConfig, ingest)
