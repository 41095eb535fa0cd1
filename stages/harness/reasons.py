"""Why something is made again: what the last run knew, against what this one needs. It explains, and decides nothing."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stages.core.store import write_json

_SHOWN = 3  # labels per reason


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one run made, or is about to make."""

    inputs: dict[str, Any]  # as of Stage.inputs
    keys: dict[str, str]  # label (a file's name, a caption) -> key of its content


def remember(path: Path, memory: Memory) -> None:
    """Keep `memory` for the next run."""
    write_json(path, {"inputs": memory.inputs, "keys": memory.keys})


def recall(path: Path) -> Memory | None:
    """What the last run kept; None when there is nothing that can be read."""
    try:
        value = json.loads(path.read_text())
        return Memory(inputs=value["inputs"], keys=value["keys"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def explain(before: Memory | None, now: Memory, missing: list[str]) -> str:
    """How many of `missing` (labels of `now.keys`) are made, and why: one line."""
    if before is None:
        return f"{len(missing)}, because no run has finished with this store yet"
    if changed := _changed(before.inputs, now.inputs):
        return f"{len(missing)}, because of another {', '.join(changed)}"
    groups: dict[str, list[str]] = {}
    for label in missing:
        if label not in before.keys:
            reason = "new"
        elif before.keys[label] != now.keys[label]:
            reason = "changed"
        else:
            reason = "no longer in the store"
        groups.setdefault(reason, []).append(label)
    return "; ".join(f"{len(labels)} {reason} ({_some(labels)})" for reason, labels in groups.items())


def _some(labels: list[str]) -> str:
    return ", ".join(labels[:_SHOWN]) + (", ..." if len(labels) > _SHOWN else "")


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of the inputs that differ, with both values where these are short."""
    found: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        one, other = before.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            parts = _changed(cast(dict[str, Any], one), cast(dict[str, Any], other))
            found += [f"{name}: {part}" for part in parts]
        elif one != other:
            short = all(len(str(value)) <= 20 for value in (one, other))
            found.append(f"{name} ({one} -> {other})" if short else name)
    return found
