"""The journal: what a stage tells MLflow, as lines of JSON in a file. The stage's process never imports mlflow.

<tracking root>/journal/<name>/journal.jsonl    begin (launcher), then the stage's records, then end (launcher)
<tracking root>/journal/<name>/files/           copies of images and artifacts: outs may be replaced before they are read

The agent (agent.py) replays journals to MLflow. A record costs the stage one `write`, and whatever goes wrong here or
there costs it one warning: tracking can change neither bytes nor speed nor the exit code.
"""

import json
import math
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["FINISHED", "FAILED", "KILLED"]
JOURNAL = "journal.jsonl"

_SECRET = re.compile(r"token|secret|password|api_key", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_YAML_SECRET = re.compile(
    r"""((?:^|[\s{,"'])[\w.-]*(?:token|secret|password|api_key)[\w.-]*["']?:[ \t]+)([^\s,{}\[\]][^,}\n]*)""",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class ProcessKey:
    """One process, told apart from every other, earlier and elsewhere: a pid alone is reused."""

    host: str
    boot: str  # of /proc/sys/kernel/random/boot_id: start times count from the boot
    pid: int
    start: int  # clock ticks after the boot, exact where a wall-clock start time drifts

    def __str__(self) -> str:
        return f"{self.host}:{self.boot}:{self.pid}:{self.start}"

    @classmethod
    def of(cls, pid: int) -> "ProcessKey":
        """The process that has `pid` now; start is 0 when there is none."""
        stat = _stat(pid)
        return cls(host=socket.gethostname(), boot=_boot(), pid=pid, start=stat[2] if stat else 0)

    @classmethod
    def parse(cls, text: str) -> "ProcessKey":
        """The inverse of `str`. Raises ValueError."""
        host, boot, pid, start = text.rsplit(":", 3)
        return cls(host=host, boot=boot, pid=int(pid), start=int(start))

    def alive(self) -> bool | None:
        """Whether it still runs; None when it belongs to another host, where nobody here can look."""
        if self.host != socket.gethostname():
            return None
        stat = _stat(self.pid)
        return self.boot == _boot() and stat is not None and stat[0] not in "ZX" and stat[2] == self.start


@dataclass(frozen=True)
class PipelineKey(ProcessKey):
    """The process that one execution of the pipeline is: the nearest `dvc` above, else the launcher itself."""

    @classmethod
    def current(cls) -> "PipelineKey":
        """$DARKROOM_PIPELINE_KEY (set inside containers, where dvc is out of sight), else by walking up."""
        given = os.environ.get("DARKROOM_PIPELINE_KEY", "")
        try:
            return cls(**vars(ProcessKey.parse(given)))
        except ValueError:
            pid = dvc_ancestor(os.getpid()) or os.getpid()
            return cls(**vars(ProcessKey.of(pid)))


def dvc_ancestor(pid: int) -> int | None:
    """The pid of the nearest process above `pid` that is the dvc command."""
    stat = _stat(pid)
    while stat and stat[1] > 0:
        parent = stat[1]
        if _is_dvc(_command(parent)):
            return parent
        stat = _stat(parent)
    return None


def _is_dvc(command: list[str]) -> bool:
    if not command:
        return False
    if Path(command[0]).name == "dvc":
        return True
    if not Path(command[0]).name.startswith("python"):
        return False
    # python [-u ...] /somewhere/bin/dvc repro, or python -m dvc repro
    for position, argument in enumerate(command[1:], start=1):
        if argument == "-m":
            return command[position + 1 : position + 2] == ["dvc"]
        if not argument.startswith("-"):
            return Path(argument).name == "dvc"
    return False


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State letter, parent's pid and start in ticks; None when there is no such process."""
    try:
        # The name, in brackets, may hold anything, also spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[1]), int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def _command(pid: int) -> list[str]:
    try:
        return [part for part in Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0") if part]
    except OSError:
        return []


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return "-"


def tracking_root(root: Path) -> Path:
    """$DARKROOM_TRACKING_ROOT (relative to the project), else .darkroom/mlflow in the project `root`; absolute."""
    return (root / (os.environ.get("DARKROOM_TRACKING_ROOT") or Path(".darkroom", "mlflow"))).absolute()


def tracking_on() -> bool:
    """$DARKROOM_TRACKING is not `off`. It is no parameter of the pipeline: it cannot change a byte."""
    return os.environ.get("DARKROOM_TRACKING", "on").strip().lower() != "off"


def masked(key: str, value: object) -> str:
    """`value` as MLflow's text: JSON for what is not text; secrets and the credentials in URIs are hidden."""
    if _SECRET.search(key):
        return "***"
    return mask_uri(value if isinstance(value, str) else json.dumps(value, default=str))


def mask_uri(text: str) -> str:
    """scheme://user:password@host -> scheme://***@host, wherever it stands in `text`."""
    return _CREDENTIALS.sub("***@", text)


def mask_yaml(text: str) -> str:
    """A YAML file's text with the values of secret keys, and the credentials in URIs, hidden."""
    return mask_uri(_YAML_SECRET.sub(r"\1'***'", text))


class Journal:
    """Appends a stage's records to its journal. No method raises; the first failure to write silences it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = 0
        self._handle: int | None = None
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self._give_up(error)

    def params(self, values: Mapping[str, object]) -> None:
        """Facts that are fixed before the work: flat names, any values."""
        self._write("params", values={key: masked(key, value) for key, value in values.items()})

    def tags(self, values: Mapping[str, object]) -> None:
        """Facts about the run; a later value replaces an earlier one."""
        self._write("tags", values={key: masked(key, value) for key, value in values.items()})

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Numbers at a step; the time is now. NaN and infinity are kept."""
        try:
            self._write("metrics", step=int(step), values={key: _number(x) for key, x in values.items()})
        except (TypeError, ValueError) as error:
            _warn(f"a metric was not recorded: {error}")

    def image(self, key: str, path: Path, step: int = 0) -> None:
        """A picture file, shown under `key` at a step. It is copied now."""
        if name := self._keep(path):
            self._write("image", key=key, file=name, step=int(step))

    def artifact(self, path: Path, folder: str = "") -> None:
        """A file or a folder, placed in the run's artifact folder `folder`. It is copied now."""
        if name := self._keep(path):
            self._write("artifact", file=name, folder=folder)

    def dataset(self, name: str, digest: str, source: str, counts: Mapping[str, float]) -> None:
        """The data that the stage read: its digest, where it is, and how much of what."""
        try:
            numbers = {key: _number(x) for key, x in counts.items()}
            self._write("dataset", name=name, digest=digest, source=mask_uri(source), counts=numbers)
        except (TypeError, ValueError) as error:
            _warn(f"a dataset was not recorded: {error}")

    def _keep(self, path: Path) -> str | None:
        """Copy `path` beside the journal; its name there, or None."""
        if self._handle is None:
            return None
        self._files += 1
        name = f"{os.getpid()}-{self._files:06d}/{path.name}"
        target = self._path.parent / "files" / name
        try:
            target.parent.mkdir(parents=True)
            if path.is_dir():
                shutil.copytree(path, target)
            else:
                shutil.copyfile(path, target)
        except FileNotFoundError as error:
            _warn(f"{path} was not recorded: {error}")
            return None
        except OSError as error:
            self._give_up(error)
            return None
        return name

    def _write(self, kind: str, **fields: Any) -> None:
        if self._handle is None:
            return
        try:
            _append(self._handle, kind, fields)
        except OSError as error:
            self._give_up(error)
        except (TypeError, ValueError) as error:
            _warn(f"a record ({kind}) was not kept: {error}")

    def _give_up(self, error: OSError) -> None:
        self._handle = None  # not closed: a thread may be writing to it, and the process ends soon
        _warn(f"tracking stopped for this stage, the work goes on: {error}")


class NullJournal:
    """What a stage gets when nobody tracks: the same methods, no effect."""

    def params(self, values: Mapping[str, object]) -> None: ...

    def tags(self, values: Mapping[str, object]) -> None: ...

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None: ...

    def image(self, key: str, path: Path, step: int = 0) -> None: ...

    def artifact(self, path: Path, folder: str = "") -> None: ...

    def dataset(self, name: str, digest: str, source: str, counts: Mapping[str, float]) -> None: ...


def open_journal() -> Journal | NullJournal:
    """The stage's journal: the file that the launcher named in $DARKROOM_JOURNAL."""
    path = os.environ.get("DARKROOM_JOURNAL")
    return Journal(Path(path)) if path else NullJournal()


def begin(
    root: Path, stage: str, *, params: Mapping[str, object], tags: Mapping[str, object], pipeline: PipelineKey
) -> Path | None:
    """Start the journal of one run of `stage`; None when tracking is off or the disk refuses. Never raises.

    root: the project. params: flat, of this stage; the whole params.yaml of the cwd is copied for the parent run.
    """
    if not tracking_on():
        return None
    now = time.time()
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}-{stage}-{uuid.uuid4().hex[:8]}"
    parent = tracking_root(root) / "journal"
    # The agent looks at names without a leading dot: it never meets half a beginning.
    building = parent / f".{name}"
    try:
        (building / "files").mkdir(parents=True)
        if Path("params.yaml").is_file():
            text = Path("params.yaml").read_text(errors="replace")
            (building / "files" / "params.yaml").write_text(mask_yaml(text))
        fields = {
            "stage": stage,
            "launcher": str(ProcessKey.of(os.getpid())),
            "pipeline": str(pipeline),
            "name": _pipeline_name(now, stage, tags, pipeline),
            "cwd": str(Path.cwd()),
            "params": {key: masked(key, value) for key, value in params.items()},
            "tags": {key: masked(key, value) for key, value in tags.items()},
        }
        handle = os.open(building / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _append(handle, "begin", fields)
        finally:
            os.close(handle)
        building.rename(parent / name)
    except (OSError, TypeError, ValueError) as error:
        _warn(f"this run of {stage} is not tracked: {error}")
        shutil.rmtree(building, ignore_errors=True)
        return None
    return parent / name / JOURNAL


def end(path: Path | None, status: Status) -> None:
    """Close the journal with the stage's status. Never raises; without it the agent will say KILLED."""
    if path is None:
        return
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            size = os.lseek(handle, 0, os.SEEK_END)
            # A stage killed in mid-write leaves half a line, which must not swallow this one.
            if size and os.pread(handle, 1, size - 1) != b"\n":
                os.write(handle, b"\n")
            _append(handle, "end", {"status": status})
        finally:
            os.close(handle)
    except OSError as error:
        _warn(f"the end of this run was not recorded: {error}")


def read_records(
    path: Path, offset: int, limit: int = 4_000_000
) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Whole lines from byte `offset`: (where the line starts, record) each, and the offset to go on from.

    A last line without its newline waits: it is being written, or it was torn. A damaged line is left out.
    """
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(limit)
        while b"\n" not in data and (more := file.read(limit)):
            data += more
    whole = data[: data.rfind(b"\n") + 1]
    records: list[tuple[int, dict[str, Any]]] = []
    position = offset
    for line in whole.splitlines(keepends=True):
        try:
            value = json.loads(line)
            if isinstance(value, dict):
                records.append((position, value))
        except ValueError:
            pass
        position += len(line)
    return records, position


def _append(handle: int, kind: str, fields: dict[str, Any]) -> None:
    """One record in one write: records of several processes do not mix, a kill leaves at most one torn line."""
    line = json.dumps({"kind": kind, "t": int(time.time() * 1000), **fields}, allow_nan=False)
    data = (line + "\n").encode()
    if os.write(handle, data) != len(data):
        raise OSError("the disk took a part of a record")


def _number(value: float) -> float | str:
    """Non-finite numbers as text, which JSON lacks; `float()` reads it back."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _pipeline_name(now: float, stage: str, tags: Mapping[str, object], pipeline: PipelineKey) -> str:
    by_hand = pipeline.pid == os.getpid()
    parts = [stage if by_hand else "repro", time.strftime("%Y-%m-%d %H:%M", time.localtime(now))]
    if commit := str(tags.get("commit") or "")[:7]:
        parts.append(f"{tags.get('branch') or 'detached'}@{commit}")
    if experiment := os.environ.get("DVC_EXP_NAME"):
        parts.append(f"exp {experiment}")
    return " ".join(parts)


def _warn(message: str) -> None:
    print(f"tracking: {mask_uri(message)}", file=sys.stderr, flush=True)
