"""The stage on a small workspace: stopped anywhere and started again, it ends in the same bytes."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages.core.errors import ConfigError, TrainingError
from stages.core.models.schedule import NoiseSchedule
from stages.core.models.unet import Conditions, lr_scheduler
from stages.core.safetensors_io import save_file
from stages.core.shards import write_index
from stages.core.training.config import (
    SCHEDULES,
    CheckpointsConfig,
    LoaderConfig,
    ObjectiveConfig,
    SamplesConfig,
    StoppingConfig,
    ValidationConfig,
    check,
)
from stages.core.training.trainer import Trainer
from stages.train import train
from tests.training import CONFIG, HARD, make_workspace, outs, stage_in, trainer_for

OUTS = ("loss.csv", "validation.csv", "metrics.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("train"))


@pytest.fixture
def workspace(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "work"))


class Stopped(BaseException):
    """A kill, as far as the bytes are concerned."""


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """End the process's work in the middle of `step`, after its forward and backward passes."""
    advance = Trainer.advance

    def stopping(self: Trainer) -> dict[str, float]:
        row = advance(self)
        if self.step == step:
            raise Stopped
        return row

    monkeypatch.setattr(Trainer, "advance", stopping)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("every", [1, 2])
def test_stopped_twice_equals_uninterrupted(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, every: int
) -> None:
    cfg = replace(HARD, method=method, checkpoints=CheckpointsConfig(every=every, last=2))
    straight = Path(shutil.copytree(workspace, tmp_path / "straight"))
    train(cfg, stage_in(straight))
    expected = outs(straight)

    for step in (2, 4):
        torch.manual_seed(step * 1000)  # another process has other generators
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(Stopped):
                train(cfg, stage_in(workspace))
        assert not (workspace / "data" / "train").exists()
    train(cfg, stage_in(workspace))
    assert outs(workspace) == expected
    assert set(OUTS) < set(expected)


