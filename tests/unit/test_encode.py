"""The stage item by item: pictures and captions are kept apart, and what was kept never shows in the outs."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image
from safetensors.torch import load_file

from stages import encode as stage_module
from stages.core.errors import ConfigError, MachineError, SourceError, StoreError
from stages.core.latents import LatentCache, LatentItem, text_name
from stages.core.models.text import TextEncoder
from stages.core.models.vae import Vae
from stages.core.packs import Packs
from stages.core.safetensors_io import save_file
from stages.core.sampler import stream
from stages.core.shards import (
    PIXELS_FORMAT,
    open_index,
    pixel_key,
    save_pt,
    shard_name,
    shard_of,
    stacked,
    text_key,
    write_index,
)
from stages.core.shuffle import ShuffleConfig, variants
from stages.core.store import sha256_bytes
from stages.encode import EncodeConfig, encode
from tests.latents import item_fields
from tests.tiny import XL_POOLED, XL_WIDTH, make_tiny_base, make_tiny_xl, write_record
from tests.unit.test_ingest import stage_in

CONFIG = EncodeConfig(
    batch_size=4,
    dtype="float32",
    compute_dtype="float32",
    flips=False,
    tile=None,
    captions_over_limit="error",
    shuffle=ShuffleConfig(variants=1, separator=", ", keep=0, seed=0),
    sheet=2,
)
VAE = "tiny-sd/vae/diffusion_pytorch_model.safetensors"


def pixels_of(number: int) -> torch.Tensor:
    """The picture of this number, uint8 [3, H, W]; every fourth is wide."""
    size = (16, 24) if number % 4 == 3 else (16, 16)
    return torch.from_numpy(stream(0, "pixels", number).integers(0, 256, size=(3, *size), dtype="uint8"))


def write_pictures(root: Path, numbers: range, **captions: str | list[str]) -> None:
    """`data/preprocess` with one random picture for each number, in two shards and two buckets."""
    shutil.rmtree(root / "data" / "preprocess", ignore_errors=True)
    pixels: dict[int, dict[str, torch.Tensor]] = {0: {}, 1: {}}
    items: list[LatentItem] = []
    for number in numbers:
        name = sha256_bytes(str(number).encode())
        picture = pixels_of(number)
        pixels[number % 2][name] = picture
        given = captions.get(f"n{number}", f"a red ball {number}")
        item = LatentItem(
            id=name,
            file_name=f"{number}.png",
            captions=(given,) if isinstance(given, str) else tuple(given),
            split="train",
            bucket=(picture.shape[1], picture.shape[2]),
            original=(3 * picture.shape[1], 3 * picture.shape[2] + 6 * number),
            corner=(0, number),
            shard=number % 2,
            key=pixel_key(picture),
        )
        items.append(item)
    for shard, tensors in pixels.items():
        save_pt(root / "data" / "preprocess" / shard_name(shard, ".pt"), stacked(tensors))
    write_preprocess_index(root, sorted(items, key=lambda item: item.id))


def write_preprocess_index(root: Path, items: list[LatentItem]) -> None:
    fields = {"format": PIXELS_FORMAT, "items": [item_fields(item) for item in items], "shards": 2}
    write_index(root / "data" / "preprocess", fields, [shard_name(shard, ".pt") for shard in (0, 1)])


def change_weights(root: Path, path: str, ending: str, value: float) -> None:
    """Add `value` to the first number of the one tensor whose name ends so; the base is recorded anew."""
    weights = load_file(root / path)
    (name,) = [name for name in weights if f".{name}".endswith(f".{ending}")]
    weights[name].view(-1)[0] += value
    save_file(root / path, weights, {"format": "pt"})
    write_record(root / "tiny-sd", root)


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


def from_nothing(root: Path, cfg: EncodeConfig = CONFIG) -> dict[str, bytes]:
    shutil.rmtree(root / "store")
    run(root, cfg)
    return outs(root)


# --- what is kept


def test_outs_are_what_vae_and_text_encoder_give(made: Path) -> None:
    cache = LatentCache(made / "data" / "encode")
    vae, text = Vae(made / "tiny-sd", "cpu"), TextEncoder(made / "tiny-sd", "cpu")
    for item in cache.items:
        picture = pixels_of(int(item.file_name[0]))
        mean, logvar = vae.moments(picture[None].repeat(4, 1, 1, 1))
        assert torch.equal(cache.moments(item)[0], mean[0])
        assert torch.equal(cache.moments(item)[1], logvar[0])
        assert torch.equal(cache.text(item.caption), text.encode([item.caption] * 4)[0])
    assert torch.equal(cache.text(""), text.encode([""] * 4)[0])
    assert cache.space == vae.space


def test_the_index_says_what_is_kept(made: Path) -> None:
    index = LatentCache(made / "data" / "encode").index
    none = {"max": 0.0, "rms": 0.0}
    expected = {
        "format": 3,
        "shards": 2,
        "dtype": "float32",
        "compute_dtype": "float32",
        "flips": False,
        "latent_space": {"channels": 4, "downsample": 4, "scaling_factor": 0.6, "shift_factor": 0.0},
        "text": {"encoders": 1, "layer": "last", "limit": 32, "width": 32, "pooled": 0},
        "error": {"mean": none, "logvar": none, "text": none},
        "retried_in_float32": [],
        "truncated_captions": 0,
        "shuffle": {"variants": 1, "separator": ", ", "keep": 0, "seed": 0},
    }
    assert {name: index[name] for name in expected} == expected
    assert len(index["items"]) == 7
    texts = {text_name(shard_of(text_key(text), 2)) for text in ["", *(f"a red ball {n}" for n in range(7))]}
    assert set(index["files"]) == {"shard-00.safetensors", "shard-01.safetensors"} | texts


def test_items_are_those_of_preprocess(made: Path) -> None:
    cache = LatentCache(made / "data" / "encode")
    assert cache.index["items"] == open_index(made / "data" / "preprocess")["items"]
    found = {item.file_name: (item.bucket, item.original, item.corner) for item in cache.items}
    assert found["2.png"] == ((16, 16), (48, 60), (0, 2))
    assert found["3.png"] == ((16, 24), (48, 90), (0, 3))


def test_pixels_of_another_format_are_refused(root: Path) -> None:
    folder = root / "data" / "preprocess"
    index = open_index(folder)
    write_index(folder, {**index, "format": 2}, list(index["files"]))
    with pytest.raises(
        StoreError, match=r"has format 2; this version reads 3\n  remedy: run `dvc repro preprocess`"
    ):
        run(root)


def test_flips_keep_the_mirrored_pictures_too_and_encode_only_these(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = replace(CONFIG, flips=True)
    run(root, cfg)
    assert "7 items: 7 pictures and 0 captions encoded" in capsys.readouterr().out
    cache, vae = LatentCache(root / "data" / "encode"), Vae(root / "tiny-sd", "cpu")
    assert cache.flips
    for item in cache.items:
        picture = pixels_of(int(item.file_name[0]))
        for flipped, shown in ((False, picture), (True, picture.flip(-1))):
            mean, logvar = vae.moments(shown[None].repeat(4, 1, 1, 1))
            assert torch.equal(cache.moments(item, flipped=flipped)[0], mean[0])
            assert torch.equal(cache.moments(item, flipped=flipped)[1], logvar[0])
    kept = outs(root)
    assert from_nothing(root, cfg) == kept


@pytest.mark.parametrize(("dtype", "step"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_fewer_bits_with_their_measured_error(root: Path, made: Path, dtype: str, step: float) -> None:
    run(root, replace(CONFIG, dtype=dtype))
    exact, kept = LatentCache(made / "data" / "encode"), LatentCache(root / "data" / "encode")
    lost: dict[str, list[torch.Tensor]] = {"mean": [], "logvar": [], "text": []}
    for item in exact.items:
        for place, part in enumerate(("mean", "logvar")):
            lost[part].append((kept.moments(item)[place] - exact.moments(item)[place]).double().flatten())
    for caption in ["", *(item.caption for item in exact.items)]:
        lost["text"].append((kept.text(caption) - exact.text(caption)).double().flatten())
    for part, values in lost.items():
        error = torch.cat(values)
        stated = kept.index["error"][part]
        assert stated["max"] == pytest.approx(float(error.abs().max()), rel=5e-6)
        assert stated["rms"] == pytest.approx(float(error.square().mean().sqrt()), rel=5e-6)
        assert 0 < stated["max"] < 8 * step  # the values are below 16
    assert 0.4 < sum(map(len, outs(root).values())) / sum(map(len, outs(made).values())) < 0.8


def test_half_precision_states_its_error_against_float32(root: Path, made: Path) -> None:
    cfg = replace(CONFIG, compute_dtype="bfloat16")
    run(root, cfg)
    exact, kept = LatentCache(made / "data" / "encode"), LatentCache(root / "data" / "encode")
    stated = kept.index["error"]["against_float32"]
    lost = [(kept.moments(item)[0] - exact.moments(item)[0]).abs().max() for item in exact.items]
    assert stated["items"] == 7
    assert stated["mean"]["max"] == pytest.approx(float(max(lost)), rel=5e-6)
    assert stated["mean"]["max"] > 0
    assert kept.index["error"]["mean"] == {"max": 0.0, "rms": 0.0}


def test_several_captions_and_variants_are_all_kept(root: Path) -> None:
    captions = ["red ball, on grass, photo", "a ball"]
    write_pictures(root, range(7), n2=captions)
    shuffle = ShuffleConfig(variants=4, separator=", ", keep=1, seed=3)
    run(root, replace(CONFIG, shuffle=shuffle))
    cache, text = LatentCache(root / "data" / "encode"), TextEncoder(root / "tiny-sd", "cpu")
    (item,) = [item for item in cache.items if item.file_name == "2.png"]
    assert item.captions == tuple(captions)
    assert cache.texts(item) == [*variants(captions[0], shuffle), "a ball"]
    for caption in cache.texts(item):
        assert torch.equal(cache.text(caption), text.encode([caption] * 4)[0])


def test_tiles_are_near_the_whole(root: Path, made: Path) -> None:
    """16 pixels a tile, for pictures of 24: the wide ones are cut, the others are not."""
    run(root, replace(CONFIG, tile=16))
    whole, tiled = LatentCache(made / "data" / "encode"), LatentCache(root / "data" / "encode")
    for item in whole.items:
        one, other = whole.moments(item)[0], tiled.moments(item)[0]
        if item.bucket == (16, 16):
            assert torch.equal(one, other)
        else:
            assert 0 < float((one - other).square().mean() / one.square().mean()) < 0.3


def test_the_sheet_shows_some_pictures(made: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = root / "store" / "encode" / "reconstruction.png"
    with Image.open(sheet) as image:
        assert image.width > 2 * 128
    sheet.unlink()
    run(root, replace(CONFIG, sheet=0))
    assert not sheet.exists()
    assert "decoded again" not in capsys.readouterr().out
    run(root)
    assert "decoded again, 2 pictures are " in capsys.readouterr().out
    assert sheet.is_file()
    assert outs(root) == outs(made)


def test_two_text_encoders(tmp_path: Path) -> None:
    """Penultimate states of both, side by side, and the second one's pooled output: as diffusers' pipeline has them."""
    base = make_tiny_xl(tmp_path / "tiny-sd")
    write_record(base, tmp_path)
    write_pictures(tmp_path, range(3))
    run(tmp_path)
    cache = LatentCache(tmp_path / "data" / "encode")
    assert cache.index["text"] == {
        "encoders": 2, "layer": "penultimate", "limit": 32, "width": XL_WIDTH, "pooled": XL_POOLED,
    }  # fmt: skip
    pipeline: Any = StableDiffusionXLPipeline.from_pretrained(base)
    for caption in ("a red ball 1", ""):
        with torch.no_grad():
            states, _, pooled, _ = pipeline.encode_prompt(
                [caption] * 4, device="cpu", do_classifier_free_guidance=False
            )
        assert torch.equal(cache.text(caption), states[0])
        assert torch.equal(cache.pooled(caption), pooled[0])
    # The second tokenizer is one of the inputs, too.
    change_weights(tmp_path, "tiny-sd/text_encoder_2/model.safetensors", "text_projection.weight", 1.0)
    run(tmp_path)
    again = LatentCache(tmp_path / "data" / "encode")
    assert torch.equal(again.text("a red ball 1"), cache.text("a red ball 1"))
    assert not torch.equal(again.pooled("a red ball 1"), cache.pooled("a red ball 1"))


# --- what is encoded anew, and why


def test_full_or_empty_store_gives_the_same_bytes(
    root: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(root)
    said = capsys.readouterr().out
    assert "7 items: 0 pictures and 0 captions encoded, the rest kept from before\n" in said
    assert "to encode" not in said
    assert outs(root) == outs(made)
    assert from_nothing(root) == outs(made)
    said = capsys.readouterr().out
    assert "encode: pictures to encode: 7, because no run has finished with this store yet\n" in said
    assert "encode: captions to encode: 8, because no run has finished with this store yet\n" in said
    assert "7 items: 7 pictures and 8 captions encoded" in said


def test_the_bytes_that_are_announced_are_enough(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from_nothing(root)
    (stated,) = re.findall(
        r"7 items: ([0-9.]+) kB in .*, ([0-9.]+) kB more in the store", capsys.readouterr().out
    )
    for text, folder in zip(stated, (root / "data" / "encode", root / "store"), strict=True):
        written = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        assert written <= float(text) * 1000 < 1.3 * written


def test_one_more_picture_encodes_one_and_gives_the_bytes_of_a_fresh_run(
    root: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(root, range(8))
    run(root)
    said = capsys.readouterr().out
    assert "encode: pictures to encode: 1 new (7.png)\n" in said
    assert "encode: captions to encode: 1 new ('a red ball 7')\n" in said
    assert "8 items: 1 pictures and 1 captions encoded" in said
    kept = outs(root)
    text = text_name(shard_of(text_key("a red ball 7"), 2))
    changed = {name for name, data in kept.items() if outs(made)[name] != data}
    assert changed == {"shard-01.safetensors", text, "index.json"}
    assert from_nothing(root) == kept


def test_one_picture_less_leaves_nothing_behind(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(root, range(6))
    run(root)
    assert "6 items: 0 pictures and 0 captions encoded" in capsys.readouterr().out
    kept = outs(root)
    assert from_nothing(root) == kept


def test_another_caption_encodes_one_text_and_no_picture(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(root, range(7), n3="a blue square")
    run(root)
    assert "7 items: 0 pictures and 1 captions encoded" in capsys.readouterr().out


def test_another_vae_encodes_the_pictures_and_no_text(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_weights(root, VAE, "encoder.conv_in.bias", 0.1)
    run(root)
    said = capsys.readouterr().out
    assert "encode: pictures to encode: 7, because of another vae\n" in said
    assert "7 items: 7 pictures and 0 captions encoded" in said


def test_another_batch_size_encodes_all_and_says_so(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(root, replace(CONFIG, batch_size=3))
    said = capsys.readouterr().out
    assert "pictures to encode: 7, because of another batch_size (4 -> 3)\n" in said
    assert "captions to encode: 8, because of another batch_size (4 -> 3)\n" in said


def test_more_shards_encode_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where an item lies says nothing about what it is."""
    cache = LatentCache(root / "data" / "encode")
    pixels = {item.id: pixels_of(int(item.file_name[0])) for item in cache.items}
    shutil.rmtree(root / "data" / "preprocess")
    folder = root / "data" / "preprocess"
    save_pt(folder / shard_name(0, ".pt"), stacked(pixels))
    save_pt(folder / shard_name(1, ".pt"), stacked({}))
    write_preprocess_index(root, [replace(item, shard=0) for item in cache.items])
    run(root)
    assert "7 items: 0 pictures and 0 captions encoded" in capsys.readouterr().out
    assert sorted(name for name in outs(root) if name.startswith("shard")) == ["shard-00.safetensors"]


