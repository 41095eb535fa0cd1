"""Packs: what was added is found, also by others; a damaged file never is."""

import contextlib
from pathlib import Path

import pytest
import torch

from stages.core import packs as module
from stages.core.errors import StoreError
from stages.core.packs import Packs, Writer
from stages.core.rows import Rows
from stages.core.store import sha256_file


def rows(*names: str) -> Rows:
    """Of each name its length, in two parts."""
    lengths = torch.tensor([float(len(name)) for name in names])
    return Rows(
        list(names), {"wide": lengths[:, None, None].expand(-1, 2, 3), "narrow": lengths[:, None].half()}
    )


def test_what_was_added_is_there_now_and_later(tmp_path: Path) -> None:
    packs = Packs(tmp_path)
    packs.add([rows("a", "bb"), rows("eeeee")])
    packs.add([rows("ccc")])
    for seen in (packs, Packs(tmp_path)):
        assert [name in seen for name in ("a", "bb", "ccc", "d", "eeeee")] == [True, True, True, False, True]
        for name in ("a", "bb", "ccc", "eeeee"):
            row = seen[name]
            assert sorted(row) == ["narrow", "wide"]
            assert torch.equal(row["wide"], torch.full((2, 3), float(len(name))))
            assert torch.equal(row["narrow"], torch.tensor([len(name)]).half())
        with pytest.raises(KeyError):
            seen["d"]


def test_files_are_called_by_their_sha256(tmp_path: Path) -> None:
    Packs(tmp_path).add([rows("a")])
    (path,) = tmp_path.iterdir()
    assert path.name == f"{sha256_file(path)}.safetensors"


def test_nothing_to_add_writes_nothing(tmp_path: Path) -> None:
    Packs(tmp_path).add([])
    assert list(tmp_path.iterdir()) == []


def test_what_another_process_added_is_seen_after_refresh(tmp_path: Path) -> None:
    mine, other = Packs(tmp_path), Packs(tmp_path)
    other.add([rows("a")])
    assert "a" not in mine
    mine.refresh()
    assert torch.equal(mine["a"]["wide"], torch.ones(2, 3))


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    Packs(tmp_path).add([rows("a", "bb")])
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for place in range(len(whole)):
        spoiled = bytearray(whole)
        spoiled[place] ^= 1 << place % 8
        path.write_bytes(spoiled)
        with pytest.raises(
            StoreError, match=rf"{path} is damaged: .*\n  remedy: delete it and run `dvc repro` again"
        ):
            Packs(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.raises(StoreError, match="is damaged"):
        Packs(tmp_path)


def test_more_files_than_a_process_may_hold_open(tmp_path: Path) -> None:
    packs = Packs(tmp_path)
    for number in range(300):
        packs.add([Rows([f"{number}"], {"value": torch.tensor([number])})])
    again = Packs(tmp_path)
    assert [int(again[f"{number}"]["value"]) for number in range(300)] == list(range(300))
    assert len(list(Path("/proc/self/fd").iterdir())) < 300


def test_a_writer_writes_at_the_end_also_of_an_error(tmp_path: Path) -> None:
    packs = Packs(tmp_path)
    with Writer(packs) as writer:
        writer.add(Rows([], {}))
        writer.add(rows("a"))
        writer.add(rows("bb"))
        assert list(tmp_path.iterdir()) == []
    assert len(list(tmp_path.iterdir())) == 1
    with contextlib.suppress(KeyboardInterrupt), Writer(packs) as writer:
        writer.add(rows("ccc"))
        raise KeyboardInterrupt
    assert "ccc" in Packs(tmp_path)


def test_a_writer_does_not_let_work_wait_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 30.0, 60.0, 61.0, 61.0, 120.0, 121.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    files: list[int] = []
    with Writer(Packs(tmp_path), seconds=60.0) as writer:
        for name in ("a", "bb", "ccc", "dddd"):  # at 30, 60, 61 and 120 seconds
            writer.add(rows(name))
            files.append(len(list(tmp_path.iterdir())))
    assert files == [0, 0, 1, 1]
