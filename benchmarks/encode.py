"""Stage encode against the bare VAE, one picture more against all of them, and what training waits for its latents.

    python benchmarks/encode.py [--items 10000] [--rounds 3] [--plus-one 0] [--steps 40]

encode_vs_bare_vae     pictures a second of the whole stage (read, check, encode, keep, write; one caption, no sheet), over
                       those of the VAE's encoder on tensors that lie in memory: same pictures, batch size, threads
train_waiting_share    of a training step of the embedded base's whole U-Net: the part spent waiting for the next batch
plus_one_vs_all        with --plus-one N: seconds of the stage for one picture more, over those for the N before it

Rounds are interleaved, medians reported. The last line is one JSON object.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from stages.core.determinism import DeterminismConfig  # noqa: E402
from stages.harness.launch import environment  # noqa: E402

SETTINGS = DeterminismConfig(mode="portable", threads=1)
if "DARKROOM_BENCHMARK" not in os.environ:  # the caps are read when torch loads
    settings = environment(SETTINGS) | {"HF_HUB_OFFLINE": "1", "DARKROOM_BENCHMARK": "1"}
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from stages.core import determinism  # noqa: E402
from stages.core.batches import Batches  # noqa: E402
from stages.core.latents import LatentCache  # noqa: E402
from stages.core.models.schedule import NoiseSchedule, base_schedule  # noqa: E402
from stages.core.models.unet import load_unet, predict  # noqa: E402
from stages.core.models.vae import Vae  # noqa: E402
from stages.core.record import describe  # noqa: E402
from stages.core.sampler import stream  # noqa: E402
from stages.core.shards import (  # noqa: E402
    PIXELS_FORMAT,
    pixel_key,
    save_pt,
    shard_name,
    shard_of,
    stacked,
    write_index,
)
from stages.core.shuffle import ShuffleConfig  # noqa: E402
from stages.core.store import Store, sha256_bytes, write_json  # noqa: E402
from stages.encode import EncodeConfig, encode  # noqa: E402
from stages.harness.config import SharedConfig  # noqa: E402
from stages.harness.journal import NullJournal  # noqa: E402
from stages.harness.provenance import cpu_kind  # noqa: E402
from stages.harness.run import Stage  # noqa: E402

BASE = PROJECT / "data" / "embedded" / "tiny-sd"
BATCH, SHARDS, SIZE = 16, 8, 64
CONFIG = EncodeConfig(
    batch_size=BATCH,
    dtype="float32",
    compute_dtype="float32",
    flips=False,
    tile=None,
    captions_over_limit="error",
    shuffle=ShuffleConfig(variants=1, separator=", ", keep=0, seed=0),
    sheet=0,
)


def pixels_of(number: int) -> Tensor:
    """A picture of noise, uint8 [3, 64, 64]: the VAE's speed does not depend on what it sees."""
    return torch.from_numpy(stream(1, "pixels", number).integers(0, 256, size=(3, SIZE, SIZE), dtype="uint8"))


def write_pictures(root: Path, items: int) -> None:
    """`data/preprocess` and `data/base` of a project in `root`."""
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    index: list[dict[str, Any]] = []
    for number in range(items):
        name, pixels = sha256_bytes(str(number).encode()), pixels_of(number)
        shard = shard_of(name, SHARDS)
        shards[shard][name] = pixels
        fields = {
            "file_name": f"{number}.png",
            "captions": ["a face"],
            "split": "train",
            "bucket": [SIZE, SIZE],
            "original": [SIZE, SIZE],
            "corner": [0, 0],
        }
        index.append({"id": name, **fields, "shard": shard, "key": pixel_key(pixels)})
    folder = root / "data" / "preprocess"
    for number, tensors in enumerate(shards):
        save_pt(folder / shard_name(number, ".pt"), stacked(tensors))
    index.sort(key=lambda item: item["id"])
    names = [shard_name(number, ".pt") for number in range(SHARDS)]
    write_index(folder, {"format": PIXELS_FORMAT, "items": index, "shards": SHARDS}, names)
    record = describe(BASE, {"kind": "folder", "path": str(BASE)})
    write_json(root / "data" / "base" / "record.json", record.to_json())


