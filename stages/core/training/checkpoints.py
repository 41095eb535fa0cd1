"""Checkpoints: states of a training in one folder of the store, each in a file that is named by its step and its sha256.

step-00000040-<sha256>.safetensors     tensors, and in the metadata "state": all that is no tensor (JSON)

A file is written under another name, flushed and renamed, so that a kill leaves none half written; one whose bytes are no
longer those of its name (a disk's fault) is passed over for the one before.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from stages.core.safetensors_io import chunks
from stages.core.store import sha256_file, write_chunks

FORMAT = 1  # goes into the fingerprint of a training: checkpoints of another format lie in other folders
_NAME = re.compile(r"step-(?P<step>\d{8,})-(?P<digest>[0-9a-f]{64})\.safetensors")


@dataclass(frozen=True)
class State:
    """All that training needs to go on: tensors by name, and plain values that JSON holds."""

    step: int
    tensors: dict[str, Tensor]
    plain: dict[str, Any]


class Checkpoints:
    """The checkpoints in `folder`. warn: is told, in one line, of a file that is passed over."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self.warn = warn

    def steps(self) -> list[int]:
        """The steps that there are files of, ascending."""
        return sorted(self._files())

    def save(self, state: State) -> Path:
        """Write `state`; besides the training itself one tensor of it at a time is in memory."""
        metadata = {"state": json.dumps(state.plain, sort_keys=True)}
        return write_chunks(
            self.folder / "step",
            chunks(state.tensors, metadata),
            named=lambda digest: f"step-{state.step:08d}-{digest}.safetensors",
        )

    def newest(self, limit: int) -> State | None:
        """The last usable state of at most `limit` steps; None when there is none."""
        for step in reversed([step for step in self.steps() if step <= limit]):
            if state := self.at(step):
                return state
        return None

    def at(self, step: int) -> State | None:
        """The state of exactly this step; None when there is none, or it is damaged."""
        path = self._files().get(step)
        if path is None:
            return None
        match = _NAME.fullmatch(path.name)
        assert match
        if sha256_file(path) != match["digest"]:
            self.warn(
                f"the checkpoint {path} is damaged (its sha256 is no longer that of its name); it is passed over"
            )
            return None
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return State(step, tensors, json.loads(file.metadata()["state"]))

    def prune(self, keep: set[int], upto: int) -> None:
        """Delete the files of steps up to `upto` that are not in `keep`; later ones are of a longer training, and stay."""
        for step, path in self._files().items():
            if step <= upto and step not in keep:
                path.unlink()

    def _files(self) -> dict[int, Path]:
        found = {path: match for path in self.folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
        return {int(match["step"]): path for path, match in found.items()}
