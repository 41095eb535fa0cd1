"""The stage item by item: pictures and captions are kept apart, and what was kept never shows in the outs."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import encode as stage_module
from stages.core.errors import ConfigError, SourceError, StoreError
from stages.core.latents import LatentCache, text_key
from stages.core.models.text import TextEncoder
from stages.core.models.vae import Vae
from stages.core.safetensors_io import save_file
from stages.core.sampler import stream
from stages.core.shards import save_pt, shard_name, write_index
from stages.core.store import sha256_bytes
from stages.encode import EncodeConfig, encode
from tests.tiny import make_tiny_base, write_record
from tests.unit.test_ingest import stage_in

CONFIG = EncodeConfig(batch_size=4, captions_over_limit="error")
VAE = "tiny-sd/vae/diffusion_pytorch_model.safetensors"


def write_pictures(root: Path, numbers: range, **captions: str) -> None:
    """`data/preprocess` with one random picture for each number, in two shards and two buckets."""
    shutil.rmtree(root / "data" / "preprocess", ignore_errors=True)
    pixels: dict[int, dict[str, torch.Tensor]] = {0: {}, 1: {}}
    items: list[dict[str, Any]] = []
    for number in numbers:
        name = sha256_bytes(str(number).encode())
        bucket = [16, 24] if number % 4 == 3 else [16, 16]
        drawn = stream(0, "pixels", number).integers(0, 256, size=(3, *bucket), dtype="uint8")
        pixels[number % 2][name] = torch.from_numpy(drawn)
        item = {
            "id": name,
            "file_name": f"{number}.png",
            "caption": captions.get(f"n{number}", f"a red ball {number}"),
        }
        items.append({**item, "split": "train", "bucket": bucket, "shard": number % 2})
    for shard, tensors in pixels.items():
        save_pt(root / "data" / "preprocess" / shard_name(shard, ".pt"), tensors)
    items.sort(key=lambda item: item["id"])
    write_index(
        root / "data" / "preprocess", {"items": items}, [shard_name(shard, ".pt") for shard in pixels]
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encode")
    write_record(make_tiny_base(root / "tiny-sd"), root)
    write_pictures(root, range(7))
    encode(CONFIG, stage_in(root, "encode"))
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "work"))


def run(root: Path, cfg: EncodeConfig = CONFIG) -> None:
    shutil.rmtree(root / "data" / "encode", ignore_errors=True)  # as dvc does
    encode(cfg, stage_in(root, "encode"))


def outs(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "data" / "encode").iterdir())}


def test_outs_are_what_vae_and_text_encoder_give(made: Path) -> None:
    cache = LatentCache(made / "data" / "encode")
    vae, text = Vae(made / "tiny-sd", "cpu"), TextEncoder(made / "tiny-sd", "cpu")
    for item in cache.items[:3]:
        number = int(item.file_name[0])
        drawn = stream(0, "pixels", number).integers(0, 256, size=(3, *item.bucket), dtype="uint8")
        mean, logvar = vae.moments(torch.from_numpy(drawn)[None].repeat(4, 1, 1, 1))
        assert torch.equal(cache.moments(item)[0], mean[0])
        assert torch.equal(cache.moments(item)[1], logvar[0])
        assert torch.equal(cache.text(item.caption), text.encode([item.caption] * 4)[0])
    assert torch.equal(cache.text(""), text.encode([""] * 4)[0])
    assert cache.space == vae.space


def test_full_or_empty_store_gives_the_same_bytes(
    root: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(root)
    assert (
        "7 items: 0 pictures and 0 captions encoded, the rest kept from before\n" in capsys.readouterr().out
    )
    assert outs(root) == outs(made)
    shutil.rmtree(root / "store")
    run(root)
    assert "7 items: 7 pictures and 8 captions encoded" in capsys.readouterr().out
    assert outs(root) == outs(made)


def test_one_more_picture_encodes_one_and_gives_the_bytes_of_a_fresh_run(
    root: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(root, range(8))
    run(root)
    assert "8 items: 1 pictures and 1 captions encoded" in capsys.readouterr().out
    kept = outs(root)
    assert {name for name, data in kept.items() if outs(made)[name] != data} == {
        "shard-01.safetensors", "text.safetensors", "index.json",
    }  # fmt: skip
    shutil.rmtree(root / "store")
    run(root)
    assert outs(root) == kept


def test_one_picture_less_leaves_nothing_behind(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(root, range(6))
    run(root)
    assert "6 items: 0 pictures and 0 captions encoded" in capsys.readouterr().out
    kept = outs(root)
    shutil.rmtree(root / "store")
    run(root)
    assert outs(root) == kept


def test_another_caption_encodes_one_text_and_no_picture(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(root, range(7), n3="a blue square")
    run(root)
    assert "7 items: 0 pictures and 1 captions encoded" in capsys.readouterr().out


def test_another_vae_encodes_the_pictures_and_no_text(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(root / VAE)
    weights["encoder.conv_in.bias"] += 0.1
    save_file(root / VAE, weights, {"format": "pt"})
    write_record(root / "tiny-sd", root)
    run(root)
    assert "7 items: 7 pictures and 0 captions encoded" in capsys.readouterr().out


class Killed(BaseException):
    """A kill between two writes."""


@pytest.mark.parametrize("writes", [1, 2, 3, 5])
def test_killed_between_writes(root: Path, made: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    shutil.rmtree(root / "store")
    save, count = stage_module.save_file, 0

    def counting(*args: Any) -> None:
        nonlocal count
        if count == writes:
            raise Killed
        count += 1
        save(*args)

    with monkeypatch.context() as patch:
        patch.setattr(stage_module, "save_file", counting)
        with pytest.raises(Killed):
            run(root)
    assert not (root / "data" / "encode" / "index.json").exists()
    run(root)
    assert outs(root) == outs(made)


LONG = " ".join(["red ball"] * 20)  # 40 words and two marks: 42 tokens of 32


def test_a_caption_over_the_limit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(root, range(7), n2=LONG, n5=LONG)
    message = (
        r"2 caption\(s\) over the text encoder's 32 tokens:\n  [25]\.png: 42 tokens\n  [25]\.png: 42 tokens\n"
        r"  remedy: shorten them, or set encode\.captions_over_limit: truncate"
    )
    with pytest.raises(SourceError, match=message):
        run(root)
    run(root, replace(CONFIG, captions_over_limit="truncate"))
    assert "; 2 captions cut at 32 tokens\n" in capsys.readouterr().out
    states = load_file(root / "data" / "encode" / "text.safetensors")
    text = TextEncoder(root / "tiny-sd", "cpu")
    assert torch.equal(states[text_key(LONG)], text.encode([" ".join(LONG.split()[:30])] * 4)[0])


def test_latents_that_are_no_numbers_are_named_and_not_kept(root: Path) -> None:
    weights = load_file(root / VAE)
    weights["encoder.conv_in.bias"][0] = float("nan")
    save_file(root / VAE, weights, {"format": "pt"})
    write_record(root / "tiny-sd", root)
    with pytest.raises(
        SourceError, match=r"0\.png, 2\.png, 4\.png, 6\.png: the VAE gives values that are not finite"
    ):
        run(root)
    assert sum(1 for _ in (root / "store").rglob("shard-*")) == 2  # of the sound VAE


def test_texts_that_are_no_numbers_are_named(root: Path) -> None:
    path = root / "tiny-sd" / "text_encoder" / "model.safetensors"
    weights = load_file(path)
    (name,) = [name for name in weights if name.endswith("final_layer_norm.bias")]
    weights[name][0] = float("nan")
    save_file(path, weights, {"format": "pt"})
    write_record(root / "tiny-sd", root)
    with pytest.raises(
        SourceError,
        match=r"captions '', 'a red ball 0', .*: the text encoder gives values that are not finite",
    ):
        run(root)


def test_buckets_that_the_vae_cannot_halve(root: Path) -> None:
    write_pictures(root, range(1))
    name = sha256_bytes(b"0")
    item = {
        "id": name,
        "file_name": "0.png",
        "caption": "x",
        "split": "train",
        "bucket": [16, 18],
        "shard": 0,
    }
    write_index(root / "data" / "preprocess", {"items": [item]}, [])
    message = r"buckets \[\(16, 18\)\] are not multiples of the VAE's downsampling, 4\n  remedy: set "
    with pytest.raises(ConfigError, match=message):
        run(root)


def test_a_damaged_pack_in_the_store_is_named(root: Path) -> None:
    (path,) = (root / "store").rglob("shard-00.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(
        StoreError,
        match=r"shard-00\.safetensors is damaged .*\n  remedy: delete it and run `dvc repro` again",
    ):
        run(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, r"encode\.batch_size is 0\n  remedy: set it to 1 or more"),
        (
            {"captions_over_limit": "cut"},
            r"encode\.captions_over_limit is 'cut'\n  remedy: set error or truncate",
        ),
    ],
)
def test_settings(root: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(root, replace(CONFIG, **change))
