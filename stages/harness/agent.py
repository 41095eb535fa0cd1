"""The agent: replays journals to MLflow, beside the pipeline. `python -m stages.harness.agent TRACKING_ROOT`

One agent per tracking root. It follows the journals of running stages (twice a second), keeps one parent run per
execution of the pipeline with one child per stage, and leaves when nothing is left to do. Everything it does may be
done twice: its position is saved after the work, and all that it sends is the same the second time.
"""

import json
import logging
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from stages.core.store import write_atomic, write_json
from stages.harness.journal import JOURNAL, ProcessKey, mask_uri, mask_yaml, masked, read_records
from stages.harness.tracking import (
    DATABASE,
    agent_lock,
    first_record,
    going_on,
    journal_folders,
    running,
    server_uri,
)

T = TypeVar("T")
POLL_SECONDS = 0.5
EXPERIMENT = "darkroom"
_SYSTEM_SECONDS = 5
_BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
_LAST_TRIES = 2  # more tries when the server is away and nothing runs any more: about 3 s
_PARAMETER_CHARACTERS = 6000  # MLflow's limits (mlflow/utils/validation.py); it would cut without a word
_TAG_CHARACTERS = 8000
_METRICS_PER_CALL = 1000
_PER_CALL = 100
# Answers about one record, not about the server: trying again cannot help.
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")

log = logging.getLogger("darkroom.agent")


@dataclass
class Position:
    """How far a journal has been sent; kept beside it."""

    offset: int = 0
    run_id: str = ""
    status: str = ""  # of the finished child; empty while it goes on


@dataclass
class Pipeline:
    """What this agent knows of one parent run."""

    run_id: str
    workspace: Path  # where dvc runs; an experiment's may vanish
    lock_time: float = 0.0  # of the dvc.lock that was sent last


@dataclass
class Pending:
    """Records that go to MLflow in common calls."""

    metrics: list[Any] = field(default_factory=list[Any])
    headline: list[Any] = field(default_factory=list[Any])  # the metrics that the parent gets as well


def make_database(tracking: Path) -> None:
    """Make the local database if it is missing: under another name first, so that a full disk or a kill in the middle of
    MLflow's migrations leaves nothing that can never be opened again."""
    from mlflow import MlflowClient

    path, building = tracking / DATABASE, tracking / f".{DATABASE}.building"
    if path.exists():
        return
    building.unlink(missing_ok=True)
    MlflowClient(f"sqlite:///{building}").search_experiments()
    building.rename(path)


