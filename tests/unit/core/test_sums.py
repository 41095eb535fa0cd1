"""SHA256SUMS: what coreutils reads, and every way in which a folder can differ from it."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from stages.core.errors import StoreError
from stages.core.sums import verify_sums, write_sums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two words.txt").write_text("2")
    (tmp_path / "a.bin").write_bytes(b"\x00\xff")
    write_sums(tmp_path)
    return tmp_path


def test_exact_lines_sorted_without_itself(folder: Path) -> None:
    write_sums(folder)
    assert (folder / "SHA256SUMS").read_text() == (
        f"{hashlib.sha256(bytes([0, 255])).hexdigest()}  a.bin\n{hashlib.sha256(b'2').hexdigest()}  b/two words.txt\n"
    )


def test_sha256sum_accepts_it_and_notices_a_change(folder: Path) -> None:
    command = ["sha256sum", "-c", "--strict", "SHA256SUMS"]
    assert subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0
    assert verify_sums(folder) == 2
    (folder / "a.bin").write_bytes(b"\x00\xfe")
    assert subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 1


def test_all_differences_are_named_at_once(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"")
    (folder / "b" / "two words.txt").unlink()
    (folder / "new").touch()
    expected = r"a\.bin was changed; b/two words\.txt is missing; new is not listed"
    with pytest.raises(StoreError, match=expected):
        verify_sums(folder)


def test_a_folder_without_sums_is_unfinished(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="was never finished"):
        verify_sums(tmp_path)


def test_names_that_sha256sum_would_escape_are_refused(folder: Path) -> None:
    (folder / "back\\slash").touch()
    with pytest.raises(StoreError, match="back"):
        write_sums(folder)
