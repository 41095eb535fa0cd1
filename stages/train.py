"""train: fine-tune the base's U-Net on the latent cache, by LoRA factors or whole.

Reads   data/encode/, data/base/record.json and the base's U-Net and scheduler
Writes  data/train/weights/          LoRA: pytorch_lora_weights.safetensors; full: config.json and safetensors;
                                     scheduler_config.json where the objective is not the base's
        data/train/loss.csv          step, loss, learning rate, gradient norm
        data/train/validation.csv    step, loss on held-out items at fixed noise: of all timesteps, and in bands of them
        data/train/metrics.json      steps, first, last and best validation loss

Killed and started again, it continues from its last checkpoint in the store to the same bits: everything random is a
function of (seed, step), so a checkpoint is weights, optimiser, schedule, average and the curves so far. On SIGTERM and
Ctrl-C it finishes its step and saves first. docs/training.md explains it.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.core import determinism
from stages.core.batches import Batches
from stages.core.errors import ConfigError, TrainingError
from stages.core.heldout import band_labels, band_timesteps, heldout_losses
from stages.core.latents import LatentCache
from stages.core.models.lora import save_lora
from stages.core.models.schedule import CONFIG_NAME, NoiseSchedule, base_schedule, objective_schedule
from stages.core.models.unet import load_unet, save_unet
from stages.core.ranks import Ranks, ranks
from stages.core.record import read_record, verified_folder
from stages.core.space import size_text
from stages.core.store import file_digests, write_atomic, write_json
from stages.core.tables import csv_bytes
from stages.core.training.checkpoints import FORMAT, Checkpoints, State
from stages.core.training.config import TrainConfig, check, dependencies
from stages.core.training.estimate import estimate, measured_peak
from stages.core.training.trainer import CURVE, Trainer, prepare
from stages.harness.previews import check_samples, draw_samples
from stages.harness.processes import stop_asked
from stages.harness.run import Stage, stage_main


class Job:
    """What all parts of the work share: the trainer, the curves so far, and where checkpoints are."""

    def __init__(self, cfg: TrainConfig, stage: Stage, team: Ranks) -> None:
        self.cfg, self.stage, self.team = cfg, stage, team
        self.record = read_record(stage.folder("base") / "record.json")
        staging = Path(cfg.loader.staging) if cfg.loader.staging else None
        self.cache = LatentCache(stage.folder("encode"), staging=staging)
        self.cache.check_base(self.record)
        check(
            cfg,
            stage.shared.device,
            training=len(self.cache.split("train")),
            heldout=len(self.cache.split("holdout")),
            timesteps=int(self.record.components["scheduler"]["config"].get("num_train_timesteps", 1000)),
        )
        check_team(cfg, team)
        drawn = ("vae", "text_encoder", "tokenizer") if cfg.samples.every else ()
        self.base = verified_folder(self.record, stage.root, "unet", "scheduler", *drawn)
        if drawn and team.main:
            check_samples(cfg.samples, self.base, self.cache)
        self.base_schedule = base_schedule(self.base)
        asked = cfg.objective
        self.objective = objective_schedule(
            self.base_schedule, prediction=asked.prediction, zero_terminal_snr=asked.zero_terminal_snr
        )
        self.noise = NoiseSchedule(self.objective, team.device)
        check_objective(self.noise)
        first, end = asked.timesteps
        self.batches = Batches(
            self.cache,
            self.noise,
            batch_size=cfg.batch_size,
            seed=stage.shared.seed,
            caption_dropout=cfg.caption_dropout,
            device=team.device,
            offset_noise=asked.offset_noise,
            timesteps=(first, end),
            pin_memory=cfg.loader.pin_memory,
        )
        self.steps = cfg.total_steps(self.batches.order.batches_per_epoch)
        unet = load_unet(self.base / "unet", team.device)
        prepare(unet, cfg, stage.shared.seed)
        self.trainer = Trainer(cfg, unet, self.batches, team=team, steps=self.steps)
        self.curve: list[dict[str, float]] = []  # every log_every steps
        self.validation: list[
            dict[str, float]
        ] = []  # every validation.every steps, and before the first; of rank 0
        bands = band_labels(cfg.validation.bands, self.noise.steps)
        self.columns = ["step", "loss", *(f"loss_{band}" for band in bands)]

    @property
    def inputs(self) -> dict[str, Any]:
        """What a state of this training depends on."""
        return {
            "config": dependencies(self.cfg),
            "seed": self.stage.shared.seed,
            "base": self.record.component_digest("unet", "scheduler"),
            "latents": self.cache.digest,
            "checkpoints": FORMAT,
        }

    def state(self) -> State:
        """The trainer's state and the curves: a function of the inputs and the step, of nothing else."""
        own = self.trainer.state()
        curves = {"curve": table(self.curve, CURVE), "validation": table(self.validation, self.columns)}
        return State(own.step, own.tensors | curves, own.plain)

    def load(self, state: State) -> None:
        """Continue from `state`."""
        self.trainer.load(state)
        self.curve = rows(state.tensors["curve"], CURVE)
        self.validation = rows(state.tensors["validation"], self.columns)

    def validate(self) -> dict[str, float]:
        """The loss on held-out items at fixed noise, with the averaged weights where they are kept; one row."""
        asked, trainer = self.cfg.validation, self.trainer
        with trainer.averaged():
            losses_NS = heldout_losses(
                trainer.bare,
                self.noise,
                self.cache,
                self.cache.split("holdout")[: asked.items],
                seed=self.stage.shared.seed,
                timesteps=band_timesteps(
                    self.noise.steps, bands=asked.bands, per_band=asked.timesteps_per_band
                ),
                batch_size=self.cfg.batch_size,
                device=self.team.device,
            )
        loss = float(losses_NS.mean())
        if not math.isfinite(loss):
            raise TrainingError(
                f"the held-out loss after step {trainer.step} is {loss}", remedy="lower train.learning_rate"
            )
        bands = losses_NS.mean(0).unflatten(0, (asked.bands, -1)).mean(1).tolist()
        return dict(zip(self.columns, [trainer.step, loss, *bands], strict=True))


