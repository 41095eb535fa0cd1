"""The stage: one record, a function of the folder."""

import json
from pathlib import Path

import pytest

from stages.base import BaseConfig, base
from stages.core.errors import BaseModelError
from tests.tiny import make_tiny_base, make_tiny_xl
from tests.unit.test_ingest import stage_in


def test_record_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_base(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    base(BaseConfig(source="models/tiny"), stage_in(Path(), "base"))
    first = (tmp_path / "data" / "base" / "record.json").read_bytes()
    record = json.loads(first)
    assert record["source"] == {"kind": "folder", "path": "models/tiny"}
    assert str(tmp_path) not in first.decode()
    assert f"base: models/tiny: {len(record['files'])} files, " in capsys.readouterr().out
    base(BaseConfig(source="models/tiny"), stage_in(Path(), "base"))
    assert (tmp_path / "data" / "base" / "record.json").read_bytes() == first


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BaseModelError, match=r"base\.source is models/none, and there is nothing there"):
        base(BaseConfig(source="models/none"), stage_in(Path(), "base"))
    assert not (tmp_path / "data").exists()


def test_a_base_that_train_cannot_use_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_xl(tmp_path / "xl")
    monkeypatch.chdir(tmp_path)
    message = r"xl is of Stable Diffusion XL's kind, with two text encoders\n  remedy: encode reads such a base, but train"
    with pytest.raises(BaseModelError, match=message):
        base(BaseConfig(source="xl"), stage_in(Path(), "base"))
    assert not (tmp_path / "data").exists()