class Runs:
    """MLflow as the agent uses it: every call may be repeated, and no refused record holds up the others."""

    def __init__(self, tracking: Path) -> None:
        from mlflow import MlflowClient

        self._uri = server_uri(tracking)
        if self._uri == f"sqlite:///{tracking / DATABASE}":
            make_database(tracking)
        self._client = MlflowClient(self._uri)
        # A server decides for itself where artifacts are; a local database must not take it from the cwd.
        local = self._uri.startswith("sqlite:")
        location = (tracking / "artifacts").as_uri() if local else None
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found else self._client.create_experiment(name, location)

    def find_or_create(self, tags: dict[str, str], more: dict[str, str], name: str, start: int) -> str:
        """The run that has all of `tags`, else a new one with `more` tags as well. start: ms."""
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found = self._client.search_runs([self._experiment], wanted, max_results=1)
        if found:
            return str(found[0].info.run_id)
        every = {key: _cut(value, _TAG_CHARACTERS) for key, value in {**more, **tags}.items()}
        run = self._client.create_run(self._experiment, start_time=start, run_name=name, tags=every)
        return str(run.info.run_id)

    def params(self, run_id: str, values: dict[str, str]) -> None:
        """Parameters; a long one is cut and whole in the artifact folder `params`. A changed one stays as it was."""
        from mlflow.entities import Param

        for key, value in values.items():
            if len(value) > _PARAMETER_CHARACTERS:
                self.text(run_id, value, f"params/{key.replace('/', '.')}.txt")
        params = [Param(key, _cut(value, _PARAMETER_CHARACTERS)) for key, value in values.items()]
        self._batches(params, _PER_CALL, lambda part: self._client.log_batch(run_id, params=part))

    def tags(self, run_id: str, values: dict[str, str]) -> None:
        """Tags; the last value stays."""
        from mlflow.entities import RunTag

        tags = [RunTag(key, _cut(value, _TAG_CHARACTERS)) for key, value in values.items()]
        self._batches(tags, _PER_CALL, lambda part: self._client.log_batch(run_id, tags=part))

    def metrics(self, run_id: str, metrics: Sequence[Any]) -> None:
        """Metrics with their own times and steps; MLflow keeps one of two equal ones."""
        self._batches(metrics, _METRICS_PER_CALL, lambda part: self._client.log_batch(run_id, metrics=part))

    def text(self, run_id: str, text: str, file: str) -> None:
        """`text` as the artifact `file`."""
        self._one(file, lambda: self._client.log_text(run_id, text, file))

    def artifact(self, run_id: str, path: Path, folder: str) -> None:
        """A file or folder as an artifact; a second time it replaces itself."""
        if path.exists():
            self._one(str(path), lambda: self._client.log_artifact(run_id, str(path), folder or None))
        else:
            log.warning("%s is gone and was not sent", path)

    def image(self, run_id: str, path: Path, key: str, step: int, time_ms: int, mark: str) -> None:
        """A picture as MLflow's page shows them by step: `log_image`, but with a name that repeats (`mark`)."""
        from PIL import Image

        try:
            with Image.open(path) as picture:
                picture.load()
        except OSError as error:
            raise ValueError(f"{path.name} is no picture: {error}") from error
        name = f"{key.replace('/', '~')}+step+{step}+timestamp+{time_ms}+{mark}"
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder, f"{name}.png")
            if picture.format == "PNG":
                shutil.copyfile(path, whole)
            else:
                picture.save(whole)
            small = picture.convert("RGBA" if "A" in picture.getbands() else "RGB")
            small.thumbnail((256, 256))
            small.save(Path(folder, f"{name}+compressed.webp"))
            self._one(key, lambda: self._client.log_artifacts(run_id, folder, "images"))
        self.tags(run_id, {"mlflow.loggedImages": "True"})

    def dataset(self, run_id: str, record: dict[str, Any]) -> None:
        """A dataset's digest, place and counts."""
        from mlflow.entities import Dataset, DatasetInput

        digest = str(record["digest"])
        entry = Dataset(
            name=str(record["name"]),
            digest=digest[:36],  # MLflow's limit; whole in the profile
            source_type="local",
            source=json.dumps({"uri": record["source"]}),
            profile=json.dumps({"digest": digest, **record["counts"]}),
        )
        self._one(
            entry.name, lambda: self._client.log_inputs(run_id, datasets=[DatasetInput(entry, tags=[])])
        )

    def finish(self, run_id: str, status: str, end: int) -> None:
        """Set the run's status and end (ms)."""
        self._one(status, lambda: self._client.set_terminated(run_id, status, end))

    def system_monitor(self, run_id: str) -> Any:
        """MLflow's own monitor of CPU, memory, disk, network and GPUs, already started."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(
            run_id, sampling_interval=_SYSTEM_SECONDS, resume_logging=True, tracking_uri=self._uri
        )
        monitor.start()
        return monitor

    def _batches(self, items: Sequence[T], size: int, send: Callable[[Sequence[T]], object]) -> None:
        for start in range(0, len(items), size):
            part = items[start : start + size]
            if self._refused(lambda part=part: send(part)) is None:
                continue
            # One of them is at fault; the others must arrive.
            for item in part:
                if reason := self._refused(lambda item=item: send([item])):
                    log.warning("MLflow refused %s: %s", getattr(item, "key", item), reason)

    def _one(self, what: str, send: Callable[[], object]) -> None:
        if reason := self._refused(send):
            log.warning("MLflow refused %s: %s", what, reason)

    def _refused(self, send: Callable[[], object]) -> str | None:
        """None when it went well, the reason when repeating cannot help; raises when the server is away."""
        from mlflow.exceptions import MlflowException

        try:
            send()
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            return mask_uri(str(error)).split("\n")[0][:300]
        return None


class Agent:
    """Follows every journal under one tracking root until none is left, or the server is away and nothing runs."""

    def __init__(self, tracking: Path) -> None:
        self.tracking = tracking
        self.seen: set[str] = set()  # journals that this agent has looked at
        self._runs: Runs | None = None
        self._pipelines: dict[str, Pipeline] = {}
        self._monitors: dict[str, Any] = {}

    def run(self) -> None:
        """Work until there is nothing to do."""
        failures, last_tries = 0, 0
        while folders := journal_folders(self.tracking):
            self.seen |= {folder.name for folder in folders}
            try:
                self._runs = self._runs or Runs(self.tracking)
                for folder in folders:
                    self._follow(folder)
                self._close(folders)
            except _away() as error:
                failures += 1
                self._note(error, failures)
                live = any(going_on(folder) for folder in folders)
                last_tries = 0 if live else last_tries + 1
                if last_tries > _LAST_TRIES:
                    break
                self._wait(_BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS)) - 1], live)
                continue
            if failures:
                log.info("MLflow answers again")
            failures = last_tries = 0
            (self.tracking / "problem.txt").unlink(missing_ok=True)
            if journal_folders(self.tracking):
                time.sleep(POLL_SECONDS)
        self._stop_monitors()

    def _note(self, error: BaseException, failures: int) -> None:
        self._stop_monitors()  # they end at the first failed call; started anew when the server is back
        self._runs = None
        uri = mask_uri(server_uri(self.tracking))
        text = f"MLflow at {uri} is away: {mask_uri(str(error))[:500]}"
        if failures == 1:
            log.warning("%s", text)
        try:
            write_atomic(self.tracking / "problem.txt", (text.split("\n")[0] + "\n").encode())
        except _away():
            log.warning("the disk is full as well")

    def _wait(self, seconds: float, live: bool) -> None:
        """Back off; `tracking sync` and the end of the last stage cut it short."""
        woken = _modified(self.tracking / "wake")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and woken == _modified(self.tracking / "wake"):
            if live and not any(going_on(folder) for folder in journal_folders(self.tracking)):
                return
            time.sleep(POLL_SECONDS)

    def _follow(self, folder: Path) -> None:
        """Send what one journal holds beyond its position."""
        position = _load(folder)
        if position.status:
            return
        # Looked at before the reading: whatever a launcher wrote before it died is then read below.
        begin = first_record(folder)
        if begin is None:
            return
        gone = not running(ProcessKey.parse(begin["launcher"]), folder)
        pipeline = self._pipeline(begin, folder)
        if not position.run_id:
            position.run_id = self._child(folder, begin, pipeline)
            write_json(folder / "position.json", asdict(position))
        ended: tuple[str, int] | None = None
        while ended is None:
            records, offset = read_records(folder / JOURNAL, position.offset)
            if offset == position.offset:
                break
            ended = self._send(folder, position, records, pipeline)
            position.offset = offset
            if ended is None:
                write_json(folder / "position.json", asdict(position))
        if ended is None and gone:
            ended = ("KILLED", int(_modified(folder / JOURNAL) * 1000))
        if ended is None:
            here = ProcessKey.parse(begin["launcher"]).alive()
            if here and position.run_id not in self._monitors:
                self._monitors[position.run_id] = self._here.system_monitor(position.run_id)
            return
        if monitor := self._monitors.pop(position.run_id, None):
            monitor.finish()
        status, end = ended
        self._here.finish(position.run_id, status, end)
        position.status = status
        write_json(folder / "position.json", asdict(position))
        shutil.rmtree(folder / "files", ignore_errors=True)
        log.info("%s: %s", folder.name, status)

    def _send(
        self, folder: Path, position: Position, records: list[tuple[int, dict[str, Any]]], pipeline: Pipeline
    ) -> tuple[str, int] | None:
        """Send the records; the status and time of an `end` among them."""
        ended: tuple[str, int] | None = None
        pending = Pending()
        for offset, record in records:
            try:
                if record["kind"] == "end":
                    ended = (str(record["status"]), int(record["t"]))
                elif record["kind"] == "metrics":
                    _queue(pending, record)
                elif record["kind"] != "begin":
                    self._single(folder, position.run_id, offset, record)
            except (KeyError, TypeError, ValueError) as error:
                log.warning("%s, byte %d: damaged record left out: %r", folder.name, offset, error)
        self._here.metrics(position.run_id, pending.metrics)
        self._here.metrics(pipeline.run_id, pending.headline)
        return ended

    def _single(self, folder: Path, run_id: str, offset: int, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "params":
            self._here.params(run_id, record["values"])
        elif kind == "tags":
            self._here.tags(run_id, record["values"])
        elif kind == "artifact":
            self._here.artifact(run_id, folder / "files" / record["file"], record["folder"])
        elif kind == "image":
            path = folder / "files" / record["file"]
            mark = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{folder.name}:{offset}"))
            self._here.image(run_id, path, record["key"], record["step"], record["t"], mark)
        elif kind == "dataset":
            self._here.dataset(run_id, record)

    def _pipeline(self, begin: dict[str, Any], folder: Path) -> Pipeline:
        """The parent run, found by its key; with the whole params.yaml on first sight."""
        key = begin["pipeline"]
        if key in self._pipelines:
            return self._pipelines[key]
        tags = begin["tags"]
        more = {**tags, "mlflow.note.content": _pipeline_note(begin), **_source(begin, "dvc")}
        run_id = self._here.find_or_create(
            {"pipeline_key": key, "role": "pipeline"}, more, begin["name"], begin["t"]
        )
        pipeline = Pipeline(run_id, Path(begin["cwd"]))
        if (path := folder / "files" / "params.yaml").is_file():
            self._here.params(run_id, _flat_params(path))
            self._here.artifact(run_id, path, "")
        self._pipelines[key] = pipeline
        return pipeline

    def _child(self, folder: Path, begin: dict[str, Any], pipeline: Pipeline) -> str:
        stage = begin["stage"]
        more = {
            **begin["tags"],
            **_source(begin, f"stages/{stage}"),
            "pipeline_key": begin["pipeline"],
            "role": "stage",
            "stage": stage,
            "mlflow.parentRunId": pipeline.run_id,
            "mlflow.note.content": _child_note(begin),
        }
        run_id = self._here.find_or_create({"journal": folder.name}, more, stage, begin["t"])
        self._here.params(run_id, begin["params"])
        return run_id

    def _close(self, folders: list[Path]) -> None:
        """End the parents whose dvc is gone and whose journals are sent; then their journals may go."""
        groups: dict[str, list[tuple[Path, str]]] = {}
        for folder in folders:
            begin = first_record(folder)
            if begin is None:
                log.warning("%s is no journal and is put aside", folder.name)
                folder.rename(folder.with_name(f".{folder.name}.damaged"))
                continue
            groups.setdefault(begin["pipeline"], []).append((folder, _load(folder).status))
        for key, members in groups.items():
            begin = first_record(members[0][0])
            if begin is None:
                continue
            pipeline = self._pipeline(begin, members[0][0])
            over = not any(running(ProcessKey.parse(key), folder) for folder, _ in members)
            self._send_lock(pipeline)
            statuses = [status for _, status in members]
            # A stage that began after `folders` was listed may belong here: then the next round decides.
            if not over or not all(statuses) or set(journal_folders(self.tracking)) - set(folders):
                continue
            worst = next((status for status in ("KILLED", "FAILED") if status in statuses), "FINISHED")
            end = max(_modified(folder / JOURNAL) for folder, _ in members)
            self._here.finish(pipeline.run_id, worst, int(end * 1000))
            # Those that went well first: if this is cut short, the next agent still sees why the parent failed.
            for folder, _ in sorted(members, key=lambda member: member[1] != "FINISHED"):
                _drop(folder)
            del self._pipelines[key]

    def _send_lock(self, pipeline: Pipeline) -> None:
        """dvc.lock changes after each stage has ended; dvc has no hook, so its time is watched."""
        path = pipeline.workspace / "dvc.lock"
        changed = _modified(path)
        if changed and changed != pipeline.lock_time:
            self._here.text(pipeline.run_id, mask_yaml(path.read_text(errors="replace")), "dvc.lock")
            pipeline.lock_time = changed

    @property
    def _here(self) -> Runs:
        assert self._runs is not None
        return self._runs

    def _stop_monitors(self) -> None:
        for monitor in self._monitors.values():
            monitor.finish()
        self._monitors.clear()


def _away() -> tuple[type[Exception], ...]:
    """What the clients raise when the server, its database or the disk does not answer."""
    from mlflow.exceptions import MlflowException
    from requests import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    from stages.core.errors import StoreError

    return (MlflowException, RequestException, SQLAlchemyError, OSError, StoreError)


def _queue(pending: Pending, record: dict[str, Any]) -> None:
    from mlflow.entities import Metric

    for key, value in record["values"].items():
        metric = Metric(key, float(value), int(record["t"]), int(record["step"]))
        pending.metrics.append(metric)
        if key.startswith("eval/"):
            pending.headline.append(metric)


def _load(folder: Path) -> Position:
    try:
        return Position(**json.loads((folder / "position.json").read_text()))
    except (OSError, ValueError, TypeError):
        return Position()


def _drop(folder: Path) -> None:
    """Remove a journal; under its new name nobody takes what is left of it for one."""
    hidden = folder.with_name(f".{folder.name}.sent")
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _sweep(tracking: Path) -> None:
    """Leftovers of launchers and agents that were killed in mid-work."""
    for path in (tracking / "journal").glob(".*"):
        if path.name.endswith(".sent") or time.time() - _modified(path) > 86_400:
            shutil.rmtree(path, ignore_errors=True)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _cut(value: str, limit: int) -> str:
    if len(value) <= limit:
        return value
    tail = f"... ({len(value):,} characters)"
    return value[: limit - len(tail)] + tail


def _flat_params(path: Path) -> dict[str, str]:
    from stages.core.errors import DarkroomError
    from stages.harness.config import flatten, read_params

    try:
        values = flatten(read_params(path))
    except DarkroomError as error:
        log.warning("the parent run has no parameters: %s", error)
        return {}
    return {key: masked(key, value) for key, value in values.items()}


def _source(begin: dict[str, Any], name: str) -> dict[str, str]:
    """MLflow's own fields for where a run came from."""
    commit = begin["tags"].get("commit", "")
    source = {"mlflow.source.name": name, "mlflow.source.type": "PROJECT"}
    return {**source, "mlflow.source.git.commit": commit} if commit else source


