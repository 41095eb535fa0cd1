"""encode: pixels and captions -> the latent cache that training reads.

Reads   data/preprocess/, data/base/record.json and the base's VAE, text encoders and tokenizers
Writes  data/encode/shard-00.safetensors ...   posterior mean and log-variance per picture, unscaled
        data/encode/text-00.safetensors ...    text states per caption, the empty caption too
        data/encode/index.json                 items, latent space, sha256 of each shard; written last

The posterior's moments are cached, not a draw from it: the bytes depend on pixels and VAE alone, and training draws anew
at each visit. Pictures and captions are kept apart in the store: a changed caption encodes one text and no picture.
$DARKROOM_PROCESSES processes share the shards between them. docs/latents.md explains the cache.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from stages.core import determinism
from stages.core.errors import ConfigError, SourceError
from stages.core.latents import FORMAT, SUFFIX, LatentCache, LatentItem, picture_row, text_name
from stages.core.models.text import PairedTextEncoder, TextEncoder, load_text
from stages.core.models.vae import LatentSpace, Vae
from stages.core.moments import PARTS, Row, encode_group, grouped
from stages.core.packs import FORMAT as PACK_FORMAT
from stages.core.packs import Packs, Writer
from stages.core.pixels import Pixels
from stages.core.ranks import Ranks, ranks
from stages.core.reconstruction import choose, decoded, psnr_of, reconstruction_sheet
from stages.core.record import read_record, verified_folder
from stages.core.rounding import difference, dtype_of, error_of
from stages.core.rows import Rows
from stages.core.safetensors_io import save_file
from stages.core.shards import shard_name, shard_of, text_key, write_index
from stages.core.sheets import png_bytes
from stages.core.shuffle import ShuffleConfig, check_shuffle, variants
from stages.core.space import check_space, size_text
from stages.core.store import fingerprint, write_atomic
from stages.core.text_states import encode_captions
from stages.harness.reasons import Memory, explain, recall, remember
from stages.harness.run import Stage, stage_main

_COMPARED = 8  # pictures on which half precision is compared with float32


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """Section `encode` of params.yaml."""

    batch_size: int  # rows per forward, always this many (padded): other numbers differ in the last bits
    dtype: str  # float32 | float16 | bfloat16: of what is kept; the index states the error
    compute_dtype: str  # float32 | float16 | bfloat16: of the VAE; texts are always computed in float32
    flips: bool  # whether mirrored pictures are kept too, and drawn in training
    tile: int | None  # side in pixels above which pictures are encoded in overlapping tiles; null: whole
    captions_over_limit: str  # error | truncate: captions with more tokens than the text encoder reads
    shuffle: ShuffleConfig
    sheet: int  # pictures on the sheet of reconstructions, for MLflow; 0: no sheet


def check(cfg: EncodeConfig) -> None:
    """Raise ConfigError for settings that cannot work."""
    if cfg.batch_size < 1:
        raise ConfigError(f"encode.batch_size is {cfg.batch_size}", remedy="set it to 1 or more")
    if cfg.captions_over_limit not in ("error", "truncate"):
        raise ConfigError(
            f"encode.captions_over_limit is {cfg.captions_over_limit!r}", remedy="set error or truncate"
        )
    if cfg.sheet < 0:
        raise ConfigError(f"encode.sheet is {cfg.sheet}", remedy="set it to 0 or more")
    dtype_of("encode.dtype", cfg.dtype)
    dtype_of("encode.compute_dtype", cfg.compute_dtype)
    check_shuffle(cfg.shuffle)


class Job:
    """What all parts of the work share; models are loaded when they are first needed."""

    def __init__(self, cfg: EncodeConfig, stage: Stage, team: Ranks) -> None:
        self.cfg, self.stage, self.team = cfg, stage, team
        self.record = read_record(stage.folder("base") / "record.json")
        self.base = verified_folder(self.record, stage.root, "vae", *self.record.text_components)
        self.space = LatentSpace.of(self.record.components["vae"]["config"])
        self.pixels = Pixels(stage.folder("preprocess"))
        self.items = [LatentItem.of(fields) for fields in self.pixels.index["items"]]
        self.shards = int(self.pixels.index["shards"])
        self.keep = dtype_of("encode.dtype", cfg.dtype)
        self.compute = dtype_of("encode.compute_dtype", cfg.compute_dtype)
        self.mirrored = (False, True) if cfg.flips else (False,)
        self.mine = set(team.mine(list(range(self.shards))))  # shards that this rank makes

    @cached_property
    def vae(self) -> Vae:
        """As params.yaml asks for."""
        return Vae(self.base, self.team.device, dtype=self.compute, tile=self.cfg.tile)

    @cached_property
    def exact_vae(self) -> Vae:
        """In float32."""
        if self.compute == torch.float32:
            return self.vae
        return Vae(self.base, self.team.device, tile=self.cfg.tile)

    @cached_property
    def text(self) -> TextEncoder | PairedTextEncoder:
        """The text encoders; always in float32."""
        return load_text(self.base, self.team.device)

    @cached_property
    def rows(self) -> dict[str, tuple[LatentItem, bool]]:
        """Each picture to encode: its name in the packs -> an item that shows it, and whether it is mirrored."""
        return {
            picture_row(item.key, flipped=flip): (item, flip) for item in self.items for flip in self.mirrored
        }

    @cached_property
    def texts(self) -> dict[str, str]:
        """Each text to encode (captions, their shuffled variants, the empty one): its name in the packs -> the text."""
        found = [
            "",
            *(t for item in self.items for c in item.captions for t in variants(c, self.cfg.shuffle)),
        ]
        return {text_key(text): text for text in found}

    def encode_rows(self, group: list[Row], vae: Vae) -> Rows:
        """`moments.encode_group` with these settings."""
        return encode_group(
            vae, group, batch_size=self.cfg.batch_size, keep=self.keep, exact=lambda: self.exact_vae
        )


class Work:
    """One kind of work, pictures or texts: what it depends on, what of it the store holds, and what is missing.

    names: names in the packs -> what people call it.
    """

    def __init__(self, job: Job, kind: str, what: str, inputs: dict[str, Any], names: dict[str, str]) -> None:
        self.job, self.kind, self.what = job, kind, what
        self.now = Memory(inputs=inputs, keys={label: name for name, label in names.items()})
        self.names = names
        self.missing: list[str] = []

    @contextmanager
    def held(self) -> Generator[Self]:
        """Inside, rank 0 holds the lock of the store's folder for all ranks, and `packs` and `missing` are there."""
        store, print_ = self.job.stage.store, fingerprint(self.now.inputs)
        with store.lock(self.kind, print_) if self.job.team.main else nullcontext():
            self.job.team.barrier()
            self.packs = Packs(store.folder(self.kind, print_))
            self.missing = [name for name in self.names if name not in self.packs]
            self.job.team.barrier()  # all have looked, so now it may be made
            yield self
            if self.job.team.main:
                remember(self._memory, self.now)

    @property
    def reason(self) -> str:
        """Why something is missing."""
        return explain(recall(self._memory), self.now, [self.names[name] for name in self.missing])

    @property
    def facts(self) -> Tensor:
        """The facts of all rows, float64, one row each in the order of `names`."""
        return torch.stack([self.packs[name]["facts"] for name in self.names])

    @property
    def _memory(self) -> Path:
        return self.job.stage.store.root / self.kind / "last.json"


