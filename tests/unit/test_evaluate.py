"""The stage on a small workspace: random base, random CLIP, nine held-out pictures of two shapes."""

import csv
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages import evaluate as stage_module
from stages.core.determinism import DeterminismConfig
from stages.core.drawings import Drawing, batches, plan
from stages.core.errors import ConfigError, TrainingError
from stages.core.heldout import heldout_losses
from stages.core.intervals import of_mean, of_pair_means
from stages.core.latents import LatentCache, LatentItem
from stages.core.models.pipeline import Painter
from stages.core.models.schedule import NoiseSchedule, base_schedule
from stages.core.models.text import TextEncoder
from stages.core.models.unet import load_unet, save_unet
from stages.core.models.vae import Vae
from stages.core.record import read_record
from stages.core.sampler import stream
from stages.core.shards import PIXELS_FORMAT, pixel_key, save_pt, shard_name, stacked, write_index
from stages.core.store import Store, sha256_bytes, write_json
from stages.evaluate import EvaluateConfig, band_labels, check, evaluate, in_terms_of
from stages.harness.config import SharedConfig
from stages.harness.run import Stage
from tests.latents import item_fields, write_latents
from tests.tiny import make_tiny_base, scale_output, write_record
from tests.tiny_clip import make_tiny_clip

CONFIG = EvaluateConfig(
    batch_size=4,
    bands=2,
    timesteps_per_band=2,
    pictures=12,
    steps=2,
    guidance=2.0,
    clip="clip",
    cmmd_sigma=0.5,
    confidence=0.95,
    minimum_heldout=3,
    minimum_pictures=3,
    sheet_columns=3,
)
MEASURES = ("loss", "cmmd", "clip_score", "clip_contrast")
OUTS = ("metrics.json", "bands.csv", "items.csv", "sheets/before_after.png")


@dataclass
class Recorder:
    """What the stage tells the tracker."""

    values: dict[str, float] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)

    def metrics(self, values: dict[str, float], step: int = 0) -> None:
        assert step == 0
        self.values |= values

    def image(self, key: str, path: Path, step: int = 0) -> None:
        assert path.is_file()
        self.images.append(key)


def make_workspace(root: Path) -> Path:
    """The outs of the stages before evaluate: 9 held-out items, 2 training items, two buckets, two shards."""
    base = make_tiny_base(root / "tiny-sd")
    record = read_record(write_record(base, root))
    make_tiny_clip(root / "clip", base)
    vae, text = Vae(base, "cpu"), TextEncoder(base, "cpu")
    items: list[LatentItem] = []
    pixels: dict[int, dict[str, Tensor]] = {0: {}, 1: {}}
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    for number in range(11):
        name = sha256_bytes(str(number).encode())
        bucket = (32, 24) if number % 4 == 3 else (32, 32)
        drawn = stream(0, "pixels", number).integers(0, 256, size=(3, *bucket), dtype="uint8")
        picture = torch.from_numpy(drawn)
        mean, logvar = vae.moments(picture[None])
        pixels[number % 2][name] = picture
        moments[name] = (mean[0].clone(), logvar[0].clone())
        item = LatentItem(
            id=name,
            file_name=f"{number}.png",
            captions=(f"a {'red' if number % 2 else 'blue'} circle, number {number}",),
            split="holdout" if number < 9 else "train",
            bucket=bucket,
            original=bucket,
            corner=(0, 0),
            shard=number % 2,
            key=pixel_key(picture),
        )
        items.append(item)
    items.sort(key=lambda item: item.id)
    for shard in (0, 1):
        save_pt(root / "data" / "preprocess" / shard_name(shard, ".pt"), stacked(pixels[shard]))
    fields = {"format": PIXELS_FORMAT, "items": [item_fields(item) for item in items]}
    write_index(root / "data" / "preprocess", fields, [shard_name(s, ".pt") for s in (0, 1)])
    write_latents(
        root / "data" / "encode",
        items,
        moments,
        {caption: text.encode([caption])[0].clone() for caption in ("", *(item.caption for item in items))},
        space=vae.space.to_json(),
        vae=record.vae_digest,
        text_encoder=record.text_digest,
    )
    weights = root / "data" / "train" / "weights"
    save_unet(load_unet(base / "unet", "cpu"), weights, torch.float32)
    scale_output(weights, 0.5)
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_workspace(tmp_path_factory.mktemp("evaluate"))
    evaluate(CONFIG, stage_in(root))
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A workspace that was evaluated once with CONFIG."""
    return Path(shutil.copytree(made, tmp_path / "work"))


def stage_in(root: Path, store: str = "store") -> Stage:
    shared = SharedConfig(
        seed=1, device="cpu", runtime="native", determinism=DeterminismConfig(mode="native", threads=1)
    )
    tracker: Any = Recorder()
    return Stage(name="evaluate", root=root, shared=shared, store=Store(root / store), tracker=tracker)


@pytest.fixture
def painted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many pictures each call of the painter drew."""
    calls: list[int] = []
    paint = Painter.paint

    def counted(self: Painter, captions: list[str], seeds: list[int], **settings: Any) -> Tensor:
        calls.append(len(captions))
        return paint(self, captions, seeds, **settings)

    monkeypatch.setattr(Painter, "paint", counted)
    return calls


