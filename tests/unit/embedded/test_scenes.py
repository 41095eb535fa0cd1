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
        (0, 0, "85167f1609f75f0f", "a blue ring on orange checks, at the top"),
        (0, 13, "a650d5da3553e3d7", "a small yellow triangle on pink stripes, on the right"),
        (20261201, 7, "46287b0334af1bdc", "a magenta triangle on teal stripes, at the top"),
        (20261201, 39999, "999a11fe1aefab46", "a teal house"),
    ],
)
def test_scenes_are_golden(seed: int, index: int, digest: str, caption: str) -> None:
    picture, words = scenes.scene(seed, index)
    assert (_digest(picture), words) == (digest, caption)


def test_alike_scenes_share_background_and_colours() -> None:
    # Only shape, size, place, number and what is left unsaid may differ within a group.
    objects: list[set[str]] = []
    for group in range(20):
        captions = [scenes.scene(5, 8 * group + member, alike=8)[1] for member in range(8)]
        grounds = {caption.split(" on ")[1].split(",")[0] for caption in captions if " on " in caption}
        assert len(grounds) == 1
        objects.append({word for caption in captions for word in caption.split(" on ")[0].split()})
    assert all(len(words & {*scenes.COLOURS}) <= 2 for words in objects)
    assert max(len(words & {*scenes.SHAPES}) for words in objects) >= 6
    picture, words = scenes.scene(0, 13, alike=8)
    assert _digest(picture) == "248a789571854968"
    assert words == "a small pink triangle on red checks, on the right"


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
