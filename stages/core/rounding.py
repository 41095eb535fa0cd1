"""Keeping values in fewer bits, and what that costs: measured, not assumed."""

import torch
from torch import Tensor

from stages.core.errors import ConfigError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def dtype_of(field: str, name: str) -> torch.dtype:
    """The dtype that a parameter names; raises ConfigError that names the field."""
    if name not in DTYPES:
        raise ConfigError(f"{field} is {name!r}", remedy=f"set one of {', '.join(DTYPES)}")
    return DTYPES[name]


def kept(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A copy of `value` in `dtype`, and its `difference` from it."""
    rounded = value.to(dtype, copy=True)
    if dtype == value.dtype:
        return rounded, torch.tensor([0, 0, value.numel()], dtype=torch.float64)
    return rounded, difference(rounded, value)


def difference(one: Tensor, other: Tensor) -> Tensor:
    """float64 [3]: the largest absolute difference, the sum of the squared ones, the number of values."""
    lost = (one.double() - other.double()).abs()
    return torch.stack([lost.max(), lost.square().sum(), lost.new_tensor(lost.numel())])


def error_of(errors: list[Tensor]) -> dict[str, float]:
    """{"max", "rms"} over all that `difference` gave; six significant digits, because sums depend on the machine."""
    together = torch.stack(errors)
    values = {"max": together[:, 0].max(), "rms": (together[:, 1].sum() / together[:, 2].sum()).sqrt()}
    return {name: float(f"{float(value):.6g}") for name, value in values.items()}
