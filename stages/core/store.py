"""The store: finished work kept by content, outside the outs, so that a crash or a new parameter loses nothing.

<root>/<stage>/<fingerprint>/<name>      one pack per hash prefix, or one checkpoint, written atomically
<root>/<stage>/<fingerprint>/.lock       held (flock) by the process that works there, with its pid inside

The fingerprint covers everything that the bytes depend on except the items themselves, so nothing in the store is ever
stale: what no longer fits is simply not found. `python -m stages.cli store` shows and prunes it.
"""

import errno
import fcntl
import glob
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import Buffer

from stages.core.errors import LockedError, StoreError


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old file or the whole new one, also after a power cut.

    Raises StoreError when the disk is full; the old file is then untouched.
    """
    write_chunks(path, [data])


def write_chunks(path: Path, chunks: Iterable[Buffer], *, named: Callable[[str], str] | None = None) -> Path:
    """As `write_atomic`, piece by piece: what is written need never be in memory as a whole. Returns where it lies.

    named: gives the file's name from its sha256, where that is part of it; `path` says the folder, and what it is about.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        temporary = Path(name)
        digest = hashlib.sha256()
        with os.fdopen(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # a sign of life for _remove_leftovers
            for chunk in chunks:
                file.write(chunk)
                if named:
                    digest.update(chunk)
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(0o644)
            if named:
                path = path.with_name(named(digest.hexdigest()))
            temporary.replace(path)
    except OSError as error:
        if temporary:
            temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"the disk is full: {path} was not written",
                remedy="free space (`python -m stages.cli store prune` helps), then run the same command again; "
                "finished work is kept",
            ) from error
        raise
    except BaseException:
        if temporary:
            temporary.unlink(missing_ok=True)
        raise
    return path


def _remove_leftovers(path: Path) -> None:
    """A writer killed in the middle leaves its temporary file: gigabytes in the store, and a stray dep in an out."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        try:
            with leftover.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()
        except OSError:  # it is being written, or is gone
            continue


def write_json(path: Path, value: Any) -> None:
    """Write `value` as sorted, indented JSON with a final newline. NaN and infinity are refused (ValueError)."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_atomic(path, (text + "\n").encode())


def sha256_bytes(data: bytes) -> str:
    """sha256 of `data`, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, read in pieces; 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 of every file right in `folder`, by name and in the order of the names."""
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()}


def fingerprint(parts: dict[str, Any]) -> str:
    """sha256 over the sorted JSON of `parts`: everything that the work depends on; 64 hex digits."""
    return sha256_bytes(json.dumps(parts, sort_keys=True, allow_nan=False).encode())


class Store:
    """Finished work under `root`, one folder per stage and fingerprint."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, stage: str, print_: str) -> Path:
        """The folder of this stage and fingerprint; made if missing."""
        folder = self.root / stage / print_
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def lock(self, stage: str, print_: str) -> Generator[Path]:
        """Hold this stage and fingerprint alone; yields its folder. Raises LockedError with the holder's pid.

        The kernel drops the lock when the holder dies, so a killed run never blocks the next one.
        """
        while True:
            path = self.folder(stage, print_) / ".lock"
            with path.open("a+") as file:
                _lock(file, stage)
                # Pruned between the two lines above: what is locked is no longer what the next one will find.
                if not path.is_file() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    continue
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
                yield path.parent
                return


def _lock(file: TextIO, stage: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        raise LockedError(
            f"stage {stage} is already running with the same inputs, as process {holder}",
            remedy=f"wait for it, or stop it (kill {holder}) and run the same command again",
        ) from error
