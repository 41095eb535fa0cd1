"""What surrounds a stage: folders, fingerprints, errors, signals, progress."""

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.core.determinism import DeterminismConfig
from stages.core.errors import MachineError, StoreError
from stages.core.store import Store
from stages.harness import progress as progress_module
from stages.harness import run
from stages.harness.closure import PROJECT
from stages.harness.config import SharedConfig
from stages.harness.journal import NullJournal
from stages.harness.progress import progress
from stages.harness.run import Stage, check_device, project_root, store_root

SHARED = SharedConfig(
    seed=7, device="cpu", runtime="native", determinism=DeterminismConfig(mode="portable", threads=1)
)
STAGE = Stage(name="encode", root=Path("/w"), shared=SHARED, store=Store(Path("/s")), tracker=NullJournal())


def test_folders() -> None:
    assert STAGE.out == Path("/w/data/encode")
    assert STAGE.folder("ingest") == Path("/w/data/ingest")


def test_fingerprint_changes_with_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [STAGE.fingerprint(a=1, config=SHARED.determinism)]
    assert STAGE.fingerprint(config=SHARED.determinism, a=1) == found[0]
    threads = DeterminismConfig(mode="portable", threads=2)
    found += [
        STAGE.fingerprint(a=2, config=SHARED.determinism),
        STAGE.fingerprint(a=1, config=threads),
        replace(STAGE, name="train").fingerprint(a=1, config=SHARED.determinism),
        replace(STAGE, shared=replace(SHARED, device="cuda")).fingerprint(a=1, config=SHARED.determinism),
        replace(STAGE, shared=replace(SHARED, determinism=threads)).fingerprint(
            a=1, config=SHARED.determinism
        ),
    ]
    # What must not matter: the seed (a stage that depends on it says so), the folder, the runtime.
    same = replace(STAGE, root=Path("/x"), shared=replace(SHARED, seed=8, runtime="container"))
    assert same.fingerprint(a=1, config=SHARED.determinism) == found[0]
    version = run.importlib.metadata.version
    for library in ("torch", "diffusers", "transformers", "tokenizers", "pillow"):
        with monkeypatch.context() as patch:
            patch.setattr(
                run.importlib.metadata,
                "version",
                lambda name, library=library: "0" if name == library else version(name),
            )
            found.append(STAGE.fingerprint(a=1, config=SHARED.determinism))
    with monkeypatch.context() as patch:
        patch.setattr(run, "closure_digest", lambda _module: "edited")
        found.append(STAGE.fingerprint(a=1, config=SHARED.determinism))
    assert len(set(found)) == len(found) == 12


def test_shared_state_lives_under_dvc_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert project_root() == tmp_path  # no git here
    subprocess.run(["git", "init", "-q"], check=True)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert project_root() == tmp_path
    monkeypatch.setenv("DVC_ROOT", "/elsewhere")
    assert store_root() == Path("/elsewhere/.darkroom/store")
    monkeypatch.setenv("DARKROOM_STORE", "/large/disk")
    assert store_root() == Path("/large/disk")


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        MachineError, match=r"device: cuda, but torch .* sees no GPU\n  remedy: set device: cpu, or install"
    ):
        check_device("cuda")
    check_device("cpu")


# --- a stage as a process: the harness around a few lines of work

SCRIPT = '''"""toy: does what it is told.

Second line.
"""
import errno, sys, time
from dataclasses import dataclass
from stages.core.errors import SourceError
from stages.harness.run import stage_main

@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    what: str

def work(cfg, stage):
    stage.say(cfg.what)
    if cfg.what == "bad": raise SourceError("a.txt, line 3: bad", remedy="mend it")
    if cfg.what == "full": raise OSError(errno.ENOSPC, "No space left on device", "/x/y")
    if cfg.what == "bug": raise ValueError("a bug")
    if cfg.what == "missing": open("/no/such/file")
    if cfg.what == "wait": time.sleep(60)

stage_main("train", ToyConfig, work)
'''
PARAMS = """seed: 1
device: cpu
runtime: native
determinism: {mode: portable, threads: 1}
train: {what: WHAT}
"""


