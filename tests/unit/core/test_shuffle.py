"""Shuffled captions: declared, seeded, and the caption itself always among them."""

from dataclasses import replace
from typing import Any

import pytest

from stages.core.errors import ConfigError
from stages.core.shuffle import ShuffleConfig, check_shuffle, variants

CONFIG = ShuffleConfig(variants=4, separator=", ", keep=1, seed=7)
CAPTION = "red ball, on grass, photo, noon"


def test_the_caption_comes_first_and_what_is_kept_stays_in_front() -> None:
    found = variants(CAPTION, CONFIG)
    assert len(found) == 4
    assert found[0] == CAPTION
    for text in found:
        assert text.split(", ")[0] == "red ball"
        assert sorted(text.split(", ")) == sorted(CAPTION.split(", "))
    assert len(set(found)) > 1


def test_values_are_those_of_the_generator() -> None:
    assert variants(CAPTION, CONFIG) == [
        "red ball, on grass, photo, noon",
        "red ball, photo, on grass, noon",
        "red ball, noon, on grass, photo",
        "red ball, on grass, noon, photo",
    ]


def test_more_variants_leave_the_first_ones_as_they_are() -> None:
    assert variants(CAPTION, replace(CONFIG, variants=9))[:4] == variants(CAPTION, CONFIG)


def test_orders_depend_on_caption_and_seed() -> None:
    many = replace(CONFIG, variants=20, keep=0)
    assert variants(CAPTION, many) != variants(CAPTION, replace(many, seed=8))
    other = [text.replace("noon", "dusk") for text in variants(CAPTION, many)]
    assert variants(CAPTION.replace("noon", "dusk"), many) != other


@pytest.mark.parametrize("caption", ["", "red ball", "red ball, on grass"])
def test_nothing_to_shuffle(caption: str) -> None:
    assert variants(caption, CONFIG) == [caption]


def test_one_variant_is_the_caption() -> None:
    assert variants(CAPTION, replace(CONFIG, variants=1)) == [CAPTION]


def test_every_order_comes() -> None:
    found = set(variants("a, b, c", replace(CONFIG, keep=0, variants=100)))
    assert len(found) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variants": 0}, r"encode\.shuffle\.variants is 0; set it to 1 or more"),
        ({"keep": -1}, r"encode\.shuffle\.keep is -1; set it to 0 or more"),
        ({"seed": -1}, r"encode\.shuffle\.seed is -1; set it to 0 or more"),
        ({"separator": ""}, r"encode\.shuffle\.separator is ''; set it to what stands between the parts"),
    ],
)
def test_settings_that_cannot_work(change: dict[str, Any], message: str) -> None:
    check_shuffle(CONFIG)
    with pytest.raises(ConfigError, match=message):
        check_shuffle(replace(CONFIG, **change))
