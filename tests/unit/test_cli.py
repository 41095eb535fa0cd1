"""The commands as people type them."""

import os
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from stages.cli import main
from stages.core.store import Store
from stages.harness import doctor
from stages.harness.closure import PROJECT


def call(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=answer)


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, command in group.commands.items():
        found.append((*prefix, name))
        if isinstance(command, click.Group):
            found += commands(command, (*prefix, name))
    return found


@pytest.mark.parametrize("command", [(), *commands(main)])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_teaches(command: tuple[str, ...], flag: str) -> None:
    result = call(*command, flag)
    assert result.exit_code == 0
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    assert lines[0].startswith(f"Usage: {' '.join(('main', *command))}")
    assert len(lines[1]) > 30  # a sentence


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["docter"], "no command is called 'docter'; did you mean doctor? The commands are "),
        (
            ["store", "prun"],
            "no command is called 'prun'; did you mean prune? The commands are gc, prune, show.",
        ),
        (["xyz"], "no command is called 'xyz'. The commands are "),
        (["doctor", "--devise", "cpu"], "No such option"),
        (["doctor", "--device", "gpu"], "'gpu' is not one of 'cpu', 'cuda'"),
        (["latents", "inspct"], "no command is called 'inspct'; did you mean inspect?"),
        (["latents", "inspect", "--items", "-1"], "-1 is not in the range x>=0"),
        (["latents", "inspect", "--sheet", "."], "File '.' is a directory."),
        (["store", "prune", "--keep", "-1"], "-1 is not in the range x>=0"),
        (["params"], "Missing argument 'PRESET'"),
    ],
)
def test_mistyped(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_doctor_prints_every_row_and_then_fails_when_cuda_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(doctor, "gpus", list)
    result = call("doctor", "--device", "cuda")
    assert result.exit_code == 1
    for row in ("Python", "torch", "GPUs  0", "engine", "mlflow"):
        assert row in result.output
    assert (
        "error: CUDA is asked for, but torch sees no GPU\n  remedy: set device: cpu in params.yaml"
        in result.output
    )
    assert "Traceback" not in result.output
    result = call("doctor", "--device", "cpu")
    assert (result.exit_code, result.output.splitlines()[-1]) == (0, "all stages run on the CPU, natively")


def test_outside_of_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("doctor")
    assert result.exit_code == 1
    assert "error: params.yaml is missing\n  remedy: run this at the top of a clone" in result.output


def test_sample_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("sample-data", "--folder", "pictures")
    count = len(list((tmp_path / "pictures").glob("*.png")))
    assert (result.exit_code, result.output) == (0, f"{count} captioned pictures in pictures\n")
    assert count > 100
    before = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    (tmp_path / "pictures" / "mine.txt").write_text("mine")
    result = call("sample-data", "--folder", "pictures")
    assert result.exit_code == 1
    assert (
        "error: pictures exists and is not empty: the sample pictures are not written over it"
        in result.output
    )
    assert call("sample-data", "--folder", "pictures", "--if-missing").output == ""
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == sorted([*before, "mine.txt"])


def test_params(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copy(PROJECT / "params.yaml", tmp_path)
    shutil.copytree(PROJECT / "params", tmp_path / "params")
    monkeypatch.chdir(tmp_path)
    result = call("params", "micro")
    assert (result.exit_code, "params.yaml now holds preset micro" in result.output) == (0, True)
    assert "  steps: 6  " in (tmp_path / "params.yaml").read_text()  # its comment is kept
    result = call("params", "micra")
    assert (result.exit_code, "error: no preset is called 'micra'" in result.output) == (1, True)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """train: an old entry of 3 MB and a new one of 1 MB; encode: one of 2 MB."""
    monkeypatch.setenv("DARKROOM_STORE", str(tmp_path))
    for number, (stage, letter, size) in enumerate(
        [("train", "a", 3), ("train", "b", 1), ("encode", "c", 2)]
    ):
        folder = tmp_path / stage / (letter * 64)
        folder.mkdir(parents=True)
        (folder / "pack").write_bytes(b"0" * (size * 1_000_000))
        os.utime(folder / "pack", (10**9 + number, 10**9 + number))
    return tmp_path


def test_store_show(store: Path) -> None:
    lines = call("store", "show").output.splitlines()
    assert lines[0] == str(store)
    assert [line.split()[:4] for line in lines[1:]] == [
        ["encode", "c" * 12, "2.0", "MB"],
        ["train", "a" * 12, "3.0", "MB"],
        ["train", "b" * 12, "1.0", "MB"],
        ["encode", "together", "2.0", "MB"],
        ["train", "together", "4.0", "MB"],
        ["all", "together", "6.0", "MB"],
    ]
    assert lines[-1].endswith(" MB  3 entries")


def test_an_empty_store_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DARKROOM_STORE", str(tmp_path))
    assert call("store", "show").output.split() == [
        str(tmp_path), "all", "together", "0.0", "MB", "0", "entries"
    ]  # fmt: skip


def test_gc_is_prune(store: Path) -> None:
    for name in ("gc", "prune"):
        assert "Remove old work (gc and prune are one command)." in call("store", name, "--help").output
    assert call("store", "gc", "--yes").output == "1 entries removed, 3.0 MB freed\n"
    assert not (store / "train" / ("a" * 64)).exists()
    assert (store / "train" / ("b" * 64)).is_dir()


def test_store_prune(store: Path) -> None:
    result = call("store", "prune", answer="n\n")
    assert (result.exit_code, "remove 1 entries, 3.0 MB? [y/N]" in result.output) == (1, True)
    assert (store / "train" / ("a" * 64)).is_dir()
    result = call("store", "prune", answer="y\n")
    assert result.output.endswith("1 entries removed, 3.0 MB freed\n")
    assert not (store / "train" / ("a" * 64)).exists()
    assert (store / "train" / ("b" * 64)).is_dir()
    assert call("store", "prune", "--yes").output == "nothing to remove\n"
    assert call("store", "prune", "--yes", "--keep", "0").output == "2 entries removed, 3.0 MB freed\n"


def test_store_prune_keeps_what_is_in_use_and_removes_the_rest(store: Path) -> None:
    with Store(store).lock("encode", "c" * 64):
        output = call("store", "prune", "--yes", "--keep", "0").output
    assert output == (
        f"kept: encode {'c' * 12} is in use by process {os.getpid()}\n2 entries removed, 4.0 MB freed\n"
    )
    assert (store / "encode" / ("c" * 64) / "pack").is_file()


def test_doctor_names_what_is_wrong_in_all_sections_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (PROJECT / "params.yaml").read_text()
    for good, bad in (("  holdout_percent:", "  holdout_percents:"), ("  opset: 17", "  opset: many")):
        assert text.count(good) == 1
        text = text.replace(good, bad)
    (tmp_path / "params.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    result = call("doctor")
    assert result.exit_code == 1
    for message in (
        "ingest.holdout_percents is unknown; did you mean holdout_percent?",
        "ingest.holdout_percent is missing",
        "export.opset is 'many', expected int",
    ):
        assert message in result.output
