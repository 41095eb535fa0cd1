"""Why something is made again, in one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.harness.reasons import Memory, explain, recall, remember

BEFORE = Memory(
    inputs={"vae": "a" * 64, "batch_size": 16, "versions": {"torch": "2.12", "numpy": "2.0"}},
    keys={"cat.png": "1", "dog.png": "2", "owl.png": "3"},
)


def test_round_trip(tmp_path: Path) -> None:
    remember(tmp_path / "encode" / "last.json", BEFORE)
    assert recall(tmp_path / "encode" / "last.json") == BEFORE


@pytest.mark.parametrize("data", [None, b"", b"[]", b"{}", b"\xff"])
def test_nothing_that_can_be_read_is_nothing(tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "last.json").write_bytes(data)
    assert recall(tmp_path / "last.json") is None


def test_the_first_run() -> None:
    assert explain(None, BEFORE, ["cat.png"]) == "1, because no run has finished with this store yet"


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"vae": "b" * 64}, "vae"),
        ({"batch_size": 8}, "batch_size (16 -> 8)"),
        ({"tile": 64}, "tile (None -> 64)"),
        (
            {"versions": {"torch": "2.13", "numpy": "2.0"}, "vae": "c" * 64},
            "vae, versions: torch (2.12 -> 2.13)",
        ),
    ],
)
def test_a_changed_input_is_named(inputs: dict[str, Any], reason: str) -> None:
    now = replace(BEFORE, inputs=BEFORE.inputs | inputs)
    assert explain(BEFORE, now, list(now.keys)) == f"3, because of another {reason}"


def test_new_changed_and_lost() -> None:
    now = replace(BEFORE, keys={"cat.png": "1", "dog.png": "9"} | {f"new{n}.png": str(n) for n in range(5)})
    assert explain(BEFORE, now, list(now.keys)) == (
        "1 no longer in the store (cat.png); 1 changed (dog.png); 5 new (new0.png, new1.png, new2.png, ...)"
    )
