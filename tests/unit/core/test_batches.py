"""A micro-batch is a function of (seed, number): against the formulas, in any order."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from stages.core.batches import Batch, Batches
from stages.core.latents import LatentCache, LatentItem
from stages.core.models.schedule import NoiseSchedule, base_schedule
from stages.core.sampler import integers, normal, uniforms
from stages.core.shuffle import ShuffleConfig, variants
from stages.core.store import sha256_bytes
from tests.latents import write_latents
from tests.tiny import make_tiny_base
from tests.training import make_workspace


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("batches"))


def batches(root: Path, *, seed: int = 3, size: int = 2, dropout: float = 0.5) -> Batches:
    cache, schedule = (
        LatentCache(root / "data" / "encode"),
        NoiseSchedule(base_schedule(root / "tiny-sd"), "cpu"),
    )
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
            assert torch.equal(
                batch.conditions.text_BLD[row], made.cache.text("" if dropped else item.caption)
            )


def same(one: Batch, other: Batch) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("noisy_BChw", "target_BChw", "steps_B")]
    pairs.append((one.conditions.text_BLD, other.conditions.text_BLD))
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
    rows = [torch.equal(text, empty) for number in range(6) for text in made[number].conditions.text_BLD]
    assert sum(rows) / len(rows) == share


# --- mirrored pictures, several captions


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six items of one bucket; mean = place, mirrored mean = place + 100; two captions each, one of them of three tags."""
    root = tmp_path_factory.mktemp("varied")
    make_tiny_base(root / "tiny-sd")
    items: list[LatentItem] = []
    for place in range(6):
        name = sha256_bytes(str(place).encode())
        captions = (f"one {place}", f"a {place}, b, c")
        item = LatentItem(
            id=name,
            file_name=f"{place}.png",
            captions=captions,
            split="train",
            bucket=(8, 8),
            original=(8, 8),
            corner=(0, 0),
            shard=0,
            key=name,
        )
        items.append(item)
    low = torch.full((4, 2, 2), -60.0)  # no spread: a draw is the mean
    shuffle = ShuffleConfig(variants=3, separator=", ", keep=0, seed=1)
    captions = [text for item in items for caption in item.captions for text in variants(caption, shuffle)]
    write_latents(
        root / "encode",
        items,
        {item.id: (torch.full((4, 2, 2), float(item.file_name[0])), low) for item in items},
        {"": torch.full((3, 2), -1.0)}
        | {text: torch.full((3, 2), float(n)) for n, text in enumerate(captions)},
        flipped={item.id: (torch.full((4, 2, 2), 100.0 + float(item.file_name[0])), low) for item in items},
        space={"channels": 4, "downsample": 4, "scaling_factor": 1.0, "shift_factor": 0.0},
        shuffle=shuffle.to_json(),
    )
    return root


def varied_batches(root: Path, seed: int = 3) -> Batches:
    schedule = NoiseSchedule(base_schedule(root / "tiny-sd"), "cpu")
    return Batches(
        LatentCache(root / "encode"), schedule, batch_size=3, seed=seed, caption_dropout=0.0, device="cpu"
    )


def test_mirrored_and_captions_are_drawn_by_number_and_row(varied: Path) -> None:
    made = varied_batches(varied)
    mirrored: list[bool] = []
    seen: dict[str, set[str]] = defaultdict(set)
    for number in range(400):
        batch = made[number]
        for row, item in enumerate(batch.items):
            flip = integers(3, "flip", number, row, below=2)[0] == 1
            texts = made.cache.texts(item)
            assert len(texts) == 4
            text = texts[integers(3, "caption", number, row, below=4)[0]]
            clean = made.cache.moments(item, flipped=flip)[0]
            noise = normal(3, "noise", number, row, shape=(4, 2, 2))
            alpha = made.schedule.alphas_cumprod[int(batch.steps_B[row])]
            velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
            assert torch.allclose(batch.target_BChw[row], velocity, atol=1e-4)
            assert torch.equal(batch.conditions.text_BLD[row], made.cache.text(text))
            mirrored.append(flip)
            seen[item.file_name].add(text)
    assert 0.45 < sum(mirrored) / len(mirrored) < 0.55
    assert seen == {item.file_name: set(made.cache.texts(item)) for item in made.items}


def test_without_flips_nothing_is_mirrored(root: Path) -> None:
    assert not batches(root).cache.flips
    batches(root)[0]  # would ask for moments that are not there
