"""A copy of this project in an empty folder, for tests that run the real pipeline on the micro preset."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages.harness.closure import PROJECT
from stages.harness.presets import apply_preset
from stages.harness.samples import write_samples

PICTURES = 24


class Project:
    """A git and DVC repository at `root` with few pictures; commands run in it with this interpreter's environment."""

    def __init__(self, root: Path, *, pictures: int = PICTURES) -> None:
        self.root = root
        _copy_tracked(root)
        few_pictures(root / "data" / "pictures", pictures)
        apply_preset(root / "params.yaml", root / "params", "micro")
        for command in (
            ["git", "init", "-q", "-b", "main"],
            ["git", "config", "user.email", "tests@example.invalid"],
            ["git", "config", "user.name", "tests"],
            [*DVC, "add", "-q", "data/pictures"],
            ["git", "add", "-A"],
            ["git", "commit", "-q", "-m", "start"],
        ):
            self.run(*command)

    @classmethod
    def copy_of(cls, other: "Project", root: Path) -> "Project":
        """Another project's folder, with its store and DVC cache, at `root`."""
        shutil.copytree(other.root, root, symlinks=True)
        project = cls.__new__(cls)  # not through __init__, which makes a new one
        project.root = root
        return project

    def environment(self, **extra: str) -> dict[str, str]:
        """Nothing of the caller's own store, records or DVC leaks in."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("DARKROOM_", "DVC_", "MLFLOW_", "HF_"))
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
        return {**kept, "PATH": path, "PYTHONPATH": "", "DARKROOM_TRACKING": "off", **extra}

    def run(self, *command: str, code: int = 0, timeout: float = 900, **extra: str) -> str:
        """Run a command to its end; asserts its exit code, returns stdout and stderr together."""
        done = subprocess.run(command, **self._settings(extra), timeout=timeout, check=False)
        assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def dvc(self, *arguments: str, code: int = 0, **extra: str) -> str:
        """Run dvc."""
        return self.run(*DVC, *arguments, code=code, **extra)

    def start(self, *command: str, **extra: str) -> "subprocess.Popen[str]":
        """Start a command without waiting."""
        return subprocess.Popen(command, **self._settings(extra), start_new_session=True)

    def _settings(self, extra: dict[str, str]) -> dict[str, Any]:
        return {
            "cwd": self.root,
            "env": self.environment(**extra),
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }

    @property
    def lock(self) -> str:
        """dvc.lock's text."""
        return (self.root / "dvc.lock").read_text()

    @property
    def store(self) -> Path:
        """The store's folder."""
        return self.root / ".darkroom" / "store"

    def set(self, old: str, new: str) -> None:
        """Replace `old` in params.yaml, which must hold it exactly once."""
        path = self.root / "params.yaml"
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in params.yaml"
        path.write_text(text.replace(old, new))


DVC = (sys.executable, "-m", "dvc")


def few_pictures(folder: Path, count: int) -> None:
    """Every ninth or so of the sample pictures, with its captions."""
    write_samples(folder)
    lines = (folder / "metadata.jsonl").read_text().splitlines()
    kept = lines[:: len(lines) // count][:count]
    names = {json.loads(line)["file_name"] for line in kept}
    for path in folder.iterdir():
        if path.name not in names and path.name != "metadata.jsonl":
            path.unlink()
    (folder / "metadata.jsonl").write_text("\n".join(kept) + "\n")


def project_files() -> list[str]:
    """The project's files as git lists them, new ones that it does not ignore included; relative paths."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [name for name in listed.split("\0") if name and (PROJECT / name).is_file()]


def _copy_tracked(root: Path) -> None:
    """The project's files, without dvc.lock and DVC's pointer to the pictures."""
    for name in project_files():
        if name in ("dvc.lock", "data/pictures.dvc"):
            continue
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT / name, root / name)
