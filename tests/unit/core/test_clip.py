"""The CLIP that measures: preprocessing by hand, features of length 1, refusals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPTokenizer

from stages.core.errors import BaseModelError
from stages.core.models.clip import Clip, clip_digest, fit
from stages.core.sampler import stream
from stages.core.store import write_json
from tests.tiny import TEXT_LIMIT, make_tiny_base
from tests.tiny_clip import make_tiny_clip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clip")
    return make_tiny_clip(root / "clip", make_tiny_base(root / "base"))


def picture(number: int, height: int, width: int) -> torch.Tensor:
    drawn = stream(0, "clip test", number).integers(0, 256, size=(3, height, width), dtype="uint8")
    return torch.from_numpy(drawn)


def test_fit_leaves_the_right_size_alone() -> None:
    pixels = picture(0, 32, 32)
    assert torch.equal(fit(pixels, 32), pixels)


def test_fit_takes_the_centre_square() -> None:
    pixels = torch.zeros(3, 32, 64, dtype=torch.uint8)
    pixels[:, :, 16:48] = picture(0, 32, 32)
    # The shorter edge has the size already: no resampling, columns 16 to 47.
    assert torch.equal(fit(pixels, 32), pixels[:, :, 16:48])


def test_fit_resamples_as_pillow_does() -> None:
    pixels = picture(0, 50, 40)
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((32, 40), Image.Resampling.BICUBIC)
    expected = np.asarray(image)[4:36]
    assert np.array_equal(fit(pixels, 32).permute(1, 2, 0).numpy(), expected)


def test_features_are_the_models_own(folder: Path) -> None:
    pixels, captions = [picture(n, 32, 32) for n in range(3)], ["a red ball", "a blue table"]
    clip = Clip(folder, "cpu", batch_size=2)
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    scale = torch.tensor([[0.5, 0.4, 0.3], [0.5, 0.2, 0.1]]).view(2, 1, 3, 1, 1)
    with torch.no_grad():
        output = model(
            pixel_values=(torch.stack(pixels) / 255 - scale[0]) / scale[1],
            **tokenizer(captions, padding="max_length", max_length=TEXT_LIMIT, return_tensors="pt"),
        )
    found = clip.pictures(pixels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, output.image_embeds, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(clip.captions(captions), output.text_embeds, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(3))
    assert clip.parameters == sum(value.numel() for value in model.parameters())


def test_features_do_not_depend_on_companions(folder: Path) -> None:
    clip = Clip(folder, "cpu", batch_size=4)
    pixels = [picture(n, 32, 40) for n in range(5)]
    assert torch.equal(clip.pictures(pixels)[3:], clip.pictures(pixels[3:]))
    captions = [f"ball {n}" for n in range(5)]
    assert torch.equal(clip.captions(captions)[3:], clip.captions(captions[3:]))


def test_a_long_caption_is_cut_not_refused(folder: Path) -> None:
    assert Clip(folder, "cpu", batch_size=1).captions(["ball " * 100]).shape == (1, 16)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "tokenizer_config.json"])
def test_an_incomplete_folder_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "clip"))
    (copy / name).unlink()
    with pytest.raises(
        BaseModelError, match=f"clip/{name} is missing\n  remedy: evaluate.clip names a folder"
    ):
        Clip(copy, "cpu", 1)


def test_another_model_is_named(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "clip"))
    config = json.loads((copy / "config.json").read_text())
    write_json(copy / "config.json", config | {"model_type": "siglip"})
    with pytest.raises(BaseModelError, match="says model_type 'siglip'"):
        Clip(copy, "cpu", 1)


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "clip"))
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(BaseModelError, match=r"has no \.safetensors weights"):
        Clip(copy, "cpu", 1)


def test_the_digest_follows_every_file(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "clip"))
    assert clip_digest(copy) == clip_digest(folder)
    write_json(copy / "preprocessor_config.json", {"image_mean": [0, 0, 0], "image_std": [1, 1, 1]})
    assert clip_digest(copy) != clip_digest(folder)
