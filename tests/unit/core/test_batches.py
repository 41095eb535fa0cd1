"""A micro-batch is a function of (seed, number): against the formulas, in any order."""

from pathlib import Path

import pytest
import torch

from stages.core.batches import Batches
from stages.core.latents import LatentCache
from stages.core.models.schedule import NoiseSchedule
from stages.core.sampler import integers, normal, uniforms
from tests.unit.test_train import make_workspace


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("batches"))


def batches(root: Path, *, seed: int = 3, size: int = 2, dropout: float = 0.5) -> Batches:
    cache, schedule = LatentCache(root / "data" / "encode"), NoiseSchedule(root / "tiny-sd", "cpu")
    return Batches(cache, schedule, batch_size=size, seed=seed, caption_dropout=dropout, device="cpu")


def test_a_batch_by_hand(root: Path) -> None:
    made = batches(root)
    for number in (0, 5):
        batch = made[number]
        for row, item in enumerate(batch.items):
            mean, logvar = made.cache.moments(item)
            shape = tuple(mean.shape)
            clean = 0.6 * (mean + torch.exp(0.5 * logvar) * normal(3, "posterior", number, row, shape=shape))
            noise = normal(3, "noise", number, row, shape=shape)
            step = integers(3, "timestep", number, row, below=1000)[0]
            alpha = made.schedule.alphas_cumprod[step]
            assert int(batch.steps_B[row]) == step
            noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
            velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
            assert torch.allclose(batch.noisy_BChw[row], noisy, atol=1e-5)
            assert torch.allclose(batch.target_BChw[row], velocity, atol=1e-5)
            dropped = uniforms(3, "caption-dropout", number, row)[0] < 0.5
            assert torch.equal(batch.text_BLD[row], made.cache.text("" if dropped else item.caption))


def same(one: object, other: object) -> bool:
    pairs = [
        (getattr(one, name), getattr(other, name))
        for name in ("noisy_BChw", "target_BChw", "steps_B", "text_BLD")
    ]
    return all(torch.equal(a, b) for a, b in pairs)


def test_any_order_gives_the_same(root: Path) -> None:
    straight = batches(root)
    expected = [straight[number] for number in range(9)]
    mixed = batches(root)
    for number in (8, 0, 3, 3, 1):
        torch.manual_seed(number)
        assert same(mixed[number], expected[number])


def test_batches_differ_by_number_and_seed(root: Path) -> None:
    made = batches(root)
    assert not torch.equal(made[0].steps_B, made[4].steps_B)
    assert made[0].steps_B.tolist() != batches(root, seed=4)[0].steps_B.tolist()


def test_training_items_only_one_bucket_each_and_all_in_an_epoch(root: Path) -> None:
    made = batches(root)
    epoch = [made[number] for number in range(made.order.batches_per_epoch)]
    assert {item.file_name for batch in epoch for item in batch.items} == {f"{n}.png" for n in range(7)}
    assert all(len({item.bucket for item in batch.items}) == 1 for batch in epoch)
    assert {tuple(batch.noisy_BChw.shape) for batch in epoch} == {(2, 4, 8, 8), (2, 4, 8, 12)}


@pytest.mark.parametrize(("dropout", "share"), [(0.0, 0.0), (1.0, 1.0)])
def test_caption_dropout_never_and_always(root: Path, dropout: float, share: float) -> None:
    made = batches(root, dropout=dropout)
    empty = made.cache.text("")
    rows = [torch.equal(text, empty) for number in range(6) for text in made[number].text_BLD]
    assert sum(rows) / len(rows) == share
