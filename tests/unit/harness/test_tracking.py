"""Journals become MLflow runs: exact values in a real sqlite database, also after crashes and outages."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stages.core.errors import ConfigError
from stages.harness import agent as agent_module
from stages.harness import tracking
from stages.harness.agent import Agent, Runs
from stages.harness.journal import Journal, PipelineKey, ProcessKey, begin, end, read_records, tracking_root

PROJECT = Path(tracking.__file__).parents[2]
TAGS = {"commit": "abc1234def", "branch": "main", "dirty": "false", "cpu": "x-1-2-avx2"}


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty MLflow database: the migration takes longer than the tests."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> Path:
    """A project folder without secrets of this shell, its database ready."""
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "DARKROOM_", "DVC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.chdir(tmp_path)
    place = tracking_root(tmp_path)
    place.mkdir(parents=True)
    (place / "mlflow.db").write_bytes(empty_database.read_bytes())
    monkeypatch.setattr(agent_module, "POLL_SECONDS", 0.02)
    return tmp_path


def gone() -> PipelineKey:
    """The key of a dvc process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    key = PipelineKey(**vars(ProcessKey.of(process.pid)))
    process.kill()
    process.wait()
    return key


def start(root: Path, stage: str, pipeline: PipelineKey, **params: object) -> Path:
    path = begin(root, stage, params=params, tags=TAGS, pipeline=pipeline)
    assert path is not None
    return path


def drain(root: Path) -> None:
    Agent(tracking_root(root)).run()