def picture_work(job: Job) -> Work:
    """The pictures, mirrored ones too where flips are on."""
    cfg = job.cfg
    inputs = job.stage.inputs(
        code="stages.core.moments",
        pack_format=PACK_FORMAT,
        vae=job.record.vae_digest,
        batch_size=cfg.batch_size,
        dtype=cfg.dtype,
        compute_dtype=cfg.compute_dtype,
        tile=cfg.tile,
    )
    names = {row: f"{item.file_name}{' mirrored' * flip}" for row, (item, flip) in job.rows.items()}
    return Work(job, "encode", "pictures", inputs, names)


def text_work(job: Job) -> Work:
    """The captions, their variants, and the empty one."""
    inputs = job.stage.inputs(
        code="stages.core.text_states",
        pack_format=PACK_FORMAT,
        text_encoder=job.record.text_digest,
        batch_size=job.cfg.batch_size,
        dtype=job.cfg.dtype,
    )
    return Work(job, "encode-text", "captions", inputs, {key: repr(text) for key, text in job.texts.items()})


def encode(cfg: EncodeConfig, stage: Stage) -> None:
    """Encode what the store does not hold; assemble the outs from it; then the index, and the sheet."""
    check(cfg)
    job = Job(cfg, stage, ranks(stage.shared.device))
    refuse_odd_buckets(job)
    cut = refuse_long(job)
    with picture_work(job).held() as pictures, text_work(job).held() as texts:
        if job.team.main:
            announce(job, pictures, texts)
        encode_pictures(job, pictures)
        encode_texts(job, texts)
        job.team.barrier()
        pictures.packs.refresh()
        texts.packs.refresh()
        files = write_shards(job, pictures, texts)
        job.team.barrier()
        if job.team.main:
            write_index(stage.out, fields(job, pictures, texts, cut), files)
            write_sheet(job)
            report(job, pictures, texts, cut)