def seconds_of_stage(root: Path, store: Path) -> float:
    """Run stage encode as it is, in this process."""
    shared = SharedConfig(seed=0, device="cpu", runtime="native", determinism=SETTINGS)
    stage = Stage(name="encode", root=root, shared=shared, store=Store(store), tracker=NullJournal())
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        encode(CONFIG, stage)
    return time.perf_counter() - start


@torch.inference_mode()
def seconds_of_bare_vae(vae: Any, batches: list[Tensor]) -> float:
    """The encoder alone, on float tensors in [-1, 1]."""
    start = time.perf_counter()
    for batch in batches:
        posterior = vae.encode(batch).latent_dist
        _ = posterior.mean, posterior.logvar
    return time.perf_counter() - start


def waiting(root: Path, steps: int) -> tuple[float, float]:
    """Medians of the seconds that a step waits for its batch, and of the whole step."""
    cache = LatentCache(root / "data" / "encode")
    schedule = NoiseSchedule(base_schedule(BASE), "cpu")
    batches = Batches(cache, schedule, batch_size=BATCH, seed=1, caption_dropout=0.1, device="cpu")
    unet = load_unet(BASE / "unet", "cpu").train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    waited: list[float] = []
    took: list[float] = []
    for step in range(steps):
        start = time.perf_counter()
        batch = batches[step]
        waited.append(time.perf_counter() - start)
        predicted = predict(unet, batch.noisy_BChw, batch.steps_B, batch.conditions)
        (predicted - batch.target_BChw).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.perf_counter() - start)
    return statistics.median(waited[1:]), statistics.median(took[1:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("items", 10000), ("rounds", 3), ("plus-one", 0), ("steps", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    determinism.apply(SETTINGS)
    gc.freeze()  # as harness.run does
    found: dict[str, Any] = {
        "machine": cpu_kind(),
        "threads": 1,
        "batch_size": BATCH,
        "items": arguments.items,
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "ratio"
        write_pictures(root, arguments.items)
        vae = Vae(BASE, "cpu").model
        pictures = torch.stack([pixels_of(number) for number in range(arguments.items)])
        batches = list((pictures.float() / 127.5 - 1.0).split(BATCH))
        seconds_of_bare_vae(vae, batches[:4])
        stage: list[float] = []
        bare: list[float] = []
        for number in range(arguments.rounds):
            bare.append(seconds_of_bare_vae(vae, batches))
            stage.append(seconds_of_stage(root, Path(folder) / f"store-{number}"))
            print(f"round {number + 1}: bare {bare[-1]:.2f} s, stage {stage[-1]:.2f} s", file=sys.stderr)
        found["bare_pictures_per_second"] = arguments.items / statistics.median(bare)
        found["encode_vs_bare_vae"] = statistics.median(bare) / statistics.median(stage)
        waited, took = waiting(root, arguments.steps)
        found |= {"train_step_seconds": took, "train_waiting_share": waited / took}
        if arguments.plus_one:
            found |= plus_one(Path(folder) / "plus", arguments.plus_one)
    print(json.dumps({name: round(x, 6) if isinstance(x, float) else x for name, x in found.items()}))


def plus_one(root: Path, items: int) -> dict[str, Any]:
    """Seconds of the stage for `items` pictures, for one more, and for none; and how many shards that one changed."""
    seconds: dict[str, float] = {}
    files: list[dict[str, str]] = []
    for name, count in (("all", items), ("one", items + 1), ("none", items + 1)):
        write_pictures(root, count)
        seconds[name] = seconds_of_stage(root, root / "store")
        files.append(LatentCache(root / "data" / "encode").index["files"])
    changed = sum(files[1][name] != digest for name, digest in files[0].items())
    return {
        "plus_one_items": items,
        **{f"plus_one_seconds_{name}": value for name, value in seconds.items()},
        "plus_one_vs_all": seconds["one"] / seconds["all"],
        "plus_one_shards_changed": changed,
    }


if __name__ == "__main__":
    main()
