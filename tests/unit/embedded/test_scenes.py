"""The scenes are the same on every machine, and the base's emoji share nothing with the sample subset."""

import hashlib

import pytest
from PIL import Image

from data.embedded import scenes


def _digest(picture: Image.Image) -> str:
    assert picture.mode == "RGB"
    assert picture.size == (64, 64)
    return hashlib.sha256(picture.tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("seed", "index", "digest", "caption"),
    [
        (0, 0, "2b2dadf87a0e3d59", "a big magenta triangle on a plain black background"),
        (0, 13, "107c49e3654214a9", "a black ring and a teal ball on red stripes"),
        (20261201, 7, "4c1510a420576542", "a big pink moon on black checks, on the right"),
        (20261201, 39999, "a39bff88fe636f05", "a grey house"),
    ],
)
def test_scenes_are_golden(seed: int, index: int, digest: str, caption: str) -> None:
    picture, words = scenes.scene(seed, index)
    assert (_digest(picture), words) == (digest, caption)


@pytest.mark.parametrize(
    ("index", "variant", "digest"), [(5, 0, "173577905421b91a"), (700, 3, "7a6d391123f035a2")]
)
def test_emoji_variants_are_golden(index: int, variant: int, digest: str) -> None:
    path, _ = scenes.emoji_items()[index]
    assert _digest(scenes.emoji_picture(Image.open(path), 20261201, index, variant)) == digest


def test_every_shape_colour_and_background_appears() -> None:
    words = " ".join(scenes.scene(3, index)[1] for index in range(600)).replace(",", "").split()
    assert {*scenes.SHAPES, *scenes.COLOURS, *scenes.BACKGROUNDS, "white", "small", "big"} <= set(words)


def test_emoji_share_nothing_with_the_samples() -> None:
    learnt = {hashlib.sha256(path.read_bytes()).hexdigest() for path, _ in scenes.emoji_items()}
    samples = {hashlib.sha256(path.read_bytes()).hexdigest() for path, _, _ in scenes.sample_items()}
    assert len(scenes.emoji_items()) == 1412
    assert len(samples) == 220
    assert not learnt & samples


def test_emoji_captions_never_name_a_face() -> None:
    named = [caption for _, caption in scenes.emoji_items() if "face" in caption.split()]
    assert named == []