def announce(job: Job, pictures: Work, texts: Work) -> None:
    """Say what will be made and why, and how many bytes that is; refuse where the disk is too small."""
    for work in (pictures, texts):
        if work.missing:
            job.stage.say(f"{work.what} to encode: {work.reason}")
    size = job.keep.itemsize
    values = {
        row: 2 * job.space.channels * item.bucket[0] * item.bucket[1] // job.space.downsample**2
        for row, (item, _) in job.rows.items()
    }
    text = job.text.limit * job.text.width + job.text.pooled
    entry = 500  # bytes of each row's names, shapes and facts in the files' headers, rounded up
    outs = sum(values.values()) * size + len(texts.names) * text * size
    kept = sum(values[row] for row in pictures.missing) * size + len(texts.missing) * text * size
    outs += entry * (len(values) + len(texts.names))
    kept += entry * (len(pictures.missing) + len(texts.missing))
    check_space([(job.stage.out, outs), (job.stage.store.root, kept)])
    if kept:
        job.stage.say(
            f"{len(job.items)} items: {size_text(outs)} in {job.stage.out}, {size_text(kept)} more in the store"
        )


def encode_pictures(job: Job, work: Work) -> None:
    """Put the missing pictures of this rank's shards into the packs. Raises SourceError that names what cannot be."""
    todo = sorted(
        (row for row in work.missing if job.rows[row][0].shard in job.mine),
        key=lambda row: (job.rows[row][0].shard, row),
    )
    shapes = Counter(job.rows[row][0].bucket for row in todo)
    total = sum(math.ceil(count / job.cfg.batch_size) for count in shapes.values())
    groups = grouped(((row, picture(job, row)) for row in todo), job.cfg.batch_size)
    with Writer(work.packs) as writer:
        for group in timed(job, groups, total, work.what):
            found = job.encode_rows(group, job.vae)
            bad = found.unusable()
            writer.add(found.without(bad))
            if bad:
                raise SourceError(
                    f"{', '.join(work.names[row] for row in bad)}: the VAE gives values that are not finite, or too "
                    f"large for {job.cfg.dtype}",
                    remedy="look at the picture, at whether the base's VAE is damaged, and at encode.dtype",
                )


def picture(job: Job, row: str) -> Tensor:
    """The pixels of a row, uint8 RGB [3, H, W]."""
    item, mirrored = job.rows[row]
    return job.pixels[item].flip(-1) if mirrored else job.pixels[item]


