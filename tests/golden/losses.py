"""The losses of the first 20 steps of the tests' own small training, in `portable` mode, one thread.

    python tests/golden/losses.py            prints {"kind": ..., "losses": {"full": [...], ...}}

losses.json keeps what was seen, by kind of CPU; tests/unit/core/training/test_golden.py holds known kinds to it, to the
last bit.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from stages.core import determinism  # noqa: E402
from stages.harness.provenance import cpu_kind  # noqa: E402

CONFIG = determinism.DeterminismConfig(mode="portable", threads=1)
SEEN = PROJECT / "tests/golden/losses.json"
STEPS = 20


def losses(method: str) -> list[float]:
    """Of each step, as `loss.csv` would have them."""
    from tests.training import HARD, make_workspace, trainer_for

    determinism.apply(CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(make_workspace(Path(folder)), replace(HARD, method=method, steps=STEPS))
        found = [trainer.advance()["loss"] for _ in range(STEPS)]
        trainer.close()
    return found


def main() -> None:
    """Print one line of JSON."""
    variables = determinism.environment(CONFIG)
    if any(os.environ.get(name) != value for name, value in variables.items()):
        # Libraries read them when they load.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables})
    print(json.dumps({"kind": cpu_kind(), "losses": {method: losses(method) for method in ("full", "lora")}}))


if __name__ == "__main__":
    main()
