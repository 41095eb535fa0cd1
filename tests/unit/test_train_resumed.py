"""What a training in the store is good for: killed, damaged, prolonged, shortened, stopped early, read otherwise."""

import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.core import store as store_module
from stages.core.errors import ConfigError, TrainingError
from stages.core.store import sha256_bytes
from stages.core.training.config import CheckpointsConfig, LoaderConfig, TrainConfig
from stages.harness.run import Stage
from stages.train import best_row, exhausted, train
from tests.training import CONFIG, HARD, make_workspace, outs, stage_in

pytestmark = pytest.mark.slow

# One process imports everything and is forked for each attempt. Each attempt has another number of workers, and saves
# after each step. The first is left alone: what it gives is what all must give.
ATTEMPTS = """
import json, os, random, shutil, signal, sys, time
from dataclasses import replace
from pathlib import Path
from stages.core.training.config import CheckpointsConfig, LoaderConfig
from stages.train import train
from tests.training import HARD, outs, stage_in

root, method = Path(sys.argv[1]), sys.argv[2]
drawn, expected, killed, resumed = random.Random(method), None, 0, 0
while expected is None or killed < 3:
    shutil.rmtree(root / "data" / "train", ignore_errors=True)  # as dvc does
    workers = drawn.randrange(1, 4)
    loader = LoaderConfig(num_workers=workers, prefetch=workers, pin_memory=False, staging=None)
    cfg = replace(HARD, method=method, steps=12, loader=loader, checkpoints=CheckpointsConfig(every=1, last=2))
    resumed += any((root / "store").rglob("step-*"))
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        train(cfg, stage_in(root))
        os._exit(0)
    if expected is not None:
        time.sleep(drawn.uniform(0.25, 0.75) * seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        killed += 1
        continue
    assert status == 0, status
    if expected is None:
        expected, seconds = outs(root), time.monotonic() - start
        shutil.rmtree(root / "store")
    elif outs(root) == expected:  # it ended before its kill: from the start again, with all three kills to come
        killed = 0
        shutil.rmtree(root / "store")
train(cfg, stage_in(root))  # what the last kill left, and the rest
assert outs(root) == expected
print(json.dumps({"resumed": resumed}))
"""


@pytest.mark.parametrize("method", ["full", "lora"])
def test_killed_three_times_in_one_run(tmp_path: Path, method: str) -> None:
    make_workspace(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, str(tmp_path), method],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
    )
    assert json.loads(done.stdout.splitlines()[-1])["resumed"] >= 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("resumed"))


@pytest.fixture
def copies(made: Path, tmp_path: Path) -> Any:
    """Makes workspaces, each with an empty store."""
    return lambda name: Path(shutil.copytree(made, tmp_path / name))


def files(root: Path) -> list[Path]:
    """The checkpoints of the only training in the store."""
    return sorted((root / "store" / "train").glob("*/step-*"))


def steps(root: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in files(root)]


class Crash(BaseException):
    """The end of the process, as far as the bytes are concerned."""


def test_the_last_ones_and_the_best_are_kept(copies: Any) -> None:
    root = copies("work")
    train(replace(CONFIG, steps=7), stage_in(root))
    held = list(csv.DictReader((root / "data/train/validation.csv").open()))
    on_grid = [row for row in held if row["step"] != "7"]
    best = min(on_grid, key=lambda row: float(row["loss"]))
    assert steps(root) == sorted({6, 7, int(best["step"])})


