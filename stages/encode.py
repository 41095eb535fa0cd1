"""encode: pixels and captions -> the latent cache that training reads.

Reads   data/preprocess/, data/base/record.json and the base's VAE, text encoder and tokenizer
Writes  data/encode/shard-00.safetensors ...   "<item>.mean", "<item>.logvar": float32 [C, h, w], unscaled
        data/encode/text.safetensors           "<sha256 of caption>": float32 [L, D], the empty caption too
        data/encode/index.json                 items, latent space, sha256 of each file; written last

The posterior's moments are cached, not a draw from it: the bytes depend on pixels and VAE alone, and training draws anew
each epoch. Pictures and captions are kept apart in the store: a changed caption encodes one text and no picture.
Letters: B batch, C latent channels, H W pixels, h w latents, L tokens, D width.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stages.core import determinism
from stages.core.errors import ConfigError, SourceError, StoreError
from stages.core.latents import TEXT_NAME, text_key
from stages.core.models.text import TextEncoder
from stages.core.models.vae import Vae
from stages.core.record import BaseRecord, read_record, verified_folder
from stages.core.safetensors_io import save_file
from stages.core.shards import load_pt, read_index, shard_name, write_index
from stages.core.store import sha256_bytes
from stages.harness.run import Stage, stage_main

Item = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """Section `encode` of params.yaml."""

    batch_size: int  # pictures per forward, always this many (padded): other sizes differ in the last bits
    captions_over_limit: str  # error | truncate: captions with more tokens than the text encoder reads


def pixel_key(pixels_CHW: Tensor) -> str:
    """The content of a prepared picture: sha256 over its shape and bytes."""
    return sha256_bytes(str(tuple(pixels_CHW.shape)).encode() + pixels_CHW.numpy().tobytes())


def encode_pictures(vae: Vae, pixels: dict[str, Tensor], batch_size: int) -> dict[str, Tensor]:
    """{key: uint8 [3, H, W]} -> {"<key>.mean", "<key>.logvar": float32 [C, h, w]}.

    Every forward has `batch_size` rows of one shape.
    """
    by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for key in sorted(pixels):
        by_shape[tuple(pixels[key].shape)].append(key)
    moments: dict[str, Tensor] = {}
    for _, keys in sorted(by_shape.items()):
        for start in range(0, len(keys), batch_size):
            part = keys[start : start + batch_size]
            padded = part + [part[-1]] * (batch_size - len(part))
            mean, logvar = vae.moments(torch.stack([pixels[key] for key in padded]))
            for row, key in enumerate(part):
                moments[f"{key}.mean"], moments[f"{key}.logvar"] = mean[row].clone(), logvar[row].clone()
    return moments


def encode_captions(text: TextEncoder, captions: list[str], batch_size: int) -> dict[str, Tensor]:
    """{text key: float32 [L, D]} for each caption; forwards have `batch_size` rows."""
    states: dict[str, Tensor] = {}
    for start in range(0, len(captions), batch_size):
        part = captions[start : start + batch_size]
        rows_BLD = text.encode(part + [""] * (batch_size - len(part)))
        states |= {text_key(caption): rows_BLD[row].clone() for row, caption in enumerate(part)}
    return states


def refuse_long(text: TextEncoder, items: list[Item], policy: str) -> int:
    """Count captions over the text encoder's limit; with policy `error` raise SourceError that lists them."""
    if policy not in ("error", "truncate"):
        raise ConfigError(f"encode.captions_over_limit is {policy!r}", remedy="set error or truncate")
    lengths = {caption: text.length(caption) for caption in {str(item["caption"]) for item in items}}
    long = [item for item in items if lengths[item["caption"]] > text.limit]
    if long and policy == "error":
        listed = "\n  ".join(f"{item['file_name']}: {lengths[item['caption']]} tokens" for item in long[:20])
        raise SourceError(
            f"{len(long)} caption(s) over the text encoder's {text.limit} tokens:\n  {listed}",
            remedy="shorten them, or set encode.captions_over_limit: truncate to cut them there",
        )
    return len(long)


