"""The manifest: one row per picture file, as parquet.

item_id (sha256 of the file's bytes), file_name (posix, relative to the source), captions (one or more, distinct, as
ordered by the user), bytes, format, mode, width, height, split (train | holdout), status (accepted | duplicate |
quarantined), reason ("" or a code), detail.
"""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.core.errors import SourceError, StoreError
from stages.core.store import write_atomic

Row = dict[str, Any]


def write_table(path: Path, rows: list[Row], schema: Any) -> None:
    """Write rows (schema: pyarrow's) as parquet whose bytes depend on the rows and the library versions alone."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), buffer, compression="zstd", store_schema=False)
    write_atomic(path, buffer.getvalue())


def read_rows(path: Path, columns: list[str]) -> list[Row]:
    """The named columns of a table. Raises SourceError when it is missing, StoreError when it is damaged."""
    if not path.is_file():
        raise SourceError(f"{path} is missing", remedy="run `dvc repro` to make it")
    try:
        return pq.read_table(path, columns=columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise StoreError(
            f"{path} is damaged ({error})",
            remedy="run `dvc checkout --force`, or `dvc repro` to make it anew",
        ) from error


def split_of(item_id: str, holdout_percent: int) -> str:
    """train or holdout, by the item's own hash: adding pictures never moves one across."""
    return "holdout" if int(item_id[:8], 16) % 100 < holdout_percent else "train"


MANIFEST = pa.schema(
    [
        ("item_id", pa.string()),
        ("file_name", pa.string()),
        ("captions", pa.list_(pa.string())),
        ("bytes", pa.int64()),
        ("format", pa.string()),
        ("mode", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("split", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)

ITEMS = pa.schema(
    [
        ("item_id", pa.string()),
        ("file_name", pa.string()),
        ("captions", pa.list_(pa.string())),
        ("split", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("repairs", pa.string()),
        ("bucket_height", pa.int32()),
        ("bucket_width", pa.int32()),
        ("crop_left", pa.int32()),
        ("crop_top", pa.int32()),
        ("crop_right", pa.int32()),
        ("crop_bottom", pa.int32()),
    ]
)


def check_limit(rows: list[Row], percent: int, *, what: str) -> None:
    """Raises SourceError that lists the quarantined pictures when they are more than `percent` of all."""
    bad = [row for row in rows if row["status"] == "quarantined"]
    if len(bad) * 100 > percent * len(rows):
        listed = "\n  ".join(f"{row['file_name']}: {row['reason']}, {row['detail']}" for row in bad[:20])
        more = f"\n  and {len(bad) - 20} more" if len(bad) > 20 else ""
        raise SourceError(
            f"{len(bad)} of {len(rows)} pictures cannot be used, more than {what} allows ({percent} %):\n  {listed}{more}",
            remedy=f"replace or remove these files, or raise {what} in params.yaml",
        )
