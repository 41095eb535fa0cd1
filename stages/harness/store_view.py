"""Looking at the store, and removing what is old."""

import fcntl
import os
import shutil
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from stat import S_ISREG

from stages.core.errors import LockedError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The work of one stage under one fingerprint."""

    stage: str
    fingerprint: str
    folder: Path
    bytes: int
    used: datetime  # when it was last written or locked


def entries(root: Path) -> list[Entry]:
    """All entries, by stage and then by age, the newest last."""
    found: list[Entry] = []
    for folder in sorted(path for path in root.glob("*/*") if path.is_dir()):
        files = _stats(folder)
        used = max((file.st_mtime for file in files), default=folder.stat().st_mtime)
        found.append(
            Entry(
                stage=folder.parent.name,
                fingerprint=folder.name,
                folder=folder,
                bytes=sum(file.st_size for file in files),
                used=datetime.fromtimestamp(used).astimezone(),
            )
        )
    return sorted(found, key=lambda entry: (entry.stage, entry.used))


def _stats(folder: Path) -> list[os.stat_result]:
    found: list[os.stat_result] = []
    for path in folder.rglob("*"):
        try:
            stat = path.stat()
        except FileNotFoundError:  # a stage that works there renamed it meanwhile
            continue
        if S_ISREG(stat.st_mode):
            found.append(stat)
    return found


@dataclass(frozen=True, kw_only=True)
class Total:
    """Several entries together."""

    name: str  # of their stage; "all"
    entries: int
    bytes: int


def totals(found: list[Entry]) -> list[Total]:
    """The sizes of each stage's entries, by stage, and of all, last; found: in the order of `entries`."""
    groups = [(stage, list(group)) for stage, group in groupby(found, key=lambda entry: entry.stage)]
    return [
        Total(name=name, entries=len(group), bytes=sum(entry.bytes for entry in group))
        for name, group in [*groups, ("all", found)]
    ]


def old_entries(root: Path, keep: int) -> list[Entry]:
    """All but the newest `keep` entries of each stage."""
    old: list[Entry] = []
    for _, group in groupby(entries(root), key=lambda entry: entry.stage):
        of_stage = list(group)
        old += of_stage[: len(of_stage) - keep] if keep else of_stage
    return old


def remove(entry: Entry) -> None:
    """Remove an entry. Raises LockedError when a stage is working in it."""
    lock = entry.folder / ".lock"
    if lock.is_file():
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LockedError(
                    f"{entry.stage} {entry.fingerprint[:12]} is in use by process {lock.read_text()}",
                    remedy="wait until that run ends",
                ) from error
            shutil.rmtree(entry.folder)  # under the lock, so that no stage begins in it
    else:
        shutil.rmtree(entry.folder)
