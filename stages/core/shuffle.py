"""Shuffled captions: the parts of a caption ("red ball, on grass, photo") in other orders, declared and seeded.

Captions that are lists of tags have no order of their own; a model that reads them in one order alone learns that order.
"""

from dataclasses import asdict, dataclass
from typing import Any

from stages.core.errors import ConfigError
from stages.core.sampler import stream
from stages.core.store import sha256_bytes


@dataclass(frozen=True, kw_only=True)
class ShuffleConfig:
    """Part `shuffle` of section `encode`."""

    variants: int  # texts per caption, the caption itself among them; 1: no shuffling
    separator: str  # between a caption's parts
    keep: int  # parts that stay in front
    seed: int

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def check_shuffle(cfg: ShuffleConfig) -> None:
    """Raise ConfigError for settings that cannot work."""
    problems = [
        f"encode.shuffle.{name} is {value!r}; set it to {right}"
        for name, value, right, good in (
            ("variants", cfg.variants, "1 or more", cfg.variants >= 1),
            ("separator", cfg.separator, "what stands between the parts, such as ', '", bool(cfg.separator)),
            ("keep", cfg.keep, "0 or more", cfg.keep >= 0),
            ("seed", cfg.seed, "0 or more", cfg.seed >= 0),
        )
        if not good
    ]
    if problems:
        raise ConfigError("\n  ".join(problems), remedy="correct section encode of params.yaml")


def variants(caption: str, cfg: ShuffleConfig) -> list[str]:
    """`cfg.variants` texts: the caption as it is, then its parts in drawn orders (which can repeat).

    A function of caption and settings alone; number k stays the same when more are asked for. A caption of one part, or
    the empty one, is its only variant.
    """
    parts = caption.split(cfg.separator)
    front, rest = parts[: cfg.keep], parts[cfg.keep :]
    if len(rest) < 2:
        return [caption]
    own = int(sha256_bytes(caption.encode())[:16], 16)
    orders = [
        stream(cfg.seed, "shuffle", own, number).permutation(len(rest)) for number in range(1, cfg.variants)
    ]
    return [caption] + [
        cfg.separator.join([*front, *(rest[int(place)] for place in order)]) for order in orders
    ]
