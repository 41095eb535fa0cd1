"""What the store holds, and what is removed from it."""

import os
from pathlib import Path

import pytest

from stages.core.errors import LockedError
from stages.core.store import Store
from stages.harness.store_view import Total, entries, old_entries, remove, totals


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """encode: one entry; train: three, b the oldest, then c, then a."""
    for number, (stage, print_, size) in enumerate(
        [("train", "b", 10), ("encode", "x", 5), ("train", "c", 20), ("train", "a", 30)]
    ):
        folder = tmp_path / stage / print_
        folder.mkdir(parents=True)
        (folder / "pack").write_bytes(b"0" * size)
        os.utime(folder / "pack", (1000 + number, 1000 + number))
    return tmp_path


def names(found: list[object]) -> list[tuple[str, str]]:
    return [(entry.stage, entry.fingerprint) for entry in found]  # type: ignore[attr-defined]


def test_entries_by_stage_and_age(root: Path) -> None:
    found = entries(root)
    assert names([*found]) == [("encode", "x"), ("train", "b"), ("train", "c"), ("train", "a")]
    assert [entry.bytes for entry in found] == [5, 10, 20, 30]
    assert [entry.used.timestamp() for entry in found] == [1001, 1000, 1002, 1003]


def test_no_store_is_an_empty_one(tmp_path: Path) -> None:
    assert entries(tmp_path / "nowhere") == []


def test_totals(root: Path) -> None:
    assert totals(entries(root)) == [
        Total(name="encode", entries=1, bytes=5),
        Total(name="train", entries=3, bytes=60),
        Total(name="all", entries=4, bytes=65),
    ]
    assert totals([]) == [Total(name="all", entries=0, bytes=0)]


def test_a_lock_counts_as_use(root: Path) -> None:
    with Store(root).lock("train", "b"):
        pass
    assert names([*entries(root)])[-1] == ("train", "b")


@pytest.mark.parametrize(
    ("keep", "old"),
    [
        (0, [("encode", "x"), ("train", "b"), ("train", "c"), ("train", "a")]),
        (1, [("train", "b"), ("train", "c")]),
        (2, [("train", "b")]),
        (3, []),
    ],
)
def test_old_entries(root: Path, keep: int, old: list[tuple[str, str]]) -> None:
    assert names([*old_entries(root, keep)]) == old


def test_remove(root: Path) -> None:
    remove(entries(root)[1])
    assert names([*entries(root)]) == [("encode", "x"), ("train", "c"), ("train", "a")]


def test_an_entry_in_use_stays(root: Path) -> None:
    with Store(root).lock("train", "b"):
        (entry,) = [entry for entry in entries(root) if entry.fingerprint == "b"]
        with pytest.raises(LockedError, match=f"train b is in use by process {os.getpid()}\n  remedy: wait"):
            remove(entry)
        assert (root / "train" / "b" / "pack").is_file()
    remove(entry)
    assert not (root / "train" / "b").exists()
