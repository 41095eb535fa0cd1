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


def kept(values_B: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [B, ...] in `dtype`, and for each row its `difference` from what it was: float64 [B, 3]."""
    if dtype == values_B.dtype:
        none = torch.zeros(len(values_B), 3, dtype=torch.float64)
        none[:, 2] = values_B[0].numel()
        return values_B, none
    rounded_B = values_B.to(dtype)
    return rounded_B, difference(rounded_B, values_B)


def difference(one_B: Tensor, other_B: Tensor) -> Tensor:
    """For each row of [B, ...], float64 [B, 3]: largest absolute difference, sum of the squared ones, number of values."""
    lost_BN = (one_B.double() - other_B.double()).abs().flatten(1)
    counts_B = lost_BN.new_full((len(lost_BN),), lost_BN.shape[1])
    return torch.stack([lost_BN.amax(1), lost_BN.square().sum(1), counts_B], dim=1)


def error_of(errors_N3: Tensor) -> dict[str, float]:
    """{"max", "rms"} over rows that `difference` gave; six significant digits, because sums depend on the machine."""
    values = {"max": errors_N3[:, 0].max(), "rms": (errors_N3[:, 1].sum() / errors_N3[:, 2].sum()).sqrt()}
    return {name: float(f"{float(value):.6g}") for name, value in values.items()}
