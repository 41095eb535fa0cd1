"""evaluate: the base against the fine-tuned model, on pictures that training never saw, with intervals.

Reads   data/encode/, data/preprocess/ (the held-out items), data/base/record.json and the base, data/train/weights/,
        the CLIP folder that measures
Writes  data/evaluate/metrics.json             each measure for both models and the improvement: value, low, high
        data/evaluate/bands.csv                held-out loss per range of timesteps
        data/evaluate/items.csv                the same measures item by item, so that runs can be compared in pairs
        data/evaluate/sheets/before_after.png  the same captions and seeds before and after, under the real pictures

Drawn pictures are kept in the store, batch by batch: a killed run goes on, the base's are drawn once for all fine-tunes,
and another report draws nothing. docs/evaluation.md explains each measure.
Letters: N items, S timesteps, M drawn pictures, D width of the features.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.core import determinism
from stages.core.drawings import (
    Drawing,
    batches,
    draw,
    load_model,
    make_painter,
    model_schedule,
    plan,
    read_packs,
)
from stages.core.errors import ConfigError, TrainingError
from stages.core.heldout import band_labels, band_timesteps, heldout_losses
from stages.core.intervals import Interval, of_ratio, pair_means, significant
from stages.core.latents import LatentCache, LatentItem
from stages.core.metrics import Measured, caption_cosines, contrast_pairs, mmd_pairs
from stages.core.models.clip import Clip, clip_digest
from stages.core.models.schedule import NoiseSchedule
from stages.core.pixels import Pixels
from stages.core.record import COMPONENTS, read_record, verified_folder
from stages.core.sheets import png_bytes, sheet
from stages.core.store import file_digests, fingerprint, write_atomic, write_json
from stages.core.tables import csv_bytes
from stages.harness.run import Stage, stage_main

CMMD_SCALE = 1000.0  # as Jayasumana et al. print it


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Section `evaluate` of params.yaml."""

    batch_size: int  # rows of every forward, always this many (padded)
    bands: int  # equal ranges of timesteps, each with its own loss
    timesteps_per_band: int  # fixed timesteps in each, evenly spaced
    pictures: int  # drawn by each model: the held-out captions in turn, each time with another seed
    steps: int  # of the sampler, per picture
    guidance: float  # classifier-free guidance scale; 1 is none
    clip: str  # folder of the CLIPModel that measures
    cmmd_sigma: float  # bandwidth of the Gaussian kernel on features of length 1
    confidence: float  # of every interval, 0.95 for 95%
    minimum_heldout: int  # the stage refuses to measure on fewer held-out items
    minimum_pictures: int  # and on fewer drawn pictures
    sheet_columns: int  # captions on the sheet


def check(cfg: EvaluateConfig, heldout: int, steps: int) -> None:
    """Raise one ConfigError that lists all settings that cannot work, and counts too small for an honest interval.

    heldout: held-out items. steps: timesteps of the base's schedule.
    """
    problems: list[str] = []
    for name in ("batch_size", "bands", "timesteps_per_band", "steps", "sheet_columns"):
        if getattr(cfg, name) < 1:
            problems.append(f"evaluate.{name} is {getattr(cfg, name)}; set it to 1 or more")
    for name in ("minimum_heldout", "minimum_pictures"):
        # Pairs of items, with one left out, need three.
        if getattr(cfg, name) < 3:
            problems.append(f"evaluate.{name} is {getattr(cfg, name)}; no interval exists below 3")
    if cfg.bands * cfg.timesteps_per_band > steps:
        problems.append(
            f"evaluate.bands x timesteps_per_band is {cfg.bands * cfg.timesteps_per_band}, "
            f"but the base has {steps} timesteps"
        )
    if not 0 < cfg.confidence < 1:
        problems.append(f"evaluate.confidence is {cfg.confidence}; set it between 0 and 1, for example 0.95")
    if not cfg.cmmd_sigma > 0:
        problems.append(f"evaluate.cmmd_sigma is {cfg.cmmd_sigma}; set it above 0")
    if heldout < cfg.minimum_heldout:
        problems.append(
            f"{heldout} pictures are held out, but evaluate.minimum_heldout is {cfg.minimum_heldout}; raise "
            "ingest.holdout_percent or add pictures (a lower minimum gives wide intervals that may not cover)"
        )
    if cfg.pictures < cfg.minimum_pictures:
        problems.append(
            f"evaluate.pictures is {cfg.pictures}, but evaluate.minimum_pictures is {cfg.minimum_pictures}; draw more"
        )
    if problems:
        raise ConfigError(
            "\n  ".join(problems), remedy="correct params.yaml; docs/evaluation.md explains the counts"
        )


