"""One step, with every optimiser and option; what it refuses."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.core.batches import Batches
from stages.core.errors import MachineError, TrainingError
from stages.core.models.unet import set_attention
from stages.core.ranks import Ranks
from stages.core.sampler import normal
from stages.core.training.checkpoints import Checkpoints
from stages.core.training.config import TrainConfig
from stages.core.training.optimizers import OPTIMIZERS, OptimizerConfig, build_optimizer
from stages.core.training.trainer import Trainer
from tests.training import CONFIG, HARD, make_workspace, trainer_for


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("trainer"))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.parameters.items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def with_optimizer(cfg: TrainConfig, name: str) -> TrainConfig:
    rate = 1.0 if name == "prodigy" else 1e-3
    return replace(cfg, optimizer=replace(cfg.optimizer, name=name), learning_rate=rate)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"adamw8bit"}))
def test_every_optimizer_continues_to_the_same_bits(
    root: Path, tmp_path: Path, name: str, method: str
) -> None:
    """Three steps and a file and two more are five steps; and five steps have changed something."""
    cfg = with_optimizer(replace(HARD, method=method), name)
    straight = trainer_for(root, cfg)
    start = weights(straight)
    straight_rows = [straight.advance() for _ in range(5)]
    first = trainer_for(root, cfg)
    rows = [first.advance() for _ in range(3)]
    checkpoints = Checkpoints(tmp_path, pytest.fail)
    checkpoints.save(first.state())
    second = trainer_for(root, cfg)
    state = checkpoints.newest(3)
    assert state is not None
    second.load(state)
    rows += [second.advance() for _ in range(2)]
    assert rows == straight_rows
    assert equal(weights(second), weights(straight))
    assert not equal(weights(straight), start)
    checkpoints.save(second.state())
    checkpoints.save(straight.state())
    assert checkpoints.steps() == [3, 5]
    assert len(list(tmp_path.iterdir())) == 2  # the same state is the same file


def test_adamw_by_hand() -> None:
    """Loshchilov and Hutter 2019, algorithm 2, in float64."""
    cfg = OptimizerConfig(name="adamw", beta1=0.8, beta2=0.9, epsilon=1e-8, weight_decay=0.1)
    value = torch.nn.Parameter(normal(1, "value", shape=(5,)))
    optimizer = build_optimizer(cfg, [value], 0.01)
    expected, m, v = value.detach().double(), 0.0, 0.0
    for step in range(1, 5):
        gradient = normal(1, "gradient", step, shape=(5,))
        value.grad = gradient.clone()
        optimizer.step()
        m = 0.8 * m + 0.2 * gradient.double()
        v = 0.9 * v + 0.1 * gradient.double() ** 2
        expected = expected - 0.01 * 0.1 * expected
        expected = expected - 0.01 * (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-8)
        assert torch.allclose(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_channels_last_is_the_same_step_up_to_rounding(root: Path) -> None:
    plain = trainer_for(root, replace(CONFIG, optimizer=replace(CONFIG.optimizer, name="adamw")))
    other = trainer_for(root, replace(CONFIG, memory=replace(CONFIG.memory, channels_last=True)))
    for _ in range(3):
        one, two = plain.advance(), other.advance()
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert other.bare.conv_in.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr]


def test_bf16_trains_float32_weights(root: Path) -> None:
    plain, half = trainer_for(root, CONFIG), trainer_for(root, replace(CONFIG, mixed_precision="bf16"))
    one, two = plain.advance()["loss"], half.advance()["loss"]
    assert two != one
    assert two == pytest.approx(one, rel=0.02)
    assert {value.dtype for value in half.parameters.values()} == {torch.float32}


# --- what a step is made of


def test_ranks_share_the_micro_batches_and_none_comes_twice(root: Path) -> None:
    cfg = replace(CONFIG, accumulation=4)
    asked: dict[int, list[int]] = {}
    for count in (1, 2, 4):
        for number in range(count):
            trainer = trainer_for(root, cfg)
            trainer.team = Ranks(number, count)
            asked[number] = []

            def ahead(numbers: Any, *, seen: list[int] = asked[number], **_: Any) -> Any:
                for one in numbers:
                    seen.append(one)
                    yield one

            trainer.batches.ahead = ahead
            for _ in range(3 * 4 // count):
                trainer._next()
        taken = [one for number in range(count) for one in asked[number]]
        assert sorted(taken) == list(range(12))
        assert asked[0] == [n for n in range(12) if n % 4 % count == 0]


def test_offset_noise_by_hand(root: Path) -> None:
    plain = trainer_for(root, CONFIG).batches
    offset = trainer_for(root, replace(CONFIG, objective=replace(CONFIG.objective, offset_noise=0.5))).batches
    for number in range(4):
        one, other = plain[number], offset[number]
        for row in range(2):
            alpha = plain.schedule.alphas_cumprod[one.steps_B[row]]
            added_C11 = 0.5 * normal(7, "offset-noise", number, row, shape=(4, 1, 1))
            assert torch.allclose(
                other.noisy_BChw[row] - one.noisy_BChw[row],
                ((1 - alpha).sqrt() * added_C11).expand(one.noisy_BChw.shape[1:]),
                atol=1e-5,
            )
            # The target (v) holds the same noise.
            assert torch.allclose(
                other.target_BChw[row] - one.target_BChw[row],
                (alpha.sqrt() * added_C11).expand(one.noisy_BChw.shape[1:]),
                atol=1e-5,
            )


def test_only_timesteps_of_the_range_are_drawn_and_all_of_them(root: Path) -> None:
    batches = trainer_for(
        root, replace(CONFIG, objective=replace(CONFIG.objective, timesteps=[10, 14]))
    ).batches
    assert {int(step) for number in range(60) for step in batches[number].steps_B} == {10, 11, 12, 13}


def test_batches_made_ahead_are_the_same_in_the_same_order(root: Path) -> None:
    batches: Batches = trainer_for(root, CONFIG).batches
    expected = [batches[number] for number in range(3, 20)]
    for workers, prefetch in ((1, 1), (4, 2), (3, 30)):
        found = list(batches.ahead(range(3, 20), workers=workers, prefetch=prefetch))
        assert [batch.items for batch in found] == [batch.items for batch in expected]
        assert all(torch.equal(a.noisy_BChw, b.noisy_BChw) for a, b in zip(found, expected, strict=True))


def test_an_error_in_a_worker_is_raised_where_the_batch_is_asked_for(root: Path) -> None:
    batches: Batches = trainer_for(root, CONFIG).batches

    def fail(number: int, places: list[int]) -> Any:
        raise MachineError(f"batch {number}", remedy="none")

    batches.make = fail
    with pytest.raises(MachineError, match="batch 5"):
        next(batches.ahead(range(5, 9), workers=2, prefetch=2))


def test_the_largest_batch_is_of_the_largest_bucket(root: Path) -> None:
    batch = trainer_for(root, CONFIG).batches.largest()
    assert {item.bucket for item in batch.items} == {(32, 48)}
    assert tuple(batch.noisy_BChw.shape) == (2, 4, 8, 12)


# --- it learns


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_one_item_is_learnt_to_near_zero_loss(tmp_path: Path, method: str) -> None:
    """One picture at one timestep: the target is a linear function of what goes in, and 300 steps find it."""
    root = make_workspace(tmp_path)
    lora = replace(
        CONFIG.lora,
        rank=16,
        alpha=16.0,
        targets=["to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2", "conv_in", "conv_out"],
    )
    objective = replace(CONFIG.objective, timesteps=[600, 601])
    cfg = replace(
        CONFIG,
        method=method,
        lora=lora,
        objective=objective,
        learning_rate=5e-3,
        steps=300,
        batch_size=4,
        caption_dropout=0.0,
        lr_schedule="cosine",
    )
    trainer = trainer_for(root, cfg)
    cache, sample = trainer.batches.cache, trainer.batches.cache.sample
    # Always the mean: what is drawn from the posterior could not be foretold.
    cache.sample = lambda item, noise_Chw, *, flipped=False: sample(item, 0 * noise_Chw, flipped=flipped)
    trainer.batches.order.buckets = [[0]]
    trainer.batches.order.batches_per_epoch = 1
    losses = [trainer.advance()["loss"] for _ in range(300)]
    assert losses[0] > 0.4
    assert sum(losses[-10:]) / 10 < 0.02, losses[-10:]


# --- what it refuses


def test_an_exploding_loss_names_step_and_items(root: Path) -> None:
    trainer = trainer_for(root, replace(CONFIG, stopping=replace(CONFIG.stopping, max_loss=0.01)))
    before = weights(trainer)
    with pytest.raises(TrainingError) as caught:
        trainer.advance()
    names = ", ".join(item.file_name for item in trainer.batches[0].items)
    loss = trainer_for(root, CONFIG).advance()["loss"]
    assert caught.value.message == (
        f"the loss of step 1 is {loss:.6g}, above train.stopping.max_loss (0.01); its batch: {names}"
    )
    assert equal(weights(trainer), before)


class Scaler:
    """Stands for the gradient scaler of fp16, which needs a GPU."""

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"scale": 2.0}


def test_fp16_may_overflow_so_many_times_in_a_row(root: Path) -> None:
    trainer = trainer_for(root, replace(CONFIG, stopping=replace(CONFIG.stopping, max_overflows=2)))
    trainer.scaler = Scaler()  # type: ignore[assignment]
    trainer._refuse([(0.5, "")], math.inf, "a.png")
    trainer._refuse([(0.5, "")], math.nan, "a.png")
    trainer._refuse([(0.5, "")], 1.0, "a.png")
    assert trainer.overflows == 0
    trainer._refuse([(0.5, "")], math.inf, "a.png")
    trainer._refuse([(0.5, "")], math.inf, "a.png")
    assert trainer.state().plain["overflows"] == 2
    with pytest.raises(
        TrainingError,
        match=r"fp16 has overflowed in 3 steps in a row, the last of step 1; its batch: b\.png\n",
    ):
        trainer._refuse([(0.5, "")], math.inf, "b.png")


def test_xformers_that_is_not_there(root: Path) -> None:
    trainer = trainer_for(root, CONFIG)
    with pytest.raises(
        MachineError, match=r"train\.memory\.attention is xformers, which cannot be used here"
    ):
        set_attention(trainer.bare, "xformers")
    set_attention(trainer.bare, "sdpa")


def test_too_little_memory_is_said_in_plain_words(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_for(root, CONFIG)

    def none_left(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer, "loss", none_left)
    with pytest.raises(
        MachineError,
        match=r"a step with 2 pictures a forward needs more memory than there is\n  remedy: lower train.batch_size",
    ):
        trainer.advance()


def test_a_copy_of_the_workspace_trains_to_the_same_bits(root: Path, tmp_path: Path) -> None:
    """Nothing depends on where it lies."""
    other = Path(shutil.copytree(root, tmp_path / "elsewhere"))
    one, two = trainer_for(root, CONFIG), trainer_for(other, CONFIG)
    assert one.advance() == two.advance()
    assert equal(weights(one), weights(two))
