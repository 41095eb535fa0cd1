"""The launcher: what it refuses, what it sets, and that nothing outlives it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.harness.closure import PROJECT

PARAMS = """seed: 1
device: cpu
runtime: native
determinism: {mode: portable, threads: 3}
ingest: {}
"""
# Stands for a stage: `python -m stages.ingest` finds this one first.
STAGE = """
import json, os, pathlib, signal, sys, time
pathlib.Path("started.json").write_text(json.dumps({"pid": os.getpid(), "env": dict(os.environ)}))
what = pathlib.Path("what.txt").read_text()
if what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    time.sleep(60)
if what == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(what))
"""
COMMAND = [sys.executable, "-m", "stages.harness.launch"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project whose stages are toys and whose harness is the real one."""
    (tmp_path / "params.yaml").write_text(PARAMS)
    (tmp_path / "stages").mkdir()
    for name in ("__init__.py", "core", "harness"):
        (tmp_path / "stages" / name).symlink_to(PROJECT / "stages" / name)
    for name in ("ingest", "base", "train"):
        (tmp_path / "stages" / f"{name}.py").write_text(STAGE)
    (tmp_path / "what.txt").write_text("0")
    return tmp_path


def start(root: Path, *command: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "DVC_ROOT": str(root), "DARKROOM_TRACKING": "off"}
    return subprocess.Popen(
        command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def launch(root: Path, *arguments: str) -> tuple[int, str]:
    process = start(root, *COMMAND, *arguments)
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


def started(root: Path) -> dict[str, object]:
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        try:
            return json.loads((root / "started.json").read_text())
        except (FileNotFoundError, ValueError):
            time.sleep(0.05)
    raise AssertionError("the stage never started")


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["trian"],
            "launch: error: no stage is called 'trian'; did you mean train?\n  remedy: the stages are ingest, base",
        ),
        (["stages"], "launch: error: no stage is called 'stages'\n"),
        ([], "launch: error: one stage is expected, 0 arguments are given\n"),
        (["train", "--steps=3"], "launch: error: one stage is expected, 2 arguments are given\n"),
    ],
)
def test_mistyped(root: Path, arguments: list[str], message: str) -> None:
    code, output = launch(root, *arguments)
    assert code == 1
    assert output.startswith(message)
    assert "Traceback" not in output


def test_help(root: Path) -> None:
    code, output = launch(root, "--help")
    assert code == 0
    assert output.endswith("The stages are ingest, base, preprocess, encode, train, evaluate, export.\n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "runtime: native",
            "runtime: container",
            "ingest: error: params.yaml says runtime: container, but no image digest",
        ),
        ("device: cpu", "device: auto", "ingest: error: params.yaml: device is 'auto'; set cpu or cuda"),
        ("threads: 3", "threads: 0", "ingest: error: determinism.threads is 0"),
        ("seed: 1", "seed: [", "ingest: error: params.yaml, line 3: "),
    ],
)
def test_params_that_nothing_can_run_with(root: Path, old: str, new: str, message: str) -> None:
    (root / "params.yaml").write_text(PARAMS.replace(old, new))
    code, output = launch(root, "ingest")
    assert (code, output.startswith(message)) == (1, True), output
    assert not (root / "started.json").exists()  # and it never falls back to running natively


@pytest.mark.parametrize(("what", "code"), [("0", 0), ("1", 1), ("7", 7), ("130", 130), ("die", 137)])
def test_exit_codes_are_the_stages_own(root: Path, what: str, code: int) -> None:
    (root / "what.txt").write_text(what)
    killed = (
        "ingest: killed; if nobody did, the machine ran out of memory. The same command continues from here\n"
    )
    assert launch(root, "ingest") == (code, killed if what == "die" else "")


@pytest.mark.parametrize(("stage", "offline"), [("ingest", "1"), ("base", None)])
def test_environment_of_the_stage(root: Path, stage: str, offline: str | None) -> None:
    assert launch(root, stage)[0] == 0
    environment = started(root)["env"]
    assert isinstance(environment, dict)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["ATEN_CPU_CAPABILITY"] == "avx2"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment.get("HF_HUB_OFFLINE") == offline


def test_sigterm_reaches_the_stage(root: Path) -> None:
    (root / "what.txt").write_text("wait")
    process = start(root, *COMMAND, "ingest")
    stage = int(str(started(root)["pid"]))
    time.sleep(0.5)
    process.terminate()
    assert process.wait(timeout=20) == 130
    assert gone(stage)


def test_a_killed_launcher_takes_the_stage_down(root: Path) -> None:
    (root / "what.txt").write_text("wait")
    process = start(root, *COMMAND, "ingest")
    stage = int(str(started(root)["pid"]))
    process.kill()
    process.wait()
    assert gone(stage)


# As dvc starts a stage: through a shell.
DVC = """
import subprocess, sys
subprocess.run(sys.argv[1], shell=True)
"""


@pytest.mark.parametrize(("name", "ends"), [("dvc", True), ("bash-like", False)])
def test_a_killed_dvc_ends_launcher_and_stage_and_a_shell_does_not(root: Path, name: str, ends: bool) -> None:
    (root / "what.txt").write_text("wait")
    (root / name).write_text(DVC)
    parent = start(root, sys.executable, str(root / name), " ".join([*COMMAND, "ingest"]))
    stage = int(str(started(root)["pid"]))
    launcher = int(Path(f"/proc/{stage}/stat").read_text().rpartition(")")[2].split()[1])
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    if ends:
        assert gone(stage)
        assert gone(launcher)
        return
    time.sleep(1.0)
    assert Path(f"/proc/{stage}").exists()
    os.kill(launcher, signal.SIGTERM)
    assert gone(stage)


def test_a_real_stage_started_without_the_launcher_says_so() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "stages.preprocess"],
        cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        "preprocess: error: OMP_NUM_THREADS is None instead of '1': this process was not started by the launcher\n"
        "  remedy: run the stage with `dvc repro` or `python -m stages.harness.launch STAGE`\n"
    )
