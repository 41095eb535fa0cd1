"""Tracking as the launcher and the command line see it: start the agent, wait for it, open MLflow's page.

Light: nothing here imports mlflow (2.8 s), and nothing that the launcher calls can fail or wait.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core.errors import ConfigError
from stages.harness.journal import JOURNAL, ProcessKey, mask_uri, read_records, tracking_on, tracking_root

DATABASE = "mlflow.db"
# What MLflow reads by itself and must not see: a run id would replace ours.
_NOT_FOR_THE_AGENT = ("MLFLOW_RUN_ID", "DARKROOM_JOURNAL", "DARKROOM_PIPELINE_KEY")
_PRIVATE = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
_FOREIGN_SECONDS = 3600.0  # a journal of another host that has been silent for so long is taken for dead


@dataclass(frozen=True)
class Report:
    """What `sync` found: stage runs that MLflow now holds whole, those it does not, and why not."""

    drained: int
    left: int
    why: str  # empty when nothing is left
    folder: Path  # where the journals wait

    def __str__(self) -> str:
        if not self.left:
            return f"MLflow holds everything ({self.drained} stage run(s) completed now)"
        return (
            f"{self.drained} stage run(s) completed now, {self.left} left: {self.why}\n"
            f"  nothing is lost: the journals wait in {self.folder}; run this again"
        )


def server_uri(tracking: Path) -> str:
    """$MLFLOW_TRACKING_URI, else the sqlite file under the tracking root."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{tracking / DATABASE}"


def journal_folders(tracking: Path) -> list[Path]:
    """The journals that MLflow does not hold whole yet, the oldest first."""
    try:
        return sorted(path for path in (tracking / "journal").iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def running(key: ProcessKey, folder: Path) -> bool:
    """Whether the process `key`, which began the journal in `folder`, still runs."""
    alive = key.alive()
    if alive is not None:
        return alive
    try:
        return time.time() - (folder / JOURNAL).stat().st_mtime < _FOREIGN_SECONDS
    except OSError:
        return False


@contextmanager
def agent_lock(tracking: Path, patience_s: float = 0.0) -> Generator[bool]:
    """Try to be the one agent of this tracking root; yields whether that worked. Raises OSError."""
    tracking.mkdir(parents=True, exist_ok=True)
    with (tracking / "agent.lock").open("a") as file:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                held = False
            if held or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        yield held


def ensure_agent(root: Path) -> None:
    """Start the agent unless one runs. Returns at once and never raises; without an agent the journals wait."""
    if not tracking_on():
        return
    tracking = tracking_root(root)
    try:
        with agent_lock(tracking) as free:
            pass
        # An agent that is about to leave looks once more after it has let go of the lock, so nothing falls between.
        if free:
            _start(root, tracking)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"tracking: the agent did not start, the journal waits: {error}", file=sys.stderr, flush=True)


def sync(root: Path, timeout_s: float) -> Report:
    """Wait until MLflow holds all that has ended, `timeout_s` at most. Runs that still go on are not waited for."""
    tracking = tracking_root(root)
    tracking.mkdir(parents=True, exist_ok=True)
    first = {folder.name for folder in journal_folders(tracking)}
    deadline = time.monotonic() + timeout_s
    starts = 0
    process: subprocess.Popen[bytes] | None = None
    waiting = [folder for folder in journal_folders(tracking) if not going_on(folder)]
    (tracking / "wake").touch()  # an agent that waits for a server to come back tries at once
    while waiting and time.monotonic() < deadline:
        if process is None or process.poll() is not None:
            with agent_lock(tracking) as free:
                pass
            if free and starts == 2:
                break
            if free:
                process = _start(root, tracking)
                starts += 1
        time.sleep(0.1)
        waiting = [folder for folder in journal_folders(tracking) if not going_on(folder)]
    left = {folder.name for folder in journal_folders(tracking)}
    return Report(
        drained=len(first - left),
        left=len(left),
        why=_why(tracking, len(waiting), len(left) - len(waiting), timeout_s),
        folder=tracking / "journal",
    )


def ui_command(root: Path, port: int) -> list[str]:
    """The command that serves MLflow's page on the local records, to this machine only.

    Raises ConfigError when $MLFLOW_TRACKING_URI names a server, which has a page of its own.
    """
    tracking = tracking_root(root)
    uri = server_uri(tracking)
    if uri.startswith(("http:", "https:", "databricks")):
        raise ConfigError(
            f"the records are on the server {mask_uri(uri)} (MLFLOW_TRACKING_URI), not here",
            remedy="open that address in a browser, or unset MLFLOW_TRACKING_URI to see the local records",
        )
    tracking.mkdir(parents=True, exist_ok=True)
    options = {
        "--backend-store-uri": uri,
        "--default-artifact-root": (tracking / "artifacts").as_uri(),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--workers": "1",
    }
    return [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        *(part for option in options.items() for part in option),
    ]


def ui_environment() -> dict[str, str]:
    """The environment for `ui_command`. Without the job runner the page is there in 5 s instead of 21 s."""
    return {**os.environ, **_PRIVATE, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def _start(root: Path, tracking: Path) -> "subprocess.Popen[bytes]":
    """Start the agent, out of reach of this terminal and of whatever ends with this process."""
    log = tracking / "agent.log"
    if log.is_file() and log.stat().st_size > 1_000_000:
        shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_THE_AGENT}
    # The project's own code comes first (the cwd); this copy's folder may be an experiment's, and vanish.
    code = Path(__file__).resolve().parents[2]
    paths = [str(code), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "stages.harness.agent", str(tracking)],
            cwd=root,
            env={
                **environment,
                **_PRIVATE,
                "PYTHONPATH": os.pathsep.join(paths),
                "GIT_PYTHON_REFRESH": "quiet",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def going_on(folder: Path) -> bool:
    """Whether more may come for this journal's runs: its stage works, or its pipeline does. False for no journal."""
    begin = first_record(folder)
    if begin is None:
        return False
    if running(ProcessKey.parse(begin["pipeline"]), folder):
        return True
    return not _has_end(folder / JOURNAL) and running(ProcessKey.parse(begin["launcher"]), folder)


def first_record(folder: Path) -> dict[str, Any] | None:
    """A journal's `begin`; None when this is no journal, or it is gone."""
    try:
        record = read_records(folder / JOURNAL, 0, limit=100_000)[0][0][1]
        for name in ("launcher", "pipeline"):
            ProcessKey.parse(record[name])
        whole = {"stage", "name", "cwd", "params", "tags", "t"} <= record.keys()
    except (OSError, IndexError, KeyError, ValueError, AttributeError):
        return None
    return record if whole else None


def _has_end(path: Path) -> bool:
    """The last line is the launcher's `end`, a short one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200))
            return file.read().rstrip(b"\n").rpartition(b"\n")[2].startswith(b'{"kind": "end"')
    except OSError:
        return False


def _why(tracking: Path, waiting: int, live: int, timeout_s: float) -> str:
    reasons: list[str] = []
    if waiting:
        problem = tracking / "problem.txt"
        reasons.append(
            problem.read_text().strip()
            if problem.is_file()
            else f"they were not sent within {timeout_s:g} s ({tracking / 'agent.log'} may say why)"
        )
    if live > 0:
        reasons.append(f"{live} belong(s) to a pipeline that still runs")
    return "; ".join(reasons)
