"""The promise: only what changed runs, and the same inputs give the same bytes, whatever happened on the way."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project import DVC, Project

pytestmark = pytest.mark.slow

Copy = Callable[[], Project]
STAGES = ["ingest", "base", "preprocess", "encode", "train", "evaluate", "export"]


def ran(output: str) -> list[str]:
    """The stages that a `dvc repro` ran."""
    return [stage for stage in STAGES if f"Running stage '{stage}'" in output]


def test_second_repro_runs_nothing(finished: Project) -> None:
    output = finished.dvc("repro")
    assert ran(output) == []
    assert "Data and pipelines are up to date." in output


def test_forced_with_an_empty_store_gives_the_same_lock(copy: Copy) -> None:
    project = copy()
    before = project.lock
    shutil.rmtree(project.store)
    assert ran(project.dvc("repro", "--force")) == STAGES
    assert project.lock == before


def test_forced_with_a_full_store_gives_the_same_lock_and_computes_nothing_anew(copy: Copy) -> None:
    project = copy()
    before = project.lock
    output = project.dvc("repro", "--force", "--no-run-cache")
    assert ran(output) == STAGES
    assert "(0 decoded, 24 kept)" in output
    assert "0 pictures and 0 captions encoded" in output
    assert "continues from step 6 of 6" in output
    assert project.lock == before


@pytest.mark.parametrize("processes", ["2", "3"])
def test_encode_in_several_processes_gives_the_same_lock(copy: Copy, processes: str) -> None:
    project = copy()
    before = project.lock
    for stage in ("encode", "encode-text"):
        shutil.rmtree(project.store / stage)
    output = project.dvc("repro", "--force", "--single-item", "encode", DARKROOM_PROCESSES=processes)
    assert output.count("encode: 24 items: 24 pictures and 25 captions encoded") == 1
    assert project.lock == before


def test_an_error_in_several_processes_is_said_once(copy: Copy) -> None:
    project = copy()
    project.set("sheet: 8", "sheet: -1")
    output = project.dvc("repro", "encode", code=255, DARKROOM_PROCESSES="2")
    assert output.count("encode: error: encode.sheet is -1\n  remedy: set it to 0 or more\n") == 1
    assert "Traceback" not in output
    project.set("sheet: -1", "sheet: 7")
    output = project.dvc("repro", "encode", code=255, DARKROOM_PROCESSES="two")
    assert "encode: error: the environment variable DARKROOM_PROCESSES is 'two'\n" in output


def test_tracking_on_off_and_failing_give_the_same_lock(copy: Copy, tmp_path: Path) -> None:
    project = copy()
    before = project.lock
    for number, tracking in enumerate(
        (
            {"DARKROOM_TRACKING": "on"},
            {"DARKROOM_TRACKING": "on", "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
            {"DARKROOM_TRACKING": "on", "DARKROOM_TRACKING_ROOT": "/proc/no-such-folder"},
        )
    ):
        store = {"DARKROOM_STORE": str(tmp_path / f"store-{number}")}
        output = project.dvc("repro", "--force", "--no-run-cache", "preprocess", **tracking, **store)
        assert ran(output) == ["ingest", "preprocess"]
        assert project.lock == before


# What a stage has written when it is in the middle of its work.
MIDDLE = {
    "preprocess": ".darkroom/store/preprocess/*/shard-*.pt",
    "encode": ".darkroom/store/encode/*/*.safetensors",
    "train": ".darkroom/store/train/*/step-*",
    "evaluate": ".darkroom/store/evaluate/*/*.pt",
    "export": "data/export/pipeline/model_index.json",
}


@pytest.mark.parametrize("stage", list(MIDDLE))
def test_killed_and_run_again_gives_the_same_lock(copy: Copy, stage: str) -> None:
    project = copy()
    before = project.lock
    for _ in range(5):
        shutil.rmtree(project.store, ignore_errors=True)
        if kill_in_the_middle(project, stage):
            break
    else:
        pytest.fail(f"{stage} was always faster than the kill")
    assert not (project.root / "data" / "export" / "SHA256SUMS").exists() or stage != "export"
    project.dvc("repro", "--no-run-cache", "--force", "--single-item", stage)
    assert project.lock == before


def kill_in_the_middle(project: Project, stage: str) -> bool:
    """Force the stage and kill it with -9 once its first work is on disk; False when it ended before."""
    process = project.start(*DVC, "repro", "--force", "--no-run-cache", "--single-item", stage)
    victim = wait_for_stage(project, stage)
    while process.poll() is None and not list(project.root.glob(MIDDLE[stage])):
        time.sleep(0.002)
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        process.wait(timeout=60)
        return False
    process.wait(timeout=60)
    return process.returncode != 0


def wait_for_stage(project: Project, stage: str, patience: float = 60) -> int:
    """The pid of the stage's process in this project."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                here = (entry / "cwd").resolve() == project.root
            except OSError:
                continue
            if here and command[1:3] == [b"-m", f"stages.{stage}".encode()]:
                return int(entry.name)
        time.sleep(0.05)
    raise AssertionError(f"stage {stage} never started")