def outs(root: Path) -> dict[str, bytes]:
    return {name: (root / "data" / "evaluate" / name).read_bytes() for name in OUTS}


def rows_of(root: Path, name: str) -> list[dict[str, str]]:
    with (root / "data" / "evaluate" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_outs_and_what_the_tracker_hears(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = stage_in(root)
    evaluate(CONFIG, stage)

    written = sorted(
        path.relative_to(stage.out).as_posix() for path in stage.out.rglob("*") if path.is_file()
    )
    assert written == sorted(OUTS)
    metrics = json.loads((stage.out / "metrics.json").read_text())
    assert sorted(metrics) == sorted([*MEASURES, "clip", "items", "pictures"])
    assert (metrics["items"], metrics["pictures"]) == (9, 12)
    for name in MEASURES:
        parts = {"base", "finetuned", "improvement"} | {"loss": {"ratio"}, "cmmd": set()}.get(name, {"real"})
        assert set(metrics[name]) == parts
        for part in parts:
            assert metrics[name][part]["low"] <= metrics[name][part]["value"] <= metrics[name][part]["high"]
            for key, end in ((f"eval/{name}/{part}", "value"), (f"eval/{name}/{part}_low", "low")):
                tracked = stage.tracker.values[key]  # type: ignore[union-attr]
                assert tracked == pytest.approx(metrics[name][part][end], rel=1e-5)
    gain = metrics["loss"]["base"]["value"] - metrics["loss"]["finetuned"]["value"]
    assert metrics["loss"]["improvement"]["value"] == pytest.approx(gain, rel=1e-3)
    assert stage.tracker.images == ["sheets/before_after"]  # type: ignore[union-attr]

    bands = rows_of(root, "bands.csv")
    assert [row["timesteps"] for row in bands] == ["0-499", "500-999"]
    assert list(bands[0])[1:4] == ["base", "base_low", "base_high"]
    mean = sum(float(row["base"]) for row in bands) / 2
    assert mean == pytest.approx(metrics["loss"]["base"]["value"], rel=1e-4)
    assert "evaluate: 9 held-out items, 12 pictures per model, 95% intervals" in capsys.readouterr().out


def test_intervals_follow_from_the_items(root: Path) -> None:
    """items.csv is enough to compare two runs in pairs: the intervals are functions of its columns."""
    metrics = json.loads((root / "data" / "evaluate" / "metrics.json").read_text())
    rows = rows_of(root, "items.csv")
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    for name, over in (("loss", of_mean), ("cmmd", of_pair_means), ("clip_contrast", of_pair_means)):
        columns = [
            torch.tensor([float(row[f"{name}_{model}"]) for row in rows]) for model in ("base", "finetuned")
        ]
        found = over(columns[0], 0.95)
        for end in ("value", "low", "high"):
            assert getattr(found, end) == pytest.approx(metrics[name]["base"][end], rel=1e-3, abs=1e-4)
        sign = 1 if name == "clip_contrast" else -1
        gain = over(sign * (columns[1] - columns[0]), 0.95)
        assert gain.low == pytest.approx(metrics[name]["improvement"]["low"], rel=1e-3, abs=1e-4)


def test_the_same_model_shows_no_improvement(root: Path) -> None:
    weights = root / "data" / "train" / "weights"
    shutil.rmtree(weights)
    save_unet(load_unet(root / "tiny-sd" / "unet", "cpu"), weights, torch.float32)
    evaluate(CONFIG, stage_in(root))
    metrics = json.loads((root / "data" / "evaluate" / "metrics.json").read_text())
    for name in MEASURES:
        assert metrics[name]["base"] == metrics[name]["finetuned"]
        assert metrics[name]["improvement"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert metrics["loss"]["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_a_second_run_draws_nothing_and_writes_the_same_bytes(root: Path, painted: list[int]) -> None:
    first = outs(root)
    shutil.rmtree(root / "data" / "evaluate")
    evaluate(CONFIG, stage_in(root))
    assert painted == []
    assert outs(root) == first


def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = outs(root)
    paint, calls = Painter.paint, [0]

    def dies(self: Painter, captions: list[str], seeds: list[int], **settings: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return paint(self, captions, seeds, **settings)

    monkeypatch.setattr(Painter, "paint", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluate(CONFIG, stage_in(root, store="an empty one"))
    evaluate(CONFIG, stage_in(root, store="an empty one"))
    batches_in_all = 8  # 12 pictures a model: 10 square ones in 3 batches, 2 of the other shape in 1
    assert calls[0] == batches_in_all + 1
    assert outs(root) == whole


def test_other_weights_redraw_the_finetuned_pictures_alone(root: Path, painted: list[int]) -> None:
    scale_output(root / "data" / "train" / "weights", 0.5)
    evaluate(CONFIG, stage_in(root))
    assert sum(painted) == 12


@pytest.mark.parametrize(
    ("change", "drawn"),
    [
        ({"confidence": 0.9, "cmmd_sigma": 2.0, "bands": 1, "sheet_columns": 2}, 0),
        ({"pictures": 15}, 6),  # three more for each model
        ({"pictures": 3, "steps": 3}, 6),
        ({"pictures": 3, "guidance": 1.0}, 6),
    ],
)
def test_what_draws_again(root: Path, painted: list[int], change: dict[str, Any], drawn: int) -> None:
    evaluate(replace(CONFIG, **change), stage_in(root))
    assert sum(painted) == drawn


PLAIN = {"rescale_betas_zero_snr": False, "timestep_spacing": "leading"}


@pytest.mark.parametrize(
    ("of_base", "of_weights"),
    [
        ({"prediction_type": "v_prediction"}, {"prediction_type": "epsilon", **PLAIN}),
        ({"prediction_type": "epsilon", **PLAIN}, {"prediction_type": "v_prediction"}),
        # Another noise schedule alone: nothing to restate.
        ({"prediction_type": "v_prediction", **PLAIN}, {"prediction_type": "v_prediction"}),
    ],
)
def test_each_model_is_asked_and_draws_on_its_own_schedule(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_base: dict[str, Any],
    of_weights: dict[str, Any],
) -> None:
    base, weights = root / "tiny-sd", root / "data" / "train" / "weights"
    fields = base_schedule(base)
    write_json(base / "scheduler" / "scheduler_config.json", fields | of_base)
    write_record(base, root)
    write_json(weights / "scheduler_config.json", fields | of_weights)
    draws: list[tuple[str, bool]] = []
    paint = Painter.paint

    def watched(self: Painter, captions: list[str], seeds: list[int], **settings: Any) -> Tensor:
        config = self.pipeline.scheduler.config
        draws.append((config.prediction_type, config.rescale_betas_zero_snr))
        return paint(self, captions, seeds, **settings)

    monkeypatch.setattr(Painter, "paint", watched)
    evaluate(CONFIG, stage_in(root, store="an empty one"))

    wanted = [(fields | part) for part in (of_base, of_weights)]
    assert list(dict.fromkeys(draws)) == [
        (part["prediction_type"], part["rescale_betas_zero_snr"]) for part in wanted
    ]
    cache, timesteps = LatentCache(root / "data" / "encode"), [125, 375, 625, 875]
    rows = rows_of(root, "items.csv")
    schedules = [NoiseSchedule(part, "cpu") for part in wanted]
    alphas = torch.tensor([float(schedules[0].alphas_cumprod[t]) for t in timesteps], dtype=torch.float64)
    factors = {("v_prediction", "epsilon"): alphas, ("epsilon", "v_prediction"): 1 / alphas}.get(
        (schedules[0].prediction, schedules[1].prediction), torch.ones(4, dtype=torch.float64)
    )
    for name, folder, schedule, factor in (
        ("base", base / "unet", schedules[0], factors),
        ("finetuned", weights, schedules[1], torch.ones(4, dtype=torch.float64)),
    ):
        losses = heldout_losses(
            load_unet(folder, "cpu"),
            schedule,
            cache,
            cache.split("holdout"),
            seed=1,
            timesteps=timesteps,
            batch_size=CONFIG.batch_size,
            device="cpu",
        )
        for column, restated in (("loss", losses * factor), ("loss_500-999", (losses * factor)[:, 2:])):
            found = [float(row[f"{column}_{name}"]) for row in rows]
            assert found == pytest.approx(restated.mean(dim=1).tolist(), rel=1e-5)


def test_another_schedule_of_the_weights_draws_the_finetuned_pictures_alone(
    root: Path, painted: list[int]
) -> None:
    fields = base_schedule(root / "tiny-sd")
    path = root / "data" / "train" / "weights" / "scheduler_config.json"
    write_json(path, fields | {"prediction_type": "epsilon", **PLAIN})
    evaluate(CONFIG, stage_in(root))
    assert sum(painted) == 12
    path.unlink()
    evaluate(CONFIG, stage_in(root))
    assert sum(painted) == 12  # those of the base's schedule are still kept


def test_losses_in_other_terms(root: Path) -> None:
    fields = base_schedule(root / "tiny-sd")
    losses = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    velocity, noise = (
        NoiseSchedule(fields | {"prediction_type": name}, "cpu") for name in ("v_prediction", "epsilon")
    )
    assert torch.equal(in_terms_of(losses, velocity, [5, 999], "v_prediction"), losses)
    assert in_terms_of(losses, velocity, [5, 999], "epsilon")[:, 1].tolist() == [0.0, 0.0]
    there = in_terms_of(losses, velocity, [5, 500], "epsilon")
    torch.testing.assert_close(in_terms_of(there, noise, [5, 500], "v_prediction"), losses)
    assert in_terms_of(losses, noise, [5, 999], "v_prediction")[:, 1].tolist() == [float("inf")] * 2


def test_fewer_pictures_than_items(root: Path) -> None:
    evaluate(replace(CONFIG, pictures=5), stage_in(root))
    rows = rows_of(root, "items.csv")
    assert [row["cmmd_base"] != "" for row in rows] == [True] * 5 + [False] * 4
    assert all(row["loss_base"] for row in rows)


def test_weights_that_are_not_finite_are_named(root: Path) -> None:
    scale_output(root / "data" / "train" / "weights", float("nan"))
    with pytest.raises(
        TrainingError, match=r"the finetuned U-Net's loss is not finite on 9 held-out items: \d\.png"
    ):
        evaluate(CONFIG, stage_in(root))


def test_too_few_items_or_pictures_are_refused_with_the_numbers() -> None:
    cfg = replace(CONFIG, minimum_heldout=32, minimum_pictures=128, pictures=64)
    with pytest.raises(ConfigError) as caught:
        check(cfg, heldout=31, steps=1000)
    text = str(caught.value)
    assert (
        "31 pictures are held out, but evaluate.minimum_heldout is 32; raise ingest.holdout_percent" in text
    )
    assert "evaluate.pictures is 64, but evaluate.minimum_pictures is 128; draw more" in text
    check(replace(cfg, pictures=128), heldout=32, steps=1000)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"batch_size": 0}, "evaluate.batch_size is 0; set it to 1 or more"),
        ({"minimum_heldout": 2}, "evaluate.minimum_heldout is 2; no interval exists below 3"),
        ({"confidence": 95.0}, "evaluate.confidence is 95.0; set it between 0 and 1"),
        ({"cmmd_sigma": 0.0}, "evaluate.cmmd_sigma is 0.0; set it above 0"),
        (
            {"bands": 400, "timesteps_per_band": 3},
            "timesteps_per_band is 1200, but the base has 1000 timesteps",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check(replace(CONFIG, **change), heldout=9, steps=1000)


def item(number: int, size: tuple[int, int] = (32, 32), caption: str = "a ball") -> LatentItem:
    name = sha256_bytes(str(number).encode())
    return LatentItem(
        id=name,
        file_name=f"{number}.png",
        captions=(caption,),
        split="holdout",
        bucket=size,
        original=size,
        corner=(0, 0),
        shard=0,
        key=name,
    )


def test_plan_takes_captions_in_turn_with_other_seeds() -> None:
    items = [item(0), item(1, (32, 24)), item(2)]
    drawings = plan(items, 7, seed=1)
    assert [drawing.owner for drawing in drawings] == [0, 1, 2, 0, 1, 2, 0]
    assert [drawing.size for drawing in drawings[:3]] == [(32, 32), (32, 24), (32, 32)]
    assert len({drawing.seed for drawing in drawings}) == 7  # although all captions are the same
    assert len({drawing.key for drawing in drawings}) == 7
    fewer = plan([items[2]], 2, seed=1)
    assert [drawing.seed for drawing in fewer] == [drawings[2].seed, drawings[5].seed]
    assert plan(items, 1, seed=2)[0].seed != drawings[0].seed


def test_batches_have_one_size_each() -> None:
    drawings = [Drawing(owner=n, caption="", seed=n, size=(32, 32) if n % 2 else (32, 24)) for n in range(7)]
    found = batches(drawings, 2)
    assert [[drawing.seed for drawing in batch] for batch in found] == [[0, 2], [4, 6], [1, 3], [5]]


def test_band_labels() -> None:
    assert band_labels(4, 1000) == ["0-249", "250-499", "500-749", "750-999"]
    assert band_labels(3, 1000) == ["0-332", "333-665", "666-999"]


def test_the_record_covers_what_draws(root: Path) -> None:
    """Everything of the base that a picture depends on is in the digest that its pictures are kept under."""
    record = read_record(root / "data" / "base" / "record.json")
    assert set(record.components) == {"unet", "vae", "text_encoder", "tokenizer", "scheduler"}
    assert stage_module.COMPONENTS == ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
