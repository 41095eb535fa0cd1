"""Twenty kills at random moments of stage encode: what is kept is whole, and the end is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_tiny_base, write_record
from tests.unit.test_encode import write_pictures

# One process imports everything and is forked for each attempt: imports take longer than the work. Packs are written
# every 20 ms, not every minute, so that most attempts begin where the one before was killed.
ATTEMPTS = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from stages.core.packs import Writer
from stages.encode import encode
from tests.unit.test_encode import CONFIG, outs
from tests.unit.test_ingest import stage_in

Writer.__init__.__defaults__ = (0.02,)
root, expected, killed, resumed, drawn = Path(sys.argv[1]), None, 0, 0, random.Random(7)
while killed < 20:
    shutil.rmtree(root / "data" / "encode", ignore_errors=True)  # as dvc does
    resumed += any((root / "store").rglob("*.safetensors"))
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        encode(CONFIG, stage_in(root, "encode"))
        os._exit(0)
    if expected is not None:
        time.sleep(drawn.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        killed += 1
        continue
    assert status == 0, status
    if expected is None:  # the first attempt is left alone: what it gives is what all must give
        expected, seconds = outs(root), time.monotonic() - start
    assert outs(root) == expected  # it ended before its kill
    shutil.rmtree(root / "store")
encode(CONFIG, stage_in(root, "encode"))  # what the last kill left, and the rest
assert outs(root) == expected
print(json.dumps({"resumed": resumed}))
"""


@pytest.mark.slow
def test_twenty_kills_then_the_same_bytes(tmp_path: Path) -> None:
    base = make_tiny_base(tmp_path / "tiny-sd")
    write_record(base, tmp_path)
    write_pictures(tmp_path, range(160))
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, str(tmp_path)],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
    )
    # The last line: before it the stage talks. All in that process: this one may have other threads and settings, and
    # so other bits.
    assert json.loads(done.stdout.splitlines()[-1])["resumed"] >= 5
