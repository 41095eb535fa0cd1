"""Provenance: exact facts from a real repository, and no failure where something is missing."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from stages.harness import provenance


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    (tmp_path / "a file.txt").write_text("1")
    (tmp_path / "requirements.lock").write_text("torch==2\n")
    for command in (["init", "-q", "-b", "main"], ["add", "."], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_commit_branch_and_changes(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=project, capture_output=True, text=True, check=True
    )
    facts = provenance.collect(project)
    assert facts["commit"] == head.stdout.strip()
    assert (facts["branch"], facts["dirty"], facts["changed"]) == ("main", False, [])
    (project / "new.txt").write_text("untracked files do not count")
    (project / "a file.txt").write_text("2")
    monkeypatch.setenv("DVC_EXP_NAME", "wet-plate")
    facts = provenance.collect(project)
    assert (facts["dirty"], facts["changed"], facts["dvc_exp"]) == (True, ["a file.txt"], "wet-plate")

    tags = provenance.tags(facts)
    assert tags["commit"] == head.stdout.strip()
    assert (tags["dirty"], tags["dvc_exp"], tags["cpu"]) == ("true", "wet-plate", provenance.cpu_kind())
    assert tags["requirements_sha256"] == "c49345c98c684410a2c0b2cb96c5408c3593ef84b18d67055b373ea4a37d557d"
    assert all(isinstance(value, str) for value in tags.values())


def test_an_experiment_is_described_by_its_own_copy(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = project / ".dvc" / "tmp" / "exps" / "x"
    subprocess.run(["git", "clone", "-q", str(project), str(copy)], check=True)
    (copy / "a file.txt").write_text("3")
    monkeypatch.chdir(copy)
    assert provenance.collect(project)["changed"] == ["a file.txt"]


def test_written_as_sorted_json(project: Path) -> None:
    path = provenance.write(project, "train", {"b": 1, "a": "x"})
    assert path == project / ".darkroom" / "provenance" / "train.json"
    assert path.read_text() == '{\n  "a": "x",\n  "b": 1\n}\n'


def test_a_disk_that_refuses_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".darkroom").write_text("a file where a folder should be")
    provenance.write(tmp_path, "train", {})
    assert "was not written" in capsys.readouterr().err


def test_outside_a_repository_without_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = provenance.collect(tmp_path)
    assert "commit" not in facts
    assert facts["gpus"] == []
    assert facts["packages"]["dvc"].startswith("3.")
    assert facts["memory_bytes"] > 1e8
    json.dumps(facts, allow_nan=False)


def test_gpus_as_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 580.1'\necho 'NVIDIA L4, 23034 MiB, 580.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = provenance.collect(tmp_path)
    assert facts["gpus"][0] == {"name": "NVIDIA H200", "memory": "143771 MiB", "driver": "580.1"}
    assert provenance.tags(facts)["gpu"] == "NVIDIA H200, NVIDIA L4"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (
            "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 106\nflags : avx avx2 avx512f",
            "GenuineIntel-6-106-avx512",
        ),
        (
            "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\nflags : avx2 avx512f amx_tile",
            "GenuineIntel-6-143-amx",
        ),
        ("vendor_id : AuthenticAMD\ncpu family : 25\nmodel : 1\nflags : avx avx2", "AuthenticAMD-25-1-avx2"),
        (
            "processor : 0\nFeatures : fp asimd sve\nCPU implementer : 0x41\nCPU part : 0xd40",
            "aarch64-0x41-0xd40-sve",
        ),
    ],
)
def test_cpu_kinds(fields: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [line.split(" : ") for line in fields.splitlines()]
    monkeypatch.setattr(provenance, "_cpuinfo", lambda: dict(rows))
    monkeypatch.setattr(provenance.platform, "machine", lambda: "aarch64")
    assert provenance.cpu_kind() == kind


def test_this_cpu_has_a_kind() -> None:
    assert re.fullmatch(r"[\w.-]+", provenance.cpu_kind())
