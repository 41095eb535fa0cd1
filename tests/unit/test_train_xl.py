"""Training a base of SDXL's kind: pooled texts, sizes and crops reach the U-Net."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages.core.conditions import size_ids
from stages.core.errors import ConfigError
from stages.train import train
from tests.training import CONFIG, make_workspace, outs, stage_in, trainer_for


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("xl"), xl=True)


def test_sizes_and_corners_by_hand(made: Path) -> None:
    """Item 3: 67 x 96 pixels, of which a 32 x 32 bucket was cut at (0, 3) after resizing to 32 rows, 45.85 columns."""
    batches = trainer_for(made, CONFIG).batches
    (item,) = [item for item in batches.items if item.file_name == "3.png"]
    expected = [[67, 96, 0, 3, 32, 32], [67, 96, 0, 46 - 32 - 3, 32, 32]]
    assert size_ids([item, item], [False, True]).tolist() == expected
    assert size_ids([item], [False]).dtype == torch.float32


def test_a_batch_holds_what_the_cache_holds(made: Path) -> None:
    trainer = trainer_for(made, replace(CONFIG, caption_dropout=0.0))
    batch, cache = trainer.batches[0], trainer.batches.cache
    conditions = batch.conditions
    assert conditions.pooled_BP is not None
    assert conditions.sizes_B6 is not None
    for row, item in enumerate(batch.items):
        assert torch.equal(conditions.text_BLD[row], cache.text(item.caption))
        assert torch.equal(conditions.pooled_BP[row], cache.pooled(item.caption))
    assert torch.equal(conditions.sizes_B6, size_ids(batch.items, [False, False]))


def test_the_unet_hears_all_of_it(made: Path) -> None:
    trainer = trainer_for(made, CONFIG)
    batch = trainer.batches[0]
    conditions = batch.conditions
    assert conditions.pooled_BP is not None
    assert conditions.sizes_B6 is not None
    with torch.no_grad():
        loss = float(trainer.loss(batch))
        for other in (
            replace(conditions, text_BLD=conditions.text_BLD + 1),
            replace(conditions, pooled_BP=conditions.pooled_BP + 1),
            replace(conditions, sizes_B6=conditions.sizes_B6 + 5),
        ):
            assert float(trainer.loss(replace(batch, conditions=other))) != loss


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_stage_trains_it_and_continues_to_the_same_bytes(made: Path, tmp_path: Path, method: str) -> None:
    straight, root = (Path(shutil.copytree(made, tmp_path / name)) for name in ("straight", "work"))
    cfg = replace(CONFIG, method=method)
    train(cfg, stage_in(straight))
    train(replace(cfg, steps=3), stage_in(root))
    train(cfg, stage_in(root))
    assert outs(root) == outs(straight)
    losses = json.loads((root / "data/train/metrics.json").read_text())["validation_loss"]
    assert losses["last"] != losses["first"]


def test_it_cannot_be_drawn_with_yet(made: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(made, tmp_path / "work"))
    cfg = replace(CONFIG, samples=replace(CONFIG.samples, every=1, prompts=["a ball"]))
    with pytest.raises(
        ConfigError, match=r"two text encoders cannot be drawn with yet; set train\.samples\.every: 0"
    ):
        train(cfg, stage_in(root))