def test_killing_dvc_takes_the_stage_down(copy: Copy) -> None:
    project = copy()
    process = project.start(*DVC, "repro", "--force", "--no-run-cache", "--single-item", "encode")
    victim = wait_for_stage(project, "encode")
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    deadline = time.monotonic() + 15
    while Path(f"/proc/{victim}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{victim}").exists()


def test_one_more_picture_decodes_and_encodes_one(copy: Copy) -> None:
    project = copy()
    pictures = project.root / "data" / "pictures"
    before = json.loads((project.root / "data/preprocess/index.json").read_text())["files"]
    donor = sorted(pictures.glob("*.png"))[0]
    # The same picture saved anew: other bytes, other item, other shard perhaps.
    from PIL import Image

    Image.open(donor).convert("RGBA").rotate(90).save(pictures / "one-more.png")
    with (pictures / "metadata.jsonl").open("a") as file:
        file.write(json.dumps({"file_name": "one-more.png", "text": "one more picture"}) + "\n")
    output = project.dvc("repro", "encode")
    assert ran(output) == ["ingest", "preprocess", "encode"]
    assert "(1 decoded, 24 kept)" in output
    assert "25 items: 1 pictures and 1 captions encoded" in output
    after = json.loads((project.root / "data/preprocess/index.json").read_text())["files"]
    assert sum(after.get(name) != digest for name, digest in before.items()) == 1


def test_another_caption_encodes_one_text_and_no_picture(copy: Copy) -> None:
    project = copy()
    path = project.root / "data" / "pictures" / "metadata.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["text"] = "quite another caption"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = project.dvc("repro", "encode")
    assert "(0 decoded, 24 kept)" in output
    assert "24 items: 0 pictures and 1 captions encoded" in output


def test_a_learning_rate_runs_train_and_what_follows(copy: Copy) -> None:
    project = copy()
    output = project.dvc("exp", "run", "-S", "train.learning_rate=1.0e-4", "--name", "slower", "train")
    assert ran(output) == ["train"]
    rate = json.loads(project.dvc("params", "diff", "--json"))["params.yaml"]["train.learning_rate"]
    assert (rate["old"], rate["new"]) == (1.5e-3, 1.0e-4)
    changed = json.loads(project.dvc("metrics", "diff", "--json"))["data/train/metrics.json"]
    assert set(changed) == {"validation_loss.last", "validation_loss.best"}
    assert "slower" in project.dvc("exp", "show", "--csv")


def test_plots_show_writes_a_page_with_curves_and_the_sheet(copy: Copy) -> None:
    project = copy()
    project.dvc("plots", "show", "-o", "plots")
    page = (project.root / "plots" / "index.html").read_text()
    for text in ("training loss", "held-out loss", "before_after.png"):
        assert text in page


def test_lora_is_a_change_of_one_parameter(copy: Copy) -> None:
    project = copy()
    project.set("  method: full ", "  method: lora ")
    output = project.dvc("repro")
    assert ran(output) == ["train", "evaluate", "export"]
    assert (project.root / "data/train/weights/pytorch_lora_weights.safetensors").is_file()
    assert (project.root / "data/export/lora/pytorch_lora_weights.safetensors").is_file()
    before = project.lock
    shutil.rmtree(project.store)
    project.dvc("repro", "--force", "--no-run-cache")
    assert project.lock == before
