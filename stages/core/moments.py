"""Pictures -> posterior moments, in forwards of one shape each.

Every forward has the same number of rows, the last ones padded: a row's bits then depend neither on its place nor on its
companions (measured on CPUs; another number of rows changes them by 1.7e-6), so that it does not matter which rows a
run, a rank or a restart had left to do.

Letters: B batch, C latent channels, H W pixels, h w latents.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from stages.core.memory import explained
from stages.core.models.vae import Vae
from stages.core.rounding import kept

PARTS = ("mean", "logvar")
Row = tuple[str, Tensor]  # a name, and uint8 RGB [3, H, W]


def grouped(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """`rows` in groups of `size` of one shape, in the order in which groups become full; then what is left, by shape."""
    waiting: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in rows:
        shape = tuple(row[1].shape)
        waiting[shape].append(row)
        if len(waiting[shape]) == size:
            yield waiting.pop(shape)
    for _, group in sorted(waiting.items()):
        yield group


def encode_group(
    vae: Vae, group: list[Row], *, batch_size: int, keep: torch.dtype, exact: Callable[[], Vae]
) -> dict[str, Tensor]:
    """Up to `batch_size` rows of one shape -> for each, "<name>.mean" and "<name>.logvar" [C, h, w] in `keep`, and
    "<name>.facts": float64 [7], the rounding errors of both (`rounding.kept`), then 1 where float32 had to be used.

    exact: gives the VAE in float32; asked for where the numbers of one in half precision are not finite: then the same
    forward is repeated, and the rows concerned are taken from there. Raises MachineError when the memory is too small.
    """
    pixels_BCHW = torch.stack([pixels for _, pixels in group] + [group[-1][1]] * (batch_size - len(group)))
    height, width = pixels_BCHW.shape[2:]
    smaller = f"encode.batch_size to {batch_size // 2}" if batch_size > 1 else "encode.tile to a smaller tile"
    with explained(f"encoding {batch_size} pictures of {width} x {height}", f"set {smaller}"):
        mean, logvar = vae.moments(pixels_BCHW)
        bad = [] if vae.dtype == torch.float32 else _not_finite(mean[: len(group)], logvar[: len(group)])
        if bad:
            exact_mean, exact_logvar = exact().moments(pixels_BCHW)
            mean, logvar = mean.clone(), logvar.clone()
            mean[bad], logvar[bad] = exact_mean[bad], exact_logvar[bad]
    found: dict[str, Tensor] = {}
    for place, (name, _) in enumerate(group):
        found[f"{name}.mean"], mean_error = kept(mean[place], keep)
        found[f"{name}.logvar"], logvar_error = kept(logvar[place], keep)
        again = torch.tensor([float(place in bad)], dtype=torch.float64)
        found[f"{name}.facts"] = torch.cat([mean_error, logvar_error, again])
    return found


def unusable(found: dict[str, Tensor], group: list[Row]) -> list[str]:
    """Names of the rows whose kept moments hold a NaN or an infinity."""
    return [
        name
        for name, _ in group
        if not all(bool(torch.isfinite(found[f"{name}.{part}"]).all()) for part in PARTS)
    ]


def _not_finite(mean_BChw: Tensor, logvar_BChw: Tensor) -> list[int]:
    good_B = torch.isfinite(mean_BChw).flatten(1).all(1) & torch.isfinite(logvar_BChw).flatten(1).all(1)
    return [place for place, good in enumerate(good_B.tolist()) if not good]