def pictures_of(
    drawings: list[Drawing],
    base: Path,
    unet: torch.nn.Module,
    schedule: dict[str, Any],
    cfg: EvaluateConfig,
    stage: Stage,
    **models: Any,
) -> list[Tensor]:
    """The model's pictures, uint8 RGB [3, H, W]: from the store, the missing ones drawn now.

    schedule: what `unet` was trained for. models: digests of what draws, the schedule's file among them. The code that
    the pictures are kept under is core.drawings and what it reaches, not this file: another report must not draw
    anything again.
    """
    print_ = stage.fingerprint(
        code="stages.core.drawings",
        **models,
        steps=cfg.steps,
        guidance=cfg.guidance,
        batch_size=cfg.batch_size,
    )
    with stage.store.lock("evaluate", print_) as folder:
        kept = read_packs(folder)
        todo = batches([drawing for drawing in drawings if drawing.key not in kept], cfg.batch_size)
        if todo:
            painter = make_painter(base, unet, schedule, stage.shared.device)
            packs = draw(
                painter, todo, folder, steps=cfg.steps, guidance=cfg.guidance, batch_size=cfg.batch_size
            )
            for pack in stage.progress(packs, total=len(todo), what="pictures", unit="batches"):
                kept |= pack
    return [kept[drawing.key] for drawing in drawings]


def in_terms_of(losses_NS: Tensor, schedule: NoiseSchedule, timesteps: list[int], prediction: str) -> Tensor:
    """The losses of a model on its own `schedule`, stated as those of a model that predicts `prediction`.

    losses_NS: float64 [N, S] on the CPU, a column for each of `timesteps`. Returns the same shape, dtype and device, the
    same numbers where the model predicts that already. Infinite where a guess of the noise is stated as one of v at a
    timestep that is noise alone: such a guess says nothing about the picture.
    """
    steps_S = torch.tensor(timesteps, device=schedule.alphas_cumprod.device)
    return losses_NS * schedule.error_factors(steps_S, prediction).cpu()


def loss_measures(losses: dict[str, Tensor], labels: list[str]) -> list[Measured]:
    """The loss over all timesteps, then one per band; `losses` holds float64 [N, S] of base and finetuned."""
    banded = {model: rows_NS.unflatten(1, (len(labels), -1)).mean(dim=2) for model, rows_NS in losses.items()}
    whole = {model: rows_NS.mean(dim=1) for model, rows_NS in losses.items()}
    bands = [{model: rows[:, band] for model, rows in banded.items()} for band in range(len(labels))]
    names = ["loss", *(f"loss_{label}" for label in labels)]
    return [
        Measured(name=name, base_N=part["base"], finetuned_N=part["finetuned"], pairs=False, better=-1)
        for name, part in zip(names, [whole, *bands], strict=True)
    ]


def clip_measures(
    clip: Clip,
    captions: list[str],
    real: list[Tensor],
    drawn: dict[str, list[Tensor]],
    owners: list[int],
    sigma: float,
) -> list[Measured]:
    """Distance to the real pictures, CLIP score, and its contrast to other captions."""
    real_ND, captions_ND = clip.pictures(real), clip.captions(captions)
    real_NN = caption_cosines(real_ND, captions_ND, list(range(len(captions))))
    reached: list[Tensor | None] = [None, real_NN.diagonal(), pair_means(contrast_pairs(real_NN))]
    parts: dict[str, list[Tensor]] = {}
    for model, pictures in drawn.items():
        drawn_MD = clip.pictures(pictures)
        distances_NN = CMMD_SCALE * mmd_pairs(real_ND, drawn_MD, owners, sigma)
        cosines_NN = caption_cosines(drawn_MD, captions_ND, owners)
        parts[model] = [
            pair_means(distances_NN),
            cosines_NN.diagonal(),
            pair_means(contrast_pairs(cosines_NN)),
        ]
    kinds = [("cmmd", True, -1), ("clip_score", False, 1), ("clip_contrast", True, 1)]
    return [
        Measured(name=name, base_N=base_N, finetuned_N=finetuned_N, pairs=pairs, better=better, real_N=real_N)
        for (name, pairs, better), base_N, finetuned_N, real_N in zip(
            kinds, parts["base"], parts["finetuned"], reached, strict=True
        )
    ]


def band_rows(bands: list[Measured], confidence: float) -> list[dict[str, Any]]:
    """One row per band: losses of both models and the improvement, with the ends of their intervals."""
    return [
        {"timesteps": band.name.removeprefix("loss_"), **flat(band.intervals(confidence))} for band in bands
    ]


def item_rows(items: list[LatentItem], measures: list[Measured]) -> list[dict[str, Any]]:
    """One row per item: what it is, then each measure for both models; empty where an item had no pictures."""
    rows: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        row: dict[str, Any] = {"id": item.id, "file_name": item.file_name, "caption": item.caption}
        for measured in measures:
            if place < len(measured.base_N):
                row[f"{measured.name}_base"] = float(measured.base_N[place])
                row[f"{measured.name}_finetuned"] = float(measured.finetuned_N[place])
        rows.append(row)
    return rows