def encode(cfg: EncodeConfig, stage: Stage) -> None:
    """Encode what the store does not hold, shard by shard; assemble the outs; the index last."""
    if cfg.batch_size < 1:
        raise ConfigError(f"encode.batch_size is {cfg.batch_size}", remedy="set it to 1 or more")
    record = read_record(stage.folder("base") / "record.json")
    index = read_index(stage.folder("preprocess"))
    items: list[Item] = index["items"]
    folder = verified_folder(record, stage.root, "vae", "text_encoder", "tokenizer")
    vae = Vae(folder, stage.shared.device)
    _refuse_odd_buckets(items, vae)
    pictures = _encode_shards(cfg, stage, record, vae, items)
    text = TextEncoder(folder, stage.shared.device)
    cut = refuse_long(text, items, cfg.captions_over_limit)
    captions = _encode_texts(cfg, stage, record, text, items)

    files = [shard_name(number, ".safetensors") for number in sorted({item["shard"] for item in items})]
    fields = {
        "format": 1,
        "items": items,
        "latent_space": vae.space.to_json(),
        "dtype": "float32",
        "truncated_captions": cut,
        "vae": record.component_digest("vae"),
        "text_encoder": record.component_digest("text_encoder", "tokenizer"),
    }
    write_index(stage.out, fields, [*files, TEXT_NAME])
    stage.tracker.metrics(
        {"encode/items": len(items), "encode/pictures_encoded": pictures, "encode/captions_encoded": captions}
    )
    stage.say(
        f"{len(items)} items: {pictures} pictures and {captions} captions encoded, the rest kept from before"
        + (f"; {cut} captions cut at {text.limit} tokens" if cut else "")
    )


def _encode_shards(cfg: EncodeConfig, stage: Stage, record: BaseRecord, vae: Vae, items: list[Item]) -> int:
    """Write the picture shards; returns how many pictures the store did not hold."""
    made = 0
    print_ = stage.fingerprint(vae=record.component_digest("vae"), batch_size=cfg.batch_size)
    numbers = sorted({int(item["shard"]) for item in items})
    with stage.store.lock("encode", print_) as store:
        for number in stage.progress(numbers, total=len(numbers), what="pictures", unit="shards"):
            pixels: dict[str, Tensor] = load_pt(stage.folder("preprocess") / shard_name(number, ".pt"))
            keys = {item: pixel_key(value) for item, value in pixels.items()}
            pack = _load_pack(store / shard_name(number, ".safetensors"))
            missing = {
                keys[item]: value for item, value in pixels.items() if f"{keys[item]}.mean" not in pack
            }
            if missing:
                encoded = encode_pictures(vae, missing, cfg.batch_size)
                _refuse_not_finite(
                    encoded, {keys[item["id"]]: item["file_name"] for item in items if item["id"] in keys}
                )
                pack |= encoded
                save_file(store / shard_name(number, ".safetensors"), pack)
            made += len(missing)
            out = {
                f"{item}.{part}": pack[f"{key}.{part}"]
                for item, key in keys.items()
                for part in ("mean", "logvar")
            }
            save_file(stage.out / shard_name(number, ".safetensors"), out)
    return made


def _encode_texts(
    cfg: EncodeConfig, stage: Stage, record: BaseRecord, text: TextEncoder, items: list[Item]
) -> int:
    """Write the text states; returns how many captions the store did not hold."""
    print_ = stage.fingerprint(
        text=record.component_digest("text_encoder", "tokenizer"), batch_size=cfg.batch_size
    )
    captions = sorted({"", *(str(item["caption"]) for item in items)})
    with stage.store.lock("encode-text", print_) as store:
        pack = _load_pack(store / TEXT_NAME)
        missing = [caption for caption in captions if text_key(caption) not in pack]
        if missing:
            encoded = encode_captions(text, missing, cfg.batch_size)
            _refuse_not_finite_text(encoded, missing)
            pack |= encoded
            save_file(store / TEXT_NAME, pack)
        save_file(stage.out / TEXT_NAME, {text_key(caption): pack[text_key(caption)] for caption in captions})
    return len(missing)


def _refuse_not_finite(moments: dict[str, Tensor], names: dict[str, str]) -> None:
    bad = sorted(
        {names[name.split(".")[0]] for name, value in moments.items() if not torch.isfinite(value).all()}
    )
    if bad:
        raise SourceError(
            f"{', '.join(bad)}: the VAE gives values that are not finite",
            remedy="look at the picture, and at whether the base's VAE is damaged",
        )


def _refuse_not_finite_text(states: dict[str, Tensor], captions: list[str]) -> None:
    bad = [repr(caption) for caption in captions if not torch.isfinite(states[text_key(caption)]).all()]
    if bad:
        raise SourceError(
            f"captions {', '.join(bad[:20])}: the text encoder gives values that are not finite",
            remedy="look at whether the base's text encoder is damaged",
        )


def _refuse_odd_buckets(items: list[Item], vae: Vae) -> None:
    odd = sorted(
        {
            tuple(item["bucket"])
            for item in items
            if any(side % vae.space.downsample for side in item["bucket"])
        }
    )
    if odd:
        raise ConfigError(
            f"buckets {odd} are not multiples of the VAE's downsampling, {vae.space.downsample}",
            remedy=f"set preprocess.buckets.step to a multiple of {vae.space.downsample}",
        )


def _load_pack(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path) if path.is_file() else {}
    except SafetensorError as error:
        raise StoreError(
            f"{path} is damaged ({error})",
            remedy="delete it and run `dvc repro` again; it is made anew",
        ) from error


if __name__ == "__main__":
    stage_main("encode", EncodeConfig, encode, fix=determinism.apply)
