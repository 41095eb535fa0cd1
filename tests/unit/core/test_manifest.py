"""Tables with stable bytes, splits that stay, limits that list."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import SourceError, StoreError
from stages.core.manifest import ITEMS, MANIFEST, check_limit, read_rows, split_of, write_table
from stages.core.store import sha256_bytes, sha256_file

ROWS: list[dict[str, Any]] = [
    {
        "item_id": sha256_bytes(str(n).encode()),
        "file_name": f"ü {n}.png",
        "captions": ["a\nb", "ü"][: 1 + n % 2],
        "bytes": n,
        "split": "train",
    }
    for n in range(50)
]


def test_round_trip_keeps_order_and_nulls(tmp_path: Path) -> None:
    write_table(tmp_path / "t.parquet", ROWS, MANIFEST)
    rows = read_rows(tmp_path / "t.parquet", ["file_name", "captions", "bytes", "width"])
    assert rows[:2] == [
        {"file_name": "ü 0.png", "captions": ["a\nb"], "bytes": 0, "width": None},
        {"file_name": "ü 1.png", "captions": ["a\nb", "ü"], "bytes": 1, "width": None},
    ]
    assert len(rows) == 50


def test_bytes_are_equal_in_another_process_and_under_another_name(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", ROWS, MANIFEST)
    code = (
        "from pathlib import Path\nfrom tests.unit.core.test_manifest import ROWS, MANIFEST, write_table\n"
        f"write_table(Path({str(tmp_path / 'other-name.parquet')!r}), ROWS, MANIFEST)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONHASHSEED": "7", "PYTHONPATH": "."})
    assert sha256_file(tmp_path / "a.parquet") == sha256_file(tmp_path / "other-name.parquet")


def test_no_rows_is_a_table_too(tmp_path: Path) -> None:
    write_table(tmp_path / "t.parquet", [], ITEMS)
    assert read_rows(tmp_path / "t.parquet", ["item_id"]) == []


def test_missing_and_damaged(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(SourceError, match=r"t\.parquet is missing\n  remedy: run `dvc repro`"):
        read_rows(path, ["item_id"])
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(StoreError, match=r"t\.parquet is damaged"):
        read_rows(path, ["item_id"])


def test_split_is_by_the_first_32_bits_in_percent() -> None:
    assert [split_of(f"{value:08x}" + "0" * 56, 20) for value in (0, 19, 20, 99, 100, 119, 120)] == [
        "holdout", "holdout", "train", "train", "holdout", "holdout", "train",
    ]  # fmt: skip
    assert split_of("0" * 64, 0) == "train"


def test_a_larger_percentage_only_adds_to_the_held_out() -> None:
    ids = [str(row["item_id"]) for row in ROWS]
    held = [{name for name in ids if split_of(name, percent) == "holdout"} for percent in (0, 10, 20, 50, 99)]
    assert all(small <= large for small, large in pairwise(held))
    assert [len(names) for names in held] == [0, 5, 12, 27, 50]


def rows_of(good: int, bad: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"status": "accepted"}] * good
    return rows + [
        {"status": "quarantined", "file_name": f"{n}.png", "reason": "truncated", "detail": "cut"}
        for n in range(bad)
    ]


def test_limit_is_inclusive_and_exact() -> None:
    check_limit(rows_of(19, 1), 5, what="x.y")
    check_limit([], 0, what="x.y")
    with pytest.raises(
        SourceError,
        match=r"1 of 19 pictures cannot be used, more than x\.y allows \(5 %\):\n  0\.png: truncated, cut",
    ):
        check_limit(rows_of(18, 1), 5, what="x.y")


def test_a_long_list_is_cut_and_says_so() -> None:
    with pytest.raises(SourceError, match=r"19\.png: truncated, cut\n  and 5 more\n  remedy") as caught:
        check_limit(rows_of(0, 25), 50, what="x.y")
    assert "20.png" not in str(caught.value)
