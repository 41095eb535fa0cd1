"""The bucket rule against known tables, and its properties."""

import pytest

from stages.core.buckets import BucketConfig, make_buckets, nearest_bucket
from stages.core.errors import ConfigError


def config(resolution: int, step: int, minimum: int, maximum: int) -> BucketConfig:
    return BucketConfig(resolution=resolution, step=step, minimum=minimum, maximum=maximum)


# The table of kohya's sd-scripts for 512 x 512, 256 to 1024, step 64 (one side of each pair; it holds both).
SD15 = [
    (256, 832),
    (256, 896),
    (256, 960),
    (256, 1024),
    (320, 704),
    (320, 768),
    (384, 640),
    (448, 576),
    (512, 512),
]


def test_the_table_of_sd15() -> None:
    expected = sorted({*SD15, *((width, height) for height, width in SD15)})
    assert make_buckets(config(512, 64, 256, 1024)) == expected


def test_the_default_table() -> None:
    assert make_buckets(config(64, 16, 32, 128)) == [
        (32, 96), (32, 112), (32, 128), (48, 80), (64, 64), (80, 48), (96, 32), (112, 32), (128, 32),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "values", [(512, 64, 256, 1024), (1024, 64, 512, 2048), (64, 16, 32, 128), (96, 8, 30, 99)]
)
def test_properties(values: tuple[int, int, int, int]) -> None:
    resolution, step, minimum, maximum = values
    buckets = make_buckets(config(*values))
    assert len(set(buckets)) == len(buckets)
    assert (resolution, resolution) in buckets
    for height, width in buckets:
        assert height * width <= resolution**2
        assert height % step == width % step == 0
        assert minimum <= min(height, width)
        assert max(height, width) <= maximum
        assert (width, height) in buckets


@pytest.mark.parametrize(
    "values",
    [
        (500, 64, 256, 1024),
        (512, 0, 256, 1024),
        (512, 64, 513, 1024),
        (512, 64, 0, 1024),
        (512, 64, 256, 511),
        (0, 8, 0, 8),
    ],
)
def test_settings_that_do_not_fit(values: tuple[int, int, int, int]) -> None:
    text = "resolution {}, step {}, minimum {}, maximum {} do not fit".format(*values)
    with pytest.raises(ConfigError, match=f"preprocess.buckets: {text}"):
        make_buckets(config(*values))


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        ((72, 72), (64, 64)),
        ((1000, 999), (64, 64)),
        ((100, 160), (48, 80)),
        ((160, 100), (80, 48)),
        ((10, 900), (32, 128)),
    ],
)
def test_nearest(size: tuple[int, int], bucket: tuple[int, int]) -> None:
    assert nearest_bucket(size, make_buckets(config(64, 16, 32, 128))) == bucket


def test_of_equal_ratios_the_larger_area() -> None:
    assert nearest_bucket((30, 60), [(16, 32), (32, 64), (24, 48)]) == (32, 64)


def test_the_order_of_the_list_decides_nothing() -> None:
    buckets = make_buckets(config(512, 64, 256, 1024))
    for size in [(h, w) for h in range(50, 1500, 97) for w in range(50, 1500, 89)]:
        assert nearest_bucket(size, buckets) == nearest_bucket(size, buckets[::-1])