def timed(job: Job, groups: Iterator[list[Row]], total: int, what: str) -> Iterator[list[Row]]:
    """`groups` under a progress bar; after the first, how long the rest takes at the rate of that one."""
    first = next(groups, None)
    if first is None:
        return
    _ = job.vae  # loading it says nothing about the rate
    start = time.monotonic()
    yield first
    seconds = time.monotonic() - start
    job.stage.say(
        f"{job.cfg.batch_size / seconds:.3g} {what} a second: about {(total - 1) * seconds:.0f} s for {total} batches"
    )
    yield from job.stage.progress(groups, total=total, what=what, unit="batches", done=1)


def encode_texts(job: Job, work: Work) -> None:
    """Put the missing texts of this rank's shards into the packs. Raises SourceError that names what cannot be."""
    todo = sorted(key for key in work.missing if shard_of(key, job.shards) in job.mine)
    parts = [todo[start : start + job.cfg.batch_size] for start in range(0, len(todo), job.cfg.batch_size)]
    with Writer(work.packs) as writer:
        for part in job.stage.progress(parts, total=len(parts), what=work.what, unit="batches"):
            captions = [job.texts[key] for key in part]
            found = encode_captions(job.text, captions, batch_size=job.cfg.batch_size, keep=job.keep)
            bad = found.unusable()
            writer.add(found.without(bad))
            if bad:
                raise SourceError(
                    f"captions {', '.join(work.names[key] for key in bad)}: the text encoder gives values that are not "
                    f"finite, or too large for {job.cfg.dtype}",
                    remedy="look at whether the base's text encoder is damaged, and at encode.dtype",
                )


def write_shards(job: Job, pictures: Work, texts: Work) -> list[str]:
    """Write this rank's shards from the packs; returns the names of all ranks' files."""
    files: dict[tuple[int, str], dict[str, Packs]] = defaultdict(dict)
    for item in job.items:  # not job.rows: two files may show one picture, and lie in different shards
        rows = [picture_row(item.key, flipped=flip) for flip in job.mirrored]
        files[item.shard, shard_name(item.shard, SUFFIX)] |= dict.fromkeys(rows, pictures.packs)
    for key in job.texts:
        shard = shard_of(key, job.shards)
        files[shard, text_name(shard)][key] = texts.packs
    mine = [key for key in sorted(files) if key[0] in job.mine]
    for key in job.stage.progress(mine, total=len(mine), what="writing", unit="files"):
        rows = ((name, packs[name]) for name, packs in files[key].items())
        tensors = {f"{name}.{part}": row[part] for name, row in rows for part in row if part != "facts"}
        save_file(job.stage.out / key[1], tensors)
    return [name for _, name in files]


def fields(job: Job, pictures: Work, texts: Work, cut: int) -> dict[str, Any]:
    """The index, without what `write_index` adds."""
    facts, text = pictures.facts, job.text
    retried = {job.rows[row][0].file_name for row, fact in zip(pictures.names, facts, strict=True) if fact[6]}
    return {
        "format": FORMAT,
        "items": job.pixels.index["items"],
        "shards": job.shards,
        "latent_space": job.space.to_json(),
        "dtype": job.cfg.dtype,
        "compute_dtype": job.cfg.compute_dtype,
        "flips": job.cfg.flips,
        "error": {
            "mean": error_of(facts[:, :3]),
            "logvar": error_of(facts[:, 3:6]),
            "text": error_of(texts.facts),
            **half_precision_error(job, pictures.packs),
        },
        "retried_in_float32": sorted(retried),
        "text": {name: getattr(text, name) for name in ("encoders", "layer", "limit", "width", "pooled")},
        "shuffle": job.cfg.shuffle.to_json(),
        "truncated_captions": cut,
        "vae": job.record.vae_digest,
        "text_encoder": job.record.text_digest,
    }


