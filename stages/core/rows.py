"""Finished work as the stage and its store hand it on: rows of tensors, each with a name.

Rows stay together as one tensor per part, as the model gave them: keeping a tensor for each row and part took 4 % of the
time of encoding with the embedded VAE (1,600 pictures, 2026-12-07).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """names: of N rows. parts: for each part, such as "mean", a tensor [N, ...]."""

    names: list[str]
    parts: dict[str, Tensor]

    def unusable(self) -> list[str]:
        """Names of the rows that hold a NaN or an infinity in any part."""
        return [self.names[place] for place in not_finite(*self.parts.values())]

    def without(self, names: list[str]) -> "Rows":
        """The other rows."""
        if not names:
            return self
        places = [place for place, name in enumerate(self.names) if name not in names]
        return Rows(
            [self.names[place] for place in places],
            {part: value[places] for part, value in self.parts.items()},
        )


def not_finite(*values: Tensor) -> list[int]:
    """The places n where any of the tensors [N, ...] holds a NaN or an infinity."""
    good_N = torch.stack([torch.isfinite(value).flatten(1).all(1) for value in values]).all(0)
    return [place for place, good in enumerate(good_N.tolist()) if not good]