def test_what_was_finished_is_written_again_to_the_same_bytes(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(CONFIG, stage_in(workspace))
    before = outs(workspace)
    shutil.rmtree(workspace / "data" / "train")
    train(CONFIG, stage_in(workspace))
    assert outs(workspace) == before
    assert "train: continues from step 5 of 5" in capsys.readouterr().out
    rows = list(csv.DictReader((workspace / "data/train/loss.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row["learning_rate"] for row in rows] == ["0.001"] * 5
    held = list(csv.DictReader((workspace / "data/train/validation.csv").open()))
    assert [row["step"] for row in held] == ["0", "2", "4", "5"]
    metrics = json.loads((workspace / "data/train/metrics.json").read_text())
    first, last = float(held[0]["loss"]), float(held[-1]["loss"])
    best = min(float(row["loss"]) for row in held)
    losses = {"first": first, "last": last, "best": best}
    assert metrics == {"steps": 5, "weights_of_step": 5, "validation_loss": losses}
    assert sorted(before) == ["loss.csv", "metrics.json", "validation.csv", "weights/config.json",
                              "weights/diffusion_pytorch_model.safetensors"]  # fmt: skip


def test_another_setting_does_not_continue_from_it(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = replace(CONFIG, steps=1)
    train(cfg, stage_in(workspace))
    train(replace(cfg, learning_rate=2e-3), stage_in(workspace))
    assert "continues" not in capsys.readouterr().out


def test_sparse_log_keeps_the_last_step(workspace: Path) -> None:
    train(
        replace(CONFIG, steps=3, log_every=2, checkpoints=CheckpointsConfig(every=9, last=1)),
        stage_in(workspace),
    )
    rows = list(csv.DictReader((workspace / "data/train/loss.csv").open()))
    assert [row["step"] for row in rows] == ["2", "3"]


# --- one step against plain formulas


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    """The gradients of one step, unclipped."""
    found: list[torch.Tensor] = []

    def keep(*_args: Any, **_kwargs: Any) -> None:
        found.extend(value.grad.clone() for value in trainer.parameters.values() if value.grad is not None)

    trainer.optimizer.step = keep
    trainer.advance()
    return found


def test_two_times_two_are_four(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same four rows in two micro-batches or one; they differ by float32 rounding of the sums alone."""
    small = trainer_for(workspace, replace(CONFIG, accumulation=2, max_grad_norm=1e9))
    large = trainer_for(workspace, replace(CONFIG, batch_size=4, max_grad_norm=1e9))
    # Which micro-batches of one shape there are depends on the order; take the first two of the square bucket.
    parts = [part for n in range(8) if (part := small.batches[n]).items[0].bucket == (32, 32)][:2]
    whole = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("noisy_BChw", "target_BChw", "steps_B")
    }
    text_BLD = torch.cat([part.conditions.text_BLD for part in parts])
    items = [item for part in parts for item in part.items]
    together = replace(parts[0], items=items, conditions=Conditions(text_BLD), **whole)
    monkeypatch.setattr(small, "batches", Fixed(small.batches.schedule, parts))
    monkeypatch.setattr(large, "batches", Fixed(large.batches.schedule, [together]))
    for one, other in zip(gradients(small), gradients(large), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)


class Fixed:
    """Stands for Batches."""

    seed = 7

    def __init__(self, schedule: NoiseSchedule, parts: list[Any]) -> None:
        self.schedule, self.parts = schedule, parts

    def ahead(self, numbers: Any, **_: Any) -> Any:
        return iter(self.parts)


def test_checkpointing_changes_no_gradient_also_with_dropout(workspace: Path) -> None:
    from stages.core.models.unet import set_checkpointing

    cfg = replace(HARD, method="lora")
    found: list[list[torch.Tensor]] = []
    for on in (False, True):
        trainer = trainer_for(workspace, cfg)
        set_checkpointing(trainer.bare, on)
        found.append(gradients(trainer))
    assert found[0]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_lora_dropout_follows_the_seed_and_the_step(workspace: Path) -> None:
    cfg = replace(CONFIG, method="lora", lora=replace(CONFIG.lora, dropout=0.5))
    drawn: list[torch.Tensor] = []
    for seed in (7, 7, 8):
        trainer = trainer_for(workspace, cfg)
        trainer.batches.seed = 7
        batch = trainer.batches[0]
        fixed: Any = Fixed(trainer.batches.schedule, [batch])
        fixed.seed = seed
        trainer.batches = fixed
        drawn.append(gradients(trainer)[-1])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_ema_by_hand(workspace: Path) -> None:
    """diffusers' warm-up: decay of update t is min(ema_decay, 1 - t^-0.75) with t = 1 + (t' - 1), the first one 0."""
    trainer = trainer_for(workspace, replace(CONFIG, ema_decay=0.5))
    name = "conv_out.bias"
    average = trainer.parameters[name].detach().double().clone()
    for update in range(1, 6):
        trainer.advance()
        decay = 0.0 if update == 1 else min(0.5, 1 - update**-0.75)
        average = decay * average + (1 - decay) * trainer.parameters[name].detach().double()
    own = trainer.parameters[name].detach().clone()
    with trainer.averaged():
        assert torch.allclose(trainer.parameters[name].double(), average, rtol=1e-5, atol=1e-7)
        assert not torch.equal(trainer.parameters[name], own)
    assert torch.equal(trainer.parameters[name], own)


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0, [1.0] * 6),
        ("constant_with_warmup", 3, [0, 1 / 3, 2 / 3, 1.0, 1.0, 1.0]),
        ("linear", 2, [0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", 2, [0, 0.5, *((1 + math.cos(math.pi * n / 4)) / 2 for n in range(4))]),
    ],
)
def test_learning_rate_at_exact_steps(
    workspace: Path, schedule: str, warmup: int, rates: list[float]
) -> None:
    trainer = trainer_for(workspace, replace(CONFIG, steps=6, lr_schedule=schedule, warmup=warmup))
    found = [trainer.advance()["learning_rate"] for _ in range(6)]
    assert found == pytest.approx([1e-3 * rate for rate in rates], abs=1e-12)


def test_loss_is_the_weighted_mean_square(workspace: Path) -> None:
    trainer = trainer_for(
        workspace,
        replace(CONFIG, objective=replace(CONFIG.objective, min_snr_gamma=5.0), caption_dropout=0.0),
    )
    batch, schedule = trainer.batches[0], trainer.batches.schedule
    with torch.no_grad():
        predicted = trainer.bare(
            batch.noisy_BChw, batch.steps_B, encoder_hidden_states=batch.conditions.text_BLD
        ).sample
    square_B = (predicted - batch.target_BChw).square().mean(dim=(1, 2, 3))
    alphas_B = schedule.alphas_cumprod[batch.steps_B]
    snr_B = alphas_B / (1 - alphas_B)
    expected = (square_B * snr_B.clamp(max=5.0) / (snr_B + 1)).mean()
    assert trainer.advance()["loss"] == pytest.approx(float(expected), rel=1e-5)


# --- what stops it


def poison(root: Path, name: str) -> None:
    """A latent that is not a number, in an otherwise valid cache."""
    folder = root / "data" / "encode"
    index = json.loads((folder / "index.json").read_text())
    (item,) = [item for item in index["items"] if item["file_name"] == name]
    tensors = load_file(folder / "shard-00.safetensors")
    tensors[f"{item['key']}.mean"][0, 0, 0] = math.nan
    save_file(folder / "shard-00.safetensors", tensors)
    write_index(folder, index, list(index["files"]))


def test_a_loss_that_is_no_number_names_step_and_files(workspace: Path) -> None:
    poison(workspace, "5.png")  # one of the two in its bucket, so its batch is 5.png and 6.png
    with pytest.raises(
        TrainingError, match=r"the loss of step (\d) is nan; its batch: (5\.png, 6\.png|6\.png, 5\.png)\n"
    ):
        train(CONFIG, stage_in(workspace))
    assert not (workspace / "data" / "train").exists()


def test_a_heldout_loss_that_is_no_number(workspace: Path) -> None:
    for name in ("7.png", "8.png", "9.png"):
        poison(workspace, name)
    with pytest.raises(TrainingError, match="the held-out loss after step 0 is nan\n  remedy: lower"):
        train(CONFIG, stage_in(workspace))


def test_gradients_that_are_no_numbers_change_no_weight(workspace: Path) -> None:
    trainer = trainer_for(workspace, CONFIG)
    before = {name: value.detach().clone() for name, value in trainer.parameters.items()}
    trainer.parameters["conv_out.bias"].register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match=r"the gradient norm of step 1 is (inf|nan)"):
        trainer.advance()
    assert all(torch.equal(value, before[name]) for name, value in trainer.parameters.items())


def test_check_lists_all_problems_at_once() -> None:
    cfg = replace(
        CONFIG,
        method="dora",
        steps=0,
        epochs=3,
        accumulation=3,
        processes=2,
        learning_rate=0.0,
        lr_schedule="cosin",
        warmup=-1,
        ema_decay=1.0,
        caption_dropout=1.5,
        mixed_precision="fp16",
        objective=ObjectiveConfig(
            prediction="eps", zero_terminal_snr=False, min_snr_gamma=0.0, offset_noise=-0.1, timesteps=[9, 9]
        ),
        optimizer=replace(CONFIG.optimizer, name="adamw8bit", beta2=1.0, epsilon=0.0, weight_decay=-1.0),
        lora=replace(CONFIG.lora, rank=0, targets=[]),
        memory=replace(CONFIG.memory, attention="xformers"),
        validation=ValidationConfig(every=0, items=0, bands=501, timesteps_per_band=2),
        stopping=StoppingConfig(patience=0, weights="first", max_loss=math.nan, max_overflows=-1),
        checkpoints=CheckpointsConfig(every=0, last=0),
        loader=LoaderConfig(num_workers=0, prefetch=0, pin_memory=True, staging=None),
        samples=SamplesConfig(every=1, prompts=[], height=0, width=32, steps=0, guidance=1.0),
    )
    with pytest.raises(ConfigError) as caught:
        check(cfg, "cpu", training=0, heldout=0, timesteps=1000)
    assert caught.value.message.split("\n  ") == [
        "train.steps is 0; set it to 1 or more",
        "train.checkpoints.every is 0; set it to 1 or more",
        "train.checkpoints.last is 0; set it to 1 or more",
        "train.stopping.patience is 0; set it to 1 or more",
        "train.validation.every is 0; set it to 1 or more",
        "train.validation.items is 0; set it to 1 or more",
        "train.loader.num_workers is 0; set it to 1 or more",
        "train.loader.prefetch is 0; set it to 1 or more",
        "train.stopping.max_loss is nan; set it above 0",
        "train.objective.min_snr_gamma is 0.0; set it above 0",
        "train.warmup is -1; set it to 0 or more",
        "train.objective.offset_noise is -0.1; set it to 0 or more",
        "train.stopping.max_overflows is -1; set it to 0 or more",
        "train.ema_decay is 1.0; set it to 0 up to below 1",
        "train.caption_dropout is 1.5; set it to 0 to 1",
        "train.learning_rate is 0.0; set it above 0",
        "train.optimizer.beta2 is 1.0; set it to 0 up to below 1",
        "train.optimizer.epsilon is 0.0; set it above 0",
        "train.optimizer.weight_decay is -1.0; set it to 0 or more",
        "train.optimizer.name is adamw8bit on a CPU; set adamw",
        "train.lora.rank is 0; set it to 1 or more",
        "train.lora.targets is empty; usual targets are to_q, to_k, to_v, to_out.0",
        "train.method is 'dora'; set one of lora, full",
        "train.lr_schedule is 'cosin'; set one of constant, constant_with_warmup, linear, cosine, cosine_with_restarts, "
        "polynomial",
        "train.objective.prediction is 'eps'; set one of base, epsilon, v_prediction",
        "train.stopping.weights is 'first'; set one of last, best",
        "train.mixed_precision is fp16 on a CPU; set no or bf16",
        "train.loader.pin_memory is true on a CPU; set it to false",
        "train.memory.attention is xformers on a CPU; set sdpa",
        "train.objective.timesteps is [9, 9]; set [first, after the last], each from 0 to 1000, the first lower",
        "train.validation.bands x timesteps_per_band is 1002, but the base has 1000 timesteps",
        "train.samples.height is 0; set it to 1 or more",
        "train.samples.steps is 0; set it to 1 or more",
        "train.samples.prompts is empty; give texts to draw, or set train.samples.every: 0",
        "train.steps is 0 and train.epochs is 3; set one of them, the other to null",
        "train.accumulation is 3, which 2 processes cannot share evenly; set a multiple of train.processes",
        "no picture is left to train on; lower ingest.holdout_percent or add pictures",
        "no picture is held out, so nothing can be validated; raise ingest.holdout_percent",
    ]
    check(CONFIG, "cpu", training=1, heldout=1, timesteps=1000)
    check(replace(CONFIG, mixed_precision="fp16"), "cuda", training=1, heldout=1, timesteps=1000)


@pytest.mark.parametrize("name", ["bitsandbytes"])
def test_an_optimizer_that_is_not_installed(name: str) -> None:
    cfg = replace(CONFIG, optimizer=replace(CONFIG.optimizer, name="adamw8bit"))
    with pytest.raises(
        ConfigError, match=rf"adamw8bit, and {name} is not installed; run `pip install {name}`"
    ):
        check(cfg, "cuda", training=1, heldout=1, timesteps=1000)


def test_a_warm_up_that_the_schedule_ignores_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.warmup is 5, which lr_schedule constant has none of"):
        check(replace(CONFIG, warmup=5), "cpu", training=1, heldout=1, timesteps=1000)


def test_fp16_on_a_cpu_is_refused_before_the_weights_are_looked_at(workspace: Path) -> None:
    shutil.rmtree(workspace / "tiny-sd")
    with pytest.raises(ConfigError, match="fp16 on a CPU; set no or bf16"):
        train(replace(CONFIG, mixed_precision="fp16"), stage_in(workspace))


def test_every_schedule_that_check_allows_is_known_to_diffusers() -> None:
    for name in SCHEDULES:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        assert lr_scheduler(name, optimizer, warmup=0, steps=4).get_last_lr()[0] > 0


# --- pictures on the way


SAMPLES = SamplesConfig(
    every=2, prompts=["a red ball", "picture 1"], height=32, width=48, steps=2, guidance=2.0
)


def test_samples_are_drawn_and_change_no_byte(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Path(shutil.copytree(workspace, tmp_path / "plain"))
    cfg = replace(HARD, method="lora", steps=4)
    train(cfg, stage_in(plain))
    train(replace(cfg, samples=SAMPLES), stage_in(workspace))
    assert outs(workspace) == outs(plain)
    sheets = sorted((workspace / "store" / "train").glob("*/samples-*.png"))
    assert [path.name for path in sheets] == ["samples-00000002.png", "samples-00000004.png"]
    assert f"drew 2 picture(s): see {sheets[0]}" in capsys.readouterr().out
    from PIL import Image

    with Image.open(sheets[0]) as sheet:
        assert sheet.size[0] > 2 * 48


def test_samples_that_cannot_be_drawn_are_refused_before_the_first_step(workspace: Path) -> None:
    long = " ".join(["ball"] * 40)
    with pytest.raises(ConfigError) as caught:
        train(replace(CONFIG, samples=replace(SAMPLES, height=30, prompts=[long])), stage_in(workspace))
    assert caught.value.message == (
        "train.samples.height is 30; set a multiple of 4, the VAE's factor\n  "
        f"train.samples.prompts: {long!r} has 42 tokens, the text encoder reads 32"
    )
    assert not (workspace / "store").exists() or not list((workspace / "store").rglob("step-*"))
