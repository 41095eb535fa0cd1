"""Checkpoints: whole or not there, the newest that fits, nothing deleted that is still asked for."""

import math
from pathlib import Path

import pytest
import torch

from stages.core.store import sha256_file
from stages.core.training.checkpoints import Checkpoints, State

PLAIN = {
    "row": {"loss": 0.1 + 0.2, "step": 3},
    "groups": [{"lr": 1e-3, "growth": math.inf, "betas": (0.9, 0.99)}],
    "none": None,
}


def state(step: int, value: float = 1.0) -> State:
    tensors = {
        "half": torch.full((2, 3), value, dtype=torch.bfloat16),
        "counts": torch.arange(5, dtype=torch.uint8),
        "none": torch.zeros(0, 4, dtype=torch.float64),
        "scalar": torch.tensor(value),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }
    return State(step, tensors, PLAIN)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run", pytest.fail)


def test_what_is_saved_is_what_comes_back(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(state(40, 0.1))
    assert path.name == f"step-00000040-{sha256_file(path)}.safetensors"
    found = checkpoints.at(40)
    assert found is not None
    assert found.step == 40
    assert found.plain == {**PLAIN, "groups": [{"lr": 1e-3, "growth": math.inf, "betas": [0.9, 0.99]}]}
    assert found.tensors.keys() == state(40).tensors.keys()
    for name, value in state(40, 0.1).tensors.items():
        assert found.tensors[name].dtype == value.dtype
        assert torch.equal(found.tensors[name], value)


def test_training_on_does_not_change_the_file(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(state(1))
    before = path.read_bytes()
    found = checkpoints.at(1)
    assert found is not None
    for value in found.tensors.values():
        value.zero_()
    assert path.read_bytes() == before


def test_the_newest_that_is_not_too_new(checkpoints: Checkpoints) -> None:
    assert checkpoints.newest(10**9) is None
    for step in (5, 30, 100_000_001):
        checkpoints.save(state(step))
    found = [checkpoints.newest(limit) for limit in (4, 5, 29, 30, 200, 10**9)]
    assert [one.step if one else None for one in found] == [None, 5, 5, 30, 30, 100_000_001]
    assert checkpoints.at(6) is None


def test_prune_leaves_the_kept_and_the_later_ones(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3, 4, 9):
        checkpoints.save(state(step))
    (checkpoints.folder / "samples-00000002.png").write_bytes(b"")
    checkpoints.prune({1, 3}, upto=4)
    assert checkpoints.steps() == [1, 3, 9]
    assert (checkpoints.folder / "samples-00000002.png").is_file()


def test_damaged_ones_are_passed_over_with_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, said.append)
    paths = [checkpoints.save(state(step)) for step in (1, 2, 3)]
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    paths[1].write_bytes(b"x" + paths[1].read_bytes()[1:])
    found = checkpoints.newest(3)
    assert found is not None
    assert found.step == 1
    assert [line.split(" is damaged")[0] for line in said] == [
        f"the checkpoint {paths[2]}",
        f"the checkpoint {paths[1]}",
    ]


def test_what_a_killed_writer_left_is_no_checkpoint_and_goes(checkpoints: Checkpoints) -> None:
    checkpoints.folder.mkdir()
    left = checkpoints.folder / ".step.abc.tmp"
    left.write_bytes(b"half")
    assert checkpoints.steps() == []
    checkpoints.save(state(1))
    assert not left.exists()