def rounded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with floats of six significant digits."""
    return [
        {name: significant(value) if isinstance(value, float) else value for name, value in row.items()}
        for row in rows
    ]


def flat(parts: dict[str, Interval]) -> dict[str, float]:
    """{"base": Interval} -> {"base": value, "base_low": low, "base_high": high}."""
    values: dict[str, float] = {}
    for part, interval in parts.items():
        values[part] = interval.value
        values[f"{part}_low"], values[f"{part}_high"] = interval.low, interval.high
    return values


def verdict(name: str, parts: dict[str, Interval]) -> str:
    """One line for the person who watches."""
    gain = parts["improvement"]
    word = "better" if gain.low > 0 else "worse" if gain.high < 0 else "no clear difference"
    return (
        f"{name} {parts['base'].value:.4g} -> {parts['finetuned'].value:.4g}, "
        f"improvement {gain.value:.4g} [{gain.low:.4g}, {gain.high:.4g}]: {word}"
    )


def refuse_not_finite(losses_NS: Tensor, items: list[LatentItem], model: str) -> None:
    """Raise TrainingError that names the first items on which the model's loss is not a number."""
    finite = torch.isfinite(losses_NS).all(dim=1)
    bad = [item.file_name for item, good in zip(items, finite, strict=True) if not good]
    if bad:
        raise TrainingError(
            f"the {model} U-Net's loss is not finite on {len(bad)} held-out items: {', '.join(bad[:5])}",
            remedy="look at data/train/loss.csv; lower train.learning_rate and train again",
        )


def evaluate(cfg: EvaluateConfig, stage: Stage) -> None:
    """Losses and pictures of both models, then the measures, then the report."""
    device, seed = stage.shared.device, stage.shared.seed
    cache = LatentCache(stage.folder("encode"))
    items = cache.split("holdout")
    record = read_record(stage.folder("base") / "record.json")
    cache.check_base(record)
    base = verified_folder(record, stage.root, *COMPONENTS)
    weights = stage.folder("train") / "weights"
    schedules = {"base": model_schedule(base, None), "finetuned": model_schedule(base, weights)}
    noises = {model: NoiseSchedule(fields, device) for model, fields in schedules.items()}
    steps = noises["base"].steps
    check(cfg, len(items), steps)
    clip_folder = stage.root / cfg.clip
    clip = Clip(clip_folder, device, cfg.batch_size)

    timesteps = band_timesteps(steps, bands=cfg.bands, per_band=cfg.timesteps_per_band)
    drawings = plan(items, cfg.pictures, seed)
    losses: dict[str, Tensor] = {}
    drawn: dict[str, list[Tensor]] = {}
    for model, tuned in (("base", None), ("finetuned", weights)):
        unet = load_model(base, tuned, device)
        asked = heldout_losses(
            unet,
            noises[model],
            cache,
            items,
            seed=seed,
            timesteps=timesteps,
            batch_size=cfg.batch_size,
            device=device,
        )
        losses[model] = in_terms_of(asked, noises[model], timesteps, noises["finetuned"].prediction)
        refuse_not_finite(losses[model], items, model)
        digest = fingerprint(file_digests(tuned)) if tuned else None
        drawn[model] = pictures_of(
            drawings, base, unet, schedules[model], cfg, stage, base_digest=record.digest, weights=digest
        )

    pictured = items[: cfg.pictures]
    captions = [item.caption for item in pictured]
    prepared = Pixels(stage.folder("preprocess"))
    real = [prepared[item] for item in pictured]
    loss, *bands = loss_measures(losses, band_labels(cfg.bands, steps))
    owners = [drawing.owner for drawing in drawings]
    measures = [loss, *clip_measures(clip, captions, real, drawn, owners, cfg.cmmd_sigma)]
    found = {measured.name: measured.intervals(cfg.confidence) for measured in measures}
    found["loss"]["ratio"] = of_ratio(loss.finetuned_N, loss.base_N, cfg.confidence)

    shown = min(cfg.sheet_columns, len(pictured))
    rows = [("held out", real), ("base", drawn["base"]), ("fine-tuned", drawn["finetuned"])]
    image = sheet([(name, pictures[:shown]) for name, pictures in rows], captions[:shown])
    write_atomic(stage.out / "sheets" / "before_after.png", png_bytes(image))
    write_atomic(stage.out / "items.csv", csv_bytes(rounded(item_rows(items, [*measures, *bands]))))
    write_atomic(stage.out / "bands.csv", csv_bytes(rounded(band_rows(bands, cfg.confidence))))
    values = {
        name: {part: interval.to_json() for part, interval in parts.items()} for name, parts in found.items()
    }
    judge = {"parameters": clip.parameters, "sha256": clip_digest(clip_folder)}
    write_json(
        stage.out / "metrics.json", {"clip": judge, "items": len(items), "pictures": cfg.pictures, **values}
    )

    for name, parts in found.items():
        stage.tracker.metrics({f"eval/{name}/{key}": value for key, value in flat(parts).items()})
        stage.say(verdict(name, parts))
    stage.tracker.image("sheets/before_after", stage.out / "sheets" / "before_after.png")
    stage.say(
        f"{len(items)} held-out items, {cfg.pictures} pictures per model, {100 * cfg.confidence:g}% intervals; "
        f"the CLIP that measured has {clip.parameters:,} parameters"
    )


if __name__ == "__main__":
    stage_main("evaluate", EvaluateConfig, evaluate, fix=determinism.apply)
