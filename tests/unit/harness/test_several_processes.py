"""One stage in several processes: how many, who speaks, what a dead one does to the others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.core.errors import ConfigError
from stages.core.ranks import Ranks, ranks
from stages.harness.closure import PROJECT
from stages.harness.processes import LOST, STOPPED, first_to_fail, processes, verdict

# A stage of its own, in a package `stages` beside the project's modules.
STAGE = """
import os, signal, sys, time
from pathlib import Path
from stages.core.errors import ConfigError
from stages.core.ranks import LostRanksError, ranks
from stages.harness.processes import join_group, stop_on_signals
from stages.harness.run import fail

join_group()
stop_on_signals()
team, what = ranks("cpu"), os.environ["WHAT"]
folder = Path(os.environ["FOLDER"])
(folder / f"pid-{team.number}").write_text(str(os.getpid()))
try:
    if what == "fail":
        raise ConfigError("encode.sheet is -1", remedy="set it to 0 or more")
    if what == "die" and team.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "wait":
        time.sleep(60)
    everyone = team.gather(("of", team.number))
    (folder / f"said-{team.number}").write_text(repr((everyone, team.main, team.mine(list(range(5))), team.device)))
except (ConfigError, LostRanksError) as error:
    fail("toy", error)
except KeyboardInterrupt:
    raise SystemExit(130) from None
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A copy of the package with one stage more."""
    (tmp_path / "stages").mkdir()
    for path in (PROJECT / "stages").iterdir():
        if path.name != "__pycache__":
            (tmp_path / "stages" / path.name).symlink_to(path)
    (tmp_path / "stages" / "toy.py").write_text(STAGE)
    return tmp_path


def start(toy: Path, what: str, count: int = 2) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DARKROOM_")}
    return subprocess.Popen(
        [sys.executable, "-m", "stages.harness.processes", "toy", str(count)],
        cwd=toy,
        env=environment | {"WHAT": what, "FOLDER": str(toy), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(toy)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(toy: Path, what: str, count: int = 2) -> tuple[int, str]:
    process = start(toy, what, count)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def pids(toy: Path, count: int = 2) -> list[int]:
    """Of the ranks, once all of them run."""
    deadline = time.monotonic() + 60
    paths = [toy / f"pid-{number}" for number in range(count)]
    while time.monotonic() < deadline:
        if all(path.is_file() and path.read_text() for path in paths):
            return [int(path.read_text()) for path in paths]
        time.sleep(0.05)
    raise AssertionError("the ranks never started")


def gone(numbers: list[int], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{number}").exists() for number in numbers):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_all_well(toy: Path) -> None:
    assert ended(toy, "gather", 3) == (0, "")
    everyone = [("of", 0), ("of", 1), ("of", 2)]
    parts = ([0, 3], [1, 4], [2])
    for number, part in enumerate(parts):
        assert (toy / f"said-{number}").read_text() == repr((everyone, number == 0, part, "cpu"))


@pytest.mark.slow
def test_one_error_is_said_once(toy: Path) -> None:
    assert ended(toy, "fail") == (1, "toy: error: encode.sheet is -1\n  remedy: set it to 0 or more\n")


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(toy: Path) -> None:
    code, output = ended(toy, "die")
    assert code == 137
    assert output == (
        "toy: one of the processes was ended by SIGKILL; if nobody did it, the machine ran out of memory. "
        "The same command continues from here\n"
    )
    assert gone(pids(toy))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_said_once(toy: Path, number: signal.Signals) -> None:
    process = start(toy, "wait")
    of_ranks = pids(toy)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, f"toy: {STOPPED}\n")
    assert gone(of_ranks)


@pytest.mark.slow
def test_ranks_die_with_what_started_them(toy: Path) -> None:
    process = start(toy, "wait")
    of_ranks = pids(toy)
    process.kill()
    process.wait(timeout=20)
    assert gone(of_ranks)


def test_alone_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = ranks("cuda")
    assert alone == Ranks(0, 1, "cuda")
    assert alone.main
    assert alone.gather("x") == ["x"]
    assert alone.mine([1, 2, 3]) == [1, 2, 3]
    alone.barrier()
    import torch.distributed

    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_value_is_somebodys(count: int) -> None:
    values = list(range(20))
    parts = [Ranks(number, count).mine(values) for number in range(count)]
    assert sorted(value for part in parts for value in part) == values
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("text", "count"), [(None, 1), ("1", 1), ("12", 12)])
def test_how_many(monkeypatch: pytest.MonkeyPatch, text: str | None, count: int) -> None:
    monkeypatch.delenv("DARKROOM_PROCESSES", raising=False)
    if text:
        monkeypatch.setenv("DARKROOM_PROCESSES", text)
    assert processes(12) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1.5", " 2", "²"])
def test_no_number_of_processes(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DARKROOM_PROCESSES", text)
    with pytest.raises(ConfigError) as caught:
        processes(8)
    assert str(caught.value) == (
        f"the environment variable DARKROOM_PROCESSES is {text!r}\n"
        "  remedy: set it to a whole number, 1 or more, or unset it"
    )


def test_more_processes_than_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARKROOM_PROCESSES", "9")
    with pytest.raises(ConfigError) as caught:
        processes(8)
    assert str(caught.value) == (
        "the environment variable DARKROOM_PROCESSES is 9, and preprocess.shards is 8: each process needs a shard\n"
        "  remedy: set it to 8 or less, or raise preprocess.shards"
    )


def test_only_the_first_to_fail_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DARKROOM_FAILED", raising=False)
    assert [first_to_fail(), first_to_fail()] == [True, True]
    monkeypatch.setenv("DARKROOM_FAILED", str(tmp_path / "failed"))
    assert [first_to_fail(), first_to_fail()] == [True, False]
    monkeypatch.setenv("DARKROOM_FAILED", str(tmp_path / "no" / "folder"))
    assert first_to_fail()


KILLED = "one of the processes was ended by SIGKILL; if nobody did it, the machine ran out of memory. The same command"


@pytest.mark.parametrize(
    ("codes", "code", "start"),
    [
        ([1, -15], 1, ""),
        ([LOST, 1], 1, ""),
        ([-15, 2, -9], 2, ""),
        ([-9, -15], 137, KILLED),
        ([LOST, -9], 137, KILLED),
        ([-6], 134, "one of the processes was ended by SIGABRT. The same command"),
        ([LOST, LOST], 1, "the processes lost each other. The same command"),
        ([LOST, 130], 130, STOPPED),
        ([130, 130], 130, STOPPED),
        ([-15, -15], 130, STOPPED),
    ],
)
def test_verdicts(codes: list[int], code: int, start: str) -> None:
    found, said = verdict(codes)
    assert found == code
    assert said.startswith(start)
    assert bool(said) == bool(start)
