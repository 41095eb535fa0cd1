"""What this machine has, and what will therefore run where."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from stages.core.errors import MachineError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device; memory in bytes."""

    name: str
    free: int
    total: int


def gpus() -> list[Gpu]:
    """The GPUs that torch can use."""
    if not torch.cuda.is_available():
        return []
    found: list[Gpu] = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        found.append(Gpu(name=torch.cuda.get_device_name(number), free=free, total=total))
    return found


def driver() -> str | None:
    """The NVIDIA driver's version, or None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{tool} does not answer ({error})"
    if found.returncode:  # it explains itself on stdout
        return f"nvidia-smi fails: {' '.join(found.stdout.split())[:200]}"
    return found.stdout.split("\n")[0].strip() or None


def engine() -> str | None:
    """The container engine that answers, docker or podman, with its version; None when neither does."""
    for name in ("docker", "podman"):
        tool = shutil.which(name)
        if tool is None:
            continue
        asked = [tool, "version", "--format", "{{.Server.Version}}"]
        try:
            found = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if found.returncode == 0 and found.stdout.strip():
            return f"{name} {found.stdout.strip()}"
    return None


def report(root: Path) -> list[tuple[str, str]]:
    """Rows of (what, finding), for people."""
    memory = psutil.virtual_memory()
    disk = shutil.disk_usage(root)
    cards = gpus()
    return [
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        (
            "torch",
            f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        ),
        ("CUDA", torch.version.cuda or "none: this torch is a CPU build"),
        ("cuDNN", str(torch.backends.cudnn.version() or "none")),
        ("driver", driver() or "none"),
        ("GPUs", str(len(cards))),
        *(
            (f"GPU {n}", f"{card.name}, {_gb(card.free)} of {_gb(card.total)} free")
            for n, card in enumerate(cards)
        ),
        ("CPU cores", str(os.cpu_count())),
        ("memory", f"{_gb(memory.available)} of {_gb(memory.total)} free"),
        ("disk", f"{_gb(disk.free)} of {_gb(disk.total)} free"),
        ("engine", engine() or "none: stages run natively"),
        *((name, _version(name)) for name in ("diffusers", "transformers", "peft", "dvc", "mlflow")),
    ]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed: run `make setup`"


def where(device: str, runtime: str) -> str:
    """One sentence: what params.yaml asks for and where it will run. Raises MachineError when it cannot."""
    cards = gpus()
    if device == "cuda" and not cards:
        raise MachineError(
            "CUDA is asked for, but torch sees no GPU",
            remedy="set device: cpu in params.yaml, or install the NVIDIA driver and a CUDA build of torch "
            "(README, 'A GPU')",
        )
    if runtime == "container" and engine() is None:
        raise MachineError(
            "runtime: container is asked for, but neither docker nor podman answers",
            remedy="start the engine, or set runtime: native in params.yaml",
        )
    place = f"{cards[0].name}" if device == "cuda" else "the CPU"
    return f"all stages run on {place}, {'in containers' if runtime == 'container' else 'natively'}"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