def check_team(cfg: TrainConfig, team: Ranks) -> None:
    """Raise ConfigError when other than train.processes processes were started."""
    if team.count != cfg.processes:
        raise ConfigError(
            f"train.processes is {cfg.processes}, and {team.count} process(es) were started",
            remedy=f"start it by `dvc repro train`, or set train.processes: {team.count}; sums depend on it",
        )


def check_objective(noise: NoiseSchedule) -> None:
    """Raise ConfigError for an objective from which nothing can be learnt at the last timestep."""
    if noise.zero_terminal_snr and noise.prediction == "epsilon":
        raise ConfigError(
            "the objective has zero terminal SNR and prediction epsilon: at the last timestep the noise is the input itself",
            remedy="set train.objective.prediction: v_prediction, or zero_terminal_snr: false with another base",
        )


def table(values: list[dict[str, float]], names: Sequence[str]) -> Tensor:
    """Rows as float64 [N, columns]."""
    listed = [[row[name] for name in names] for row in values]
    return torch.tensor(listed, dtype=torch.float64).reshape(len(values), len(names))


def rows(values: Tensor, names: Sequence[str]) -> list[dict[str, float]]:
    """The inverse of `table`."""
    return [{**dict(zip(names, row, strict=True)), "step": int(row[0])} for row in values.tolist()]


def best_row(validation: list[dict[str, float]]) -> dict[str, float]:
    """The row of least loss; of equal ones the first."""
    return min(validation, key=lambda row: row["loss"])


def exhausted(validation: list[dict[str, float]], patience: int | None) -> bool:
    """Whether the last `patience` validations were all no better than one before them."""
    best = validation.index(best_row(validation))
    return patience is not None and len(validation) - 1 - best >= patience


