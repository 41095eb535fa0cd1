"""The stage on small folders: rows, splits, duplicates, quarantine, limits."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stages.core.determinism import DeterminismConfig
from stages.core.errors import ConfigError, SourceError
from stages.core.manifest import MANIFEST, read_rows, split_of
from stages.core.store import Store, fingerprint, sha256_file
from stages.harness.config import SharedConfig
from stages.harness.journal import NullJournal
from stages.harness.run import Stage
from stages.ingest import IngestConfig, ingest

CONFIG = IngestConfig(source="pictures", holdout_percent=50, max_pixels=10_000, max_quarantined_percent=0)


def stage_in(root: Path, name: str = "ingest") -> Stage:
    shared = SharedConfig(
        seed=7, device="cpu", runtime="native", determinism=DeterminismConfig(mode="portable", threads=1)
    )
    return Stage(name=name, root=root, shared=shared, store=Store(root / "store"), tracker=NullJournal())


def picture(
    root: Path, name: str, colour: int, caption: str | None = None, size: tuple[int, int] = (9, 7)
) -> Path:
    path = root / "pictures" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 0, 0)).save(path)
    path.with_suffix(".txt").write_text(caption or f"number {colour}")
    return path


def several(root: Path, **captions: list[str]) -> None:
    """The pictures' captions from metadata.jsonl, `a=["one", "two"]` for a.png, not from text files."""
    for path in (root / "pictures").glob("*.txt"):
        path.unlink()
    lines = [json.dumps({"file_name": f"{name}.png", "text": texts}) for name, texts in captions.items()]
    (root / "pictures" / "metadata.jsonl").write_text("\n".join(lines))


def rows(root: Path) -> dict[str, dict[str, Any]]:
    table = read_rows(root / "data" / "ingest" / "manifest.parquet", [field.name for field in MANIFEST])
    return {row["file_name"]: row for row in table}


def summary(root: Path) -> dict[str, Any]:
    return json.loads((root / "data" / "ingest" / "summary.json").read_text())


def test_rows_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [picture(tmp_path, f"{n}.png", n) for n in range(6)]
    ingest(CONFIG, stage_in(tmp_path))
    item = sha256_file(paths[0])
    assert rows(tmp_path)["0.png"] == {
        "item_id": item,
        "file_name": "0.png",
        "captions": ["number 0"],
        "bytes": paths[0].stat().st_size,
        "format": "PNG",
        "mode": "RGB",
        "width": 9,
        "height": 7,
        "split": split_of(item, 50),
        "status": "accepted",
        "reason": "",
        "detail": "",
    }
    held = sum(split_of(sha256_file(path), 50) == "holdout" for path in paths)
    assert 0 < held < 6
    assert summary(tmp_path) == {
        "pictures": 6, "accepted": 6, "duplicate": 0, "quarantined": 0, "train": 6 - held, "holdout": held,
        "source": "pictures",
    }  # fmt: skip
    said = f"ingest: 6 pictures: 6 accepted ({6 - held} train, {held} held out), 0 duplicate, 0 quarantined\n"
    assert capsys.readouterr().out == said


def test_more_pictures_move_none_across_and_outs_are_a_function_of_the_folder(tmp_path: Path) -> None:
    for n in range(6):
        picture(tmp_path, f"{n}.png", n)
    ingest(CONFIG, stage_in(tmp_path))
    before, first = rows(tmp_path), (tmp_path / "data/ingest/manifest.parquet").read_bytes()
    added = picture(tmp_path, "00.png", 100)
    ingest(CONFIG, stage_in(tmp_path))
    assert {name: row for name, row in rows(tmp_path).items() if name != "00.png"} == before
    added.unlink()
    ingest(CONFIG, stage_in(tmp_path))
    assert (tmp_path / "data/ingest/manifest.parquet").read_bytes() == first


def test_duplicates(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        picture(tmp_path, name, 1, "one")
    ingest(CONFIG, stage_in(tmp_path))
    found = {name: (row["status"], row["reason"], row["detail"]) for name, row in rows(tmp_path).items()}
    same = ("duplicate", "same_bytes", "same as a.png")
    assert found == {"a.png": ("accepted", "", ""), "b.png": same, "c.png": same}
    (tmp_path / "pictures" / "c.txt").write_text("another")
    with pytest.raises(SourceError, match=r"a\.png and c\.png are the same picture with different captions"):
        ingest(CONFIG, stage_in(tmp_path))


def test_several_captions_keep_their_order_in_the_row_and_in_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[str] = []

    def dataset(self: NullJournal, name: str, digest: str, source: str, counts: Mapping[str, float]) -> None:
        digests.append(digest)

    monkeypatch.setattr(NullJournal, "dataset", dataset)
    ids = [sha256_file(picture(tmp_path, f"{name}.png", number)) for number, name in enumerate("ab")]
    for texts in (["red", "a ball"], ["a ball", "red"]):
        several(tmp_path, a=texts, b=["blue"])
        ingest(CONFIG, stage_in(tmp_path))
        assert {name: row["captions"] for name, row in rows(tmp_path).items()} == {
            "a.png": texts,
            "b.png": ["blue"],
        }
        assert digests[-1] == fingerprint({"a.png": [ids[0], texts], "b.png": [ids[1], ["blue"]]})
    assert digests[0] != digests[1]


def test_duplicates_have_the_same_captions_in_the_same_order(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        picture(tmp_path, name, 1)
    several(tmp_path, a=["red", "a ball"], b=["red", "a ball"])
    ingest(CONFIG, stage_in(tmp_path))
    assert [row["status"] for row in rows(tmp_path).values()] == ["accepted", "duplicate"]
    for other in (["a ball", "red"], ["red"], ["red", "a ball", "round"]):
        several(tmp_path, a=["red", "a ball"], b=other)
        message = (
            r"a\.png and b\.png are the same picture with different captions\n"
            r"  remedy: .*the same captions in the same order"
        )
        with pytest.raises(SourceError, match=message):
            ingest(CONFIG, stage_in(tmp_path))


def test_quarantine_up_to_the_limit(tmp_path: Path) -> None:
    for n in range(3):
        picture(tmp_path, f"{n}.png", n)
    picture(tmp_path, "large.png", 9, size=(101, 100))
    picture(tmp_path, "text.png", 9).write_text("no picture")
    ingest(replace(CONFIG, max_quarantined_percent=40), stage_in(tmp_path))
    found = {
        name: (row["status"], row["reason"], row["detail"], row["width"])
        for name, row in rows(tmp_path).items()
    }
    assert found["large.png"] == (
        "quarantined",
        "too_many_pixels",
        "is 101 x 100, more than 10,000 pixels",
        None,
    )
    assert found["text.png"] == ("quarantined", "unreadable", "is not a picture", None)
    assert summary(tmp_path)["quarantined"] == 2
    message = (
        r"2 of 5 pictures cannot be used, more than ingest\.max_quarantined_percent allows \(39 %\):\n"
        r"  large\.png: too_many_pixels, is 101 x 100.*\n  text\.png: unreadable, is not a picture\n"
    )
    with pytest.raises(SourceError, match=message):
        ingest(replace(CONFIG, max_quarantined_percent=39), stage_in(tmp_path))


def test_settings_are_checked_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ingest(
            replace(CONFIG, holdout_percent=100, max_pixels=0, max_quarantined_percent=-1), stage_in(tmp_path)
        )
    assert caught.value.message.split("\n  ") == [
        "ingest.holdout_percent is 100; set it to 0 to 99",
        "ingest.max_pixels is 0; set it to 1 or more",
        "ingest.max_quarantined_percent is -1; set it to 0 to 100",
    ]
