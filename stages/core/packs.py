"""Packs: tensors kept in the store, in files that are named by their own sha256 and never changed.

What is new is a new file, so that a kill loses at most what was not yet written, and nothing is read to be written again. A
file that no longer has its name is damaged, and is found before anything in it is used.
"""

import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from safetensors import safe_open
from torch import Tensor

from stages.core.errors import StoreError
from stages.core.safetensors_io import save_bytes
from stages.core.store import sha256_bytes, sha256_file, write_atomic

_SUFFIX = ".safetensors"


class Packs:
    """All tensors kept in `folder`, by name; read from memory-mapped files when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Check every file. Raises StoreError that names a damaged one."""
        self.folder = folder
        self._files: dict[str, Path] = {}
        self._seen: set[Path] = set()
        self.refresh()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        """The tensor called `name`, on the CPU; raises KeyError."""
        return _opened(self._files[name]).get_tensor(name)

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Keep `tensors` in one new file; nothing when there are none."""
        if tensors:
            data = save_bytes(tensors)
            path = self.folder / f"{sha256_bytes(data)}{_SUFFIX}"
            write_atomic(path, data)
            self._files |= dict.fromkeys(tensors, path)
            self._seen.add(path)

    def refresh(self) -> None:
        """Take in what other processes have added; checks it as the constructor does."""
        for path in sorted(set(self.folder.glob(f"*{_SUFFIX}")) - self._seen):
            self._include(path)

    def _include(self, path: Path) -> None:
        if sha256_file(path) != path.stem:
            raise StoreError(
                f"{path} is damaged: its sha256 is no longer its name",
                remedy="delete it and run `dvc repro` again; what it held is made anew",
            )
        self._files |= dict.fromkeys(_opened(path).keys(), path)
        self._seen.add(path)


@lru_cache(
    maxsize=128
)  # opening reads the whole header, and a process may not hold as many files as there can be
def _opened(path: Path) -> Any:
    return safe_open(path, framework="pt")


class Writer:
    """Puts what arrives into `packs`, some at a time: all of it at the end of a `with`, also when it ends in an error.

    seconds: what is waiting is written when so much time has passed: a killed run loses no more than that.
    """

    def __init__(self, packs: Packs, seconds: float = 60.0) -> None:
        self.packs = packs
        self.seconds = seconds
        self._waiting: dict[str, Tensor] = {}
        self._since = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Take `tensors`, finished work."""
        self._waiting |= tensors
        if time.monotonic() - self._since > self.seconds:
            self._flush()

    def _flush(self) -> None:
        self.packs.add(self._waiting)
        self._waiting, self._since = {}, time.monotonic()