def test_a_picture_twice_is_encoded_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two files, one picture: other metadata, the same pixels; in both shards."""
    cache = LatentCache(root / "data" / "encode")
    first = next(item for item in cache.items if item.shard == 0)
    twin = replace(first, id="f" * 64, file_name="twin.png", shard=1)
    folder = root / "data" / "preprocess"
    for shard in (0, 1):
        pixels = {
            item.id: pixels_of(int(item.file_name[0])) for item in cache.items if item.shard == shard
        } | ({twin.id: pixels_of(int(first.file_name[0]))} if shard else {})
        save_pt(folder / shard_name(shard, ".pt"), stacked(pixels))
    write_preprocess_index(root, [*cache.items, twin])
    run(root)
    assert "8 items: 0 pictures and 0 captions encoded" in capsys.readouterr().out
    again = LatentCache(root / "data" / "encode")
    assert torch.equal(again.moments(twin)[0], again.moments(first)[0])


class Killed(BaseException):
    """A kill between two writes."""


@pytest.mark.parametrize("writes", [1, 2, 3, 4])
def test_killed_between_writes(root: Path, made: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    shutil.rmtree(root / "store")
    save, count = stage_module.save_file, 0

    def counting(*args: Any) -> None:
        nonlocal count
        if count == writes - 1:
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


# --- what cannot be used


LONG = " ".join(["red ball"] * 20)  # 40 words and two marks: 42 tokens of 32


def test_a_caption_over_the_limit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(root, range(7), n2=LONG, n5=["a ball", LONG])
    message = (
        r"2 caption\(s\) over the text encoder's 32 tokens:\n  [25]\.png: 42 tokens\n  [25]\.png: 42 tokens\n"
        r"  remedy: shorten them, or set encode\.captions_over_limit: truncate"
    )
    with pytest.raises(SourceError, match=message):
        run(root)
    run(root, replace(CONFIG, captions_over_limit="truncate"))
    assert "; 2 captions cut at 32 tokens\n" in capsys.readouterr().out
    cache, text = LatentCache(root / "data" / "encode"), TextEncoder(root / "tiny-sd", "cpu")
    assert torch.equal(cache.text(LONG), text.encode([" ".join(LONG.split()[:30])] * 4)[0])
    assert cache.index["truncated_captions"] == 2


def test_latents_that_are_no_numbers_are_named_and_not_kept(root: Path) -> None:
    shutil.rmtree(root / "store")
    change_weights(root, VAE, "encoder.conv_in.bias", float("nan"))
    with pytest.raises(SourceError, match=r"\d\.png, .*: the VAE gives values that are not finite"):
        run(root)
    (folder,) = [path for path in (root / "store" / "encode").iterdir() if path.is_dir()]
    assert list(folder.glob("*.safetensors")) == []


def test_half_precision_that_overflows_is_done_again_in_float32(root: Path, made: Path) -> None:
    """One picture of one bucket: float16 ends at 65,504, and a bias beyond it makes every row infinite there."""
    write_pictures(root, range(3, 4))
    change_weights(root, VAE, "encoder.conv_in.bias", 1e5)
    run(root)
    exact = LatentCache(root / "data" / "encode")
    (item,) = exact.items
    wanted = exact.moments(item)
    run(root, replace(CONFIG, compute_dtype="float16"))
    again = LatentCache(root / "data" / "encode")
    assert again.index["retried_in_float32"] == ["3.png"]
    assert torch.equal(again.moments(item)[0], wanted[0])
    assert torch.equal(again.moments(item)[1], wanted[1])


def test_too_large_for_what_is_kept_is_named(root: Path) -> None:
    change_weights(root, VAE, "quant_conv.bias", 1e6)
    with pytest.raises(
        SourceError, match=r"not finite, or too large for float16\n  remedy: look at the picture"
    ):
        run(root, replace(CONFIG, dtype="float16"))


def test_texts_that_are_no_numbers_are_named(root: Path) -> None:
    path = "tiny-sd/text_encoder/model.safetensors"
    change_weights(root, path, "final_layer_norm.bias", float("nan"))
    with pytest.raises(
        SourceError,
        match=r"captions .*'a red ball \d', .*: the text encoder gives values that are not finite",
    ):
        run(root)


def test_too_little_memory_names_a_smaller_batch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    shutil.rmtree(root / "store")
    monkeypatch.setattr(Vae, "moments", out_of_memory)
    message = r"encoding 4 pictures of (16|24) x 16 needs more memory than there is\n  remedy: set encode\.batch_size to 2"
    with pytest.raises(MachineError, match=message):
        run(root)
    with pytest.raises(
        MachineError, match=r"encoding 1 pictures .*\n  remedy: set encode\.tile to a smaller tile"
    ):
        run(root, replace(CONFIG, batch_size=1))


def test_a_disk_too_small_is_refused_before_the_work(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(root / "store")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))  # pyright: ignore
    with pytest.raises(
        StoreError, match=r"data/encode and .*store need \d+\.\d kB on a disk with 1\.0 kB free"
    ):
        run(root)
    assert list((root / "store").rglob("*.safetensors")) == []


def test_buckets_that_the_vae_cannot_halve(root: Path) -> None:
    cache = LatentCache(root / "data" / "encode")
    write_preprocess_index(root, [replace(cache.items[0], bucket=(16, 18))])
    message = r"buckets \[\(16, 18\)\] are not multiples of the VAE's downsampling, 4\n  remedy: set "
    with pytest.raises(ConfigError, match=message):
        run(root)


def test_pixels_that_are_not_what_the_index_says(root: Path) -> None:
    shutil.rmtree(root / "store")
    cache = LatentCache(root / "data" / "encode")
    write_preprocess_index(root, [replace(item, key="0" * 64) for item in cache.items])
    with pytest.raises(StoreError, match=r"shard-0\d\.pt does not hold \d\.png as the index has it"):
        run(root)


def test_a_flipped_bit_in_any_file_of_the_store_is_found(root: Path) -> None:
    paths = sorted((root / "store").rglob("*.safetensors"))
    assert len(paths) == 2  # of pictures, of texts
    for path in paths:
        whole = path.read_bytes()
        for place in (0, 20, len(whole) // 2, len(whole) - 1):
            spoiled = bytearray(whole)
            spoiled[place] ^= 4
            path.write_bytes(spoiled)
            with pytest.raises(
                StoreError, match=rf"{path} is damaged: .*\n  remedy: delete it and run `dvc repro` again"
            ):
                run(root)
        path.unlink()
    run(root)
    assert len(Packs(paths[0].parent)._places) == 7  # pyright: ignore[reportPrivateUsage]


def test_a_base_that_changed_after_it_was_recorded(root: Path) -> None:
    weights = load_file(root / VAE)
    weights["encoder.conv_in.bias"] += 1
    save_file(root / VAE, weights, {"format": "pt"})
    with pytest.raises(Exception, match=r"is not the file that data/base/record\.json describes"):
        run(root)


def test_last_run_is_remembered_only_when_it_ended(root: Path) -> None:
    last = json.loads((root / "store" / "encode" / "last.json").read_text())
    assert set(last["keys"]) == {f"{n}.png" for n in range(7)}
    write_pictures(root, range(7), n2=LONG)
    with pytest.raises(SourceError):
        run(root)
    assert json.loads((root / "store" / "encode" / "last.json").read_text()) == last


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, r"encode\.batch_size is 0\n  remedy: set it to 1 or more"),
        ({"captions_over_limit": "cut"}, r"encode\.captions_over_limit is 'cut'\n  remedy: set error or truncate"),
        ({"dtype": "half"}, r"encode\.dtype is 'half'\n  remedy: set one of float32, float16, bfloat16"),
        ({"compute_dtype": "no"}, r"encode\.compute_dtype is 'no'\n  remedy: set one of float32, float16, bfloat16"),
        ({"sheet": -1}, r"encode\.sheet is -1\n  remedy: set it to 0 or more"),
        ({"tile": 24}, r"encode\.tile is 24\n  remedy: set a multiple of 16, or null"),
        ({"tile": 0}, r"encode\.tile is 0\n  remedy: set a multiple of 16, or null"),
        ({"shuffle": replace(CONFIG.shuffle, variants=0)}, r"encode\.shuffle\.variants is 0"),
    ],
)  # fmt: skip
def test_settings(root: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(root, replace(CONFIG, **change))