def train(cfg: TrainConfig, stage: Stage) -> None:
    """Load, continue from the last checkpoint if there is one, train, and write what was trained."""
    team = ranks(stage.shared.device)
    job = Job(cfg, stage, team)
    print_ = stage.fingerprint(**job.inputs)
    with stage.store.lock("train", print_) if team.main else nullcontext():
        team.barrier()
        checkpoints = Checkpoints(stage.store.folder("train", print_), stage.say)
        if state := checkpoints.newest(job.steps):
            job.load(state)
            del state  # the size of a training
            stage.say(f"continues from step {job.trainer.step} of {job.steps}")
        try:
            with stop_asked() as asked:
                run(job, checkpoints, asked)
        finally:
            job.trainer.close()
        if team.main:
            finish(job, checkpoints)
    team.barrier()


def run(job: Job, checkpoints: Checkpoints, asked: Callable[[], bool]) -> None:
    """From the trainer's step to the last one; checkpoints, curves and validation on the way.

    asked: whether it was asked to stop; it then saves and raises KeyboardInterrupt. Rank 0 alone validates and writes.
    """
    cfg, trainer, stage, main = job.cfg, job.trainer, job.stage, job.team.main
    if main:
        if trainer.step < job.steps:
            announce(job)
        # A resumed run's records hold the whole curve, not only what came after the restart.
        for row in job.curve:
            record_step(stage, row)
        if not job.validation:
            job.validation.append(job.validate())
            checkpoints.save(job.state())
        for row in job.validation:
            record_validation(stage, row)
    pace = Pace(trainer)
    todo = range(trainer.step, job.steps)
    for _ in stage.progress(todo, total=job.steps, what=cfg.method, unit="steps", done=trainer.step):
        if any(job.team.gather(main and exhausted(job.validation, cfg.stopping.patience))):
            stage.say(
                f"no better held-out loss in {cfg.stopping.patience} validations: stops after step {trainer.step}"
            )
            break
        row = trainer.advance()
        ended = any(job.team.gather(asked()))
        if main:
            after_step(job, checkpoints, row, pace, ended=ended)
        if ended:
            job.team.barrier()  # rank 0 has saved
            raise KeyboardInterrupt


def after_step(
    job: Job, checkpoints: Checkpoints, row: dict[str, float], pace: "Pace", *, ended: bool
) -> None:
    """What rank 0 does when a step is done."""
    cfg, stage, step = job.cfg, job.stage, job.trainer.step
    better = False
    if step % cfg.log_every == 0:
        job.curve.append(row)
    if step % cfg.log_every == 0 or step == job.steps:
        record_step(stage, row)
        stage.tracker.metrics(pace.metrics(), step=step)
    if step % cfg.validation.every == 0:
        job.validation.append(job.validate())
        record_validation(stage, job.validation[-1])
        better = best_row(job.validation) is job.validation[-1]
    if cfg.samples.every and step % cfg.samples.every == 0:
        draw_samples(cfg.samples, job.trainer, job.base, job.objective, stage, checkpoints.folder)
    done = step == job.steps or exhausted(job.validation, cfg.stopping.patience)
    if done or ended or better or step % cfg.checkpoints.every == 0:
        checkpoints.save(job.state())
        kept = [at for at in checkpoints.steps() if at <= step]
        best = int(best_row(job.validation)["step"])
        checkpoints.prune({best, *kept[-cfg.checkpoints.last :]}, upto=step)