def runs(root: Path) -> list[Any]:
    """All runs, the oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracking_root(root) / 'mlflow.db'}")
    found = client.get_experiment_by_name("darkroom")
    return client.search_runs([found.experiment_id], order_by=["attributes.start_time"]) if found else []


def history(root: Path, run: Any, key: str) -> list[tuple[int, float, int]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracking_root(root) / 'mlflow.db'}")
    return [(m.step, m.value, m.timestamp) for m in client.get_metric_history(run.info.run_id, key)]


def by_role(root: Path) -> tuple[list[Any], dict[str, Any]]:
    """Parents, and children by stage."""
    every = runs(root)
    children = [run for run in every if run.data.tags["role"] == "stage"]
    assert len({run.data.tags["stage"] for run in children}) == len(children)
    parents = [run for run in every if run.data.tags["role"] == "pipeline"]
    return parents, {run.data.tags["stage"]: run for run in children}


def artifacts(run: Any) -> dict[str, Path]:
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def test_one_parent_with_a_child_per_stage(root: Path) -> None:
    (root / "params.yaml").write_text("seed: 7\ntrain: {lr: 1.0e-4, hub_token: abc}\n")
    (root / "dvc.lock").write_text("schema: '2.0'\n")
    pipeline = gone()
    first = start(root, "train", pipeline, **{"train.lr": 1e-4})
    tracker = Journal(first)
    for step in range(5):
        tracker.metrics({"loss": 1.0 / (step + 1), "bad": math.nan}, step)
    Image.new("RGB", (300, 200), "red").save(root / "a.png")
    (root / "notes").mkdir()
    (root / "notes" / "n.txt").write_text("note")
    tracker.image("sheets/after", root / "a.png", step=4)
    tracker.artifact(root / "notes", "kept")
    tracker.dataset("pictures", "d" * 64, "data/pictures", {"items": 24})
    tracker.params({"long": "x" * 7000})
    tracker.tags({"base.digest": "e" * 64})
    end(first, "FINISHED")
    second = start(root, "evaluate", pipeline)
    Journal(second).metrics({"eval/clip/mean": 0.25, "other": 1.0})
    end(second, "FAILED")
    written = [record for _, record in read_records(first, 0)[0]]
    drain(root)

    (parent,), children = by_role(root)
    train, evaluate = children["train"], children["evaluate"]
    assert parent.info.status == "FAILED"
    assert parent.info.run_name.endswith("main@abc1234")
    assert parent.data.tags["pipeline_key"] == str(pipeline)
    assert parent.data.params == {"seed": "7", "train.lr": "0.0001", "train.hub_token": "***"}
    assert parent.data.metrics == {"eval/clip/mean": 0.25}
    assert parent.data.tags["mlflow.source.git.commit"] == "abc1234def"
    assert "- commit: `abc1234def`" in parent.data.tags["mlflow.note.content"]
    assert artifacts(parent)["dvc.lock"].read_text() == "schema: '2.0'\n"
    assert "abc" not in artifacts(parent)["params.yaml"].read_text()
    assert [train.data.tags[name] for name in ("mlflow.parentRunId", "stage", "role", "base.digest")] == [
        parent.info.run_id, "train", "stage", "e" * 64,
    ]  # fmt: skip
    assert (train.info.status, evaluate.info.status) == ("FINISHED", "FAILED")
    assert (train.info.run_name, train.data.params["train.lr"]) == ("train", "0.0001")
    assert (train.info.start_time, train.info.end_time) == (written[0]["t"], written[-1]["t"])
    times = [record["t"] for record in written if record["kind"] == "metrics"]
    assert history(root, train, "loss") == [(step, 1.0 / (step + 1), times[step]) for step in range(5)]
    assert [math.isnan(value) for _, value, _ in history(root, train, "bad")] == [True] * 5
    files = artifacts(train)
    assert files["kept/notes/n.txt"].read_text() == "note"
    assert files["params/long.txt"].read_text() == "x" * 7000
    assert len(train.data.params["long"]) <= 6000
    assert train.data.params["long"].endswith("... (7,000 characters)")
    whole = [name for name in files if name.endswith(".png")]
    assert [name.split("+timestamp")[0] for name in whole] == ["images/sheets~after+step+4"]
    assert files[whole[0]].read_bytes() == (root / "a.png").read_bytes()
    with Image.open(files[whole[0].removesuffix(".png") + "+compressed.webp"]) as small:
        assert small.size == (256, 171)
    (dataset,) = train.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("pictures", "d" * 36)
    assert '"items": 24' in dataset.dataset.profile
    assert list((tracking_root(root) / "journal").iterdir()) == []


def test_two_pipelines_at_once_stay_apart(root: Path) -> None:
    keys = [gone(), gone()]
    paths = [start(root, stage, key) for stage, key in (("train", keys[0]), ("export", keys[1]))]
    for value, path in enumerate(paths):
        Journal(path).metrics({"eval/x": value})
    for path in paths:
        end(path, "FINISHED")
    drain(root)
    parents, children = by_role(root)
    assert {run.data.tags["pipeline_key"] for run in parents} == {str(key) for key in keys}
    found = {run.info.run_id: run.data.metrics for run in parents}
    assert found[children["train"].data.tags["mlflow.parentRunId"]] == {"eval/x": 0.0}
    assert found[children["export"].data.tags["mlflow.parentRunId"]] == {"eval/x": 1.0}


class Crash(BaseException):
    """The agent dies here, as by kill -9: nothing of its own runs any more."""


def crash_at(monkeypatch: pytest.MonkeyPatch, calls: int) -> Callable[[], bool]:
    """Die at the end of the call number `calls` that changes MLflow or the disk; returns whether it came to that."""
    count = 0

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal count
            result = original(*args, **named)
            count += 1
            if count == calls:
                raise Crash
            return result

        return call

    for name in (
        "find_or_create",
        "params",
        "tags",
        "metrics",
        "text",
        "artifact",
        "image",
        "dataset",
        "finish",
    ):
        monkeypatch.setattr(Runs, name, dying(getattr(Runs, name)))
    for name in ("write_json", "_drop"):
        monkeypatch.setattr(agent_module, name, dying(getattr(agent_module, name)))
    return lambda: count >= calls


@pytest.mark.parametrize("calls", [1, 2, 4, 5, 7, 9, 11, 13, 15, 17, 19, 21])
def test_an_agent_that_dies_anywhere_loses_and_doubles_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    (root / "params.yaml").write_text("seed: 7\n")
    pipeline = gone()
    paths = [start(root, "train", pipeline, a=1), start(root, "evaluate", pipeline)]
    tracker = Journal(paths[0])
    for step in range(3):
        tracker.metrics({"loss": 0.5, "bad": math.inf}, step)
    Image.new("RGB", (8, 8)).save(root / "a.png")
    tracker.image("sheet", root / "a.png")
    tracker.dataset("pictures", "d", "data", {"items": 1})
    tracker.artifact(root / "a.png")
    Journal(paths[1]).metrics({"eval/x": 2.0})
    end(paths[0], "FAILED")
    end(paths[1], "FINISHED")
    with monkeypatch.context() as patch:
        crashed = crash_at(patch, calls)
        with pytest.raises(Crash):
            drain(root)
        assert crashed()
    drain(root)

    (parent,), children = by_role(root)
    train = children["train"]
    assert len(children) == 2
    assert (train.info.status, children["evaluate"].info.status) == ("FAILED", "FINISHED")
    assert parent.info.status == "FAILED"
    assert [(step, value) for step, value, _ in history(root, train, "loss")] == [
        (0, 0.5),
        (1, 0.5),
        (2, 0.5),
    ]
    assert [step for step, _, _ in history(root, train, "bad")] == [0, 1, 2]
    assert [value for _, value, _ in history(root, parent, "eval/x")] == [2.0]
    assert len([name for name in artifacts(train) if name.startswith("images/")]) == 2
    assert len(train.inputs.dataset_inputs) == 1
    assert list((tracking_root(root) / "journal").iterdir()) == []


def test_one_refused_record_does_not_hold_up_the_others(root: Path) -> None:
    path = start(root, "train", gone(), a=1)
    tracker = Journal(path)
    tracker.params({"a": 2, "b": 3})  # a is fixed already
    tracker.metrics({"good": 1.0, "b;ad\x00": 2.0, "fine": 3.0})
    (root / "a.png").write_text("no picture")
    tracker.image("sheet", root / "a.png")
    with path.open("ab") as file:
        file.write(b"not json\n{}\n[]\n" + b'{"kind": "metrics", "t": 1}\n{"kind": "later", "t": 1}\n')
    tracker.metrics({"last": 4.0})
    end(path, "FINISHED")
    drain(root)
    _, children = by_role(root)
    assert children["train"].data.metrics == {"good": 1.0, "fine": 3.0, "last": 4.0}
    assert children["train"].data.params == {"a": "1", "b": "3"}
    assert children["train"].info.status == "FINISHED"


LAUNCHER = """
import sys, time
from pathlib import Path
from stages.harness.journal import Journal, PipelineKey, begin
path = begin(Path(sys.argv[1]), "train", params={}, tags={}, pipeline=PipelineKey.current())
Journal(path).metrics({"loss": 0.5}, 1)
print(path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def launcher(root: Path) -> Iterator["subprocess.Popen[str]"]:
    """A launcher that began a stage and is still there; its first line is the journal's path."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(root)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()


def test_a_killed_launcher_leaves_a_killed_run(root: Path, launcher: "subprocess.Popen[str]") -> None:
    assert launcher.stdout
    path = Path(launcher.stdout.readline().strip())
    with path.open("ab") as file:
        file.write(b'{"kind": "metrics", "t"')
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    drain(root)
    (parent,), children = by_role(root)
    assert (parent.info.status, children["train"].info.status) == ("KILLED", "KILLED")
    assert children["train"].data.metrics == {"loss": 0.5}


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_dead_server_keeps_the_journals(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = start(root, "train", gone())
    Journal(path).metrics({"loss": 0.5}, 1)
    end(path, "FINISHED")
    monkeypatch.setattr(agent_module, "_BACKOFF_SECONDS", (0.1,))
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"http://me:pw@127.0.0.1:{closed_port()}")
        began = time.monotonic()
        drain(root)
        assert time.monotonic() - began < 5
    problem = (tracking_root(root) / "problem.txt").read_text()
    assert problem.startswith("MLflow at http://***@127.0.0.1:")
    assert "pw" not in problem
    assert path.is_file()
    drain(root)
    _, children = by_role(root)
    assert children["train"].data.metrics == {"loss": 0.5}
    assert not path.exists()
    assert not (tracking_root(root) / "problem.txt").exists()


def test_starting_the_agent_never_raises_or_waits(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tracking.subprocess, "Popen", lambda *_args, **_named: 1 / 0)
        patch.setenv("DARKROOM_TRACKING", "off")
        tracking.ensure_agent(root)  # off: nothing is started
        patch.delenv("DARKROOM_TRACKING")
        with tracking.agent_lock(tracking_root(root)) as held:
            assert held
            tracking.ensure_agent(root)  # one is alive: nothing is started
    (root / "file").write_text("")
    monkeypatch.setenv("DARKROOM_TRACKING_ROOT", "file/below")
    tracking.ensure_agent(root)
    assert "the agent did not start" in capsys.readouterr().err


def test_the_page_is_served_for_this_machine_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tracking.ui_command(root, 5001)
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert command[1:4] == ["-m", "mlflow", "server"]
    assert options == {
        "--backend-store-uri": f"sqlite:///{tracking_root(root)}/mlflow.db",
        "--default-artifact-root": f"file://{tracking_root(root)}/artifacts",
        "--host": "127.0.0.1",
        "--port": "5001",
        "--workers": "1",
    }
    assert tracking.ui_environment()["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:pw@mlflow.example.org")
    with pytest.raises(
        ConfigError, match=r"server https://\*\*\*@mlflow\.example\.org \(MLFLOW_TRACKING_URI\)"
    ):
        tracking.ui_command(root, 5001)


def wait_for(condition: Callable[[], Any], seconds: float = 180.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("waited in vain")


def agent_pid(root: Path) -> int | None:
    """The pid of this root's agent: the process whose command names it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if "stages.harness.agent" in command and str(tracking_root(root)) in command:
                return int(entry.name)
    return None


@pytest.mark.slow
def test_a_live_stage_is_followed_and_a_killed_agent_replaced(
    root: Path, monkeypatch: pytest.MonkeyPatch, launcher: "subprocess.Popen[str]"
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "1")
    assert launcher.stdout
    path = Path(launcher.stdout.readline().strip())
    tracker = Journal(path)
    tracking.ensure_agent(root)
    wait_for(lambda: any(run.data.metrics.get("loss") == 0.5 for run in runs(root)))
    wait_for(lambda: "system/cpu_utilization_percentage" in by_role(root)[1]["train"].data.metrics)
    (parent,), children = by_role(root)
    assert (parent.info.status, children["train"].info.status) == ("RUNNING", "RUNNING")
    pid = agent_pid(root)
    assert pid
    assert os.getsid(pid) == pid  # out of reach of the terminal
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    for step in range(2, 3002):
        tracker.metrics({"loss": float(step)}, step)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: agent_pid(root) != pid)
    tracker.metrics({"loss": 0.0}, 3002)
    tracking.ensure_agent(root)
    launcher.kill()
    launcher.wait()
    report = tracking.sync(root, 180)
    assert (report.drained, report.left, report.why) == (1, 0, "")
    (parent,), children = by_role(root)
    assert [step for step, _, _ in history(root, children["train"], "loss")] == list(range(1, 3003))
    assert children["train"].info.status == "KILLED"
    wait_for(lambda: agent_pid(root) is None)


