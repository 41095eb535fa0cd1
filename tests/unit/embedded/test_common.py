"""A maker that is killed and started again ends in the same bits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from data.embedded import common


class _KilledError(Exception):
    pass


def _run(steps: int, *, killed_at: int | None = None, key: str = "a") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4))
    average = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4)).requires_grad_(False)
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())

    def step_loss(step: int) -> Tensor:
        if step == killed_at:
            raise _KilledError
        batch = torch.randn(8, 4, generator=common.generator(1, "test", step))
        return (model(batch) - batch.flip(1)).square().mean()

    common.train(
        common.Checkpoint("test", key),
        {"model": model, "average": average},
        optimizer,
        steps,
        step_loss,
        lambda step: common.learning_rate(0.01, step, 2, steps),
        every=4,
        averaged=(model, average, 0.9),
    )
    return model, average


def _equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_killed_and_started_again_is_the_same_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "WORK", tmp_path / "whole")
    whole = _run(14)
    monkeypatch.setattr(common, "WORK", tmp_path / "killed")
    with pytest.raises(_KilledError):
        _run(14, killed_at=10)
    resumed = _run(14)
    assert _equal(whole[0], resumed[0])
    assert _equal(whole[1], resumed[1])
    assert not _equal(whole[0], whole[1])


def test_a_checkpoint_of_other_parameters_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "WORK", tmp_path)
    _run(4)
    assert common.Checkpoint("test", "a").load() is not None
    assert common.Checkpoint("test", "b").load() is None


def test_order_takes_everything_once_an_epoch() -> None:
    epoch = torch.cat([common.order(3, "test", 12, 4, step) for step in range(3)])
    assert sorted(epoch.tolist()) == list(range(12))
    assert common.order(3, "test", 12, 4, 3).tolist() != common.order(3, "test", 12, 4, 0).tolist()
    assert torch.equal(common.order(3, "test", 12, 4, 5), common.order(3, "test", 12, 4, 5))


def test_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [common.learning_rate(1.0, step, 4, 20) for step in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[20] == pytest.approx(0.0, abs=1e-12)
