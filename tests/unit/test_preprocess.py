"""The stage item by item: what is decoded, what is kept, and that it never shows in the outs."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from stages import preprocess as stage_module
from stages.core.buckets import BucketConfig
from stages.core.errors import ConfigError, SourceError
from stages.core.manifest import ITEMS, read_rows
from stages.core.shards import load_pt, open_index, shard_of, unstacked
from stages.core.store import sha256_file
from stages.ingest import IngestConfig, ingest
from stages.preprocess import PreprocessConfig, preprocess
from tests.unit.test_ingest import picture, several, stage_in

INGEST = IngestConfig(source="pictures", holdout_percent=50, max_pixels=10_000, max_quarantined_percent=100)
CONFIG = PreprocessConfig(
    buckets=BucketConfig(resolution=16, step=8, minimum=8, maximum=32),
    background=[255, 255, 255],
    allow_upscale=False,
    max_pixels=10_000,
    max_quarantined_percent=50,
    shards=4,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for n in range(10):
        picture(tmp_path, f"{n}.png", n, size=(40, 20) if n % 3 == 0 else (24, 24))
    return tmp_path


def run(root: Path, cfg: PreprocessConfig = CONFIG) -> None:
    ingest(INGEST, stage_in(root))
    shutil.rmtree(root / "data" / "preprocess", ignore_errors=True)  # as dvc does
    preprocess(cfg, stage_in(root, "preprocess"))


def outs(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "data" / "preprocess").iterdir())}


def table(root: Path) -> dict[str, dict[str, Any]]:
    found = read_rows(root / "data" / "preprocess" / "items.parquet", [field.name for field in ITEMS])
    return {row["file_name"]: row for row in found}


def test_items_pixels_and_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(root)
    index = open_index(root / "data" / "preprocess")
    assert len(index["items"]) == 10
    assert index["shards"] == 4
    assert [item["id"] for item in index["items"]] == sorted(item["id"] for item in index["items"])
    for item in index["items"]:
        assert item["id"] == sha256_file(root / "pictures" / item["file_name"])
        assert item["captions"] == [f"number {item['file_name'][0]}"]
        assert item["shard"] == shard_of(item["id"], 4)
        shard = load_pt(root / "data" / "preprocess" / f"shard-0{item['shard']}.pt")
        pixels = unstacked(shard)[item["id"]]
        colour = int(item["file_name"][0])
        wide = colour % 3 == 0
        assert item["bucket"] == ([8, 24] if wide else [16, 16])
        expected = torch.tensor([colour, 0, 0], dtype=torch.uint8)[:, None, None].expand(3, *item["bucket"])
        assert torch.equal(pixels, expected)
    row = table(root)["0.png"]
    assert [
        row[name] for name in ("bucket_height", "bucket_width", "crop_left", "crop_right", "repairs")
    ] == [8, 24, 0, 40, ""]
    said = "preprocess: 10 items in 2 bucket(s) (10 decoded, 0 kept), 0 repaired, 0 quarantined\n"
    assert capsys.readouterr().out.endswith(said)


def test_the_index_has_the_pictures_own_size_and_where_the_crop_begins(root: Path) -> None:
    shutil.rmtree(root / "pictures")
    sizes = {
        "landscape": (100, 60),
        "portrait": (60, 100),
        "exact": (64, 64),
        "higher": (72, 90),
        "turned": (100, 60),
    }
    for colour, (name, size) in enumerate(sizes.items()):
        picture(root, f"{name}.png", colour, size=size)
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    with Image.open(root / "pictures" / "turned.png") as stored:
        stored.save(root / "pictures" / "turned.png", exif=exif)
    square = BucketConfig(resolution=64, step=64, minimum=64, maximum=64)
    run(root, replace(CONFIG, buckets=square, allow_upscale=True))
    items = open_index(root / "data" / "preprocess")["items"]
    found = {item["file_name"]: (item["original"], item["corner"], item["bucket"]) for item in items}
    assert found == {
        "landscape.png": ([60, 100], [0, 21], [64, 64]),  # resized to 64 x 106.67
        "portrait.png": ([100, 60], [21, 0], [64, 64]),
        "exact.png": ([64, 64], [0, 0], [64, 64]),
        "higher.png": ([90, 72], [8, 0], [64, 64]),  # resized to 80 x 64
        "turned.png": ([100, 60], [21, 0], [64, 64]),  # stored as the landscape, upright a portrait
    }
    assert all(
        type(value) is int for item in items for name in ("original", "corner") for value in item[name]
    )
    row = table(root)["landscape.png"]
    assert [row[f"crop_{side}"] for side in ("left", "top", "right", "bottom")] == [20, 0, 80, 60]


def test_full_or_empty_store_gives_the_same_bytes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(root)
    before = outs(root)
    run(root)
    assert "(0 decoded, 10 kept)" in capsys.readouterr().out
    assert outs(root) == before
    shutil.rmtree(root / "store")
    run(root)
    assert outs(root) == before


def test_one_more_picture_decodes_one_and_changes_one_shard(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(root)
    before = outs(root)
    picture(root, "x.png", 77)
    for path in (root / "pictures").glob("x.*"):
        if path.suffix == ".png":
            Image.new("RGB", (24, 24), (77, 0, 0)).save(path)
    run(root)
    assert "(1 decoded, 10 kept)" in capsys.readouterr().out
    changed = {name for name, data in outs(root).items() if before.get(name) != data}
    item = sha256_file(root / "pictures" / "x.png")
    assert changed == {f"shard-0{shard_of(item, 4)}.pt", "index.json", "items.parquet"}


def test_another_caption_and_another_name_decode_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(root)
    (root / "pictures" / "1.txt").write_text("another caption")
    for suffix in (".png", ".txt"):
        (root / "pictures" / f"2{suffix}").rename(root / "pictures" / f"two{suffix}")
    run(root)
    assert "(0 decoded, 10 kept)" in capsys.readouterr().out
    assert table(root)["1.png"]["captions"] == ["another caption"]
    assert "two.png" in table(root)


def test_several_captions_reach_index_and_table_in_their_order(root: Path) -> None:
    captions = {f"{n}": [f"number {n}", "a colour"][:: -1 if n % 2 else 1] for n in range(10)}
    several(root, **captions)
    run(root)
    expected = {f"{name}.png": texts for name, texts in captions.items()}
    index = open_index(root / "data" / "preprocess")
    assert {item["file_name"]: item["captions"] for item in index["items"]} == expected
    assert {name: row["captions"] for name, row in table(root).items()} == expected


def test_the_number_of_shards_is_stated_though_some_are_empty(root: Path) -> None:
    run(root, replace(CONFIG, shards=50))
    index = open_index(root / "data" / "preprocess")
    assert index["shards"] == 50
    assert len(index["files"]) == len({item["shard"] for item in index["items"]}) <= 10


@pytest.mark.parametrize("change", [{"background": [0, 0, 0]}, {"shards": 5}, {"allow_upscale": True}])
def test_a_changed_setting_decodes_anew(
    root: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    run(root)
    run(root, replace(CONFIG, **change))
    assert "(10 decoded, 0 kept)" in capsys.readouterr().out.splitlines()[-1]


def test_the_limit_alone_is_not_part_of_the_work(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(root)
    run(root, replace(CONFIG, max_quarantined_percent=1))
    assert "(0 decoded, 10 kept)" in capsys.readouterr().out


class Killed(BaseException):
    """A kill between two writes."""


@pytest.mark.parametrize("writes", [1, 2, 5])
def test_killed_between_shards(root: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    run(root)
    before = outs(root)
    shutil.rmtree(root / "store")
    write, count = stage_module.write_atomic, 0

    def counting(path: Path, data: bytes) -> None:
        nonlocal count
        if count == writes:
            raise Killed
        count += 1
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(stage_module, "write_atomic", counting)
        with pytest.raises(Killed):
            run(root)
    assert not (root / "data" / "preprocess" / "index.json").exists()
    run(root)
    assert outs(root) == before


def test_a_picture_that_changed_after_ingest_is_named(root: Path) -> None:
    ingest(INGEST, stage_in(root))
    Image.new("RGB", (24, 24), (200, 0, 0)).save(root / "pictures" / "4.png")
    with pytest.raises(
        SourceError, match=r"pictures/4\.png is not the file that ingest saw\n  remedy: run `dvc repro` again"
    ):
        preprocess(CONFIG, stage_in(root, "preprocess"))


def test_quarantine_knows_content_not_names(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture(root, "small.png", 50, size=(15, 15))
    cut = picture(root, "cut.png", 51, size=(60, 60))
    Image.effect_noise((60, 60), 90).convert("RGB").save(cut)
    cut.write_bytes(cut.read_bytes()[:2000])
    run(root)
    found = table(root)
    assert (found["small.png"]["status"], found["small.png"]["reason"]) == ("quarantined", "too_small")
    assert found["small.png"]["detail"] == "is 15 x 15, its bucket 16 x 16"
    assert (found["cut.png"]["reason"], found["cut.png"]["bucket_height"]) == ("truncated", None)
    assert found["cut.png"]["detail"].startswith("cannot be decoded (")
    # A kept reason must not tell a name that the file had once.
    for name in ("small", "cut"):
        for suffix in (".png", ".txt"):
            (root / "pictures" / f"{name}{suffix}").rename(root / "pictures" / f"renamed {name}{suffix}")
    run(root)
    kept = outs(root)
    assert "(0 decoded, 12 kept), 0 repaired, 2 quarantined" in capsys.readouterr().out
    shutil.rmtree(root / "store")
    run(root)
    assert outs(root) == kept


def test_upscaling_only_where_it_is_allowed(root: Path) -> None:
    picture(root, "small.png", 50, size=(15, 15))
    run(root, replace(CONFIG, allow_upscale=True))
    assert (table(root)["small.png"]["status"], table(root)["small.png"]["repairs"]) == (
        "accepted",
        "upscaled",
    )


def test_too_many_and_all_quarantined(root: Path) -> None:
    for n in range(10):
        picture(root, f"{n}.png", n, size=(7, 7))
    with pytest.raises(
        SourceError, match=r"10 of 10 pictures cannot be used, more than preprocess\.max_quarantined_percent"
    ):
        run(root)
    with pytest.raises(SourceError, match="no picture is left after preprocessing"):
        run(root, replace(CONFIG, max_quarantined_percent=100))


def test_settings_are_checked_together(root: Path) -> None:
    cfg = replace(CONFIG, background=[0, 256], shards=0, max_pixels=0, max_quarantined_percent=101)
    with pytest.raises(ConfigError) as caught:
        preprocess(cfg, stage_in(root, "preprocess"))
    assert caught.value.message.split("\n  ") == [
        "preprocess.background is [0, 256]; give red, green, blue, each 0 to 255",
        "preprocess.shards is 0; set it to 1 or more",
        "preprocess.max_pixels is 0; set it to 1 or more",
        "preprocess.max_quarantined_percent is 101; set it to 0 to 100",
    ]