def test_a_crash_inside_the_writing_of_a_checkpoint(copies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, root = copies("straight"), copies("work")
    train(HARD, stage_in(straight))
    fsync, calls = os.fsync, list[int]()

    def crash(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 4:  # before the first step one is written, then one a step
            os.ftruncate(handle, 1000)
            raise Crash
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(store_module.os, "fsync", crash)
        with pytest.raises(Crash):
            train(HARD, stage_in(root))
    assert steps(root)[-1] == 2
    train(HARD, stage_in(root))
    assert outs(root) == outs(straight)


@pytest.mark.parametrize("fault", ["flipped", "torn", "empty"])
def test_a_damaged_checkpoint_is_passed_over(
    copies: Any, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    straight, root = copies("straight"), copies("work")
    train(HARD, stage_in(straight))
    train(HARD, stage_in(root))
    last = files(root)[-1]
    data = bytearray(last.read_bytes())
    if fault == "flipped":
        data[len(data) // 2] ^= 1
    last.write_bytes(data if fault == "flipped" else data[: len(data) // 2] if fault == "torn" else b"")
    capsys.readouterr()
    train(HARD, stage_in(root))
    said = capsys.readouterr().out
    assert (
        f"train: the checkpoint {last} is damaged (its sha256 is no longer that of its name); it is passed over"
        in said
    )
    assert "train: continues from step 4 of 5" in said
    assert outs(root) == outs(straight)
    assert sha256_bytes(last.read_bytes()) == last.stem.split("-")[2]  # it was written again


@pytest.mark.parametrize(
    "cfg",
    [
        CONFIG,
        replace(HARD, lr_schedule="constant_with_warmup"),
        replace(HARD, method="lora", lr_schedule="constant_with_warmup"),
    ],
)
def test_raising_the_steps_continues_to_the_bytes_of_the_longer_run(
    copies: Any, capsys: pytest.CaptureFixture[str], cfg: TrainConfig
) -> None:
    cfg = replace(cfg, log_every=2)  # the last row of the shorter run's curve is not one of the longer run's
    straight, root = copies("straight"), copies("work")
    train(replace(cfg, steps=9), stage_in(straight))
    train(replace(cfg, steps=5), stage_in(root))
    capsys.readouterr()
    train(replace(cfg, steps=9), stage_in(root))
    assert "train: continues from step 5 of 9" in capsys.readouterr().out
    assert outs(root) == outs(straight)


def test_lowering_the_steps_gives_what_the_shorter_run_gives(copies: Any) -> None:
    straight, root = copies("straight"), copies("work")
    train(replace(CONFIG, steps=4), stage_in(straight))
    train(replace(CONFIG, steps=5), stage_in(root))
    train(replace(CONFIG, steps=4), stage_in(root))
    assert outs(root) == outs(straight)
    assert steps(root)[-1] == 5  # of the longer run: it may be asked for again


def test_a_schedule_that_knows_its_end_starts_over(copies: Any, capsys: pytest.CaptureFixture[str]) -> None:
    root = copies("work")
    train(replace(CONFIG, lr_schedule="cosine", steps=2), stage_in(root))
    train(replace(CONFIG, lr_schedule="cosine", steps=3), stage_in(root))
    assert "continues" not in capsys.readouterr().out


def test_epochs_are_so_many_steps(copies: Any) -> None:
    """5 items of one bucket and 2 of the other are 3 + 1 batches of 2: two epochs are 8 micro-batches."""
    straight, root = copies("straight"), copies("work")
    train(replace(CONFIG, steps=8), stage_in(straight))
    train(replace(CONFIG, steps=None, epochs=2), stage_in(root))
    assert outs(root) == outs(straight)
    cfg = replace(CONFIG, steps=None, epochs=2, accumulation=3)
    assert cfg.total_steps(4) == 3  # the third reaches into the next epoch


@pytest.mark.parametrize(
    "loader",
    [
        LoaderConfig(num_workers=3, prefetch=1, pin_memory=False, staging=None),
        LoaderConfig(num_workers=1, prefetch=7, pin_memory=False, staging="fast"),
    ],
)
def test_the_loader_changes_no_byte_and_starts_nothing_over(
    copies: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, loader: LoaderConfig
) -> None:
    straight, root = copies("straight"), copies("work")
    monkeypatch.chdir(root)
    train(HARD, stage_in(straight))
    train(replace(HARD, loader=loader), stage_in(root))
    assert outs(root) == outs(straight)
    capsys.readouterr()
    train(HARD, stage_in(root))
    assert "train: continues from step 5 of 5" in capsys.readouterr().out


def test_staged_shards_are_used_and_checked(copies: Any, tmp_path: Path) -> None:
    root, fast = copies("work"), tmp_path / "fast"
    cfg = replace(CONFIG, steps=1, loader=replace(CONFIG.loader, staging=str(fast)))
    train(cfg, stage_in(root))
    index = json.loads((root / "data/encode/index.json").read_text())
    assert {path.stem for path in fast.iterdir()} == set(index["files"].values())
    before = outs(root)
    for path in fast.iterdir():
        path.write_bytes(b"damaged")
    shutil.rmtree(root / "store")
    train(cfg, stage_in(root))  # copied again
    assert outs(root) == before
    for name in index["files"]:
        (root / "data/encode" / name).unlink()
    shutil.rmtree(root / "store")
    train(cfg, stage_in(root))  # nothing but the copies is read
    assert outs(root) == before


# --- early stop, and the best weights


def rows(*losses: float) -> list[dict[str, float]]:
    return [{"step": 10 * number, "loss": loss} for number, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "patience", "ends"),
    [
        ((1.0,), 1, False),
        ((1.0, 0.9, 0.95), 2, False),
        ((1.0, 0.9, 0.95), 1, True),
        ((1.0, 0.9, 0.95, 0.9), 2, True),  # no better is not better
        ((1.0, 0.9, 0.95, 0.8), 2, False),
        ((1.0, 1.1, 1.2, 1.3), None, False),
    ],
)
def test_when_patience_ends(losses: tuple[float, ...], patience: int | None, ends: bool) -> None:
    assert exhausted(rows(*losses), patience) is ends


def test_of_equal_ones_the_first_is_best() -> None:
    assert best_row(rows(1.0, 0.5, 0.7, 0.5))["step"] == 10


RISING = replace(
    CONFIG, learning_rate=0.5, steps=12, max_grad_norm=1e9, stopping=replace(CONFIG.stopping, max_loss=1e12)
)


def test_early_stop_and_the_best_weights(copies: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A rate so high that every step makes it worse: the untrained state of step 0 is the best."""
    root = copies("work")
    cfg = replace(RISING, stopping=replace(RISING.stopping, patience=2))
    train(cfg, stage_in(root))
    said = capsys.readouterr().out
    metrics = json.loads((root / "data/train/metrics.json").read_text())
    held = list(csv.DictReader((root / "data/train/validation.csv").open()))
    assert [row["step"] for row in held] == ["0", "2", "4"]
    assert "no better held-out loss in 2 validations: stops after step 4" in said
    assert (metrics["steps"], metrics["weights_of_step"]) == (4, 4)
    assert metrics["validation_loss"]["best"] == metrics["validation_loss"]["first"] == float(held[0]["loss"])
    last = outs(root)

    train(replace(cfg, stopping=replace(cfg.stopping, weights="best")), stage_in(root))
    said = capsys.readouterr().out
    assert "continues from step 4 of 12" in said
    metrics = json.loads((root / "data/train/metrics.json").read_text())
    assert (metrics["steps"], metrics["weights_of_step"]) == (4, 0)
    from safetensors.torch import load_file

    name = "diffusion_pytorch_model.safetensors"
    base, best = load_file(root / "tiny-sd/unet" / name), load_file(root / "data/train/weights" / name)
    assert base.keys() == best.keys()
    assert all(torch.equal(base[key], best[key]) for key in base)
    assert outs(root)["loss.csv"] == last["loss.csv"]

    train(
        replace(cfg, stopping=replace(cfg.stopping, patience=3)), stage_in(root)
    )  # more patience: it goes on
    assert json.loads((root / "data/train/metrics.json").read_text())["steps"] == 6


def test_a_best_state_that_is_gone_is_named(copies: Any) -> None:
    root = copies("work")
    cfg = replace(RISING, steps=4, stopping=replace(RISING.stopping, weights="best"))
    train(cfg, stage_in(root))
    files(root)[0].unlink()
    with pytest.raises(TrainingError, match=r"the state of step 0, the best, is no longer in .*store/train/"):
        train(cfg, stage_in(root))


# --- asked to stop


def test_sigterm_finishes_the_step_and_saves(copies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    from stages.core.training.trainer import Trainer

    straight, root = copies("straight"), copies("work")
    cfg = replace(HARD, checkpoints=CheckpointsConfig(every=100, last=1))
    train(cfg, stage_in(straight))
    micro, seen = Trainer._micro_batch, list[int]()

    def signalled(self: Trainer, number: int, count: int) -> Any:
        seen.append(number)
        if len(seen) in (3, 9):  # in the middle of the second step, and, run again, of a later one
            os.kill(os.getpid(), signal.SIGTERM)
        return micro(self, number, count)

    monkeypatch.setattr(Trainer, "_micro_batch", signalled)
    before = signal.getsignal(signal.SIGTERM)
    for stopped in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            train(cfg, stage_in(root))
        assert signal.getsignal(signal.SIGTERM) is before
        assert stopped in steps(root)
        assert not (root / "data" / "train").exists()
    train(cfg, stage_in(root))
    assert outs(root) == outs(straight)


def test_a_second_copy_is_refused(copies: Any) -> None:
    from stages.core.errors import LockedError

    root = copies("work")
    train(replace(CONFIG, steps=1), stage_in(root))
    (folder,) = (root / "store" / "train").iterdir()
    with (
        stage_in(root).store.lock("train", folder.name),
        pytest.raises(LockedError, match=rf"already running with the same inputs, as process {os.getpid()}"),
    ):
        train(replace(CONFIG, steps=1), stage_in(root))


def test_another_number_of_processes_than_the_parameter_says(copies: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.processes is 2, and 1 process\(es\) were started"):
        train(replace(CONFIG, accumulation=2, processes=2), stage_in(copies("work")))


def test_an_objective_that_teaches_nothing_at_the_end(copies: Any) -> None:
    cfg = replace(
        CONFIG, objective=replace(CONFIG.objective, prediction="epsilon")
    )  # the base has zero terminal SNR
    with pytest.raises(ConfigError, match="zero terminal SNR and prediction epsilon"):
        train(cfg, stage_in(copies("work")))


def test_the_store_is_where_the_stage_says(copies: Any) -> None:
    root = copies("work")
    stage: Stage = stage_in(root)
    train(replace(CONFIG, steps=1), stage)
    assert {path.parent.parent for path in files(root)} == {stage.store.root / "train"}
