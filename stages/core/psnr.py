"""Peak signal-to-noise ratio."""

import math

from torch import Tensor


def psnr(got_BCHW: Tensor, expected_BCHW: Tensor) -> float:
    """10 log10(255^2 / MSE) of uint8 pictures in dB, the worst of the batch; equal pictures count as 100 dB, the most.

    The mean is over all values of all channels of one picture. Raises ValueError for batches of two shapes.
    """
    if got_BCHW.shape != expected_BCHW.shape:
        raise ValueError(f"pictures of {tuple(got_BCHW.shape)} and {tuple(expected_BCHW.shape)}")
    squares = (got_BCHW.double() - expected_BCHW.double()).square().mean(dim=(1, 2, 3))
    worst = float(squares.max())
    return min(100.0, 10 * math.log10(255**2 / worst)) if worst else 100.0
