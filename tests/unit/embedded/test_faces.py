"""The faces that CLIP learns from are the same on every machine, and say what they show."""

import hashlib

import pytest

from data.embedded import faces


@pytest.mark.parametrize(
    ("index", "digest", "caption"),
    [
        (0, "3693a486e293c2cb", "a purple smiling face with sunglasses"),
        (1, "66966ed38f931f7e", "a blue face with closed eyes, an open mouth and sweat"),
        (7, "1f6d744cb12052b7", "a face with an open mouth"),
        (12, "b223616d48b73c3a", "a face without a mouth with closed eyes"),
    ],
)
def test_faces_are_golden(index: int, digest: str, caption: str) -> None:
    picture, words = faces.face(20261201, index)
    assert picture.mode == "RGB"
    assert picture.size == (64, 64)
    assert (hashlib.sha256(picture.tobytes()).hexdigest()[:16], words) == (digest, caption)


def test_every_part_appears_in_words() -> None:
    captions = " | ".join(faces.face(3, index)[1] for index in range(800))
    heads_and_mouths = (
        "green|blue|smiling face|grinning|frowning|neutral|an open mouth|its tongue out|without a mouth"
    )
    eyes = "smiling eyes|heart-eyes|star eyes|closed eyes|crossed-out eyes|big eyes|sunglasses|with glasses"
    more = "a tear|sweat|a halo|a hat|horns"
    for part in "|".join((heads_and_mouths, eyes, more)).split("|"):
        assert part in captions


def test_no_two_faces_are_the_same_picture() -> None:
    assert len({faces.face(9, index)[0].tobytes() for index in range(400)}) == 400
