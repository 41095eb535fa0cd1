"""Buckets: the few shapes (height, width) that pictures are fitted to, so that a batch has one shape.

The rule is the field's usual one: area at most resolution^2, sides multiples of `step` between `minimum` and `maximum`;
a picture goes to the bucket whose aspect ratio is nearest (in the logarithm) to its own.
"""

import math
from dataclasses import dataclass

from stages.core.errors import ConfigError

Bucket = tuple[int, int]  # (H, W)


@dataclass(frozen=True, kw_only=True)
class BucketConfig:
    """Part `buckets` of section `preprocess`. All sides in pixels."""

    resolution: int  # the square that no bucket's area exceeds
    step: int  # sides are multiples of this; at least the VAE's and U-Net's downsampling
    minimum: int  # shortest side
    maximum: int  # longest side


def make_buckets(config: BucketConfig) -> list[Bucket]:
    """All buckets, sorted. Raises ConfigError for settings that give none."""
    fits = config.step >= 1 and 1 <= config.minimum <= config.resolution <= config.maximum
    if not fits or config.resolution % config.step:
        raise ConfigError(
            f"preprocess.buckets: resolution {config.resolution}, step {config.step}, minimum {config.minimum}, "
            f"maximum {config.maximum} do not fit",
            remedy="resolution must be a multiple of step, minimum from 1 to resolution, maximum at least resolution",
        )
    area = config.resolution**2
    first = math.ceil(config.minimum / config.step) * config.step
    last = config.maximum // config.step * config.step
    buckets: set[Bucket] = {(config.resolution, config.resolution)}
    for width in range(first, last + 1, config.step):
        height = min(last, area // width // config.step * config.step)
        if height >= first:
            buckets |= {(height, width), (width, height)}
    return sorted(bucket for bucket in buckets if bucket[0] * bucket[1] <= area)


def nearest_bucket(size: tuple[int, int], buckets: list[Bucket]) -> Bucket:
    """The bucket for a picture of `size` (H, W): nearest aspect ratio, then the larger area."""
    ratio = math.log(size[1] / size[0])
    return min(
        buckets, key=lambda bucket: (abs(math.log(bucket[1] / bucket[0]) - ratio), -bucket[0] * bucket[1])
    )
