"""The stage on a small workspace: stopped anywhere and started again, it ends in the same bytes."""

import csv
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import train as stage_module
from stages.core.batches import Batches
from stages.core.determinism import DeterminismConfig
from stages.core.errors import ConfigError, TrainingError
from stages.core.latents import LatentCache, LatentItem
from stages.core.models.lora import add_lora
from stages.core.models.schedule import NoiseSchedule
from stages.core.models.unet import load_unet
from stages.core.record import read_record
from stages.core.safetensors_io import save_file
from stages.core.sampler import normal
from stages.core.shards import write_index
from stages.core.store import Store, sha256_bytes
from stages.harness.config import SharedConfig
from stages.harness.journal import NullJournal
from stages.harness.run import Stage
from stages.train import (
    LoraConfig,
    OptimizerConfig,
    TrainConfig,
    Trainer,
    ValidationConfig,
    check,
    train,
)
from tests.latents import write_latents
from tests.tiny import TEXT_LIMIT, make_tiny_base, write_record

CONFIG = TrainConfig(
    method="full",
    steps=5,
    batch_size=2,
    accumulation=1,
    learning_rate=1e-3,
    lr_schedule="constant",
    warmup=0,
    max_grad_norm=1.0,
    ema_decay=0.0,
    min_snr_gamma=None,
    caption_dropout=0.2,
    mixed_precision="no",
    gradient_checkpointing=False,
    checkpoint_every=1,
    log_every=1,
    adamw=OptimizerConfig(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01),
    lora=LoraConfig(rank=2, alpha=4.0, dropout=0.0, targets=["to_q", "to_v"]),
    validation=ValidationConfig(every=2, items=2, timesteps=[250, 750]),
)
# Everything at once that a checkpoint could forget.
HARD = replace(
    CONFIG,
    accumulation=2,
    ema_decay=0.9,
    gradient_checkpointing=True,
    min_snr_gamma=5.0,
    lr_schedule="cosine",
    warmup=2,
    lora=replace(CONFIG.lora, dropout=0.3),
)
OUTS = ("loss.csv", "validation.csv", "metrics.json")


def make_workspace(root: Path) -> Path:
    """A base, its record, and a hand-made latent cache: 5 + 2 items to train on in two buckets, 3 held out."""
    base = make_tiny_base(root / "tiny-sd")
    record = read_record(write_record(base, root))
    items: list[LatentItem] = []
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    texts = {"": normal(0, "text", 99, shape=(TEXT_LIMIT, 32))}
    for number in range(10):
        name = sha256_bytes(str(number).encode())
        bucket = (32, 48) if number in (5, 6) else (32, 32)
        shape = (4, bucket[0] // 4, bucket[1] // 4)
        moments[name] = (
            normal(0, "mean", number, shape=shape),
            normal(0, "logvar", number, shape=shape) - 4,
        )
        caption = f"picture {number}"
        texts[caption] = normal(0, "text", number, shape=(TEXT_LIMIT, 32))
        item = LatentItem(
            id=name,
            file_name=f"{number}.png",
            captions=(caption,),
            split="train" if number < 7 else "holdout",
            bucket=bucket,
            shard=0,
            key=sha256_bytes(b"pixels" + name.encode()),
        )
        items.append(item)
    write_latents(
        root / "data" / "encode",
        sorted(items, key=lambda item: item.id),
        moments,
        texts,
        space={"channels": 4, "downsample": 4, "scaling_factor": 0.6, "shift_factor": 0.0},
        vae=record.vae_digest,
        text_encoder=record.text_digest,
    )
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("train"))


@pytest.fixture
def workspace(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "work"))


def stage_in(root: Path, device: str = "cpu") -> Stage:
    shared = SharedConfig(
        seed=7, device=device, runtime="native", determinism=DeterminismConfig(mode="portable", threads=1)
    )
    return Stage(name="train", root=root, shared=shared, store=Store(root / "store"), tracker=NullJournal())