def toy(root: Path, what: str, *arguments: str) -> "subprocess.Popen[str]":
    (root / "toy.py").write_text(SCRIPT)
    (root / "params.yaml").write_text(PARAMS.replace("WHAT", what))
    return subprocess.Popen(
        [sys.executable, "toy.py", *arguments],
        cwd=root, env={**os.environ, "PYTHONPATH": str(PROJECT)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("what", "code", "error"),
    [
        ("good", 0, ""),
        ("bad", 1, "train: error: a.txt, line 3: bad\n  remedy: mend it\n"),
        ("full", 1, "train: error: [Errno 28] No space left on device: '/x/y'\n  remedy: free space or make the folder "
         "writable, then run the same command again\n"),
        ("7", 1, "train: error: params.yaml: train.what is 7, expected str\n  remedy: correct params.yaml; docs/params.md "
         "explains every field\n"),
    ],
)  # fmt: skip
def test_one_plain_error_and_no_traceback(tmp_path: Path, what: str, code: int, error: str) -> None:
    process = toy(tmp_path, what)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, error)
    assert out == ("" if what == "7" else f"train: {what}\n")


@pytest.mark.parametrize(
    ("what", "error"), [("bug", "ValueError: a bug"), ("missing", "FileNotFoundError: ")]
)
def test_an_unknown_error_keeps_its_traceback(tmp_path: Path, what: str, error: str) -> None:
    process = toy(tmp_path, what)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.splitlines()[-1].startswith(error)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_130_and_one_line_also_when_it_comes_twice(tmp_path: Path, number: int) -> None:
    process = toy(tmp_path, "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "train: wait\n"
    process.send_signal(number)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "train: stopped; the same command continues from here\n")


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("-h", 0), ("--steps=3", 2)])
def test_help_and_arguments(tmp_path: Path, argument: str, code: int) -> None:
    process = toy(tmp_path, "good", argument)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == (
        "toy: does what it is told.\n\nSecond line.\n\n"
        "Parameters: section `train` of params.yaml; run it with `dvc repro train`.\n"
    )


# --- progress


class Log(io.StringIO):
    """Standard error of a job in CI."""


def test_a_short_loop_prints_nothing_into_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    monkeypatch.setattr(sys, "stderr", log)
    assert list(progress(range(1000), total=1000, what="train: full", unit="steps")) == list(range(1000))
    assert log.getvalue() == ""


def test_a_long_loop_prints_whole_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    log, clock = Log(), [0.0]
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    for _ in progress(range(6), total=10, what="train: full", unit="steps", done=4):
        clock[0] += 20.0
    # Looked at after each item; 30 s have passed at 40, 80 and 120 s.
    assert log.getvalue().splitlines() == [
        "train: full: 6 of 10 steps, 0.05 a second, 80 s left",
        "train: full: 8 of 10 steps, 0.05 a second, 40 s left",
        "train: full: 10 of 10 steps, 0.05 a second, 0 s left",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_person_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen: Any = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    for _ in progress(range(3), total=5, what="train: full", unit="steps", done=2):
        time.sleep(0.4)
    assert "train: full" in screen.getvalue()
    assert "/5" in screen.getvalue()


def test_native_work_is_kept_apart_by_kind_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    native = replace(SHARED, determinism=DeterminismConfig(mode="native", threads=1))
    prints: dict[tuple[str, str], str] = {}
    for kind in ("a", "b"):
        monkeypatch.setattr(run, "cpu_kind", lambda kind=kind: kind)
        for shared in (SHARED, native):
            prints[kind, shared.determinism.mode] = replace(STAGE, shared=shared).fingerprint()
    assert prints["a", "native"] != prints["b", "native"]
    assert prints["a", "portable"] == prints["b", "portable"]


def test_a_store_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DARKROOM_STORE", str(tmp_path / "file" / "store"))
    with pytest.raises(
        StoreError, match=r"file/store cannot be made: Not a directory\n  remedy: set DARKROOM_STORE"
    ):
        run.usable_store()
