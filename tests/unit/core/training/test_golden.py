"""The first 20 losses, to the last bit on kinds of CPU that were seen before, nearly the same on any other."""

import json
import subprocess
import sys

import pytest

from tests.golden.losses import SEEN, STEPS


@pytest.mark.slow
def test_the_first_losses_are_those_of_this_kind_of_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "tests/golden/losses.py"], check=True, stdout=subprocess.PIPE, cwd=SEEN.parents[2]
    )
    found = json.loads(done.stdout)
    seen = json.loads(SEEN.read_text())
    if found["kind"] in seen:
        assert found["losses"] == seen[found["kind"]]
        return
    print(f"new kind of CPU: {done.stdout.decode()}")
    for losses in seen.values():
        for method, expected in losses.items():
            assert len(expected) == STEPS
            assert found["losses"][method] == pytest.approx(expected, rel=2e-2)