@pytest.mark.slow
def test_sync_says_why_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = start(root, "train", gone())
    Journal(path).metrics({"loss": 0.5})
    end(path, "FINISHED")
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port()}")
        report = tracking.sync(root, 120)
    assert (report.drained, report.left) == (0, 1)
    assert report.why.startswith("MLflow at http://127.0.0.1:")
    assert "nothing is lost" in str(report)
    assert str(tracking.sync(root, 120)) == "MLflow holds everything (1 stage run(s) completed now)"


@pytest.mark.slow
def test_through_a_server(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = closed_port()
    with (root / "server.log").open("wb") as log:
        server = subprocess.Popen(
            tracking.ui_command(root, port), env=tracking.ui_environment(), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        path = start(root, "train", gone(), a=1)
        tracker = Journal(path)
        tracker.metrics({"loss": 0.5, "bad": math.nan}, 1)
        Image.new("RGB", (8, 8)).save(root / "a.png")
        tracker.image("sheet", root / "a.png")
        tracker.params({"a": 2, "b": 3})
        tracker.dataset("pictures", "d" * 64, "data", {"items": 1})
        end(path, "FINISHED")
        drain(root)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    (parent,), children = by_role(root)
    train = children["train"]
    assert (parent.info.status, train.info.status) == ("FINISHED", "FINISHED")
    assert train.data.params == {"a": "1", "b": "3"}
    assert train.data.metrics["loss"] == 0.5
    assert math.isnan(train.data.metrics["bad"])
    assert len(train.inputs.dataset_inputs) == 1
    assert len([name for name in artifacts(train) if name.startswith("images/")]) == 2


@pytest.mark.slow
def test_a_database_that_was_half_made_is_made_anew(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    from stages.harness.agent import make_database

    (tmp_path / ".mlflow.db.building").write_bytes(b"SQLite format 3\0 and then the disk was full")
    make_database(tmp_path)
    assert not (tmp_path / ".mlflow.db.building").exists()
    found = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").search_experiments()
    assert [experiment.name for experiment in found] == ["Default"]
