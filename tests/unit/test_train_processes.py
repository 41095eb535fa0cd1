"""Training in two processes: the same items, the same losses up to rounding, one writer, and an end when one dies."""

import csv
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

from stages.core.training.config import CheckpointsConfig, TrainConfig
from stages.harness.closure import PROJECT
from tests.training import HARD, make_workspace

pytestmark = pytest.mark.slow

CONFIG = dataclasses.replace(HARD, accumulation=4, steps=6, checkpoints=CheckpointsConfig(every=2, last=2))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("processes"))


def workspace(made: Path, root: Path, cfg: TrainConfig) -> Path:
    shutil.copytree(made, root)
    yaml = YAML()
    params = yaml.load(PROJECT / "params.yaml")
    params["train"] = dataclasses.asdict(cfg)
    yaml.dump(params, root / "params.yaml")
    return root


def start(root: Path) -> "subprocess.Popen[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DARKROOM_", "DVC_"))}
    settings = {"DVC_ROOT": str(root), "DARKROOM_TRACKING": "off", "PYTHONPATH": str(PROJECT)}
    return subprocess.Popen(
        [sys.executable, "-m", "stages.harness.launch", "train"],
        cwd=root,
        env=kept | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(root: Path, code: int = 0) -> str:
    process = start(root)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def losses(root: Path) -> list[float]:
    return [float(row["loss"]) for row in csv.DictReader((root / "data/train/loss.csv").open())]


def ranks_of(root: Path) -> list[int]:
    """The pids of the ranks that work in `root`, rank 0 first; waits for two of them."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            try:
                if (entry / "cwd").resolve() == root and b"stages.train" in (entry / "cmdline").read_bytes():
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    found |= {v.decode(): int(entry.name) for v in variables if v.startswith(b"RANK=")}
            except OSError:
                continue
        if found.keys() == {"RANK=0", "RANK=1"}:
            return [found["RANK=0"], found["RANK=1"]]
        time.sleep(0.05)
    raise AssertionError("the ranks never started")


def first_checkpoint(root: Path, step: int) -> None:
    """Waits until there is one of this step or a later one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(int(path.name.split("-")[1]) >= step for path in root.rglob("step-*-*.safetensors")):
            return
        time.sleep(0.02)
    raise AssertionError(f"no checkpoint of step {step}")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_two_processes_train_as_one_does(made: Path, tmp_path: Path, method: str) -> None:
    cfg = dataclasses.replace(CONFIG, method=method)
    one = workspace(made, tmp_path / "one", cfg)
    two = workspace(made, tmp_path / "two", dataclasses.replace(cfg, processes=2))
    ended(one)
    output = ended(two)
    assert output.count("6 steps of") == 1  # rank 0 alone talks
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    (name,) = [path.name for path in (one / "data/train/weights").glob("*.safetensors")]
    weights = [load_file(root / "data/train/weights" / name) for root in (one, two)]
    for key, value in weights[0].items():
        # AdamW's first steps divide small gradients by themselves, which makes much of their rounding.
        assert torch.allclose(weights[1][key], value, atol=1e-3), key
    again = workspace(made, tmp_path / "again", dataclasses.replace(cfg, processes=2))
    ended(again)
    for path in sorted(path for path in (two / "data/train").rglob("*") if path.is_file()):
        assert (again / path.relative_to(two)).read_bytes() == path.read_bytes(), path


def test_a_rank_that_dies_ends_the_job_and_it_continues(made: Path, tmp_path: Path) -> None:
    cfg = dataclasses.replace(CONFIG, processes=2, steps=40)
    straight = workspace(made, tmp_path / "straight", cfg)
    ended(straight)
    root = workspace(made, tmp_path / "killed", cfg)
    process = start(root)
    _, second = ranks_of(root)
    first_checkpoint(root, 2)
    os.kill(second, signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert process.returncode == 137, output
    assert "train: one of the processes was ended by SIGKILL" in output
    assert "Traceback" not in output
    assert "continues from step" in ended(root)
    for path in sorted(path for path in (straight / "data/train").rglob("*") if path.is_file()):
        assert (root / path.relative_to(straight)).read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_ends_with_130(
    made: Path, tmp_path: Path, processes: int, number: signal.Signals
) -> None:
    checkpoints = CheckpointsConfig(every=1000, last=1)
    root = workspace(
        made,
        tmp_path / "work",
        dataclasses.replace(CONFIG, processes=processes, steps=2000, checkpoints=checkpoints),
    )
    process = start(root)
    first_checkpoint(root, 0)
    time.sleep(1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert output.count("stopped; the same command continues from here") == 1
    assert "Traceback" not in output
    saved = [int(path.name.split("-")[1]) for path in root.rglob("step-*-*.safetensors")]
    assert max(saved) > 0
    assert not (root / "data" / "train").exists()


def test_an_error_of_the_step_is_said_once(made: Path, tmp_path: Path) -> None:
    stopping = dataclasses.replace(CONFIG.stopping, max_loss=0.01)
    root = workspace(made, tmp_path / "work", dataclasses.replace(CONFIG, processes=2, stopping=stopping))
    output = ended(root, code=1)
    assert output.count("train: error: the loss of step 1 is") == 1
    assert "Traceback" not in output
