"""The journal in the stage's process: what is written, what is tolerated, and that nothing ever raises."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.harness import journal
from stages.harness.journal import (
    Journal,
    NullJournal,
    PipelineKey,
    ProcessKey,
    begin,
    dvc_ancestor,
    end,
    mask_uri,
    mask_yaml,
    open_journal,
    read_records,
    tracking_root,
)

KEY = PipelineKey(host="elsewhere", boot="00000000", pid=7, start=42)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DARKROOM_TRACKING_ROOT", "DARKROOM_TRACKING", "DARKROOM_JOURNAL", "DARKROOM_PIPELINE_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    monkeypatch.chdir(tmp_path)


def started(root: Path, **values: object) -> Path:
    path = begin(root, "train", params={"train.lr": 1e-4, **values}, tags={}, pipeline=KEY)
    assert path is not None
    return path


def records(path: Path) -> list[dict[str, object]]:
    return [record for _, record in read_records(path, 0)[0]]


def test_a_stage_is_told_from_begin_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    monkeypatch.setenv("DVC_EXP_NAME", "wet-plate")
    tags = {"commit": "abc1234def", "branch": "main"}
    path = begin(tmp_path, "train", params={"a": 1, "b": [1, 2], "c": None}, tags=tags, pipeline=KEY)
    assert path is not None
    monkeypatch.setenv("DARKROOM_JOURNAL", str(path))
    before = int(time.time() * 1000)
    tracker = open_journal()
    tracker.metrics({"loss": 0.5, "bad": float("nan"), "worse": float("-inf")}, step=3)
    tracker.params({"note": "text"})
    tracker.tags({"base.digest": "0" * 64})
    tracker.dataset("pictures", "d" * 64, "data/pictures", {"items": 24})
    end(path, "FINISHED")

    first, *rest, last = records(path)
    assert first["kind"] == "begin"
    assert first["params"] == {"a": "1", "b": "[1, 2]", "c": "null"}
    assert first["launcher"] == str(ProcessKey.of(os.getpid()))
    assert first["pipeline"] == "elsewhere:00000000:7:42"
    assert str(first["name"]).startswith("repro 20")
    assert str(first["name"]).endswith(" main@abc1234 exp wet-plate")
    assert first["cwd"] == str(tmp_path)
    assert [record["kind"] for record in rest] == ["metrics", "params", "tags", "dataset"]
    assert rest[0]["values"] == {"loss": 0.5, "bad": "nan", "worse": "-inf"}
    assert rest[0]["step"] == 3
    assert before <= int(str(rest[0]["t"])) <= int(time.time() * 1000)
    assert last["status"] == "FINISHED"
    assert path.is_relative_to(tmp_path / ".darkroom" / "mlflow" / "journal")
    assert (path.parent / "files" / "params.yaml").read_text() == "seed: 1\n"


def test_files_are_copied_when_told(tmp_path: Path) -> None:
    path = started(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.txt").write_text("first")
    tracker = Journal(path)
    tracker.artifact(out, "kept")
    tracker.artifact(out / "a.txt")
    tracker.image("sheet", out / "a.txt", step=2)
    (out / "a.txt").write_text("second")
    _, folder, file, image = records(path)
    files = path.parent / "files"
    assert (files / str(folder["file"]) / "a.txt").read_text() == "first"
    assert (files / str(file["file"])).read_text() == "first"
    assert (image["key"], image["step"]) == ("sheet", 2)
    assert len({folder["file"], file["file"], image["file"]}) == 3


def test_secrets_are_never_written(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("hub: {api_key: k1, url: 'https://me:pw@host/x'}\nHF_TOKEN: k2\n")
    path = started(tmp_path, **{"hub.Api_Key": "k3", "mirror": "https://user:pw@host/repo"})
    tracker = Journal(path)
    tracker.params({"db.password": "k4"})
    tracker.tags({"client_secret": "k5", "uri": "s3://a:pw@b"})
    tracker.dataset("d", "1", "https://user:pw@host/data", {})
    written = path.read_text() + (path.parent / "files" / "params.yaml").read_text()
    assert not [secret for secret in ("k1", "k2", "k3", "k4", "k5", "pw") if secret in written]
    assert records(path)[0]["params"] == {
        "train.lr": "0.0001",
        "hub.Api_Key": "***",
        "mirror": "https://***@host/repo",
    }


def test_masks_leave_the_rest_alone() -> None:
    assert mask_uri("see https://host/a@b and git@host:repo") == "see https://host/a@b and git@host:repo"
    text = "encode:\n  batch_size: 16\n  hub_token: abc   # mine\nlist: [1, 2]\n"
    assert mask_yaml(text) == "encode:\n  batch_size: 16\n  hub_token: '***'\nlist: [1, 2]\n"


def test_a_torn_line_waits_and_swallows_nothing(tmp_path: Path) -> None:
    path = started(tmp_path)
    Journal(path).metrics({"loss": 1.0})
    with path.open("ab") as file:
        file.write(b'{"kind": "metrics", "t": 17, "val')
    found, offset = read_records(path, 0)
    assert [record["kind"] for _, record in found] == ["begin", "metrics"]
    assert offset == path.read_bytes().rfind(b"\n") + 1
    end(path, "KILLED")  # the launcher's word about the stage that was killed in mid-write
    assert [record["kind"] for _, record in read_records(path, offset)[0]] == ["end"]
    assert records(path)[-1]["status"] == "KILLED"


def test_reading_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = started(tmp_path)
    tracker = Journal(path)
    for step in range(50):
        tracker.metrics({"loss": step}, step)
    offset, steps = 0, []
    while True:
        found, after = read_records(path, offset, limit=150)  # less than two records at a time
        if after == offset:
            break
        assert all(json.loads(path.read_bytes()[at:].split(b"\n")[0]) == record for at, record in found)
        steps += [record["step"] for _, record in found if record["kind"] == "metrics"]
        offset = after
    assert steps == list(range(50))


def test_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = started(tmp_path)
    tracker = Journal(path)

    def full(_handle: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal.os, "write", full)
    for step in range(3):
        tracker.metrics({"loss": 1.0}, step)
        tracker.params({"a": 1})
        tracker.image("sheet", path)
        tracker.artifact(tmp_path)
    end(path, "FINISHED")
    monkeypatch.undo()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        "tracking: tracking stopped for this stage, the work goes on: [Errno 28] No space left on device"
    )
    assert said[1].startswith("tracking: the end of this run was not recorded")
    assert len(said) == 2
    assert [record["kind"] for record in records(path)] == ["begin"]


def test_what_cannot_be_recorded_is_said_and_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = started(tmp_path)
    tracker = Journal(path)
    tracker.metrics({"loss": "high"})  # type: ignore[dict-item]
    tracker.image("sheet", tmp_path / "missing.png")
    tracker.metrics({"loss": 1.0})
    assert [record["kind"] for record in records(path)] == ["begin", "metrics"]
    assert len(capsys.readouterr().err.splitlines()) == 2
    Journal(tmp_path / "no" / "journal.jsonl").metrics({"loss": 1.0})
    assert "tracking stopped for this stage" in capsys.readouterr().err


def test_a_tracking_root_that_cannot_be_made_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DARKROOM_TRACKING_ROOT", "file/below")
    assert begin(tmp_path, "train", params={}, tags={}, pipeline=KEY) is None
    end(None, "FINISHED")
    assert "this run of train is not tracked" in capsys.readouterr().err


def test_off_means_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARKROOM_TRACKING", "off")
    assert begin(tmp_path, "train", params={}, tags={}, pipeline=KEY) is None
    assert list(tmp_path.iterdir()) == []
    tracker = open_journal()
    assert isinstance(tracker, NullJournal)
    tracker.metrics({"loss": 1.0})
    tracker.image("sheet", tmp_path / "missing.png")


def test_the_tracking_root_follows_the_project_not_the_cwd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracking_root(tmp_path / "project") == tmp_path / "project" / ".darkroom" / "mlflow"
    monkeypatch.setenv("DARKROOM_TRACKING_ROOT", "shared")
    assert tracking_root(tmp_path / "project") == tmp_path / "project" / "shared"


def test_a_process_is_known_by_its_start() -> None:
    process = subprocess.Popen(["sleep", "60"])
    key = ProcessKey.of(process.pid)
    assert ProcessKey.parse(str(key)) == key
    assert key.alive() is True
    assert ProcessKey(key.host, key.boot, key.pid, key.start + 1).alive() is False
    assert ProcessKey("elsewhere", key.boot, key.pid, key.start).alive() is None
    process.kill()
    while key.alive():  # a zombie counts as gone
        time.sleep(0.01)
    process.wait()
    assert key.alive() is False


def test_the_pipeline_is_the_nearest_dvc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A script called dvc, run by python as the real one is: python .../dvc repro -> sh -> launcher.
    script = tmp_path / "dvc"
    ask = "from stages.harness.journal import PipelineKey; print(PipelineKey.current().pid)"
    script.write_text(
        "import os, subprocess, sys\n"
        f"asked = subprocess.run(['sh', '-c', sys.executable + ' -c \"{ask}\"; true'], "
        "capture_output=True, text=True, check=True)\n"
        "print(os.getpid(), asked.stdout.strip())\n"
    )
    project = Path(journal.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script), "repro"], cwd=project, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(project)},
    )  # fmt: skip
    own, found = done.stdout.split()
    assert own == found
    assert dvc_ancestor(1) is None
    monkeypatch.setenv("DARKROOM_PIPELINE_KEY", str(KEY))  # inside a container
    assert PipelineKey.current() == KEY
    monkeypatch.setenv("DARKROOM_PIPELINE_KEY", "nonsense")
    monkeypatch.setattr(journal, "dvc_ancestor", lambda _pid: None)
    assert PipelineKey.current().pid == os.getpid()
