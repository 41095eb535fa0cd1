"""Packs: rows kept in the store, in files that are named by their own sha256 and never changed.

What is new is a new file, so that a kill loses at most what was not yet written, and nothing is read to be written again. A
file that no longer has its name is damaged, and is found before anything in it is used.

In a file, rows that came together are the tensors "<number>.<part>" [N, ...]; "rows" in the metadata lists the names of each
number's rows (JSON).
"""

import json
import time
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Self

from safetensors import safe_open
from torch import Tensor

from stages.core.errors import StoreError
from stages.core.rows import Rows
from stages.core.safetensors_io import save_bytes
from stages.core.store import sha256_bytes, sha256_file, write_atomic

FORMAT = 2  # goes into the fingerprint of what is kept: files of another format lie in other folders
_SUFFIX = ".safetensors"


class Packs:
    """All rows kept in `folder`, by name; read from memory-mapped files when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Check every file. Raises StoreError that names a damaged one."""
        self.folder = folder
        self._places: dict[str, tuple[Path, int, int]] = {}  # name -> file, number, place
        self._seen: set[Path] = set()
        self.refresh()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        """The parts of the row called `name`, on the CPU; raises KeyError."""
        path, number, place = self._places[name]
        return {part: value[place] for part, value in _mapped(path)[number].items()}

    def add(self, rows: list[Rows]) -> None:
        """Keep `rows` in one new file; nothing when there are none."""
        if rows:
            tensors = {
                f"{number}.{part}": value
                for number, some in enumerate(rows)
                for part, value in some.parts.items()
            }
            data = save_bytes(tensors, {"rows": json.dumps([some.names for some in rows])})
            path = self.folder / f"{sha256_bytes(data)}{_SUFFIX}"
            write_atomic(path, data)
            self._take(path, [some.names for some in rows])

    def refresh(self) -> None:
        """Take in what other processes have added; checks it as the constructor does."""
        for path in sorted(set(self.folder.glob(f"*{_SUFFIX}")) - self._seen):
            if sha256_file(path) != path.stem:
                raise StoreError(
                    f"{path} is damaged: its sha256 is no longer its name",
                    remedy="delete it and run `dvc repro` again; what it held is made anew",
                )
            with safe_open(path, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType]
                self._take(path, json.loads(file.metadata()["rows"]))

    def _take(self, path: Path, names: list[list[str]]) -> None:
        for number, some in enumerate(names):
            self._places |= {name: (path, number, place) for place, name in enumerate(some)}
        self._seen.add(path)


@lru_cache(maxsize=128)  # opening reads the header, and a process may not map all files
def _mapped(path: Path) -> dict[int, dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = defaultdict(dict)
    with safe_open(path, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType]
        for name in file.keys():  # noqa: SIM118
            number, part = name.split(".")
            found[int(number)][part] = file.get_tensor(name)
    return found


class Writer:
    """Puts what arrives into `packs`, some at a time: all of it at the end of a `with`, also when it ends in an error.

    seconds: what is waiting is written when so much time has passed: a killed run loses no more than that.
    """

    def __init__(self, packs: Packs, seconds: float = 60.0) -> None:
        self.packs = packs
        self.seconds = seconds
        self._waiting: list[Rows] = []
        self._since = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()

    def add(self, rows: Rows) -> None:
        """Take `rows`, finished work."""
        if rows.names:
            self._waiting.append(rows)
        if time.monotonic() - self._since > self.seconds:
            self._flush()

    def _flush(self) -> None:
        self.packs.add(self._waiting)
        self._waiting, self._since = [], time.monotonic()