def half_precision_error(job: Job, packs: Packs) -> dict[str, Any]:
    """What is kept against the VAE in float32, on some pictures; {} where float32 computed all of it."""
    if job.compute == torch.float32:
        return {}
    chosen = choose(job.items, _COMPARED)
    errors: dict[str, list[Tensor]] = {part: [] for part in PARTS}
    pixels = {item.key: job.pixels[item] for item in chosen}
    for group in grouped(pixels.items(), job.cfg.batch_size):
        exact = encode_group(
            job.exact_vae,
            group,
            batch_size=job.cfg.batch_size,
            keep=torch.float32,
            exact=lambda: job.exact_vae,
        )
        for part in PARTS:
            held = torch.stack([packs[name][part] for name in exact.names])
            errors[part].append(difference(held, exact.parts[part]))
    found = {part: error_of(torch.cat(errors[part])) for part in PARTS}
    return {"against_float32": found | {"items": len(chosen)}}


def write_sheet(job: Job) -> None:
    """Read some latents back, decode them, and show them under the pictures that they were made of."""
    cache = LatentCache(job.stage.out)
    chosen = choose(cache.items, job.cfg.sheet)
    if not chosen:
        return
    sources = [job.pixels[item] for item in chosen]
    pictures = decoded(job.exact_vae, cache, chosen, job.cfg.batch_size)
    # Not an out: another CPU may round a pixel differently, and nothing that follows needs it.
    path = job.stage.store.root / "encode" / "reconstruction.png"
    write_atomic(path, png_bytes(reconstruction_sheet(chosen, sources, pictures)))
    mean = sum(psnr_of(one, other) for one, other in zip(sources, pictures, strict=True)) / len(chosen)
    job.stage.tracker.image("encode/reconstruction", path)
    job.stage.tracker.metrics({"encode/reconstruction_psnr_db": mean})
    job.stage.say(f"decoded again, {len(chosen)} pictures are {mean:.1f} dB from their sources: see {path}")


def report(job: Job, pictures: Work, texts: Work, cut: int) -> None:
    """One line, and the same numbers for MLflow."""
    job.stage.tracker.metrics(
        {
            "encode/items": len(job.items),
            "encode/pictures_encoded": len(pictures.missing),
            "encode/captions_encoded": len(texts.missing),
        }
    )
    job.stage.say(
        f"{len(job.items)} items: {len(pictures.missing)} pictures and {len(texts.missing)} captions encoded, the rest "
        "kept from before" + (f"; {cut} captions cut at {job.text.limit} tokens" if cut else "")
    )


def refuse_long(job: Job) -> int:
    """Count captions over the text encoder's limit; with policy `error` raise SourceError that lists them."""
    lengths = {text: job.text.length(text) for text in job.texts.values()}
    limit, found = job.text.limit, list[str]()
    for item in job.items:
        for caption in item.captions:
            tokens = max(lengths[text] for text in variants(caption, job.cfg.shuffle))
            if tokens > limit:
                found.append(f"{item.file_name}: {tokens} tokens")
    if found and job.cfg.captions_over_limit == "error":
        listed = "\n  ".join(found[:20])
        raise SourceError(
            f"{len(found)} caption(s) over the text encoder's {limit} tokens:\n  {listed}",
            remedy="shorten them, or set encode.captions_over_limit: truncate to cut them there",
        )
    return len(found)


def refuse_odd_buckets(job: Job) -> None:
    """Raise ConfigError for buckets that the VAE cannot make whole latents of."""
    factor = job.space.downsample
    odd = sorted({item.bucket for item in job.items if any(side % factor for side in item.bucket)})
    if odd:
        raise ConfigError(
            f"buckets {odd} are not multiples of the VAE's downsampling, {factor}",
            remedy=f"set preprocess.buckets.step to a multiple of {factor}",
        )


if __name__ == "__main__":
    stage_main("encode", EncodeConfig, encode, fix=determinism.apply)