def outs(root: Path) -> dict[str, bytes]:
    folder = root / "data" / "train"
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def trainer_for(root: Path, cfg: TrainConfig) -> Trainer:
    unet = load_unet(root / "tiny-sd" / "unet", "cpu")
    if cfg.method == "lora":
        add_lora(unet, **vars(cfg.lora), seed=7)
    unet.train()
    cache, schedule = LatentCache(root / "data" / "encode"), NoiseSchedule(root / "tiny-sd", "cpu")
    batches = Batches(
        cache, schedule, batch_size=cfg.batch_size, seed=7, caption_dropout=cfg.caption_dropout, device="cpu"
    )
    return Trainer(cfg, unet, batches, "cpu")


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
    cfg = replace(HARD, method=method, checkpoint_every=every)
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
    assert metrics == {"steps": 5, "validation_loss": {"first": first, "last": last}}
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
    train(replace(CONFIG, steps=3, log_every=2, checkpoint_every=9), stage_in(workspace))
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
        for name in ("noisy_BChw", "target_BChw", "steps_B", "text_BLD")
    }
    together = replace(parts[0], items=[item for part in parts for item in part.items], **whole)
    monkeypatch.setattr(small, "batches", Fixed(small.batches.schedule, parts))
    monkeypatch.setattr(large, "batches", Fixed(large.batches.schedule, [together]))
    for one, other in zip(gradients(small), gradients(large), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)


class Fixed:
    """Stands for Batches."""

    seed = 7

    def __init__(self, schedule: NoiseSchedule, parts: list[Any]) -> None:
        self.schedule, self.parts = schedule, parts

    def __getitem__(self, number: int) -> Any:
        return self.parts[number]


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
    trainer = trainer_for(workspace, replace(CONFIG, min_snr_gamma=5.0, caption_dropout=0.0))
    batch, schedule = trainer.batches[0], trainer.batches.schedule
    with torch.no_grad():
        predicted = trainer.bare(batch.noisy_BChw, batch.steps_B, encoder_hidden_states=batch.text_BLD).sample
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
        learning_rate=0.0,
        lr_schedule="cosin",
        warmup=-1,
        ema_decay=1.0,
        caption_dropout=1.5,
        mixed_precision="fp16",
        adamw=replace(CONFIG.adamw, beta2=1.0),
        lora=replace(CONFIG.lora, rank=0, targets=[]),
        validation=ValidationConfig(every=0, items=0, timesteps=[1000]),
    )
    with pytest.raises(ConfigError) as caught:
        check(cfg, "cpu", training=0, heldout=0, timesteps=1000)
    assert caught.value.message.split("\n  ") == [
        "train.steps is 0; set it to 1 or more",
        "train.lora.rank is 0; set it to 1 or more",
        "train.validation.every is 0; set it to 1 or more",
        "train.validation.items is 0; set it to 1 or more",
        "train.learning_rate is 0.0; set it above 0",
        "train.ema_decay is 1.0; set it to 0 up to below 1",
        "train.adamw.beta2 is 1.0; set it to 0 up to below 1",
        "train.warmup is -1; set it to 0 or more",
        "train.caption_dropout is 1.5; set it to 0 to 1",
        "train.validation.timesteps is [1000]; set one or more, each from 0 to 999",
        "train.method is 'dora'; set lora or full",
        "train.lr_schedule is 'cosin'; set one of constant, constant_with_warmup, linear, cosine, cosine_with_restarts, "
        "polynomial",
        "train.mixed_precision is fp16 on a CPU; set no or bf16",
        "train.lora.targets is empty; usual targets are to_q, to_k, to_v, to_out.0",
        "no picture is left to train on; lower ingest.holdout_percent or add pictures",
        "no picture is held out, so nothing can be validated; raise ingest.holdout_percent",
    ]
    check(CONFIG, "cpu", training=1, heldout=1, timesteps=1000)
    check(replace(CONFIG, mixed_precision="fp16"), "cuda", training=1, heldout=1, timesteps=1000)


def test_a_warm_up_that_the_schedule_ignores_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.warmup is 5, which lr_schedule constant has none of"):
        check(replace(CONFIG, warmup=5), "cpu", training=1, heldout=1, timesteps=1000)


def test_fp16_on_a_cpu_is_refused_before_the_weights_are_looked_at(workspace: Path) -> None:
    shutil.rmtree(workspace / "tiny-sd")
    with pytest.raises(ConfigError, match="fp16 on a CPU; set no or bf16"):
        train(replace(CONFIG, mixed_precision="fp16"), stage_in(workspace))


def test_every_schedule_that_check_allows_is_known_to_diffusers(workspace: Path) -> None:
    build: Callable[..., Any] = stage_module.lr_scheduler
    for name in stage_module._SCHEDULES:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        assert build(name, optimizer, warmup=0, steps=4).get_last_lr()[0] > 0