def _pipeline_note(begin: dict[str, Any]) -> str:
    return "\n".join(["One execution of the pipeline; its stages are the runs below.", "", *_facts(begin)])


def _child_note(begin: dict[str, Any]) -> str:
    return "\n".join([f"Stage **{begin['stage']}**.", "", *_facts(begin)])


def _facts(begin: dict[str, Any]) -> Iterator[str]:
    tags = begin["tags"]
    names = {"commit": "commit", "branch": "branch", "dvc_exp": "experiment", "cpu": "CPU", "gpu": "GPU"}
    for name, label in names.items():
        if value := tags.get(name):
            yield f"- {label}: `{value}`"
    if tags.get("dirty") == "true":
        yield "- tracked files differed from the commit; `dvc.lock` and `params.yaml` say what was run"


def main() -> None:
    """Be the agent of the tracking root on the command line, unless another one is."""
    tracking = Path(sys.argv[1])
    os.nice(10)
    # Fail fast: by default a dead server holds up each call for four minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] = "false"  # a record counts as sent only when the call is over
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    log.setLevel(logging.INFO)
    seen: set[str] = set()
    # A journal that began while the last one was leaving has nobody else: its launcher saw the lock held.
    while {folder.name for folder in journal_folders(tracking)} - seen:
        with agent_lock(tracking, patience_s=0.5) as held:
            if not held:
                return
            _sweep(tracking)
            agent = Agent(tracking)
            agent.run()
            seen |= agent.seen


if __name__ == "__main__":
    main()