class Pace:
    """Pictures a second and the share of time spent on waiting for batches, since they were last asked for."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.since = time.monotonic(), trainer.step, trainer.waited

    def metrics(self) -> dict[str, float]:
        """For MLflow."""
        before, self.since = self.since, (time.monotonic(), self.trainer.step, self.trainer.waited)
        seconds, steps, waited = (now - then for now, then in zip(self.since, before, strict=True))
        pictures = steps * self.trainer.cfg.batch_size * self.trainer.cfg.accumulation
        return {"train/pictures_per_second": pictures / seconds, "train/waiting_share": waited / seconds}


def announce(job: Job) -> None:
    """Say how much memory a step will need, before the first one."""
    cfg = job.cfg
    batch = job.batches.largest()
    needed = estimate(
        job.trainer.bare,
        {"sample": batch.noisy_BChw, "timestep": batch.steps_B, **batch.conditions.arguments()},
        optimizer=cfg.optimizer.name,
        average=bool(cfg.ema_decay),
        checkpointing=cfg.memory.gradient_checkpointing,
        autocast=job.trainer.autocast,
    )
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in vars(needed).items() if size)
    job.stage.say(f"needs about {size_text(needed.total)} of memory ({parts}) besides the libraries")
    job.stage.tracker.metrics({"train/memory_estimate_bytes": needed.total})


def record_step(stage: Stage, row: dict[str, float]) -> None:
    """One point of the training curve, for MLflow."""
    stage.tracker.metrics({f"train/{name}": row[name] for name in CURVE[1:]}, step=int(row["step"]))


def record_validation(stage: Stage, row: dict[str, float]) -> None:
    """One point of the validation curves, for MLflow."""
    values = {f"train/validation_{name}": value for name, value in row.items() if name != "step"}
    stage.tracker.metrics(values, step=int(row["step"]))


def finish(job: Job, checkpoints: Checkpoints) -> None:
    """Write the outs, of the last state or of the best one."""
    cfg, stage, trainer = job.cfg, job.stage, job.trainer
    last = trainer.step
    curve = job.curve + [trainer.row] * (last % cfg.log_every != 0)
    validation = job.validation + ([job.validate()] if last % cfg.validation.every else [])
    best = best_row(validation)
    if cfg.stopping.weights == "best" and best["step"] != last:
        state = checkpoints.at(int(best["step"]))
        if state is None:
            raise TrainingError(
                f"the state of step {best['step']:.0f}, the best, is no longer in {checkpoints.folder}",
                remedy="delete that folder and run the same command again: it trains anew to the same bytes",
            )
        job.load(state)
    with trainer.averaged():
        save_weights(job)
    write_atomic(stage.out / "loss.csv", csv_bytes(curve, CURVE))
    write_atomic(stage.out / "validation.csv", csv_bytes(validation, job.columns))
    losses = {"first": validation[0]["loss"], "last": validation[-1]["loss"], "best": best["loss"]}
    facts = {"steps": last, "weights_of_step": trainer.step, "validation_loss": losses}
    write_json(stage.out / "metrics.json", facts)
    report(job, losses)


def save_weights(job: Job) -> None:
    """Write what was trained, in float32, and the schedule where it is not the base's."""
    folder = job.stage.out / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    if job.cfg.method == "lora":
        save_lora(job.trainer.bare, folder)
    else:
        save_unet(job.trainer.bare, folder, torch.float32)
    if job.objective != job.base_schedule:
        write_json(folder / CONFIG_NAME, job.objective)


def report(job: Job, losses: dict[str, float]) -> None:
    """Two lines, and the same numbers for MLflow."""
    stage, trainer = job.stage, job.trainer
    peak = measured_peak(job.team.device)
    digests = file_digests(stage.out / "weights")
    stage.tracker.tags({f"weights.{name}": digest for name, digest in digests.items()})
    stage.tracker.metrics({f"train/validation_loss_{name}": value for name, value in losses.items()})
    stage.tracker.metrics({"train/memory_peak_bytes": peak})
    count = sum(value.numel() for value in trainer.parameters.values())
    stage.say(f"took {size_text(peak)} of memory at most")
    stage.say(
        f"{trainer.step} steps of {job.cfg.method} ({count:,} parameters) on {len(job.batches.items)} items: "
        f"held-out loss {losses['first']:.4f} -> {losses['last']:.4f}, the best {losses['best']:.4f}"
    )


if __name__ == "__main__":
    stage_main("train", TrainConfig, train, fix=determinism.apply)
