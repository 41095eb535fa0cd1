"""Room on the disk: folders on one file system share what is free."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.core.errors import StoreError
from stages.core.space import check_space, size_text


def test_folders_of_one_disk_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1_000_000_000))  # pyright: ignore
    (tmp_path / "store").mkdir()
    needs = [(tmp_path / "not" / "yet", 600_000_000), (tmp_path / "store", 400_000_000)]
    check_space(needs)
    with pytest.raises(
        StoreError,
        match=rf"{tmp_path}/not/yet and {tmp_path}/store need 1\.2 GB on a disk with 1\.0 GB free\n  remedy: free space",
    ):
        check_space([needs[0], (tmp_path / "store", 600_000_000)])


def test_another_disk_is_counted_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Path("/dev/shm")
    if other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one file system for both")
    free = {tmp_path: 10, other: 5}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))  # pyright: ignore
    check_space([(tmp_path, 10), (other, 5)])
    with pytest.raises(StoreError, match=r"^/dev/shm need 6 bytes on a disk with 5 bytes free"):
        check_space([(tmp_path, 10), (other, 6)])


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (4_560_000, "4.6 MB"), (7 * 10**12, "7000.0 GB")],
)
def test_sizes_as_people_read_them(size: int, text: str) -> None:
    assert size_text(size) == text
