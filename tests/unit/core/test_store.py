"""Atomic writes, locks, fingerprints."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.core import store
from stages.core.errors import LockedError, StoreError
from stages.core.store import (
    Store,
    file_digests,
    fingerprint,
    sha256_bytes,
    sha256_file,
    write_atomic,
    write_json,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(path.parent) == ["file"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("where", ["fsync", "replace", "mkstemp"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(number, "full")

    target = {"fsync": (os, "fsync"), "replace": (Path, "replace"), "mkstemp": (store.tempfile, "mkstemp")}[
        where
    ]
    monkeypatch.setattr(*target, full)
    with pytest.raises(StoreError, match=r"the disk is full: .*file was not written\n  remedy: free space"):
        write_atomic(path, b"x" * 1234)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_any_other_end_is_passed_on_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def stop(_handle: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(type(error)):
        write_atomic(tmp_path / "file", b"x")
    assert names(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from stages.core import store
os.fsync = lambda _handle: os.kill(os.getpid(), signal.SIGKILL)
store.write_atomic(Path(sys.argv[1]), b"half")
"""


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "[odd] file.pt"
    write_atomic(path, b"old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert len(names(tmp_path)) == 2
    (tmp_path / ".another.pt.abc.tmp").write_bytes(b"not ours")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == [".another.pt.abc.tmp", "[odd] file.pt"]


def test_a_living_writer_keeps_its_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    fsync = os.fsync

    def another_writes_meanwhile(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        write_atomic(path, b"second")

    monkeypatch.setattr(os, "fsync", another_writes_meanwhile)
    write_atomic(path, b"first")
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["file"]


def test_json_is_sorted_and_ends_in_a_newline(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": "ü"})
    assert (tmp_path / "a.json").read_bytes() == '{\n  "a": "ü",\n  "b": 1\n}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert (tmp_path / "a.json").read_bytes().startswith(b'{\n  "a": "\xc3\xbc"')


def test_sha256(tmp_path: Path) -> None:
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, "abc"
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_bytes(b"abc") == sha256_file(tmp_path / "a") == expected


def test_file_digests_are_by_name_and_leave_folders_out(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "b").write_bytes(b"abc")
    (tmp_path / "a").write_bytes(b"")
    assert list(file_digests(tmp_path).items()) == [("a", sha256_bytes(b"")), ("b", sha256_bytes(b"abc"))]


def test_fingerprint_is_of_every_part_and_of_no_order() -> None:
    parts = {"a": 1, "b": [1, 2], "c": {"d": None}}
    assert fingerprint(parts) == fingerprint(dict(reversed(parts.items())))
    others = [
        {**parts, "a": 2},
        {**parts, "b": [2, 1]},
        {**parts, "c": {"d": 0}},
        {**parts, "e": 1},
        {"a": 1},
    ]
    assert len({fingerprint(parts), *map(fingerprint, others)}) == 6
    # The layout of every store that exists: it must not change by accident.
    assert fingerprint({"a": 1}) == sha256_bytes(b'{"a": 1}')


# --- locks

HOLDER = """
import sys, time
from pathlib import Path
from stages.core.store import Store
with Store(Path(sys.argv[1])).lock("train", "f" * 64):
    print("held", flush=True)
    time.sleep(60)
"""


def test_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        message = (
            rf"stage train is already running with the same inputs, as process {holder.pid}\n"
            rf"  remedy: wait for it, or stop it \(kill {holder.pid}\)"
        )
        with pytest.raises(LockedError, match=message), Store(tmp_path).lock("train", "f" * 64):
            pass
        # Another stage, or other inputs, are free.
        with Store(tmp_path).lock("encode", "f" * 64), Store(tmp_path).lock("train", "e" * 64):
            pass
    finally:
        holder.kill()
        holder.wait()
    with Store(tmp_path).lock("train", "f" * 64) as folder:
        assert folder == tmp_path / "train" / ("f" * 64)
        assert (folder / ".lock").read_text() == str(os.getpid())


def test_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Store(tmp_path).lock("a", "b"):
        raise ZeroDivisionError
    with Store(tmp_path).lock("a", "b") as folder:
        assert folder.is_dir()


def test_a_lock_whose_folder_was_pruned_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locking what is no longer there would let a second process in."""
    real = store.fcntl.flock

    def prune_first(file: Any, operation: int) -> None:
        monkeypatch.setattr(store.fcntl, "flock", real)
        (tmp_path / "a" / "b" / ".lock").unlink()
        (tmp_path / "a" / "b").rmdir()
        real(file, operation)

    monkeypatch.setattr(store.fcntl, "flock", prune_first)
    with Store(tmp_path).lock("a", "b") as folder:
        assert (folder / ".lock").read_text() == str(os.getpid())


def test_a_file_system_without_locks_is_not_taken_for_a_running_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(_file: Any, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(store.fcntl, "flock", unsupported)
    with pytest.raises(OSError, match="no locks here"), Store(tmp_path).lock("a", "b"):
        pass
