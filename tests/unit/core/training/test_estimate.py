"""The estimate of memory: sums by hand where there are formulas, bounds where there are activations."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from stages.core.training.estimate import MemoryEstimate, estimate, measured_peak
from stages.core.training.trainer import Trainer
from tests.training import CONFIG, make_workspace, trainer_for


class Small(nn.Module):
    """Keeps what can be counted: its input for the product's gradient, and the relu's result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)

    def enable_gradient_checkpointing(self) -> None: ...

    def disable_gradient_checkpointing(self) -> None: ...

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(sample)))


@pytest.mark.parametrize(
    ("name", "state"), [("adamw", 8), ("adamw8bit", 2), ("adafactor", 0), ("prodigy", 16)]
)
def test_by_hand(name: str, state: int) -> None:
    count = 8 * 16 + 16 * 4
    found = estimate(
        Small(),
        {"sample": torch.ones(5, 8)},
        optimizer=name,
        average=True,
        checkpointing=False,
        autocast=None,
    )
    assert found == MemoryEstimate(
        weights=4 * count,
        gradients=4 * count,
        optimizer=state * count,
        average=4 * count,
        activations=4
        * (5 * 8 + 5 * 16),  # the input, and the relu's result, which the second product keeps too
    )
    assert found.total == 4 * count * 3 + state * count + 4 * 5 * 24


def of(
    trainer: Trainer, *, checkpointing: bool = False, autocast: torch.dtype | None = None
) -> MemoryEstimate:
    batch = trainer.batches.largest()
    inputs = {"sample": batch.noisy_BChw, "timestep": batch.steps_B, **batch.conditions.arguments()}
    return estimate(
        trainer.bare, inputs, optimizer="adamw", average=False, checkpointing=checkpointing, autocast=autocast
    )


def test_of_a_unet(tmp_path: Path) -> None:
    root = make_workspace(tmp_path)
    full, lora = trainer_for(root, CONFIG), trainer_for(root, replace(CONFIG, method="lora"))
    before = {name: value.detach().clone() for name, value in full.parameters.items()}
    plain, lean = of(full), of(full, checkpointing=True)
    assert 0 < lean.activations < 0.6 * plain.activations
    assert not full.bare.is_gradient_checkpointing
    assert 0 < of(full, autocast=torch.bfloat16).activations < plain.activations
    trained = sum(value.numel() for value in lora.parameters.values())
    assert of(lora).gradients == 4 * trained
    assert of(lora).optimizer == 8 * trained
    assert of(lora).activations > 0
    # Nothing was computed and nothing changed.
    assert all(torch.equal(value, before[name]) for name, value in full.parameters.items())
    assert all(value.grad is None for value in full.parameters.values())


def test_what_is_kept_is_what_autograd_says_it_keeps(tmp_path: Path) -> None:
    trainer = trainer_for(make_workspace(tmp_path), CONFIG)
    batch = trainer.batches.largest()
    own = {value.untyped_storage().data_ptr() for value in trainer.bare.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        if value.untyped_storage().data_ptr() not in own:
            kept[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = trainer.loss(batch)
    total = sum(value.untyped_storage().nbytes() for value in kept.values())
    assert of(trainer).activations == pytest.approx(total, rel=0.05)
    del loss


def test_the_peak_is_that_of_this_process() -> None:
    before = measured_peak("cpu")
    block = torch.ones(200_000_000, dtype=torch.uint8)
    assert before > 50_000_000
    assert measured_peak("cpu") >= before
    assert measured_peak("cpu") > block.numel()
