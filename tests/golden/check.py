"""After `make run`: is dvc.lock still the committed one, on this kind of CPU?

kinds.json lists the kinds of CPU on which the committed lock was seen to come out again. On these a difference fails; on
another kind it is printed, and passes: docs/determinism.md collects what was seen where.
"""

import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from stages.harness.provenance import cpu_kind  # noqa: E402


def main() -> int:
    kind = cpu_kind()
    known: list[str] = json.loads((PROJECT / "tests/golden/kinds.json").read_text())
    done = subprocess.run(
        ["git", "diff", "--exit-code", "dvc.lock"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    same = done.returncode == 0
    print(
        f"CPU kind {kind} ({'known' if kind in known else 'new'}): dvc.lock {'unchanged' if same else 'CHANGED'}"
    )
    if not same:
        print(done.stdout)
    return 1 if kind in known and not same else 0


if __name__ == "__main__":
    raise SystemExit(main())
