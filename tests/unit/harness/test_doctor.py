"""What the doctor finds, and that it never hangs or trips over a broken tool."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import MachineError
from stages.harness import doctor
from stages.harness.doctor import Gpu, driver, engine, report, where

CARD = Gpu(name="NVIDIA H200", free=100 * 10**9, total=140 * 10**9)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty PATH to put tools into."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(
        doctor.shutil, "which", lambda name: str(tmp_path / name) if (tmp_path / name).exists() else None
    )
    return tmp_path


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_all_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tools: Path) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: [CARD])
    rows = dict(report(tmp_path))
    assert list(rows) == [
        "Python", "torch", "CUDA", "cuDNN", "driver", "GPUs", "GPU 0", "CPU cores", "memory", "disk", "engine",
        "diffusers", "transformers", "peft", "dvc", "mlflow",
    ]  # fmt: skip
    assert rows["GPU 0"] == "NVIDIA H200, 100.0 GB of 140.0 GB free"
    assert rows["driver"] == "none"
    assert rows["engine"] == "none: stages run natively"


def test_a_missing_package_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    assert doctor._version("mlflow") == "not installed: run `make setup`"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 550.54.14; echo 550.54.14", "550.54.14"),
        ("echo NVIDIA-SMI has failed; exit 9", "nvidia-smi fails: NVIDIA-SMI has failed"),
        ("true", None),
    ],
)
def test_driver(tools: Path, script: str, found: str | None) -> None:
    tool(tools, "nvidia-smi", script)
    assert driver() == found


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch, tools: Path) -> None:
    def hang(*_args: Any, timeout: float, **_kwargs: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    tool(tools, "nvidia-smi", "true")
    monkeypatch.setattr(doctor.subprocess, "run", hang)
    assert "nvidia-smi does not answer" in str(driver())


def test_engine(tools: Path) -> None:
    assert engine() is None
    tool(tools, "podman", "echo 5.2")
    assert engine() == "podman 5.2"
    tool(tools, "docker", "exit 1")  # the client without its daemon
    assert engine() == "podman 5.2"
    tool(tools, "docker", "echo 27.1")
    assert engine() == "docker 27.1"
    (tools / "docker").write_text("no program")
    assert engine() == "podman 5.2"


def test_where(monkeypatch: pytest.MonkeyPatch, tools: Path) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: [CARD])
    assert where("cuda", "native") == "all stages run on NVIDIA H200, natively"
    tool(tools, "docker", "echo 27.1")
    assert where("cpu", "container") == "all stages run on the CPU, in containers"


def test_where_it_cannot(monkeypatch: pytest.MonkeyPatch, tools: Path) -> None:
    monkeypatch.setattr(doctor, "gpus", list)
    with pytest.raises(
        MachineError, match=r"CUDA is asked for, but torch sees no GPU\n  remedy: set device: cpu"
    ):
        where("cuda", "native")
    with pytest.raises(MachineError, match=r"container is asked for, but neither docker nor podman answers"):
        where("cpu", "container")
