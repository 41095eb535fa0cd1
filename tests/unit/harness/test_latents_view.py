"""`latents inspect` as people type it."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from safetensors.torch import load_file

from stages.cli import main
from stages.core.latents import LatentCache, LatentItem
from stages.core.models.vae import Vae
from stages.core.reconstruction import decoded, psnr_of, reconstruction_sheet
from stages.core.record import read_record
from stages.core.sampler import stream
from stages.core.shards import PIXELS_FORMAT, pixel_key, save_pt, shard_name, stacked, write_index
from stages.core.store import sha256_bytes, sha256_file
from stages.harness.closure import PROJECT
from stages.harness.run import describe_os_error
from tests.latents import item_fields, write_latents
from tests.tiny import make_tiny_base, write_record


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["latents", "inspect", *arguments])


def pixels_of(number: int) -> torch.Tensor:
    """uint8 [3, H, W]; the last is wide."""
    size = (16, 24) if number == 2 else (16, 16)
    return torch.from_numpy(stream(0, "pixels", number).integers(0, 256, size=(3, *size), dtype="uint8"))


def item_of(number: int, **fields: Any) -> LatentItem:
    pixels = pixels_of(number)
    item = LatentItem(
        id=sha256_bytes(str(number).encode()),
        file_name=f"{number}.png",
        captions=(f"a ball, {number}",),
        split="holdout" if number == 1 else "train",
        bucket=(pixels.shape[1], pixels.shape[2]),
        original=(pixels.shape[1], pixels.shape[2]),
        corner=(0, 0),
        shard=number % 2,
        key=pixel_key(pixels),
    )
    return replace(item, **fields)


TEXTS = {"": torch.zeros(3, 2), **{f"a ball, {number}": torch.ones(3, 2) for number in range(3)}}


def write_cache(root: Path, items: list[LatentItem], **fields: Any) -> None:
    """data/encode as the base under `root` encodes the pictures 0, 1, 2."""
    vae, record = Vae(root / "tiny-sd", "cpu"), read_record(root / "data/base/record.json")
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, item in enumerate(items):
        mean, logvar = vae.moments(pixels_of(number)[None])
        moments[item.id] = (mean[0], logvar[0])
    usual = {"vae": record.vae_digest, "text_encoder": record.text_digest, "space": vae.space.to_json()}
    write_latents(root / "data/encode", items, moments, TEXTS, **usual | fields)


def write_pixels(root: Path, items: list[LatentItem]) -> None:
    folder = root / "data/preprocess"
    shards: dict[int, dict[str, torch.Tensor]] = {}
    for number, item in enumerate(items):
        shards.setdefault(item.shard, {})[item.id] = pixels_of(number)
    for shard, tensors in shards.items():
        save_pt(folder / shard_name(shard, ".pt"), stacked(tensors))
    fields = {"format": PIXELS_FORMAT, "items": [item_fields(item) for item in items], "shards": 2}
    write_index(folder, fields, [shard_name(shard, ".pt") for shard in shards])


ITEMS = [item_of(number) for number in range(3)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    write_record(make_tiny_base(root / "tiny-sd"), root)
    shutil.copy(PROJECT / "params.yaml", root)
    write_pixels(root, ITEMS)
    write_cache(root, ITEMS)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to spoil, and the current folder."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "project"))
    return tmp_path / "project"


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def findings(result: Result) -> dict[str, str]:
    """The lines above the table of files: what -> finding."""
    found = lines(result)
    above = found[1 : next(place for place, line in enumerate(found) if line.startswith("file "))]
    return {line[:12].strip(): line[14:] for line in above}


def table(root: Path) -> list[str]:
    """The lines about the files, as they should be."""
    rows = [("file", "size", "tensors", "sha256")]
    for path in sorted((root / "data/encode").glob("*.safetensors")):
        size = path.stat().st_size
        text = f"{size / 1000:.1f} kB" if size >= 1000 else f"{size} bytes"
        rows.append((path.name, text, str(len(load_file(path))), sha256_file(path)[:12]))
    assert len(rows) > 3
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join((row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3]))
        for row in rows
    ]


def test_what_the_cache_holds(root: Path) -> None:
    # Neither is needed to look at the lists.
    for name in ("tiny-sd", "data/base", "data/preprocess"):
        shutil.rmtree(root / name)
    (root / "params.yaml").unlink()
    digest = LatentCache(root / "data/encode").digest[:12]
    assert lines(call("--items", "0")) == [
        "data/encode",
        f"      format  3, digest {digest}",
        "       dtype  float32",
        "       items  3: 2 train, 1 holdout",
        "     buckets  2 of 16 x 16, 1 of 24 x 16 (W x H)",
        "    mirrored  not kept",
        "     latents  4 channels, downsampled by 4, scaling factor 0.6, shift factor 0.0",
        "       texts  4 by 1 text encoder(s), last hidden states, 3 tokens x 2, none pooled",
        *table(root),
    ]


def test_a_file_of_two_pictures_has_four_tensors(root: Path) -> None:
    rows = {row.split()[0]: row.split()[-2] for row in table(root)}
    assert (rows["shard-00.safetensors"], rows["shard-01.safetensors"]) == ("4", "2")


def test_fields_that_an_index_may_have(root: Path) -> None:
    error = {part: {"max": 0.00048828125, "rms": 1.5e-05} for part in ("mean", "logvar", "text")}
    against = {part: {"max": 0.03125, "rms": 0.25} for part in ("mean", "logvar")}
    write_cache(
        root,
        ITEMS,
        compute_dtype="bfloat16",
        flips=True,
        error=error | {"against_float32": against | {"items": 3}},
        retried_in_float32=["0.png", "2\x1b.png"],
        shuffle={"variants": 2, "separator": ", ", "keep": 0, "seed": 7},
        truncated_captions=5,
        text={"encoders": 2, "layer": "penultimate", "limit": 3, "width": 2, "pooled": 9},
    )
    found = findings(call("--items", "0"))
    assert found["dtype"] == "float32, computed in bfloat16"
    assert found["mirrored"] == "kept too"
    texts = len({text for item in ITEMS for text in LatentCache(root / "data/encode").texts(item)}) + 1
    assert 4 < texts <= 7
    assert (
        found["texts"] == f"{texts} by 2 text encoder(s), penultimate hidden states, 3 tokens x 2, pooled 9"
    )
    assert (
        found["shuffled"] == "2 variants per caption, parts between ', ', the first 0 kept in front, seed 7"
    )
    assert found["cut"] == "5 caption(s) at 3 tokens"
    assert found["in float32"] == "computed again: 0.png, 2\\x1b.png"
    assert found["rounding"] == "; ".join(
        f"{part} at most 0.000488281, rms 1.5e-05" for part in ("logvar", "mean", "text")
    )
    assert (
        found["vs float32"]
        == "logvar at most 0.03125, rms 0.25; mean at most 0.03125, rms 0.25 (of 3 pictures)"
    )


def test_keys_and_what_a_terminal_must_not_obey(root: Path) -> None:
    items = [
        item_of(0, file_name="a\x1b[31mred\n.png", captions=("a ball, 0", "tab\tbell\x07 \u202e")),
        item_of(1, file_name="b/ü 笑.png"),
        ITEMS[2],
    ]
    write_cache(root, items)
    result = call("--items", "0", "--keys")
    assert lines(result)[-3:] == [
        f"a\\x1b[31mred\\n.png  16 x 16  train  shard 0  {ITEMS[0].key[:12]}  "
        "'a ball, 0', 'tab\\tbell\\x07 \\u202e'",
        f"b/ü 笑.png  16 x 16  holdout  shard 1  {ITEMS[1].key[:12]}  'a ball, 1'",
        f"2.png  24 x 16  train  shard 0  {ITEMS[2].key[:12]}  'a ball, 2'",
    ]
    assert "\x1b" not in result.output
    write_pixels(root, items)
    shown = lines(call("--items", "1"))
    assert shown[-2].endswith(" dB  a\\x1b[31mred\\n.png")


def test_a_sheet_that_cannot_be_written(root: Path) -> None:
    write_pixels(root, ITEMS)
    result = call("--items", "1", "--sheet", "/proc/none/sheet.png")
    assert result.exit_code == 1
    assert result.output.endswith(
        "error: [Errno 2] No such file or directory: '/proc/none'\n  remedy: give a path that can be used\n"
    )


def test_a_disk_that_is_full(root: Path) -> None:
    """Another remedy than for a wrong path; and what names no path, or none that people gave, stays a fault of ours."""
    error = describe_os_error(OSError(errno.ENOSPC, "No space left on device", "x.png"), chosen=True)
    assert str(error) == (
        "[Errno 28] No space left on device: 'x.png'\n"
        "  remedy: free space or make the folder writable, then run the same command again"
    )
    for chosen, fault in (
        (True, OSError(errno.ENOENT, "gone")),
        (False, OSError(errno.ENOENT, "gone", "x.png")),
    ):
        with pytest.raises(OSError, match="gone"):
            describe_os_error(fault, chosen=chosen)


def test_a_flipped_bit_in_any_file_is_found(root: Path) -> None:
    for name in sorted(LatentCache(root / "data/encode").index["files"]):
        path = root / "data/encode" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        result = call("--items", "0")
        assert result.exit_code == 1
        assert result.output.endswith(
            f"error: data/encode/{name} is missing or does not match its sha256 in data/encode/index.json\n"
            "  remedy: run `dvc checkout --force data/encode`; the file was changed by hand or by a fault\n"
        )
        path.write_bytes(whole)
    assert call("--items", "0").exit_code == 0


def test_another_folder_and_none(root: Path) -> None:
    (root / "data/encode").rename(root / "elsewhere")
    assert lines(call("--items", "0", "elsewhere"))[0] == "elsewhere"
    result = call()
    assert result.exit_code == 1
    assert result.output.startswith(
        "error: data/encode/index.json is missing: data/encode was never finished"
    )


def test_some_latents_are_decoded_and_compared(root: Path) -> None:
    cache = LatentCache(root / "data/encode")
    pictures = decoded(Vae(root / "tiny-sd", "cpu"), cache, ITEMS, batch_size=1)
    values = [psnr_of(pixels_of(number), picture) for number, picture in enumerate(pictures)]
    result = call()
    assert lines(result)[-4:] == [
        *(f"{value:8.1f} dB  {number}.png" for number, value in enumerate(values)),
        f"{sum(values) / 3:8.1f} dB  mean of 3; the pictures are in .darkroom/reconstruction.png",
    ]
    expected = reconstruction_sheet(ITEMS, [pixels_of(number) for number in range(3)], pictures)
    with Image.open(root / ".darkroom/reconstruction.png") as image:
        assert np.array_equal(np.asarray(image), np.asarray(expected))


def test_number_of_items_and_place_of_the_sheet(root: Path) -> None:
    found = lines(call("--items", "2", "--sheet", "new/sheet.png"))
    assert [line.split()[-1] for line in found[-3:-1]] == ["0.png", "1.png"]
    assert found[-1].endswith(" dB  mean of 2; the pictures are in new/sheet.png")
    assert (root / "new/sheet.png").is_file()
    assert not (root / ".darkroom").exists()


def test_the_lists_alone_write_no_sheet(root: Path) -> None:
    assert "dB" not in call("--items", "0").output
    assert not (root / ".darkroom").exists()


def test_latents_of_another_base_are_not_decoded(root: Path) -> None:
    shutil.rmtree(root / "tiny-sd")
    write_record(make_tiny_base(root / "tiny-sd", seed=1), root)
    result = call()
    assert result.exit_code == 1
    assert (
        "error: data/encode was made with another vae than data/base/record.json describes" in result.output
    )
    assert not (root / ".darkroom").exists()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("data/base/record.json", "error: data/base/record.json is missing"),
        ("tiny-sd/vae/config.json", "error: tiny-sd/vae/config.json is missing"),
        ("data/preprocess/index.json", "error: data/preprocess/index.json is missing"),
        ("data/preprocess/shard-01.pt", "error: data/preprocess/shard-01.pt is missing or does not match"),
        ("params.yaml", "error: params.yaml is missing"),
    ],
)
def test_what_decoding_needs_is_named(root: Path, missing: str, message: str) -> None:
    (root / missing).unlink()
    result = call()
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_gpu_that_is_not_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = root / "params.yaml"
    path.write_text(path.read_text().replace("device: cpu ", "device: cuda "))
    result = call()
    assert result.exit_code == 1
    assert "error: params.yaml says device: cuda, but torch" in result.output


def test_a_cache_without_items(root: Path) -> None:
    write_cache(root, [])
    found = lines(call())
    assert "       items  none" in found
    assert "dB" not in found[-1]
