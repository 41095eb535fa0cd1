"""The held-out loss against its formula, with a fake U-Net that is easy to compute by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.core.heldout import band_timesteps, heldout_losses
from stages.core.latents import LatentCache, LatentItem
from stages.core.models.schedule import NoiseSchedule, base_schedule
from stages.core.sampler import normal
from stages.core.store import sha256_bytes, write_json
from tests.latents import write_latents

SPACE = {"channels": 4, "downsample": 4, "scaling_factor": 0.5, "shift_factor": 0.25}


class FakeUnet(nn.Module):
    """Predicts half of what it is shown, plus the timestep / 1000, plus the mean of the text states."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.modes: list[bool] = []

    def forward(self, noisy_BChw: Tensor, steps_B: Tensor, *, encoder_hidden_states: Tensor) -> Any:
        self.rows.append(len(noisy_BChw))
        self.modes.append(self.training)
        extra_B = steps_B / 1000 + encoder_hidden_states.mean(dim=(1, 2))
        return SimpleNamespace(sample=0.5 * noisy_BChw + extra_B[:, None, None, None])


def scheduler(folder: Path, prediction: str) -> NoiseSchedule:
    write_json(
        folder / "scheduler" / "scheduler_config.json",
        {
            "_class_name": "DDIMScheduler",
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "num_train_timesteps": 1000,
            "prediction_type": prediction,
        },
    )
    return NoiseSchedule(base_schedule(folder), "cpu")


def latent_cache(folder: Path, buckets: list[tuple[int, int]]) -> LatentCache:
    """One held-out item per bucket, each with its own latents and caption."""
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    texts = {"": torch.zeros(3, 2)}
    items: list[LatentItem] = []
    for number, (height, width) in enumerate(buckets):
        name = sha256_bytes(str(number).encode())
        shape = (4, height // 4, width // 4)
        # The variance is large: a draw from the posterior would show.
        moments[name] = (normal(number, "mean", shape=shape), torch.full(shape, 3.0))
        caption = f"picture {number}"
        texts[caption] = torch.full((3, 2), number / 10)
        item = LatentItem(
            id=name,
            file_name=f"{number}.png",
            captions=(caption,),
            split="holdout",
            bucket=(height, width),
            original=(height, width),
            corner=(0, 0),
            shard=0,
            key=name,
        )
        items.append(item)
    write_latents(folder, items, moments, texts, space=SPACE)
    return LatentCache(folder)


def by_hand(cache: LatentCache, schedule: NoiseSchedule, item: LatentItem, t: int, seed: int) -> float:
    clean = (cache.moments(item)[0] - 0.25) * 0.5
    noise = normal(seed, "heldout", int(item.id[:16], 16), t, shape=tuple(clean.shape))
    alpha = schedule.alphas_cumprod[t]
    noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
    target = noise if schedule.prediction == "epsilon" else alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
    predicted = 0.5 * noisy + t / 1000 + cache.text(item.caption).mean()
    return float((predicted - target).double().square().mean())


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_losses_match_the_formula(tmp_path: Path, prediction: str) -> None:
    cache = latent_cache(tmp_path / "encode", [(16, 16), (16, 32), (16, 16)])
    schedule = scheduler(tmp_path / "base", prediction)
    items = cache.split("holdout")
    losses = heldout_losses(
        FakeUnet(), schedule, cache, items, seed=5, timesteps=[0, 500, 999], batch_size=4, device="cpu"
    )
    assert losses.dtype == torch.float64
    expected = [[by_hand(cache, schedule, item, t, 5) for t in (0, 500, 999)] for item in items]
    assert losses.tolist() == [pytest.approx(row, rel=1e-5) for row in expected]


def test_an_items_losses_depend_on_no_other_item(tmp_path: Path) -> None:
    cache = latent_cache(tmp_path / "encode", [(16, 16), (16, 32), (16, 16)])
    schedule = scheduler(tmp_path / "base", "v_prediction")
    items = cache.split("holdout")
    settings: dict[str, Any] = {"seed": 5, "batch_size": 4, "device": "cpu"}
    whole = heldout_losses(FakeUnet(), schedule, cache, items, timesteps=[10, 700], **settings)
    alone = heldout_losses(FakeUnet(), schedule, cache, [items[2]], timesteps=[700], **settings)
    turned = heldout_losses(FakeUnet(), schedule, cache, items[::-1], timesteps=[700, 10], **settings)
    assert torch.equal(alone[0], whole[2, 1:])
    assert torch.equal(turned.flip(0, 1), whole)


def test_every_forward_has_the_same_rows_and_no_dropout(tmp_path: Path) -> None:
    cache = latent_cache(tmp_path / "encode", [(16, 16), (16, 32), (16, 16)])
    unet = FakeUnet().train()
    heldout_losses(
        unet,
        scheduler(tmp_path / "base", "epsilon"),
        cache,
        cache.split("holdout"),
        seed=5,
        timesteps=[10, 500, 700],
        batch_size=4,
        device="cpu",
    )
    # 2 items x 3 timesteps of one bucket, then 1 x 3 of the other
    assert unet.rows == [4, 4, 4]
    assert unet.modes == [False, False, False]
    assert unet.training


def test_band_timesteps_are_the_middles_of_equal_cells() -> None:
    assert band_timesteps(1000, bands=4, per_band=2) == [62, 187, 312, 437, 562, 687, 812, 937]
    assert band_timesteps(1000, bands=1, per_band=1) == [500]
    assert band_timesteps(4, bands=2, per_band=2) == [0, 1, 2, 3]


@pytest.mark.parametrize(("bands", "per_band"), [(0, 1), (1, 0), (3, 2)])
def test_band_timesteps_that_do_not_fit_are_refused(bands: int, per_band: int) -> None:
    with pytest.raises(ValueError, match="do not fit into 5 steps"):
        band_timesteps(5, bands=bands, per_band=per_band)
