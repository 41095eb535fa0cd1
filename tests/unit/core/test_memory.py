"""Out of memory in plain words, and nothing else taken for it."""

import pytest
import torch

from stages.core.errors import MachineError
from stages.core.memory import explained

MESSAGE = r"encoding 16 pictures needs more memory than there is\n  remedy: set encode\.batch_size to 8$"


def explain() -> None:
    with explained("encoding 16 pictures", "set encode.batch_size to 8"):
        torch.empty(2**60, dtype=torch.uint8)


def test_the_cpus_allocator() -> None:
    with pytest.raises(MachineError, match=MESSAGE):
        explain()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_other_kinds(kind: type[Exception]) -> None:
    with (
        pytest.raises(MachineError, match=MESSAGE),
        explained("encoding 16 pictures", "set encode.batch_size to 8"),
    ):
        raise kind("no memory")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explained("encoding", "less"):
        raise RuntimeError("shapes do not match")
