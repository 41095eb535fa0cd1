"""Where and from what a run came: commit, machine, versions. To `.darkroom/provenance/` and MLflow, never to an out."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.core.errors import StoreError
from stages.core.store import write_json

_PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "dvc",
    "mlflow",
    "pandas",
    "pillow",
    "numpy",
    "safetensors",
)
# What decides which kernels torch, oneDNN and MKL choose.
_FLAGS = (
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "amx_tile",
)
_CHANGED_LISTED = 20


def collect(root: Path) -> dict[str, Any]:
    """The facts about this run, as plain values; what cannot be found is left out.

    root: the project. The commit is that of the cwd when it is inside (an experiment's temporary copy).
    """
    here = Path.cwd().resolve()
    workspace = here if here.is_relative_to(root.resolve()) else root
    cpu = _cpuinfo()
    facts: dict[str, Any] = {
        **_git(workspace),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": {
            "kind": cpu_kind(),
            "model": cpu.get("model name") or platform.processor() or platform.machine(),
            "flags": [flag for flag in _FLAGS if flag in cpu.get("flags", "").split()],
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "packages": _versions(),
    }
    for name, variable in (("dvc_exp", "DVC_EXP_NAME"), ("dvc_baseline", "DVC_EXP_BASELINE_REV")):
        if value := os.environ.get(variable):
            facts[name] = value
    lock = workspace / "requirements.lock"
    if lock.is_file():
        facts["requirements_sha256"] = hashlib.sha256(lock.read_bytes()).hexdigest()
    return facts


def write(root: Path, stage: str, facts: Mapping[str, Any]) -> Path:
    """Keep the facts of the last run of `stage`. A disk that refuses is said, and stops nothing."""
    path = root / ".darkroom" / "provenance" / f"{stage}.json"
    try:
        write_json(path, dict(facts))
    except (OSError, StoreError) as error:
        print(f"provenance: {path} was not written: {error}", file=sys.stderr, flush=True)
    return path


def tags(facts: Mapping[str, Any]) -> dict[str, str]:
    """The facts that MLflow's runs are searched by; only those that are known."""
    found: dict[str, str] = {}
    for name in ("commit", "branch", "dvc_exp", "host", "python"):
        if facts.get(name):
            found[name] = str(facts[name])
    if "dirty" in facts:
        found["dirty"] = "true" if facts["dirty"] else "false"
    found["cpu"] = facts["cpu"]["kind"]
    if gpus := facts.get("gpus"):
        found["gpu"] = ", ".join(gpu["name"] for gpu in gpus)
    if lock := facts.get("requirements_sha256"):
        found["requirements_sha256"] = lock
    for name in ("torch", "diffusers"):
        if version := facts.get("packages", {}).get(name):
            found[name] = version
    return found


def cpu_kind() -> str:
    """A short id of what CPU sums can depend on, as `GenuineIntel-6-106-avx512`; golden hashes are kept by it."""
    cpu = _cpuinfo()
    if "vendor_id" in cpu and "model" in cpu:
        flags = cpu.get("flags", "").split()
        widest = {"amx": "amx_tile", "avx512": "avx512f", "avx2": "avx2", "avx": "avx"}
        level = next((name for name, flag in widest.items() if flag in flags), "sse")
        return f"{cpu['vendor_id']}-{cpu.get('cpu family', '0')}-{cpu['model']}-{level}"
    # Arm: /proc/cpuinfo names the maker and the part instead.
    parts = [platform.machine() or "unknown", cpu.get("CPU implementer", ""), cpu.get("CPU part", "")]
    flags = cpu.get("Features", "").split()
    return "-".join([*filter(None, parts), "sve" if "sve" in flags else "base"])


def _cpuinfo() -> dict[str, str]:
    """The first processor's fields of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        found[name.strip()] = value.strip()
    return found


def _git(workspace: Path) -> dict[str, Any]:
    """Commit, branch and what differs from it among tracked files; nothing outside a repository."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    # Optional locks would make this status fight with the user's own git commands.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    text = _output(command, cwd=workspace, environment=environment)
    if text is None:
        return {}
    facts: dict[str, Any] = {}
    changed: list[str] = []
    for line in text.splitlines():
        if line.startswith("# branch.oid ") and not line.endswith("(initial)"):
            facts["commit"] = line.split()[2]
        elif line.startswith("# branch.head ") and not line.endswith("(detached)"):
            facts["branch"] = line.split()[2]
        elif line.startswith("1 "):
            changed.append(line.split(" ", 8)[8])
        elif line.startswith("2 "):
            changed.append(line.split(" ", 9)[9].split("\t")[0])
        elif line.startswith("u "):
            changed.append(line.split(" ", 10)[10])
    return {
        **facts,
        "dirty": bool(changed),
        "changed": sorted(changed)[:_CHANGED_LISTED],
        "changed_count": len(changed),
    }


def _gpus() -> list[dict[str, str]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    rows = (line.split(", ") for line in (_output(query) or "").splitlines())
    return [{"name": row[0], "memory": row[1], "driver": row[2]} for row in rows if len(row) == 3]


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _output(
    command: list[str], *, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> str | None:
    """What the command prints, or None when it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
